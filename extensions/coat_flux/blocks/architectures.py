"""What is known of each model, one entry an architecture: everything else reads it here.

An entry says which linears become FP8, where the blocks are, which class reads them for the fused flow, what their
linears are called in the original checkpoint (and so in saved LoRAs), and which embedders lie before them. A class
without an entry is treated cautiously: what stands in its outermost block lists is converted, and takes the generic
flow.

To add a model's blocks: write their reader after `models/flux1.py` (`fused/reading.py` has what readers share, and
`single_block.py` and `double_block.py` compute), and an entry here whose `BlockList`s name the class and the reader;
add it to `ARCHITECTURES`, by which `lookup.py` finds it. `described.py` has the linears of a block, where `plan` shall
know its bytes.

Patterns are fnmatch patterns over full module names, never substrings: the substring `proj_out` would match FLUX's
final projection and also the single blocks' `proj_out`, a quarter of the model's FLOPs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .fused.reading import Reader
from .models import chroma, flux1, flux2, qwen_image, sd3, zimage
from .original_names import (
    FLUX2_DOUBLE,
    FLUX2_MODULATION,
    FLUX2_OUTSIDE,
    FLUX2_SINGLE,
    FLUX_DOUBLE,
    FLUX_OUTSIDE,
    FLUX_SINGLE,
    OriginalLinear,
)


@dataclass(frozen=True)
class BlockList:
    """A list of blocks.

    Attributes:
        pattern: of the module lists whose items are recomputed or kept as a whole.
        block: class of the blocks; empty where nothing more is known of them.
        reader: reads them for the fused flow; None: they take the generic one.
        kind: of `described.Block`; empty where their bytes are not known.
        fused_bytes: that the fused flow keeps per element of hidden states where `kind` is empty, with a trained
            modulation and attention in FP8; 0 where nobody measured it.
        count: key of the model's config with their number.
        original: name of the list in the original checkpoint.
        linears: of a block, by their original names.
        norms: parameters of a block's norms, original → diffusers' name.
    """

    pattern: str
    block: str = ""
    reader: Reader | None = None
    kind: str = ""
    fused_bytes: float = 0.0
    count: str = ""
    original: str = ""
    linears: tuple[OriginalLinear, ...] = ()
    norms: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Architecture:
    """What is known of a model.

    Attributes:
        convert: patterns of the linears whose weights become FP8; all others stay in high precision.
        weight_only: of those, patterns of linears that multiply in high precision: they run on one row per image
            (adaLN modulation), where reading the weight is all the time there is.
        lists: of blocks, in forward order.
        inputs: embedders whose outputs the blocks' streams start from.
        conditioning: what the blocks' modulation is made by: the embedder of its input, and where it is outside of the
            blocks its own linears.
        outside: linears outside the blocks, by their original names.
        left: patterns of linears that `convert` leaves out for a reason of their own → the reason.
    """

    convert: tuple[str, ...]
    weight_only: tuple[str, ...]
    lists: tuple[BlockList, ...]
    inputs: tuple[str, ...] = ()
    conditioning: tuple[str, ...] = ()
    outside: tuple[OriginalLinear, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def blocks(self) -> tuple[str, ...]:
        """Patterns of the block lists, in forward order."""
        return tuple(found.pattern for found in self.lists)


FLUX = Architecture(
    convert=("transformer_blocks.*", "single_transformer_blocks.*"),
    weight_only=(
        "transformer_blocks.*.norm1.linear",
        "transformer_blocks.*.norm1_context.linear",
        "single_transformer_blocks.*.norm.linear",
    ),
    lists=(
        BlockList(
            "transformer_blocks",
            block="FluxTransformerBlock",
            reader=flux1.DOUBLE,
            kind="double",
            count="num_layers",
            original="double_blocks",
            linears=FLUX_DOUBLE,
            norms=(
                ("img_attn.norm.query_norm.scale", "attn.norm_q.weight"),
                ("img_attn.norm.key_norm.scale", "attn.norm_k.weight"),
                ("txt_attn.norm.query_norm.scale", "attn.norm_added_q.weight"),
                ("txt_attn.norm.key_norm.scale", "attn.norm_added_k.weight"),
            ),
        ),
        BlockList(
            "single_transformer_blocks",
            block="FluxSingleTransformerBlock",
            reader=flux1.SINGLE,
            kind="single",
            count="num_single_layers",
            original="single_blocks",
            linears=FLUX_SINGLE,
            norms=(
                ("norm.query_norm.scale", "attn.norm_q.weight"),
                ("norm.key_norm.scale", "attn.norm_k.weight"),
            ),
        ),
    ),
    inputs=("x_embedder", "context_embedder"),
    conditioning=("time_text_embed",),
    outside=FLUX_OUTSIDE,
)


def _of(*lists: str | BlockList, one_row: tuple[str, ...] = ()) -> Architecture:
    """A model of which no more is known than its block lists, and which linears run on one row per image."""
    found = tuple(BlockList(each) if isinstance(each, str) else each for each in lists)
    convert, weight_only = tuple(f"{each.pattern}.*" for each in found), tuple(f"*.{name}" for name in one_row)
    return Architecture(convert, weight_only, found)


# of FLUX.2 and Chroma, modulation is made outside of the blocks, for all of them at once
FLUX2 = Architecture(
    convert=("transformer_blocks.*", "single_transformer_blocks.*"),
    weight_only=(),
    lists=(
        BlockList(
            "transformer_blocks",
            block="Flux2TransformerBlock",
            reader=flux2.DOUBLE,
            kind="flux2_double",
            count="num_layers",
            original="double_blocks",
            linears=FLUX2_DOUBLE,
        ),
        BlockList(
            "single_transformer_blocks",
            block="Flux2SingleTransformerBlock",
            reader=flux2.SINGLE,
            kind="flux2_single",
            count="num_single_layers",
            original="single_blocks",
            linears=FLUX2_SINGLE,
        ),
    ),
    inputs=("x_embedder", "context_embedder"),
    conditioning=("time_guidance_embed", *FLUX2_MODULATION),
    outside=FLUX2_OUTSIDE,
)
FLUX2_OF_TOOLKIT = _of(
    BlockList("double_blocks", "DoubleStreamBlock", flux2.BFL_DOUBLE, fused_bytes=14.6),
    BlockList("single_blocks", "SingleStreamBlock", flux2.BFL_SINGLE, fused_bytes=12.5),
)
CHROMA = _of(
    BlockList("transformer_blocks", "ChromaTransformerBlock", chroma.DOUBLE, fused_bytes=12.5),
    BlockList("single_transformer_blocks", "ChromaSingleTransformerBlock", chroma.SINGLE, fused_bytes=10.4),
)
CHROMA_OF_TOOLKIT = _of(
    BlockList("double_blocks", "DoubleStreamBlock", chroma.TOOLKIT_DOUBLE, fused_bytes=12.5),
    BlockList("single_blocks", "SingleStreamBlock", chroma.TOOLKIT_SINGLE, fused_bytes=10.4),
)
QWEN_IMAGE = _of(
    BlockList("transformer_blocks", "QwenImageTransformerBlock", qwen_image.BLOCK, fused_bytes=12.5),
    one_row=("img_mod.1", "txt_mod.1"),
)
Z_IMAGE = _of(
    *(
        BlockList(name, "ZImageTransformerBlock", zimage.BLOCK, fused_bytes=12.8)
        for name in ("noise_refiner", "context_refiner", "layers")
    ),
    one_row=("adaLN_modulation.0",),
)

# SDXL, Kolors, SD 1.x and 2.x. diffusers checkpoints the resnets and the transformer blocks inside the attentions, all
# but the middle's first resnet; that one and the attentions' own norms keep what they save in bf16.
# Every adapter between an attention's proj_in and proj_out gets the error of their casts. The gradients of v and out
# nearly cancel over the tokens of an image, and that error does not.
IN_AND_OUT = "in and out of an attention: an error there reaches every adapter between; kept in high precision"
UNET = Architecture(
    convert=("*.resnets.*", "*.transformer_blocks.*"),
    left={"*.attentions.*.proj_in": IN_AND_OUT, "*.attentions.*.proj_out": IN_AND_OUT},
    weight_only=("*.resnets.*.time_emb_proj",),
    lists=(
        BlockList("down_blocks.*.resnets"),
        BlockList("down_blocks.*.transformer_blocks"),
        BlockList("mid_block.*.transformer_blocks"),
        BlockList("mid_block.resnets"),
        BlockList("up_blocks.*.transformer_blocks"),
        BlockList("up_blocks.*.resnets"),
    ),
)

SD3 = Architecture(
    convert=("transformer_blocks.*",),
    weight_only=("transformer_blocks.*.norm1.linear", "transformer_blocks.*.norm1_context.linear"),
    lists=(BlockList("transformer_blocks", "JointTransformerBlock", sd3.BLOCK, fused_bytes=12.5),),
)

COGVIDEOX = Architecture(
    convert=("transformer_blocks.*",),
    weight_only=("transformer_blocks.*.norm1.linear", "transformer_blocks.*.norm2.linear"),
    lists=(BlockList("transformer_blocks"),),
)


# diffusers' and ai-toolkit's own classes, in the generic flow
PLAIN = {
    "AnimaTrainableModel": _of("transformer.transformer_blocks", one_row=("norm[123].linear_[12]",)),
    "AuraFlowTransformer2DModel": _of(
        "joint_transformer_blocks", "single_transformer_blocks", one_row=("norm1.linear", "norm1_context.linear")
    ),
    "BooguImageTransformer2DModel": _of(
        "context_refiner",
        "noise_refiner",
        "ref_image_refiner",
        "double_stream_layers",
        "single_stream_layers",
        one_row=("*norm[123].linear",),
    ),
    "CogView4Transformer2DModel": _of("transformer_blocks", one_row=("norm1.linear",)),
    "DiT": _of("blocks", one_row=("adaLN_modulation.1",)),
    "DualWanTransformer3DModel": _of("transformer_1.blocks", "transformer_2.blocks"),
    "ErnieImageTransformer2DModel": _of("layers"),
    "Ideogram4Transformer2DModel": _of("layers", one_row=("adaln_modulation",)),
    "LTX2VideoTransformer3DModel": _of("transformer_blocks"),
    "Lumina2Transformer2DModel": _of("context_refiner", "noise_refiner", "layers", one_row=("norm1.linear",)),
    "MageFlow": _of("transformer_blocks", one_row=("img_mod.1", "txt_mod.1")),
    "MiniMaxH3Transformer": _of("token_refiner.blocks", "blocks"),
    "NucleusMoEImageTransformer2DModel": _of("transformer_blocks", one_row=("img_mod.1",)),
    "OmniGen2Transformer2DModel": _of(
        "context_refiner", "noise_refiner", "ref_image_refiner", "layers", one_row=("norm1.linear",)
    ),
    "PRXTransformer2DModel": _of("blocks", one_row=("modulation.lin",)),
    "PixArtTransformer2DModel": _of("transformer_blocks"),
    "SingleStreamDiT": _of("txtfusion.layerwise_blocks", "txtfusion.refiner_blocks", "blocks"),
    "WanTransformer3DModel": _of("blocks"),
    "ZImageDCT": _of("noise_refiner", "context_refiner", "layers", one_row=("adaLN_modulation.0",)),
}

ARCHITECTURES = {
    "FluxTransformer2DModel": FLUX,
    "Flux2Transformer2DModel": FLUX2,
    "Flux2": FLUX2_OF_TOOLKIT,
    "ChromaTransformer2DModel": CHROMA,
    "Chroma": CHROMA_OF_TOOLKIT,
    "QwenImageTransformer2DModel": QWEN_IMAGE,
    "ZImageTransformer2DModel": Z_IMAGE,
    "UNet2DConditionModel": UNET,
    "SD3Transformer2DModel": SD3,
    "CogVideoXTransformer3DModel": COGVIDEOX,
    **PLAIN,
}
