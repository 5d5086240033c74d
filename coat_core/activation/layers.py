"""Layers that save their input in FP8, or save none: a LoRA's down-projection and frozen convolutions.

Down-projection, which saves its input in FP8:

    h = x Aᵀ            computed from the high precision x; A is never quantized
    dx = dh A
    dA = dhᵀ x_q        from the FP8 x, which only dA needs

An FP8 base linear that reads the same x shares its FP8 copy (`hands_input_to_adapter`), since the trainer may cast x
before the adapter reads it: q, k, v and their adapters save 1 byte per element of x among them. Of a parameter or an
input, such as a caption's embedding, they save x itself, which is kept in any case.

Convolution with frozen weights, which saves no input:

    dx = convolution_backward(dy, W)        needs the shape of x, not its values

torch saves x whenever any gradient is needed, since one formula gives dx, dW and db; only dW reads x. In a UNet's
resnets that is a third of all saved tensors: norm, SiLU and convolution save their inputs in turn.

Shapes: x [..., K], A [r, K], h [..., r]; of convolutions x [B, C, ...], weight [O, C / groups, ...] with one to three
spatial dimensions.
Source: the frozen-weight case of arXiv 2410.19313, section 5: a frozen W needs no x, LoRA's dA does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from coat_core.autograd import autocast_is_on, first_order_only
from coat_core.formats import INT8
from coat_core.granularity import Storage
from coat_core.int8 import rotation_size
from coat_core.ops.quantize import dequantize, quantize_once, read_saved_input, rotate, saved_input

CONVOLUTIONS: tuple[Callable[..., Tensor], ...] = (torch.conv1d, torch.conv2d, torch.conv3d)


class _LinearWithFP8Input(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, saved: tuple[Tensor, ...], storage: Storage) -> Tensor:
        ctx.save_for_backward(*saved, weight)
        ctx.storage = storage
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        *saved, weight = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = grad @ weight
        if ctx.needs_input_grad[1]:
            codes, scale, granularity = read_saved_input(saved, ctx.storage)
            x_hat = dequantize(codes, scale, granularity, grad.dtype)
            dw = grad.reshape(-1, grad.shape[-1]).t() @ x_hat.reshape(-1, x_hat.shape[-1])
            if codes.dtype == INT8.dtype:  # of x H, and H is its own inverse
                dw = rotate(dw, rotation_size(dw.shape[-1]))
        return dx, dw, None, None


def _is_same_input(x: Tensor, base_input: Tensor) -> bool:
    """Whether x is the base linear's input, or its cast by the autograd graph."""
    if x is base_input:
        return True
    if x.grad_fn is None or x.grad_fn.name() != "ToCopyBackward0" or not base_input.requires_grad:
        return False
    edge = torch.autograd.graph.get_gradient_edge(base_input)
    node, output = x.grad_fn.next_functions[0]
    return node is edge.node and output == edge.output_nr


class FP8InputLinear(nn.Linear):
    """A bias-free nn.Linear that saves its input in FP8; convert an adapter's down projection with `from_linear`."""

    storage: Storage  # of the saved x
    source: tuple[Any, ...]  # one-element tuple with the base linear that hands over its x, or empty

    @staticmethod
    def from_linear(linear: nn.Linear, storage: Storage, base: Any = None) -> FP8InputLinear:
        """Convert in place, keeping the parameter; ValueError if the layer has a bias."""
        if linear.bias is not None:
            raise ValueError(f"{type(linear).__name__} with a bias: an adapter's down projection must have none")
        linear.__class__ = FP8InputLinear
        assert isinstance(linear, FP8InputLinear)
        linear.storage = storage
        linear.source = () if base is None else (base,)
        if base is not None:
            base.hands_input_to_adapter = True
        return linear

    def forward(self, x: Tensor) -> Tensor:
        """Return x Aᵀ, [..., K] to [..., r]."""
        if not (torch.is_grad_enabled() and self.weight.requires_grad and x.numel()):
            return torch.nn.functional.linear(x, self.weight)
        handed, weight = None, self.weight
        for base in self.source:
            reference, base.adapter_input = getattr(base, "adapter_input", None), None
            base_input = None if reference is None else reference()
            if base_input is not None and _is_same_input(x, base_input):
                handed = base_input
        saved = quantize_once(x, self.storage)[:2] if handed is None else saved_input(handed, self.storage)
        device = x.device.type
        if autocast_is_on(device):
            dtype = torch.get_autocast_dtype(device)
            x, weight = x.to(dtype), weight.to(dtype)
        result: Tensor = _LinearWithFP8Input.apply(x, weight, saved, self.storage)
        return result


class _FrozenConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, convolve: Callable[..., Tensor], weight: Tensor, bias: Any, *sizes: Any) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape, ctx.strides, ctx.sizes = x.shape, x.stride(), sizes
        return convolve(x, weight, bias, *sizes)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        *sizes, groups = ctx.sizes
        x = grad.new_empty_strided(ctx.shape, ctx.strides)  # never read; its layout is that of dx
        weight, wanted = weight.to(grad.dtype), (True, False, False)  # autocast multiplied by a copy
        dx = torch.ops.aten.convolution_backward(grad, x, weight, None, *sizes, False, [0], groups, wanted)[0]
        return dx, *[None] * 7


def keep_no_input(layer: Any) -> None:
    """Make an nn.Conv1d, Conv2d or Conv3d save no input for backward while its weights are frozen.

    Patches the instance, so trainers still find a layer of its class. Padding given as a string or by reflection, and
    inputs without a batch, run torch's own code. Output and dx are torch's own, bit for bit.
    """
    if layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
        layer._conv_forward = functools.partial(_forward, layer)


def _forward(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    convolve = CONVOLUTIONS[weight.ndim - 3]
    sizes = (layer.stride, layer.padding, layer.dilation, layer.groups)
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    if trained or x.ndim != weight.ndim or not (x.requires_grad and torch.is_grad_enabled()):
        return convolve(x, weight, bias, *sizes)
    result: Tensor = _FrozenConvolution.apply(x, convolve, weight, bias, *sizes)
    return result
