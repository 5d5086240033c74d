"""The input of the linear after an MLP's activation, as an operator: codes, and their adapter's down-projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coat_core.autograd import without_autocast
from coat_core.casts import Declared, declarations, declares
from coat_core.ops.dispatch import operator
from coat_core.ops.gelu import activated_width, mlp_activation


@operator("coat::mlp_activation_down")
def mlp_activation_down(
    attention: Tensor | None,
    mlp: Tensor,
    h: Tensor | None,
    up: Tensor | None,
    down: Tensor,
    fmt: str,
    granularity: str,
    saved_format: str,
    group_size: int,
    dtype: torch.dtype,
    activation: str = "gelu_tanh",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the codes of the next linear's input, and its adapter's down-projection.

        values = [attention | act(mlp + h upᵀ)],   h_next = values downᵀ

    down is [R, D + F], R from 1 to 256, in `dtype`; granularity "per_row" or "per_tensor"; attention and mlp are
    values; all else as in `mlp_activation`. Returns h_next [B, S, R] of `dtype`; then as `mlp_activation` without its
    values. Raises ValueError as `mlp_activation`, and for another granularity or a down-projection of another width.

    Numerics: codes as `mlp_activation`. The kernel sums h_next in fp32 in an order that depends on the shapes alone and
    rounds once; the reference has the bits of torch's linear.
    """
    check_down(attention, mlp, down, granularity, activation)
    storage = (fmt, granularity, saved_format, group_size, dtype, activation)
    made = mlp_activation._init_fn(attention, None, mlp, None, h, up, *storage)
    with without_autocast(mlp.device):
        return torch.nn.functional.linear(made[0], down), *made[1:]


@declares(mlp_activation_down)
def _(out: Any, a: Any) -> Declared:
    inputs = (a.attention, None, a.mlp, None, a.h, a.up)
    values = mlp_activation._init_fn(*inputs, "none", "none", "none", a.group_size, a.dtype, a.activation)[0]
    storage = (a.fmt, a.granularity, a.saved_format, a.group_size, a.dtype, a.activation)
    return declarations["coat::mlp_activation"]((values, *out[1:]), *inputs, *storage)


def check_down(attention: Tensor | None, mlp: Tensor, down: Tensor, granularity: str, activation: str) -> None:
    """Raise ValueError unless `mlp_activation_down` takes such a down-projection, granularity and activation."""
    if granularity not in ("per_row", "per_tensor"):
        raise ValueError(f"granularity={granularity!r}: must be per_row or per_tensor; mlp_activation makes values")
    width = activated_width(mlp, activation) + (0 if attention is None else attention.shape[-1])
    if down.shape[-1] != width:
        raise ValueError(f"down of shape {tuple(down.shape)}: must have a column for each of {width} values of a row")
