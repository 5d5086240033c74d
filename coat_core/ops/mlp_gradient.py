"""Gradient of an adapter's down-projection whose linear reads an MLP's activation, as an operator.

A GPU recomputes the values from the saved tensors, tile by tile, and never writes them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coat_core.ops.codes import product
from coat_core.ops.gelu import mlp_activation
from coat_core.ops.operators import operator


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
    activation: str = "gelu_tanh",
) -> Tensor:
    """Return dhᵀ [attention | act(mlp)], [r, D + F] of `dtype_down`, summed over all rows of all images.

    dh: floating [B, S, r]. attention [B, S, D] (or None) and mlp [B, S, N]: values, or codes of 1×G groups with scales
    fp32 [B, S, ceil(D / G)] and [B, S, ceil(N / G)]. Values are of `dtype`, cast to dh's before the product.

    Numerics: the values are those of `mlp_activation`; the kernel sums in fp32 and rounds once, always in the same
    order. The reference has the bits of torch's matrix product of the values.
    """
    storage = (None, None, "none", "none", "none", group_size, dtype, activation)
    values = mlp_activation._init_fn(attention, attention_scale, mlp, mlp_scale, *storage)[0]
    return product(dh.flatten(0, -2).t(), values.to(dh.dtype).flatten(0, -2), dtype_down)
