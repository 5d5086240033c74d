"""Which reader a block has, by its class."""

from __future__ import annotations

import functools

from torch import nn

from .architectures import ARCHITECTURES, BlockList
from .fused.reading import argument_names

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
