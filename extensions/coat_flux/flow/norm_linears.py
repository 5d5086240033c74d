"""LayerNorm, adaLN modulation and the linears that read the result, as one autograd function that keeps x alone.

    n = LayerNorm(x)·(1 + scale) + shift,   y_i = linear_i(n)

Backward makes n anew from the FP8 x, for each adapter's dA and for LayerNorm's own gradient; h of each adapter is kept.
Source: arXiv 2410.19313, section 5, carried over to FLUX's blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coat_core.activation import PackingConfig
from coat_core.autograd import first_order_only
from coat_core.kernels.norm import layer_norm_modulate, layer_norm_modulate_backward

from .kept import Kept, pack, unpack
from .linears import AdaptedLinear


def norm_linears(
    x: Tensor, scale: Tensor, shift: Tensor, eps: float, linears: Sequence[AdaptedLinear], config: PackingConfig
) -> tuple[Tensor, ...]:
    """LayerNorm, modulation and the linears that read the result.

    Args:
        x: [B, S, D].
        scale: [B, D].
        shift: [B, D].
        eps: LayerNorm's.
        linears: all that read n = LayerNorm(x)·(1 + scale) + shift.
        config: how x is kept.

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
        config: PackingConfig,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        n = layer_norm_modulate(x, scale, shift, eps)
        kept = Kept()
        outputs = []
        for i, linear in enumerate(linears):
            y, middles = linear.forward(n)
            outputs.append(y)
            kept.add(f"h{i}", *middles)
        if any(ctx.needs_input_grad):
            kept.add("x", *pack(x, config))
            kept.add("modulation", scale, shift)
            kept.add("parameters", *parameters)
            kept.save(ctx)
        ctx.eps, ctx.linears, ctx.config, ctx.dtype = eps, linears, config, x.dtype
        return tuple(outputs)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        with torch.autocast(grads[0].device.type, enabled=False):
            kept = Kept.of(ctx)
            x, (scale, shift) = unpack(kept["x"], ctx.config, ctx.dtype), kept["modulation"]
            n = layer_norm_modulate(x, scale, shift, ctx.eps)
            needs_dn = any(ctx.needs_input_grad[:3])
            dn, parameter_grads = None, []
            for i, (linear, grad) in enumerate(zip(ctx.linears, grads, strict=True)):
                found, middle_grads = linear.parameter_gradients(grad, n, kept[f"h{i}"])
                parameter_grads += found
                if needs_dn:
                    dx = linear.input_gradient(grad, middle_grads)
                    dn = dx if dn is None else dn.add_(dx)
            gradients = (None, None, None) if dn is None else layer_norm_modulate_backward(dn, x, scale, ctx.eps)
        return *gradients, None, None, None, *parameter_grads
