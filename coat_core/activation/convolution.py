"""Convolutions with frozen weights, which keep nothing of their input for backward.

    dx = convolution_backward(dy, W)        needs the shape of x, not its values

torch's own keeps x whenever any gradient is wanted, since one formula gives dx, dW and db; only dW reads x. In a UNet's
resnets that is a third of everything: norm, SiLU and convolution keep their inputs in turn.

Shapes: x [B, C, ...], weight [O, C / groups, ...] with one to three dimensions of space.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from coat_core.autograd import first_order_only

CONVOLUTIONS: tuple[Callable[..., Tensor], ...] = (torch.conv1d, torch.conv2d, torch.conv3d)


class _FrozenConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, convolve: Callable[..., Tensor], weight: Tensor, bias: Any, *how: Any) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape, ctx.strides, ctx.how = x.shape, x.stride(), how
        return convolve(x, weight, bias, *how)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        *sizes, groups = ctx.how
        sizes = [[size] * (weight.ndim - 2) if isinstance(size, int) else size for size in sizes]
        x = grad.new_empty_strided(ctx.shape, ctx.strides)  # never read; its layout is that of dx
        weight, wanted = weight.to(grad.dtype), (True, False, False)  # autocast multiplied by a copy
        dx = torch.ops.aten.convolution_backward(grad, x, weight, None, *sizes, False, [0], groups, wanted)[0]
        return dx, *[None] * 7


def frozen_convolution(
    convolve: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """Return convolve(input, weight, ...), one of `CONVOLUTIONS`; where only dx is wanted, without keeping x.

    Numerics: output and dx are torch's own, bit for bit.
    """
    how = stride, padding, dilation, groups
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    plain = type(weight) in (Tensor, nn.Parameter) and input.ndim == weight.ndim and not isinstance(padding, str)
    if trained or not plain or not (input.requires_grad and torch.is_grad_enabled()):
        return convolve(input, weight, bias, *how)
    result: Tensor = _FrozenConvolution.apply(input, convolve, weight, bias, *how)
    return result
