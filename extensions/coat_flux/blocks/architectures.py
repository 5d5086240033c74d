"""What is known of each model, one entry an architecture: everything else reads it here.

An entry says which linears become FP8, where the blocks are, which class reads them for the fused flow, what their
linears are called in the original checkpoint (and so in saved LoRAs), and which embedders lie before them. A class
without an entry is treated cautiously: what stands in its outermost block lists is converted, and takes the generic
flow.

To add a model's blocks: write their reader after `fused/flux1.py` (`reading.py` has what readers share, and
`single_block.py` and `double_block.py` compute), and an entry here whose `BlockList`s name the class and the reader;
add it to `ARCHITECTURES`. `described.py` has the linears of a block, where `plan` shall know its bytes.

Patterns are fnmatch patterns over full module names, never substrings: the substring `proj_out` would match FLUX's
final projection and also the single blocks' `proj_out`, a quarter of the model's FLOPs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from .fused import chroma, flux1, flux2, qwen_image
from .fused.reading import Reader, argument_names
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

KEY_PREFIX = "transformer."  # of saved LoRA names, and of the names that words are matched against
MATRICES = (".lora_A.", ".lora_B.", ".lora_down.", ".lora_up.")  # in names of parameters, of PEFT and of ai-toolkit


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
    lists=(BlockList("transformer_blocks"),),
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
    "ZImageTransformer2DModel": _of("noise_refiner", "context_refiner", "layers", one_row=("adaLN_modulation.0",)),
}

ARCHITECTURES = {
    "FluxTransformer2DModel": FLUX,
    "Flux2Transformer2DModel": FLUX2,
    "Flux2": FLUX2_OF_TOOLKIT,
    "ChromaTransformer2DModel": CHROMA,
    "Chroma": CHROMA_OF_TOOLKIT,
    "QwenImageTransformer2DModel": QWEN_IMAGE,
    "UNet2DConditionModel": UNET,
    "SD3Transformer2DModel": SD3,
    "CogVideoXTransformer3DModel": COGVIDEOX,
    **PLAIN,
}


def architecture_of(model: nn.Module) -> Architecture:
    """Return the entry of this model's class, or a cautious one: what is in the model's outermost lists with linears.

    Raises:
        ValueError: the class is unknown and the model has no block list.
    """
    for cls in type(model).__mro__:
        if cls.__name__ in ARCHITECTURES:
            return ARCHITECTURES[cls.__name__]
    blocks = _outermost_lists(model)
    if not blocks:
        raise ValueError(
            f"{type(model).__name__}: no entry for this class and no list of blocks to convert; "
            f"known classes: {', '.join(ARCHITECTURES)}"
        )
    return Architecture(tuple(f"{name}.*" for name in blocks), (), tuple(map(BlockList, blocks)))


def _outermost_lists(model: nn.Module) -> tuple[str, ...]:
    """Names of the module lists with linears that the fewest modules are around."""
    lists = [
        name
        for name, items in model.named_modules()
        if isinstance(items, nn.ModuleList) and any(isinstance(module, nn.Linear) for module in items.modules())
    ]
    depth = min((name.count(".") for name in lists), default=0)
    return tuple(name for name in lists if name.count(".") == depth)


def listed_blocks(model: nn.Module, patterns: Iterable[str]) -> dict[str, nn.Module]:
    """Full name → block, in forward order: the items of the module lists whose names match.

    Raises:
        ValueError: no module list matches.
    """
    blocks = {
        f"{name}.{i}": block
        for pattern in patterns
        for name, items in model.named_modules()
        if isinstance(items, nn.ModuleList) and fnmatchcase(name, pattern)
        for i, block in enumerate(items)
    }
    if not blocks:
        raise ValueError(
            f"{type(model).__name__}: has none of the block lists its entry names ({', '.join(patterns)}); "
            "use a diffusers version that has them, or change coat_flux.blocks.architectures"
        )
    return blocks


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether the full name matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def layer_of(parameter: str) -> str:
    """Full name of the linear that a LoRA parameter of either trainer belongs to; other names come back as they are."""
    name = parameter.replace("$$", ".")
    for mark in MATRICES:
        name = name.partition(mark)[0]
    return name.removeprefix(KEY_PREFIX)


def target_names(
    names: Iterable[str],
    *,
    only_if_contains: Sequence[str] | None = None,
    ignore_if_contains: Sequence[str] | None = None,
    transformer_only: bool = True,
) -> list[str]:
    """Return those of the linears' full names that get an adapter, in their order.

    Args:
        names: of all linears.
        only_if_contains: keep names with at least one of these; None keeps all.
        ignore_if_contains: drop names with any of these.
        transformer_only: only linears inside the block lists.
    """
    inside = [name for name in names if not transformer_only or name.split(".")[0] in FLUX.blocks]
    return [name for name in inside if _is_chosen(KEY_PREFIX + name, only_if_contains, ignore_if_contains)]


def _is_chosen(name: str, only: Sequence[str] | None, ignore: Sequence[str] | None) -> bool:
    if any(word in name for word in ignore or ()):
        return False
    if only is None:
        return True
    return any(word in name or word in name.replace(".", "$$") for word in only)


# class of a block → what is known of its lists, for those that are read
READ_BLOCKS: dict[str, list[BlockList]] = {}
for _entry in ARCHITECTURES.values():
    for _list in _entry.lists:
        if _list.reader is not None and _list not in READ_BLOCKS.setdefault(_list.block, []):
            READ_BLOCKS[_list.block].append(_list)


@functools.cache
def read_list(kind: type[nn.Module]) -> BlockList | None:
    """What is known of blocks of a class that has a reader; None of others.

    Outside of diffusers several models have classes of one name: only one with the arguments that a reader knows is its
    own.
    """
    found = READ_BLOCKS.get(kind.__name__, [])
    for each in found:
        if each.reader is not None and each.reader.arguments == argument_names(kind):
            return each
    return found[0] if found and kind.__module__.startswith("diffusers.") else None


def block_name(kind: type[nn.Module]) -> str:
    """The name of a block's class, which is none of `READ_BLOCKS` where it has no reader."""
    name = kind.__name__
    return f"{kind.__module__.rpartition('.')[2]}.{name}" if name in READ_BLOCKS and read_list(kind) is None else name
