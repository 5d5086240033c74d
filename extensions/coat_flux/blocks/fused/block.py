"""A block as one autograd function, whose forward and backward passes are written out by its reader.

Autograd would hold each tensor that an operator reads, and add up and cut up gradients by kernels of their own. Here a
block keeps what its passes name, and hands gradients to the kernel that adds them in passing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from coat_core.autograd import first_order_only, without_autocast

from .attention import Shared
from .gradients import leaves_of, returned
from .kept import Kept

__all__ = ["Call", "WrittenOut", "run_block"]


class Call(NamedTuple):
    """What a block is called with, whatever model it is in.

    Attributes:
        image: [B, S, D].
        text: [B, T, D]; None where `image` has the tokens of both, text first.
        shared: what all blocks of a pass share, of the tokens of both, text first.
        temb: [B, D] that the block's own modulations are made from; None where the model hands in their vectors.
        vectors: these [B, n·D], of each stream, text first.
    """

    image: Tensor
    text: Tensor | None
    shared: Shared
    temb: Tensor | None = None
    vectors: tuple[Tensor, ...] = ()


class WrittenOut(Protocol):
    """A block whose two passes are written out."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The adapters' matrices, in the order of `backward`'s gradients."""

    def forward(
        self, kept: Kept, shared: Shared, inputs: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[Tensor, ...]:
        """Return the outputs.

        Args:
            kept: takes what backward needs.
            shared: of the pass.
            inputs: streams and modulations.
            needs: which of the inputs have a gradient.
        """

    def backward(
        self, kept: Kept, shared: Shared, grads: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """Return the gradients of the inputs, those of no need None or not, and of the parameters."""


def run_block(block: WrittenOut, shared: Shared, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Run the block with gradients for its inputs and its adapters."""
    fixed = shared[: 2 if shared.mask is None else 3]
    outputs: tuple[Tensor, ...] = _Block.apply(
        block, torch.is_grad_enabled(), len(fixed), len(inputs), *fixed, *inputs, *leaves_of(block.parameters)
    )
    return outputs


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, block: WrittenOut, keeps: bool, first: int, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        kept, shared, inputs = Kept(keeps), Shared(*tensors[:first]), tensors[first : first + count]
        ctx.inputs = slice(4 + first, 4 + first + count)  # among the arguments
        outputs = block.forward(kept, shared, inputs, ctx.needs_input_grad[ctx.inputs])
        leaves = tensors[first + count :]
        kept.watch(leaves if len(leaves) == len(block.parameters) else block.parameters)
        kept.save(ctx)
        ctx.block, ctx.shared, ctx.leaves = block, shared, len(leaves)
        return outputs

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[ctx.inputs]
        with without_autocast(grads[0].device):
            of_inputs, of_parameters = ctx.block.backward(Kept.of(ctx), ctx.shared, grads, needs)
        found = [grad if needed else None for grad, needed in zip(of_inputs, needs, strict=True)]
        return *[None] * ctx.inputs.start, *found, *returned(ctx.leaves, ctx.block.parameters, of_parameters)
