"""Gradient of the down-projection of an adapter whose linear reads an MLP's activation, as an operator.

    mlp_down_gradient    dhᵀ [attention | act(mlp)]

A GPU makes the second factor from what was saved, tile by tile, and never writes it.

Shapes: dh [B, S, r]; attention [B, S, D]; mlp [B, S, N], values or codes of 1×G groups, as in
`coat_core.ops.codes`; act(mlp) [B, S, F], as in `coat_core.ops.gelu`.
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
    """Return dhᵀ [attention | act(mlp)], summed over all rows of all images.

    Args:
        dh: floating [B, S, r].
        attention: [B, S, D], values or codes; None for the activation alone.
        attention_scale: of the codes, fp32 [B, S, ceil(D / G)]; None where attention is values.
        mlp, mlp_scale: [B, S, N], likewise.
        group_size: G of the codes.
        dtype: of the values, before they are cast to dh's to be multiplied.
        dtype_down: of the gradient.
        activation: as of `mlp_activation`.

    Returns:
        [r, D + F] of `dtype_down`.

    Numerics: the values are those of `mlp_activation`; the kernel sums in fp32 and rounds once, always in the same
    order. The reference has the bits of torch's matrix product of the values.
    """
    storage = (None, None, "none", "none", "none", group_size, dtype, activation)
    values = mlp_activation._init_fn(attention, attention_scale, mlp, mlp_scale, *storage)[0]
    return product(dh.flatten(0, -2).t(), values.to(dh.dtype).flatten(0, -2), dtype_down)
