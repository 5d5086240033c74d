"""Which blocks to recompute so that a step stays within a budget, from the formulas of `sizes`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from coat_core.granularity import Granularity

from .sizes import (
    FP32,
    Block,
    FlowSettings,
    Tokens,
    forward_bytes,
    kept_bytes,
    lora_bytes,
    recomputation_bytes,
    recomputed_bytes,
    workspace_bytes,
)

if TYPE_CHECKING:
    from ..config.coat import COATConfig


def settings_of(
    config: COATConfig, *, value_bytes: int = 2, lora_bytes: int = FP32, dropout: bool = False, cuda: bool = True
) -> FlowSettings:
    """How a config's blocks keep what they keep; without COAT, or with FP8 weights alone, in high precision.

    Args:
        config: the `coat:` block.
        value_bytes: of an element of hidden states.
        lora_bytes: of an element of what adapters compute with.
        dropout: whether the adapters have dropout.
        cuda: whether the model runs on a GPU.
    """
    activation = config.activation
    in_fp8 = config.enabled and activation.use_fp8
    return FlowSettings(
        flow=("generic" if dropout else activation.flow) if in_fp8 else "eager",
        attention=activation.attention,
        packing=Granularity(activation.nonlinear_granularity, activation.group_size),
        inputs=Granularity(activation.linear_granularity, activation.group_size),
        fp8_adapters=in_fp8,
        fp8_checkpoint=config.enabled and config.memory.enable_efficient_checkpoint,
        value_bytes=value_bytes,
        lora_bytes=lora_bytes,
        dropout=dropout,
        cuda=cuda,
        fp8_gemms=in_fp8,
        fp8_weights=config.enabled and config.weight.use_fp8,
        kernels=cuda,
    )


class BlockBytes(NamedTuple):
    """What a choice of recomputed blocks weighs, per block.

    Attributes:
        kept: when the block is not recomputed.
        recomputed: kept when it is.
        forward: needed for a moment before the block keeps anything.
        workspace: needed for a moment besides what is kept.
        recomputation: the same, when the block is recomputed.
        gradients: of its adapters.
    """

    kept: int
    recomputed: int
    forward: int
    workspace: int
    recomputation: int
    gradients: int


@functools.lru_cache(maxsize=1024)
def block_bytes(block: Block, tokens: Tokens, settings: FlowSettings) -> BlockBytes:
    """All numbers of a block; 0 kept and no backward pass where nothing up to it is trained."""
    forward, gradients = forward_bytes(block, tokens, settings), lora_bytes(block)
    if not block.trained_output:
        return BlockBytes(0, 0, forward, 0, 0, 0)
    return BlockBytes(
        kept_bytes(block, tokens, settings),
        recomputed_bytes(block, tokens, settings),
        forward,
        workspace_bytes(block, tokens, settings),
        recomputation_bytes(block, tokens, settings),
        gradients,
    )


class Moment(NamedTuple):
    """What there is at one moment of a step: kept for backward, needed for that moment only, gradients made by then."""

    kept: int
    workspace: int
    gradients: int

    @property
    def total(self) -> int:
        """All three."""
        return sum(self)


def largest_moment(blocks: Sequence[BlockBytes], recomputed: Iterable[int] = (), accumulates: bool = False) -> Moment:
    """Find the moment of a step when the blocks need most.

    Args:
        blocks: in forward order.
        recomputed: indices of those that recompute.
        accumulates: the gradients of an earlier micro-batch are there all along.
    """
    chosen = set(recomputed)
    total = sum(block.gradients for block in blocks)
    kept, later, moments = 0, total, [Moment(0, 0, 0)]
    for i, block in enumerate(blocks):
        later -= block.gradients
        moments.append(Moment(kept, block.forward, total if accumulates else 0))
        kept += block.recomputed if i in chosen else block.kept
        workspace = block.recomputation if i in chosen else block.workspace
        moments.append(Moment(kept, workspace, total if accumulates else later))
    return max(moments, key=lambda moment: moment.total)


def fewest_recomputed(blocks: Sequence[BlockBytes], free: float, accumulates: bool = False) -> list[int]:
    """Choose the fewest blocks to recompute so that `largest_moment` stays within `free` bytes.

    Those that save most come first and, among equals, the first ones, so that what a recomputed block needs for a
    moment is needed when little else is kept. All of them where even that is too much.

    Returns:
        Indices, ascending.
    """
    order = sorted(range(len(blocks)), key=lambda i: blocks[i].kept - blocks[i].recomputed, reverse=True)
    for count in range(len(blocks) + 1):
        if largest_moment(blocks, order[:count], accumulates).total <= free:
            return sorted(order[:count])
    return list(range(len(blocks)))
