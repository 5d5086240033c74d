"""Convolutions with frozen weights that save no input for backward.

    dx = convolution_backward(dy, W)        needs the shape of x, not its values

torch saves x whenever any gradient is needed, since one formula gives dx, dW and db; only dW reads x. In a UNet's
resnets that is a third of all saved tensors: norm, SiLU and convolution save their inputs in turn.

Shapes: x [B, C, ...], weight [O, C / groups, ...] with one to three spatial dimensions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
        x = grad.new_empty_strided(ctx.shape, ctx.strides)  # never read; its layout is that of dx
        weight, wanted = weight.to(grad.dtype), (True, False, False)  # autocast multiplied by a copy
        dx = torch.ops.aten.convolution_backward(grad, x, weight, None, *sizes, False, [0], groups, wanted)[0]
        return dx, *[None] * 7


def keep_no_input(layer: Any) -> None:
    """Make an nn.Conv1d, Conv2d or Conv3d save no input for backward while its weights are frozen.

    Patches the instance, so trainers still find a layer of its class. Padding given as a string or by reflection, and
    inputs without a batch, run torch's own code.

    Numerics: output and dx are torch's own, bit for bit. A second backward pass through dx raises RuntimeError.
    """
    if layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
        layer._conv_forward = functools.partial(_forward, layer)


def _forward(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    convolve, how = CONVOLUTIONS[weight.ndim - 3], (layer.stride, layer.padding, layer.dilation, layer.groups)
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    if trained or x.ndim != weight.ndim or not (x.requires_grad and torch.is_grad_enabled()):
        return convolve(x, weight, bias, *how)
    result: Tensor = _FrozenConvolution.apply(x, convolve, weight, bias, *how)
    return result
