"""Families in the generic flow, and the archs of ai-toolkit that COAT does not train."""

from __future__ import annotations

from .family import BlockList, Family, generic

# the gradients of v and out nearly cancel over the tokens of an image, and the error of a cast does not
IN_AND_OUT = "in and out of an attention: an error there reaches every adapter between; kept in high precision"
# SDXL, Kolors, SD 1.x and 2.x. diffusers checkpoints the resnets and the transformer blocks inside the attentions, all
# but the middle's first resnet; that one and the attentions' own norms keep what they save in bf16.
UNET = Family(
    "UNet2DConditionModel",
    (
        BlockList("down_blocks.*.resnets"),
        BlockList("down_blocks.*.transformer_blocks"),
        BlockList("mid_block.*.transformer_blocks"),
        BlockList("mid_block.resnets"),
        BlockList("up_blocks.*.transformer_blocks"),
        BlockList("up_blocks.*.resnets"),
    ),
    archs=("sd1", "sd2", "sdxl", "ssd", "vega"),
    one_row=("time_emb_proj",),
    converted=("*.resnets.*", "*.transformer_blocks.*"),
    left={"*.attentions.*.proj_in": IN_AND_OUT, "*.attentions.*.proj_out": IN_AND_OUT},
    pipelines={"StableDiffusionPipeline": ("sd1",), "StableDiffusionXLPipeline": ("sdxl",)},
)

REFINERS = ("context_refiner", "noise_refiner")
GENERIC = (
    UNET,
    generic("CogVideoXTransformer3DModel", "transformer_blocks", one_row=("norm1.linear", "norm2.linear")),
    generic(
        "AnimaTrainableModel", "transformer.transformer_blocks", archs=("anima",), one_row=("norm[123].linear_[12]",)
    ),
    generic(
        "AuraFlowTransformer2DModel",
        "joint_transformer_blocks",
        "single_transformer_blocks",
        archs=("auraflow",),
        one_row=("norm1.linear", "norm1_context.linear"),
        pipelines={"AuraFlowPipeline": ("auraflow",)},
    ),
    generic(
        "BooguImageTransformer2DModel",
        *REFINERS,
        "ref_image_refiner",
        "double_stream_layers",
        "single_stream_layers",
        archs=("boogu_image", "boogu_image_edit"),
        one_row=("*norm[123].linear",),
    ),
    generic("CogView4Transformer2DModel", "transformer_blocks", archs=("cogview4",), one_row=("norm1.linear",)),
    generic("DiT", "blocks", archs=("f-lite",), one_row=("adaLN_modulation.1",)),
    generic(
        "DualWanTransformer3DModel",
        "transformer_1.blocks",
        "transformer_2.blocks",
        archs=("wan22_14b", "wan22_14b_i2v"),
    ),
    generic("ErnieImageTransformer2DModel", "layers", archs=("ernie_image",)),
    generic("Ideogram4Transformer2DModel", "layers", archs=("ideogram4",), one_row=("adaln_modulation",)),
    generic("LTX2VideoTransformer3DModel", "transformer_blocks", archs=("ltx2", "ltx2.3", "ltx2.5")),
    generic(
        "Lumina2Transformer2DModel",
        *REFINERS,
        "layers",
        archs=("lumina2",),
        one_row=("norm1.linear",),
        pipelines={"Lumina2Pipeline": ("lumina2",)},
    ),
    generic("MageFlow", "transformer_blocks", archs=("mageflow", "mageflow_edit"), one_row=("img_mod.1", "txt_mod.1")),
    generic("MiniMaxH3Transformer", "token_refiner.blocks", "blocks", archs=("minimax_h3", "minimax_h3_ref2va")),
    generic(
        "NucleusMoEImageTransformer2DModel", "transformer_blocks", archs=("nucleus_image",), one_row=("img_mod.1",)
    ),
    generic(
        "OmniGen2Transformer2DModel",
        *REFINERS,
        "ref_image_refiner",
        "layers",
        archs=("omnigen2",),
        one_row=("norm1.linear",),
    ),
    generic("PRXTransformer2DModel", "blocks", archs=("prx_pixel",), one_row=("modulation.lin",)),
    generic(
        "PixArtTransformer2DModel",
        "transformer_blocks",
        archs=("pixart", "pixart_sigma"),
        pipelines={"PixArtSigmaPipeline": ("pixart_sigma",)},
    ),
    generic("SingleStreamDiT", "txtfusion.layerwise_blocks", "txtfusion.refiner_blocks", "blocks", archs=("krea2",)),
    generic("WanTransformer3DModel", "blocks", archs=("wan21", "wan21_i2v", "wan22_5b")),
    generic(
        "ZImageDCT",
        "noise_refiner",
        "context_refiner",
        "layers",
        archs=("zeta_chroma",),
        one_row=("adaLN_modulation.0",),
    ),
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
REFUSED_PIPELINES = {"HiDreamImagePipeline": ("hidream",)}
