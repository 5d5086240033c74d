"""Gradient checkpointing with block inputs saved in FP8.

`torch.utils.checkpoint` saves each block's inputs in high precision. Here a large input is replaced by an *anchor*, a
one-element tensor expanded to the input's shape, through which its gradient flows; the values are saved beside it as
FP8 with 1×G scales. The first forward pass sees the exact input, recomputation the FP8 one.

RNG state, autocast and dropout are reproduced by torch's non-reentrant checkpoint, which this wraps.
Source: the paper's efficient checkpoint; torch.utils.checkpoint for the mechanism.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from coat_core.activation.packing import PACKED_DTYPES, ExactTensor, unpack_saved
from coat_core.autograd import first_order_only
from coat_core.granularity import PER_GROUP, Granularity
from coat_core.ops.quantize import quantize
from coat_core.quantize import Quantized


class _Keeper:
    """One block input: exact until first read, then FP8."""

    def __init__(self, x: Tensor, fmt: str, granularity: Granularity) -> None:
        self._exact: Tensor | None = x.detach()
        self._quantized: Quantized = quantize(x, fmt, granularity)
        self._dtype = x.dtype

    def read(self) -> Tensor:
        if self._exact is not None:
            exact, self._exact = self._exact, None
            return exact
        return self._quantized.dequantize(self._dtype)


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_zeros(1).expand(x.shape)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, keeper: _Keeper) -> Tensor:
        return keeper.read()

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def may_draw() -> bool:
    """Whether recomputation must restore the forward pass's random state; False while a CUDA graph is captured."""
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def fp8_checkpoint(
    function: Callable[..., Any],
    *args: Any,
    fmt: str = "e4m3",
    granularity: Granularity = PER_GROUP,
    min_elements: int = 4096,
    **kwargs: Any,
) -> Any:
    """Run `function(*args, **kwargs)` under checkpointing, saving its large floating tensor arguments in FP8.

    fp32/bf16/fp16 tensors of at least `min_elements` that require a gradient are saved in FP8, others exactly (masks
    and rotary tables are shared constants that stay alive anyway). `function` returns a tensor or a tuple of tensors;
    its forward values are those of the exact inputs.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    inputs, positional, names = [*args, *kwargs.values()], len(args), tuple(kwargs)
    keepers: dict[int, _Keeper] = {}
    for i, x in enumerate(inputs):
        if not (isinstance(x, Tensor) and x.requires_grad and x.layout == torch.strided and x.ndim > 0):
            continue
        if x.dtype in PACKED_DTYPES and x.numel() >= max(min_elements, 1):
            keepers[i] = _Keeper(x, fmt, granularity)
            inputs[i] = _Anchor.apply(x)

    def run(*inputs: Any) -> Any:  # outlives this call: must not refer to args or kwargs
        read = [_Read.apply(x, keepers[i]) if i in keepers else x for i, x in enumerate(inputs)]
        return function(*read[:positional], **dict(zip(names, read[positional:], strict=True)))

    with saved_tensors_hooks(ExactTensor, unpack_saved):  # exact, also inside PackedSavedTensors
        return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=may_draw())
