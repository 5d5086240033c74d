"""LayerNorm, adaLN modulation and the linears that read the result, as one autograd function that keeps x alone.

    n = LayerNorm(x)·(1 + scale) + shift,   y_i = linear_i(n)

n is quantized as it is made. Backward recomputes n from the FP8 x, for the adapters' dA and LayerNorm's own gradient.
The adapters' h is kept.
Source: arXiv 2410.19313, section 5, carried over to FLUX's blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coat_core.activation import PackingConfig
from coat_core.autograd import first_order_only, without_autocast
from coat_core.kernels.norm import (
    layer_norm_modulate,
    layer_norm_modulate_backward,
    layer_norm_modulate_quantize,
)
from coat_core.kernels.quantize import quantize
from coat_core.quantize import Quantized

from .kept import Kept, pack, unpack
from .linears import AdaptedLinear, Spec, linears_backward, run_linears


def norm_linears(
    x: Tensor, scale: Tensor, shift: Tensor, eps: float, linears: Sequence[AdaptedLinear], config: PackingConfig | None
) -> tuple[Tensor, ...]:
    """LayerNorm, modulation and the linears that read the result.

    Args:
        x: [B, S, D].
        scale: [B, D].
        shift: [B, D].
        eps: LayerNorm's.
        linears: all that read n = LayerNorm(x)·(1 + scale) + shift.
        config: how x is kept; None keeps it as it is.

    Returns:
        Each linear's y [B, S, N].
    """
    parameters = [parameter for linear in linears for parameter in linear.parameters]
    outputs: tuple[Tensor, ...] = _NormLinears.apply(x, scale, shift, eps, linears, config, *parameters)
    return outputs


class _NormLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        eps: float,
        linears: Sequence[AdaptedLinear],
        config: PackingConfig | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        spec = next((linear.base.input_spec for linear in linears if linear.base.input_spec), None)
        outputs, h = run_linears(*_normed(x, scale, shift, eps, spec), linears)
        if any(ctx.needs_input_grad):
            kept = Kept()
            kept.add("x", *pack(x, config))
            kept.add("h", *(() if h is None else (h,)))
            kept.add("modulation", scale, shift)
            kept.add("parameters", *parameters)
            kept.save(ctx)
        ctx.eps, ctx.linears, ctx.config, ctx.dtype = eps, linears, config, x.dtype
        return tuple(outputs)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        with without_autocast(grads[0].device):
            kept = Kept.of(ctx)
            x, (scale, shift) = unpack(kept["x"], ctx.config, ctx.dtype), kept["modulation"]
            needs_dn = any(ctx.needs_input_grad[:3])
            h = next(iter(kept["h"]), None)
            dn, parameter_grads = linears_backward(
                grads, lambda: layer_norm_modulate(x, scale, shift, ctx.eps), h, ctx.linears, needs_dn
            )
            gradients = (None, None, None) if dn is None else layer_norm_modulate_backward(dn, x, scale, ctx.eps)
        return *gradients, None, None, None, *parameter_grads


def _normed(x: Tensor, scale: Tensor, shift: Tensor, eps: float, spec: Spec | None) -> tuple[Tensor, Quantized | None]:
    """LayerNorm and modulation, and the result in FP8."""
    if spec is None:
        return layer_norm_modulate(x, scale, shift, eps), None
    fmt, granularity = spec
    if granularity.name == "per_group":
        n = layer_norm_modulate(x, scale, shift, eps)
        return n, quantize(n, fmt, granularity)
    n, codes, code_scale = layer_norm_modulate_quantize(x, scale, shift, eps, fmt, granularity.name)
    return n, Quantized(codes, code_scale, granularity)
