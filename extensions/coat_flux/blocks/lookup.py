"""Looks up a model in `models`: its family, its blocks, a block's reader, its linears by name."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from ..config.findings import ConfigError
from .fused.reading import argument_names
from .models import FAMILIES, FLUX, BlockList, Family
from .models.family import generic

KEY_PREFIX = "transformer."  # of saved LoRA names, and of the names that words are matched against
MATRICES = (".lora_A.", ".lora_B.", ".lora_down.", ".lora_up.")  # in names of parameters, of PEFT and of ai-toolkit


def family_of(model: nn.Module) -> Family:
    """The family of this model's class, or a cautious one of its outermost lists; ValueError without any block list."""
    for cls in type(model).__mro__:
        if cls.__name__ in FAMILIES:
            return FAMILIES[cls.__name__]
    lists = [
        name
        for name, items in model.named_modules()
        if isinstance(items, nn.ModuleList) and any(isinstance(module, nn.Linear) for module in items.modules())
    ]
    if not lists:
        raise ValueError(
            f"{type(model).__name__}: this class is not known and has no list of blocks to convert; "
            f"known classes: {', '.join(FAMILIES)}"
        )
    depth = min(name.count(".") for name in lists)
    return generic(type(model).__name__, " ".join(name for name in lists if name.count(".") == depth))


def listed_blocks(model: nn.Module, patterns: Iterable[str]) -> dict[str, nn.Module]:
    """Full name → block, in forward order, from the matching module lists; ValueError if none matches."""
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
            "use a diffusers version that has them, or change its file in coat_flux.blocks.models"
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
    """Those of the linears' full names that get an adapter, in their order; by default those inside the blocks."""

    def is_chosen(name: str) -> bool:
        if any(word in name for word in ignore_if_contains or ()):
            return False
        spellings = (name, name.replace(".", "$$"))
        return only_if_contains is None or any(word in each for word in only_if_contains for each in spellings)

    inside = [name for name in names if not transformer_only or name.split(".")[0] in FLUX.blocks]
    return [name for name in inside if is_chosen(KEY_PREFIX + name)]


def trained_names(parameters: Iterable[str], include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """Names of the parameters that full fine-tuning trains, in order.

    `include` and `exclude` are fnmatch patterns over names of parameters and their modules.

    Raises:
        ConfigError: a pattern matches nothing, or nothing is left to train.
    """

    def holds(name: str, patterns: Sequence[str]) -> bool:
        return matches(name, tuple(patterns)) or matches(name.rpartition(".")[0], tuple(patterns))

    names = list(parameters)
    for key, patterns in (("include", include), ("exclude", exclude)):
        for pattern in patterns:
            if not any(holds(name, (pattern,)) for name in names):
                example = names[-1] if names else "transformer_blocks.0.attn.to_q"
                raise ConfigError(
                    f"coat.{key}: {pattern!r} matches no parameter of the transformer; patterns are matched against "
                    f"full names such as {example!r}"
                )
    chosen = [name for name in names if holds(name, include) and not holds(name, exclude)]
    if not chosen:
        raise ConfigError("coat.include, coat.exclude: nothing of the transformer is left to train; exclude less")
    return chosen


# class of a block → what is known of its lists, for those that are read
READ_BLOCKS: dict[str, list[BlockList]] = {}
for _family in FAMILIES.values():
    for _list in _family.lists:
        if _list.reader is not None and _list not in READ_BLOCKS.setdefault(_list.block, []):
            READ_BLOCKS[_list.block].append(_list)


@functools.cache
def read_list(kind: type[nn.Module]) -> BlockList | None:
    """The entry of a block class that has a reader, else None. Arguments must match as well."""
    found = READ_BLOCKS.get(kind.__name__, [])
    for each in found:
        if each.reader is not None and each.reader.arguments == argument_names(kind):
            return each
    return found[0] if found and kind.__module__.startswith("diffusers.") else None


def block_name(kind: type[nn.Module]) -> str:
    """The name of a block's class, which is none of `READ_BLOCKS` where it has no reader."""
    name = kind.__name__
    return f"{kind.__module__.rpartition('.')[2]}.{name}" if name in READ_BLOCKS and read_list(kind) is None else name
