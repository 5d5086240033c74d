"""Which tensors autograd sees in place of a block's adapters.

As leaves of the graph, FLUX.1-dev's 988 matrices take a tenth of a step's host time: a node of each passes through
autograd's queue. Inside `written_gradients` a block hands autograd one tensor that stands for all of them, and adds
their gradients to `.grad` itself, as a leaf's node would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["leaves_of", "returned", "written_gradients"]

_written: ContextVar[bool] = ContextVar("written", default=False)
_requires_grad = attrgetter("requires_grad")
_STAND_IN = torch.zeros((), requires_grad=True)


@contextmanager
def written_gradients(on: bool = True) -> Iterator[None]:
    """Let blocks that are called in here write their adapters' gradients, or not.

    For a trainer that reads `.grad` after `backward()`. `torch.autograd.grad` finds no adapter in such a graph, and
    hooks on an adapter or its leaf, for instance those of DistributedDataParallel, are not called.
    """
    token = _written.set(on)
    try:
        yield
    finally:
        _written.reset(token)


def leaves_of(parameters: Sequence[nn.Parameter]) -> Sequence[Tensor]:
    """What an autograd function is called with for its adapters' matrices: themselves, or what stands for them."""
    if not _written.get():
        return parameters
    return (_STAND_IN,) if parameters and all(map(_requires_grad, parameters)) else parameters


def returned(count: int, parameters: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> Sequence[Any]:
    """What the function's backward pass returns for its leaves; where one stands for all, `.grad` is written.

    Args:
        count: of the leaves.
        parameters: A and B of each adapter.
        grads: of these, in their dtypes.
    """
    if count == len(parameters):
        return grads
    for parameter, grad in zip(parameters, grads, strict=True):
        if parameter.grad is None:
            parameter.grad = grad
        else:
            parameter.grad += grad
    return (None,)
