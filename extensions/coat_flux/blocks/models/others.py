"""Families in the generic flow, and the archs of ai-toolkit that COAT does not train."""

from __future__ import annotations

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
# class, block lists, archs, linears that run on one row per image
TABLE = (
    ("AnimaTrainableModel", "transformer.transformer_blocks", "anima", "norm[123].linear_[12]"),
    (
        "AuraFlowTransformer2DModel",
        "joint_transformer_blocks single_transformer_blocks",
        "auraflow",
        "norm1.linear norm1_context.linear",
    ),
    (
        "BooguImageTransformer2DModel",
        "context_refiner noise_refiner ref_image_refiner double_stream_layers single_stream_layers",
        "boogu_image boogu_image_edit",
        "*norm[123].linear",
    ),
    ("CogView4Transformer2DModel", "transformer_blocks", "cogview4", "norm1.linear"),
    ("DiT", "blocks", "f-lite", "adaLN_modulation.1"),
    ("DualWanTransformer3DModel", "transformer_1.blocks transformer_2.blocks", "wan22_14b wan22_14b_i2v", ""),
    ("ErnieImageTransformer2DModel", "layers", "ernie_image", ""),
    ("Ideogram4Transformer2DModel", "layers", "ideogram4", "adaln_modulation"),
    ("LTX2VideoTransformer3DModel", "transformer_blocks", "ltx2 ltx2.3 ltx2.5", ""),
    ("Lumina2Transformer2DModel", "context_refiner noise_refiner layers", "lumina2", "norm1.linear"),
    ("MageFlow", "transformer_blocks", "mageflow mageflow_edit", "img_mod.1 txt_mod.1"),
    ("MiniMaxH3Transformer", "token_refiner.blocks blocks", "minimax_h3 minimax_h3_ref2va", ""),
    ("NucleusMoEImageTransformer2DModel", "transformer_blocks", "nucleus_image", "img_mod.1"),
    (
        "OmniGen2Transformer2DModel",
        "context_refiner noise_refiner ref_image_refiner layers",
        "omnigen2",
        "norm1.linear",
    ),
    ("PixArtTransformer2DModel", "transformer_blocks", "pixart pixart_sigma", ""),
    ("PRXTransformer2DModel", "blocks", "prx_pixel", "modulation.lin"),
    ("SingleStreamDiT", "txtfusion.layerwise_blocks txtfusion.refiner_blocks blocks", "krea2", ""),
    ("WanTransformer3DModel", "blocks", "wan21 wan21_i2v wan22_5b", ""),
    ("ZImageDCT", "noise_refiner context_refiner layers", "zeta_chroma", "adaLN_modulation.0"),
)
GENERIC: tuple[Family, ...] = (
    UNET,
    COGVIDEOX,
    *(generic(name, lists, archs=archs, one_row=one_row) for name, lists, archs, one_row in TABLE),
)

MUSIC = "it makes music, and COAT was tried on images and video only"
EXPERTS = "its experts get tokens by their values, so that a block recomputed from FP8 would route them differently"
OTHER_ATTENTION = "it swaps its attention while a layer is called, so that a recomputed layer would be another one"
REFUSED = {
    "ace_step_15": MUSIC,
    "ace_step_15_xl": MUSIC,
    "hidream": EXPERTS,
    "hidream_e1": EXPERTS,
    "hidream_o1": OTHER_ATTENTION,
}
# of the families in `TABLE` and of those that are refused
OTHER_PIPELINES = {
    "AuraFlowPipeline": ("auraflow",),
    "HiDreamImagePipeline": ("hidream",),
    "Lumina2Pipeline": ("lumina2",),
    "PixArtSigmaPipeline": ("pixart_sigma",),
}
