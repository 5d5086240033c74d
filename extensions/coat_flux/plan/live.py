"""The most bytes a module's forward pass holds at one moment, found by running it on the meta device.

Meta tensors have shapes and lifetimes but no memory, so the real class runs at full size in a moment, on any machine.
Counted is what torch would allocate; what a convolution or matrix library takes for itself is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..blocks.held import HeldTensors

__all__ = ["largest_held"]


class _AttentionKernel(TorchFunctionMode):
    """Attention as a GPU's kernels do it: q, k and v to out, without the matrix of weights in between."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, value = _query_and_value(*args, **kwargs)
            return query.new_empty((*query.shape[:-1], value.shape[-1]))
        return func(*args, **kwargs)


def _query_and_value(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return query, value


@torch.no_grad()
def largest_held(run: Callable[[], Any]) -> int:
    """Return the most bytes that the tensors made by `run` take at one moment.

    Args:
        run: calls a module on the meta device, with inputs it makes itself.
    """
    with _AttentionKernel(), HeldTensors() as held:
        run()
    return held.peak
