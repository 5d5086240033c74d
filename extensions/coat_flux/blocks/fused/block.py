"""A block as one autograd function, whose forward and backward passes are written out by its reader.

Autograd would hold each tensor that an operator reads, and add up and cut up gradients by kernels of their own. Here a
block keeps what its passes name, and hands gradients to the kernel that adds them in passing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from coat_core.autograd import first_order_only, without_autocast

from .attention import Rotary
from .kept import Kept

__all__ = ["WrittenOut", "run_block"]


class WrittenOut(Protocol):
    """A block whose two passes are written out."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The adapters' matrices, in the order of `backward`'s gradients."""

    def forward(
        self, kept: Kept, rotary: Rotary, inputs: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[Tensor, ...]:
        """Return the outputs.

        Args:
            kept: takes what backward needs.
            rotary: cos and sin [S, d].
            inputs: streams and modulations.
            needs: which of the inputs have a gradient.
        """

    def backward(
        self, kept: Kept, rotary: Rotary, grads: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """Return the gradients of the inputs, those of no need None or not, and of the parameters."""


def run_block(block: WrittenOut, rotary: Rotary, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Run the block with gradients for its inputs and its adapters."""
    tensors = (*rotary, *inputs, *block.parameters)
    outputs: tuple[Tensor, ...] = _Block.apply(block, torch.is_grad_enabled(), len(inputs), *tensors)
    return outputs


class _Block(torch.autograd.Function):
    # torch.compile drops ctx where arguments are as many as names in the signature: never with rotary in *tensors
    @staticmethod
    def forward(ctx: Any, block: WrittenOut, keeps: bool, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        kept, (cos, sin), inputs = Kept(keeps), tensors[:2], tensors[2 : 2 + count]
        outputs = block.forward(kept, (cos, sin), inputs, ctx.needs_input_grad[5 : 5 + count])
        kept.watch(tensors[2 + count :])
        kept.save(ctx)
        ctx.block, ctx.rotary, ctx.count = block, (cos, sin), count
        return outputs

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[5 : 5 + ctx.count]
        with without_autocast(grads[0].device):
            of_inputs, of_parameters = ctx.block.backward(Kept.of(ctx), ctx.rotary, grads, needs)
        found = [grad if needed else None for grad, needed in zip(of_inputs, needs, strict=True)]
        return None, None, None, None, None, *found, *of_parameters
