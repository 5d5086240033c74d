"""Which elements of a tensor share one scale.

| name       | elements that share a scale                  | scale shape for x [..., K] |
|------------|----------------------------------------------|----------------------------|
| per_tensor | all                                          | []                         |
| per_row    | one slice along the last dimension           | [..., 1]                   |
| per_group  | G consecutive ones along the last dimension  | [..., ceil(K / G)]         |

The paper mixes them ("mixed granularity"): per tensor for GEMM inputs, 1×G groups for non-linear layers.
Source: arXiv 2410.19313, section 5.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

NAMES = ("per_tensor", "per_row", "per_group")
GROUP_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Granularity:
    """A scaling granularity; ValueError for an unknown name or a per_group `group_size` outside `GROUP_SIZES`."""

    name: str
    group_size: int = 128

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"granularity={self.name!r}: must be one of {', '.join(NAMES)}")
        if self.group_size not in GROUP_SIZES:
            raise ValueError(f"group_size={self.group_size!r}: must be one of {', '.join(map(str, GROUP_SIZES))}")

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The scale's shape for a tensor of this shape (at least one dimension)."""
        if self.name == "per_tensor":
            return ()
        if self.name == "per_row":
            return (*shape[:-1], 1)
        return (*shape[:-1], -(-shape[-1] // self.group_size))


PER_TENSOR = Granularity("per_tensor")
PER_ROW = Granularity("per_row")


@functools.cache
def per_group(group_size: int) -> Granularity:
    """The 1×G granularity."""
    return Granularity("per_group", group_size)


PER_GROUP = per_group(128)


@dataclass(frozen=True)
class Storage:
    """How a tensor is stored; where one may stay as it is, None stands in its place."""

    format: str = "e4m3"  # of `formats`
    granularity: Granularity = PER_GROUP


FP8_GROUPS = Storage()
