"""Families in the generic flow, most of them in `others.tsv`, and the archs of ai-toolkit that COAT does not train."""

from __future__ import annotations

import csv
from pathlib import Path

from .family import Family, Rates, generic

# the gradients of v and out nearly cancel over the tokens of an image, and the error of a cast does not
IN_AND_OUT = "in and out of an attention: an error there reaches every adapter between; kept in high precision"
# SDXL, Kolors, SD 1.x and 2.x. diffusers checkpoints the resnets and the transformer blocks inside the attentions, all
# but the middle's first resnet; that one and the attentions' own norms keep what they save in bf16.
UNET = generic(
    "UNet2DConditionModel",
    "down_blocks.*.resnets down_blocks.*.transformer_blocks mid_block.*.transformer_blocks mid_block.resnets "
    "up_blocks.*.transformer_blocks up_blocks.*.resnets",
    archs="sd1 sd2 sdxl ssd vega",
    one_row="time_emb_proj",
    converted=("*.resnets.*", "*.transformer_blocks.*"),
    left={"*.attentions.*.proj_in": IN_AND_OUT, "*.attentions.*.proj_out": IN_AND_OUT},
    pipelines={"StableDiffusionPipeline": ("sd1",), "StableDiffusionXLPipeline": ("sdxl",)},
    rates={"BasicTransformerBlock": Rates(81.0, 29.9, 35.4), "ResnetBlock2D": Rates(16.0, 8.3, 8.3)},
)
COGVIDEOX = generic(
    "CogVideoXTransformer3DModel",
    "transformer_blocks",
    one_row="norm1.linear norm2.linear",
    rates={"CogVideoXBlock": Rates(59.4, 19.7, 23.6)},
)
with Path(__file__).with_suffix(".tsv").open(encoding="utf-8", newline="") as table:
    GENERIC: tuple[Family, ...] = (UNET, COGVIDEOX, *(generic(**row) for row in csv.DictReader(table, delimiter="\t")))

MUSIC = "it makes music, and COAT was tried on images and video only"
TEXT = "it writes text, and COAT was tried on images and video only"
EXPERTS = "its experts get tokens by their values, so that a block recomputed from FP8 would route them differently"
OTHER_ATTENTION = "it swaps its attention while a layer is called, so that a recomputed layer would be another one"
REFUSED = {
    "ace_step_15": MUSIC,
    "ace_step_15_xl": MUSIC,
    "hidream": EXPERTS,
    "hidream_e1": EXPERTS,
    "hidream_o1": OTHER_ATTENTION,
    "qwen25_omni": TEXT,  # from ai-toolkit 0.13 on, as the next
    "yue2": MUSIC,
}
# of the families in `others.tsv` and of those that are refused
OTHER_PIPELINES = {
    "AuraFlowPipeline": ("auraflow",),
    "HiDreamImagePipeline": ("hidream",),
    "Lumina2Pipeline": ("lumina2",),
    "PixArtSigmaPipeline": ("pixart_sigma",),
}
