"""Many small tensors as one buffer of blocks.

LoRA has hundreds of small parameters, so a step works on packed fp32 buffers instead of on one tensor at a time: the
number of launches does not depend on the number of parameters. Each flat piece starts a new block and its last block
is filled with zeros, so a block never mixes two parameters and scales belong to one piece each:

    piece 0: a a a a a 0 0 0 | piece 1: b b b b | ...      (block_size 4)

Large parameters are split at block borders, which keeps the buffers bounded and changes no result.
Shapes: a piece [size]; buffer [n_blocks, B].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

# Elements of one packed buffer. GPU: large enough to hide the launches, small enough (64 MiB in fp32) to fit beside a
# model that fills the memory. CPU: about what stays in the cache between the passes; measured, EXPERIMENTS.md.
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


def chunked(sizes: Iterable[int], limit: int) -> Iterator[slice]:
    """Cut a sequence of sizes into consecutive slices whose sizes add up to at most `limit` (or are one piece)."""
    first = total = 0
    index = -1
    for index, size in enumerate(sizes):
        if index > first and total + size > limit:
            yield slice(first, index)
            first, total = index, 0
        total += size
    if index >= 0:
        yield slice(first, index + 1)


class Layout:
    """Where each of a list of flat pieces lies in a packed buffer [n_blocks, block_size].

    Args:
        sizes: number of elements of each piece.
        block_size: elements of a block.
    """

    def __init__(self, sizes: Sequence[int], block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [n_blocks(size, block_size) for size in sizes]
        self.padded = any(size % block_size for size in sizes)
        padding = [blocks * block_size - size for blocks, size in zip(self.blocks, sizes, strict=True)]
        self._cuts = [cut for pair in zip(sizes, padding, strict=True) for cut in pair] if self.padded else list(sizes)

    def _pieces_of(self, buffer: Tensor) -> list[Tensor]:
        return list(buffer.view(-1).split(self._cuts))[:: 2 if self.padded else 1]

    def gather(self, pieces: list[Tensor], dtype: torch.dtype) -> Tensor:
        """Copy flat pieces into a new buffer [n_blocks, block_size] of `dtype`, zeros in the padding."""
        shape = (sum(self.blocks), self.block_size)
        new = torch.zeros if self.padded else torch.empty
        buffer = new(shape, dtype=dtype, device=pieces[0].device)
        torch._foreach_copy_(self._pieces_of(buffer), pieces)
        return buffer

    def scatter(self, buffer: Tensor, pieces: list[Tensor]) -> None:
        """Copy a buffer [n_blocks, block_size] back into the flat pieces, converting to their dtype."""
        torch._foreach_copy_(pieces, self._pieces_of(buffer))

    def gather_per_block(self, pieces: list[Tensor]) -> Tensor:
        """Join per-block numbers, a piece each [blocks], to [n_blocks, 1]."""
        return torch.cat(pieces).unsqueeze(-1)

    def scatter_per_block(self, values: Tensor, pieces: list[Tensor]) -> None:
        """Inverse of `gather_per_block`."""
        torch._foreach_copy_(pieces, list(values.view(-1).split(self.blocks)))
