"""Many small tensors as one buffer of blocks, so the number of launches does not depend on that of parameters.

Each flat piece starts a new block, padded with zeros, so scales belong to one piece each:

    piece 0: a a a a a 0 0 0 | piece 1: b b b b | ...      (block_size 4)

Large parameters are split at block borders, which bounds the buffers and changes no result.
Shapes: a piece [size]; buffer [n_blocks, B].
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Elements of one packed buffer. GPU: large enough to hide the launches, small enough (64 MiB in fp32) to fit next to a
# model that fills the memory. CPU: about the size that stays in the cache between the passes; measured, RESULTS.md.
CHUNK_ELEMENTS_GPU = 1 << 24
CHUNK_ELEMENTS_CPU = 1 << 17


def chunk_elements(device: torch.device) -> int:
    """Return the largest number of elements to pack into one buffer on this device."""
    return CHUNK_ELEMENTS_CPU if device.type == "cpu" else CHUNK_ELEMENTS_GPU


def n_blocks(size: int, block_size: int) -> int:
    """Return the number of blocks that `size` elements take, the last one possibly shorter."""
    return -(-size // block_size)


def spans(size: int, limit: int) -> Iterator[tuple[int, int]]:
    """Cut 0 … size into (start, stop) of at most `limit` elements; an empty range gives one empty span."""
    for start in range(0, max(size, 1), limit):
        yield start, min(start + limit, size)


class Layout:
    """Where each of a list of flat pieces is in a packed buffer [n_blocks, block_size]."""

    def __init__(self, sizes: Sequence[int], block_size: int) -> None:
        self.blocks = [n_blocks(size, block_size) for size in sizes]
        self.shape = (sum(self.blocks), block_size)
        self.padded = any(size % block_size for size in sizes)
        padding = [blocks * block_size - size for blocks, size in zip(self.blocks, sizes, strict=True)]
        self._cuts = [cut for pair in zip(sizes, padding, strict=True) for cut in pair] if self.padded else list(sizes)

    def _pieces_of(self, buffer: Tensor) -> list[Tensor]:
        return list(buffer.view(-1).split(self._cuts))[:: 2 if self.padded else 1]

    def gather(self, pieces: list[Tensor], dtype: torch.dtype) -> Tensor:
        """Copy flat pieces into a new buffer [n_blocks, block_size] of `dtype`, zeros in the padding."""
        if not self.padded:
            return torch.cat(pieces).to(dtype).view(self.shape)
        buffer = torch.zeros(self.shape, dtype=dtype, device=pieces[0].device)
        torch._foreach_copy_(self._pieces_of(buffer), pieces)
        return buffer

    def scatter(self, buffer: Tensor, pieces: list[Tensor]) -> None:
        """Copy a buffer [n_blocks, block_size] back into the flat pieces, converting to their dtype."""
        torch._foreach_copy_(pieces, self._pieces_of(buffer))


class Chunk(NamedTuple):
    """Pieces that are worked on together."""

    pieces: list[tuple[int, int, int]]  # (index of the tensor, start, stop) of each, in elements
    rows: slice  # the blocks they take of the packed state, one after the other
    layout: Layout  # the same pieces in a buffer of their own


@functools.lru_cache(maxsize=32)  # a step asks for the same chunks as the one before
def chunks(sizes: tuple[int, ...], first_blocks: tuple[int, ...], block_size: int, limit: int) -> list[Chunk]:
    """Cut flat tensors into chunks of at most `limit` elements whose blocks follow each other in the packed state."""
    runs: list[tuple[list[tuple[int, int, int]], int, int]] = []  # pieces, first row, row after the last
    total = 0
    for index, (size, first) in enumerate(zip(sizes, first_blocks, strict=True)):
        for start, stop in spans(size, limit):
            row = first + start // block_size
            after = row + n_blocks(stop - start, block_size)
            if runs and runs[-1][2] == row and total + stop - start <= limit:
                pieces, first_row, _ = runs[-1]
                runs[-1] = (pieces, first_row, after)
                total += stop - start
            else:
                pieces = []
                runs.append((pieces, row, after))
                total = stop - start
            pieces.append((index, start, stop))
    return [
        Chunk(pieces, slice(row, after), Layout([stop - start for _, start, stop in pieces], block_size))
        for pieces, row, after in runs
    ]
