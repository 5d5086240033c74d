"""Adapters of diffusers' linears as adapters of the original's fused linears, and back, without rounding.

A fused linear's weight is its parts' weights stacked. Parts with separate adapters become one adapter with a
block-diagonal up matrix, of the sum of the ranks:

    | up_q              |   | down_q |
    |      up_k         | · | down_k |        a part without an adapter is a block of zeros
    |           up_v    |   | down_v |

Parts that share one down matrix (split from a fused adapter) are fused again: the same down, the ups stacked.
Splitting does the reverse: block diagonal → one adapter per part, all-zero parts left out; else every part gets the
down and its rows of the up. Only zeros are added or removed, so nothing is rounded.

Source: sd-scripts' networks/convert_flux_lora.py for the block-diagonal form, which diffusers recognizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..blocks.models.family import Linear
from .layouts import ExportError, Pair, family_of, place_of

__all__ = ["fuse_all", "split_all"]


def fuse_all(pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    """Convert adapters from diffusers' names to the original's; raises ExportError if parts differ in rank or scale."""
    grouped: dict[str, tuple[Linear, list[Pair | None]]] = {}
    for module, pair in pairs.items():
        _, linear, index = place_of(module)
        assert index is not None
        _, members = grouped.setdefault(linear.name, (linear, [None] * len(linear.members)))
        members[index] = pair
    return {name: _fuse(linear, members) for name, (linear, members) in grouped.items()}


def _fuse(linear: Linear, members: Sequence[Pair | None]) -> Pair:
    present = [pair for pair in members if pair is not None]
    first = present[0]
    if len(members) == 1:
        return Pair(first.down, _swap(first.up) if linear.swapped else first.up, first.alpha)
    if {pair.scale for pair in present} != {first.scale} or {pair.rank for pair in present} != {first.rank}:
        raise ExportError(
            f"{linear.name}: its parts have ranks {[pair.rank for pair in present]} and alphas "
            f"{[pair.alpha for pair in present]}: one adapter holds them only if these are equal; train with one rank"
        )
    heights = _heights(linear, {i: pair.up.shape[0] for i, pair in enumerate(members) if pair is not None})
    if len(present) == len(members) and all(torch.equal(pair.down, first.down) for pair in present):
        up = torch.cat([pair.up for pair in present])
        if not _is_block_diagonal(up, heights):
            return Pair(first.down, up, first.alpha)
    rank = first.rank
    down = torch.cat([torch.zeros_like(first.down) if pair is None else pair.down for pair in members])
    up = first.up.new_zeros(sum(heights), rank * len(members))
    for i, (pair, rows) in enumerate(zip(members, up.split(heights), strict=True)):
        if pair is not None:
            rows[:, i * rank : (i + 1) * rank] = pair.up
    return Pair(down, up, first.scale * down.shape[0])


def split_all(pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    """Convert adapters from the original's names to diffusers'; raises ExportError if a height fits no hidden size."""
    split: dict[str, Pair] = {}
    family = family_of(pairs, "comfyui")
    for name, pair in pairs.items():
        linear = place_of(name, "comfyui", family).linear
        parts = zip(linear.members, _split(linear, pair), strict=True)
        split |= {module: part for module, part in parts if part is not None}
    return split


def _split(linear: Linear, pair: Pair) -> list[Pair | None]:
    count = len(linear.members)
    if count == 1:
        return [Pair(pair.down, _swap(pair.up) if linear.swapped else pair.up, pair.alpha)]
    heights = _heights(linear, {None: pair.up.shape[0]})
    rows = pair.up.split(heights)
    if not _is_block_diagonal(pair.up, heights):
        return [Pair(pair.down.clone(), up.clone(), pair.alpha) for up in rows]
    rank = pair.rank // count
    downs = pair.down.split(rank)
    ups = [up[:, i * rank : (i + 1) * rank].contiguous() for i, up in enumerate(rows)]
    parts = [Pair(down, up, pair.scale * rank) for down, up in zip(downs, ups, strict=True)]
    return [part if part.down.any() or part.up.any() else None for part in parts]


def _heights(linear: Linear, known: Mapping[int | None, int]) -> list[int]:
    """Output features of all parts, from those known (None: of all together)."""
    units = {i: sum(linear.heights) if i is None else linear.heights[i] for i in known}
    sizes = {rows / units[i] for i, rows in known.items()}
    size = min(sizes)
    if len(sizes) > 1 or not size.is_integer():
        raise ExportError(
            f"{linear.name}: outputs of {sorted(known.values())} features are not in the ratio {linear.heights}; "
            "this is not a LoRA of a FLUX transformer"
        )
    return [int(size) * height for height in linear.heights]


def _is_block_diagonal(up: Tensor, heights: list[int]) -> bool:
    """Whether each part's rows use only their own range of columns, all ranges equally wide."""
    count = len(heights)
    if up.shape[1] % count:
        return False
    rank = up.shape[1] // count
    others = ((rows[:, : i * rank], rows[:, (i + 1) * rank :]) for i, rows in enumerate(up.split(heights)))
    return not any(block.any() for pair in others for block in pair)


def _swap(up: Tensor) -> Tensor:
    first, second = up.chunk(2)
    return torch.cat([second, first])
