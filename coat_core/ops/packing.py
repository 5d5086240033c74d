"""Many small tensors as one buffer of blocks, so the number of launches does not depend on that of parameters.

Each flat piece starts a new block, padded with zeros, so scales belong to one piece each:

    piece 0: a a a a a 0 0 0 | piece 1: b b b b | ...      (block_size 4)

Large parameters are split at block borders, which bounds the buffers and changes no result.
Shapes: a piece [size]; buffer [n_blocks, B].
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

# Elements of one packed buffer. GPU: large enough to hide the launches, small enough (64 MiB in fp32) to fit next to a
# model that fills the memory. CPU: about the size that stays in the cache between the passes; measured, RESULTS.md.
CHUNK_ELEMENTS_GPU = 1 << 24
CHUNK_ELEMENTS_CPU = 1 << 17


def chunk_elements(device: torch.device) -> int:
    """The largest number of elements to pack into one buffer on this device."""
    return CHUNK_ELEMENTS_CPU if device.type == "cpu" else CHUNK_ELEMENTS_GPU


def n_blocks(size: int, block_size: int) -> int:
    """The number of blocks that `size` elements take, the last one possibly shorter."""
    return -(-size // block_size)


class Chunk:
    """Pieces of flat tensors that are worked on together, in a buffer [n_blocks, B] of their own."""

    def __init__(self, first_row: int, block_size: int) -> None:
        self.block_size = block_size
        self.pieces: list[tuple[int, int, int]] = []  # index of the tensor, start and stop in elements
        self.blocks: list[int] = []  # of each piece
        self.rows = slice(first_row, first_row)  # of the packed state: one after the other
        self._cuts: list[int] = []  # of the buffer: a piece, its padding, the next piece, ...

    def add(self, index: int, start: int, stop: int) -> None:
        """Add elements `start` to `stop` of tensor `index`, whose blocks are the next rows of the packed state."""
        blocks = n_blocks(stop - start, self.block_size)
        self.pieces.append((index, start, stop))
        self.blocks.append(blocks)
        self.rows = slice(self.rows.start, self.rows.stop + blocks)
        self._cuts += [stop - start, blocks * self.block_size - (stop - start)]

    def cut(self, tensors: list[Tensor]) -> list[Tensor]:
        """The pieces of flat tensors, as views."""
        return [tensors[index][start:stop] for index, start, stop in self.pieces]

    def gather(self, tensors: list[Tensor]) -> Tensor:
        """Copy the pieces of flat tensors into a new fp32 buffer, zeros in the padding."""
        shape = (self.rows.stop - self.rows.start, self.block_size)
        buffer = torch.zeros(shape, dtype=torch.float32, device=tensors[0].device)
        torch._foreach_copy_(list(buffer.view(-1).split(self._cuts))[::2], self.cut(tensors))
        return buffer

    def scatter(self, buffer: Tensor, tensors: list[Tensor]) -> None:
        """Copy a buffer back into the flat tensors, converting to their dtype."""
        torch._foreach_copy_(self.cut(tensors), list(buffer.view(-1).split(self._cuts))[::2])

    def per_block(self, table: Tensor) -> Tensor:
        """Return for each block the row of its tensor in a table."""
        places = zip(self.pieces, self.blocks, strict=True)
        return torch.cat([table[index].expand(blocks, -1) for (index, _, _), blocks in places])


@functools.lru_cache(maxsize=32)  # a step asks for the same chunks as the one before
def chunks(sizes: tuple[int, ...], first_blocks: tuple[int, ...], block_size: int, limit: int) -> list[Chunk]:
    """Cut flat tensors into chunks whose blocks follow each other in the packed state, of at most `limit` elements.

    `limit` is a multiple of the block size, and padding counts. A tensor without elements is an empty piece.
    """
    made: list[Chunk] = []
    for index, (size, first) in enumerate(zip(sizes, first_blocks, strict=True)):
        for start in range(0, max(size, 1), limit):
            stop = min(start + limit, size)
            row = first + start // block_size
            after = row + n_blocks(stop - start, block_size)
            chunk = made[-1] if made else None
            if chunk is None or chunk.rows.stop != row or (after - chunk.rows.start) * block_size > limit:
                chunk = Chunk(row, block_size)
                made.append(chunk)
            chunk.add(index, start, stop)
    return made
