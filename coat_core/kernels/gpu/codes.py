"""What launchers share whose kernels make rows of values and quantize them in passing.

Per row a kernel leaves codes and scales. Per tensor it leaves the amax of each row, and the cast is a second launch.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from coat_core.formats import get_format
from coat_core.kernels.codes import check_granularity, no_codes
from coat_core.kernels.gpu.quantize import cast_by_amax
from coat_core.kernels.gpu.runtime import blocks, empty, empty_codes, finished

WIDEST_ROW = 16384  # beyond 8192 the kernels that also hold sums over rows spill registers: slower, still right
TILE_ELEMENTS = 2048
ELEMENTS_A_THREAD = 16
WARPS_MAX = 16
PROGRAMS = 512  # that share the rows where each leaves column sums: two or more for each multiprocessor of a large GPU


class RowCodes:
    """Buffers for the codes of values [..., K], as a kernel's arguments `codes_ptr`, `scale_ptr` and FORMAT_MAX.

    Attributes:
        codes: what the kernel writes codes to; None unless per row.
        scale: fp32 [rows], for each row's scale, or its amax where there are no codes; None where none are asked for.
        format_max: of the format.
    """

    def __init__(self, shape: tuple[int, ...], fmt: str, granularity: str, device: torch.device) -> None:
        check_granularity(granularity)
        self._fmt, self._shape, self._granularity = get_format(fmt), shape, granularity
        self.format_max = self._fmt.max
        self.codes = empty_codes(shape, self._fmt, device) if granularity == "per_row" else None
        self.scale = None if granularity == "none" else empty((math.prod(shape[:-1]),), torch.float32, device)

    def results(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scale once the kernel has run; `values` are its own, contiguous, in their dtype."""
        if self.scale is None:
            return no_codes(values, self._fmt.name)
        if self.codes is None:
            return cast_by_amax(values, self.scale.amax(0, keepdim=True), self._fmt.name)
        return finished(self.codes, self._fmt.dtype), self.scale.view(*self._shape[:-1], 1)


def with_row_stride(x: Tensor) -> tuple[Tensor, int]:
    """Return x [..., K] and the distance of its rows in elements, copied only where that is not the same for all."""
    sizes, strides = x.shape[:-1], x.stride()[:-1]
    steps = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    even = all(outer == inner * size for (_, outer), (size, inner) in itertools.pairwise(steps))
    if not even or (x.stride(-1) != 1 and x.shape[-1] != 1):
        return x.contiguous(), x.shape[-1]
    return x, (steps[-1][1] if steps else x.shape[-1])


def check_width(width: int) -> None:
    """Raise ValueError where one program cannot hold a row."""
    if width > WIDEST_ROW:
        raise ValueError(f"x with rows of {width}: the Triton kernel holds at most {WIDEST_ROW}; split the rows")


def tile_rows(block: int) -> int:
    """Return how many rows of `block` elements one program takes: several where they are short."""
    return max(TILE_ELEMENTS // block, 1)


def warps(elements: int) -> int:
    """Return how many warps share so many elements (a power of two)."""
    return min(max(elements // (32 * ELEMENTS_A_THREAD), 1), WARPS_MAX)


def shared_rows(images: int, rows: int, tile: int) -> tuple[int, int]:
    """Share each image's rows among programs that each leave column sums.

    Args:
        images: B.
        rows: S, of each image.
        tile: rows that a program takes at once.

    Returns:
        programs for each image, and how many tiles each of them takes.
    """
    tiles = blocks(rows, tile)
    rounds = max(blocks(tiles, max(PROGRAMS // max(images, 1), 1)), 1)
    return blocks(tiles, rounds), rounds
