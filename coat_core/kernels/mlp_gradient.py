"""Gradients of the down-projections of adapters, whose linears read what is computed again from what was saved.

    mlp_down_gradient     dhᵀ [attention | GELU(mlp)]
    norm_down_gradient    dhᵀ n,   n = LayerNorm(x)·(1 + scale) + shift

A GPU makes the second factor tile by tile and never writes it.

Shapes: dh [B, S, r]; attention [B, S, D]; mlp [B, S, F]; x [B, S, D]; scale, shift [B, D]. What was saved is read as
values, or as codes of 1×G groups with their scale, as in `coat_core.kernels.codes`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coat_core.kernels.codes import product
from coat_core.kernels.dispatch import run_by_triton
from coat_core.kernels.gelu import mlp_activation
from coat_core.kernels.norm import norm_modulate
from coat_core.kernels.operators import operator


@operator("coat::mlp_down_gradient")
def mlp_down_gradient(
    dh: Tensor,
    attention: Tensor | None,
    attention_scale: Tensor | None,
    mlp: Tensor,
    mlp_scale: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
    dtype_down: torch.dtype,
) -> Tensor:
    """Return dhᵀ [attention | GELU(mlp)], summed over all rows of all images.

    Args:
        dh: floating [B, S, r].
        attention: [B, S, D], values or codes; None for GELU alone.
        attention_scale: of the codes, fp32 [B, S, ceil(D / G)]; None where attention is values.
        mlp: [B, S, F], values or codes.
        mlp_scale: likewise.
        group_size: G of the codes.
        dtype: of the values, before they are cast to dh's to be multiplied.
        dtype_down: of the gradient.

    Returns:
        [r, D + F] of `dtype_down`.

    Numerics: the values are those of `mlp_activation`; the kernel sums in fp32 and rounds once, always in the same
    order. The reference has the bits of torch's matrix product of the values.
    """
    activation = mlp_activation._init_fn
    without = (None, None, "none", "none", "none")
    values = activation(attention, attention_scale, mlp, mlp_scale, *without, group_size, dtype)[0]
    return product(dh.flatten(0, -2).t(), values.to(dh.dtype).flatten(0, -2), dtype_down)


@mlp_down_gradient.register_fake
def _(
    dh: Tensor,
    attention: Tensor | None,
    attention_scale: Tensor | None,
    mlp: Tensor,
    mlp_scale: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
    dtype_down: torch.dtype,
) -> Tensor:
    width = mlp.shape[-1] + (0 if attention is None else attention.shape[-1])
    return dh.new_empty((dh.shape[-1], width), dtype=dtype_down)


@operator("coat::norm_down_gradient")
def norm_down_gradient(
    dh: Tensor,
    x: Tensor,
    x_scale: Tensor | None,
    group_size: int,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    dtype: torch.dtype,
    dtype_down: torch.dtype,
) -> Tensor:
    """Return dhᵀ n, summed over all rows of all images.

    Args:
        dh: floating [B, S, r].
        x: [B, S, D], values or codes.
        x_scale: fp32 of the codes; None where x is values.
        group_size: G of the codes.
        scale: [B, D].
        shift: [B, D].
        eps: added to the variance.
        dtype: of x when it was made.
        dtype_down: of the gradient.

    Returns:
        [r, D] of `dtype_down`.

    Numerics: n is that of `norm_modulate`, else as `mlp_down_gradient`.
    """
    n = norm_modulate._init_fn(x, x_scale, group_size, scale, shift, eps, dtype)
    return product(dh.flatten(0, -2).t(), n.to(dh.dtype).flatten(0, -2), dtype_down)


@norm_down_gradient.register_fake
def _(
    dh: Tensor,
    x: Tensor,
    x_scale: Tensor | None,
    group_size: int,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    dtype: torch.dtype,
    dtype_down: torch.dtype,
) -> Tensor:
    return dh.new_empty((dh.shape[-1], x.shape[-1]), dtype=dtype_down)


run_by_triton(mlp_down_gradient, "mlp_gradient.mlp_down_gradient")
run_by_triton(norm_down_gradient, "mlp_gradient.norm_down_gradient")
