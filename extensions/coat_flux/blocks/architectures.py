"""Which linear layers of an architecture become FP8, as data.

Patterns are fnmatch patterns over full module names, never substrings: the substring `proj_out` would match FLUX's
final projection and also the single blocks' `proj_out`, a quarter of the model's FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn


@dataclass(frozen=True)
class Architecture:
    """What of an architecture may be FP8.

    Attributes:
        convert: patterns of the linears whose weights become FP8; all others stay in high precision.
        weight_only: of those, patterns of linears that multiply in high precision: they run on one row per image
            (adaLN modulation), where reading the weight is all the time there is.
        blocks: patterns of the module lists whose items are recomputed or kept as a whole, in forward order.
    """

    convert: tuple[str, ...]
    weight_only: tuple[str, ...]
    blocks: tuple[str, ...]


FLUX = Architecture(
    convert=("transformer_blocks.*", "single_transformer_blocks.*"),
    weight_only=(
        "transformer_blocks.*.norm1.linear",
        "transformer_blocks.*.norm1_context.linear",
        "single_transformer_blocks.*.norm.linear",
    ),
    blocks=("transformer_blocks", "single_transformer_blocks"),
)

# SDXL, Kolors, SD 1.x and 2.x. diffusers checkpoints the resnets and the transformer blocks inside the attentions, all
# but the middle's first resnet; that one, the attentions' own norms and the samplers keep what they save in bf16.
UNET = Architecture(
    convert=("down_blocks.*", "mid_block.*", "up_blocks.*"),
    weight_only=("*.resnets.*.time_emb_proj",),
    blocks=(
        "down_blocks.*.resnets",
        "down_blocks.*.transformer_blocks",
        "mid_block.*.transformer_blocks",
        "mid_block.resnets",
        "up_blocks.*.transformer_blocks",
        "up_blocks.*.resnets",
    ),
)

SD3 = Architecture(
    convert=("transformer_blocks.*",),
    weight_only=("transformer_blocks.*.norm1.linear", "transformer_blocks.*.norm1_context.linear"),
    blocks=("transformer_blocks",),
)

COGVIDEOX = Architecture(
    convert=("transformer_blocks.*",),
    weight_only=("transformer_blocks.*.norm1.linear", "transformer_blocks.*.norm2.linear"),
    blocks=("transformer_blocks",),
)

POLICIES = {
    "FluxTransformer2DModel": FLUX,
    "UNet2DConditionModel": UNET,
    "SD3Transformer2DModel": SD3,
    "CogVideoXTransformer3DModel": COGVIDEOX,
}


def policy_for(model: nn.Module) -> Architecture:
    """Return the policy of this model's class, or a cautious one: what is in the model's top-level block lists.

    Raises:
        ValueError: the class is unknown and the model has no block list.
    """
    for cls in type(model).__mro__:
        if cls.__name__ in POLICIES:
            return POLICIES[cls.__name__]
    blocks = tuple(name for name, child in model.named_children() if isinstance(child, nn.ModuleList))
    if not blocks:
        raise ValueError(
            f"{type(model).__name__}: no policy for this class and no top-level list of blocks to convert; "
            f"known classes: {', '.join(POLICIES)}"
        )
    return Architecture(tuple(f"{name}.*" for name in blocks), (), blocks)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether the full name matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


BLOCK_LISTS = ("transformer_blocks", "single_transformer_blocks")
KEY_PREFIX = "transformer."  # of saved LoRA names, and of the names that words are matched against
MATRICES = (".lora_A.", ".lora_B.", ".lora_down.", ".lora_up.")  # in names of parameters, of PEFT and of ai-toolkit


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
    inside = [name for name in names if not transformer_only or name.split(".")[0] in BLOCK_LISTS]
    return [name for name in inside if _is_chosen(KEY_PREFIX + name, only_if_contains, ignore_if_contains)]


def _is_chosen(name: str, only: Sequence[str] | None, ignore: Sequence[str] | None) -> bool:
    if any(word in name for word in ignore or ()):
        return False
    if only is None:
        return True
    return any(word in name or word in name.replace(".", "$$") for word in only)
