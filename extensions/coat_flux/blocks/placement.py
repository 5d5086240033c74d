"""Which blocks have their codes in CPU memory, weighed against recomputation by modelled time.

    copied        a streamed block's codes cross the bus in forward and backward, overlapped with other blocks
    recomputed    one more forward pass of the block, during which codes can be copied too

The rates are those of an RTX 4090 with PCIe 4.0 x16; their ratio is half of it on a 4060 Ti, a third below on a
5090.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .block_bytes import UnknownBlock
from .described import Block
from .sizes import Tokens

ALIGNMENT = 256  # bytes, where a storage begins in a slot; torch's CUDA allocator has 512, GEMMs want 16
SLOTS = 2  # buffers on the device that streamed blocks share
FP8_PER_SECOND, BF16_PER_SECOND = 330e12 * 0.65, 165e12 * 0.7  # operations of large matrix products
BACKWARD_OF_ATTENTION = 2.5  # of its forward pass
COPIED_PER_SECOND = 25e9  # bytes, host to device, pinned


def aligned(size: int) -> int:
    """Bytes that a storage takes in a slot."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def spread(count: int, blocks: int) -> tuple[int, ...]:
    """Return `count` indices of `blocks`, evenly spaced: the more blocks between two, the longer a copy may take."""
    return tuple((2 * i + 1) * blocks // (2 * count) for i in range(count))


def slot_bytes(codes: Sequence[int], streamed: Collection[int]) -> int:
    """What the slots of streamed blocks take on the device; `codes` are bytes of all blocks."""
    return min(SLOTS, len(streamed)) * max((codes[i] for i in streamed), default=0)


def pass_seconds(
    blocks: Sequence[Block | UnknownBlock], tokens: Tokens, codes: Sequence[int]
) -> list[tuple[float, float]]:
    """Return each block's seconds, forward and backward; unknown blocks take as long as their codes' copy."""
    return [_seconds(block, tokens, size) for block, size in zip(blocks, codes, strict=True)]


def extra_seconds(
    times: Sequence[tuple[float, float]], codes: Sequence[int], streamed: Collection[int], recomputed: Collection[int]
) -> float:
    """Return what streaming and recomputing these blocks adds to a step."""
    again = sum(times[i][0] for i in recomputed)
    forward, backward = (sum(column) for column in zip(*times, strict=True))
    copies = sum(codes[i] for i in streamed) / COPIED_PER_SECOND
    return again + max(0.0, copies - forward) + max(0.0, copies - backward - again)


def products(block: Block, tokens: Tokens) -> int:
    """Operations of a block's frozen weights; modulation is one row."""
    return 2 * tokens.rows * block.weights_per_row


def attention(block: Block, tokens: Tokens) -> int:
    """Operations of a block's attention, forward."""
    return 4 * tokens.rows * (tokens.text + tokens.image) * block.hidden


def _seconds(block: Block | UnknownBlock, tokens: Tokens, codes: int) -> tuple[float, float]:
    if isinstance(block, UnknownBlock):
        return codes / COPIED_PER_SECOND, codes / COPIED_PER_SECOND
    linear, other = products(block, tokens) / FP8_PER_SECOND, attention(block, tokens) / BF16_PER_SECOND
    return linear + other, linear + BACKWARD_OF_ATTENTION * other
