"""GELU-tanh between the linears of an MLP, forward (quantizing what the next linear reads) and backward, as operators.

    mlp_activation             [attention | GELU(mlp)] with mlp's adapter, and what is kept for backward; from codes too
    mlp_activation_backward    grad·GELU'(mlp) with the adapter of the linear after it
    mlp_activation_down        mlp_activation's codes, and the values times the next linear's down-projection

Shapes: attention [..., D]; mlp [..., F]; `fmt`, `granularity`, `saved_format` and `group_size` as in
`coat_core.kernels.codes`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coat_core.autograd import without_autocast
from coat_core.casts import INPUT, Cast, Declared, declarations, declares
from coat_core.kernels.codes import (
    cast_of,
    codes_of,
    fake_codes_of,
    fake_saved_codes_of,
    no_codes,
    saved_cast_of,
    saved_codes_of,
    values_of,
    with_adapter,
)
from coat_core.kernels.dispatch import run_by_triton
from coat_core.kernels.operators import operator


@operator("coat::mlp_activation")
def mlp_activation(
    attention: Tensor | None,
    attention_scale: Tensor | None,
    mlp: Tensor,
    mlp_scale: Tensor | None,
    h: Tensor | None,
    up: Tensor | None,
    fmt: str,
    granularity: str,
    saved_format: str,
    group_size: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return [attention | GELU(mlp + h upᵀ)] along the features, its codes, and what is kept for backward.

        GELU(x) = x/2·(1 + tanh(u)),   u = sqrt(2/π)·(x + 0.044715·x³)      in fp32, rounded once

    Args:
        attention: [B, S, D], values or codes of 1×G groups; None for GELU alone.
        attention_scale: of the codes, fp32 [B, S, ceil(D / G)]; None where attention is values.
        mlp: [B, S, F], values or codes.
        mlp_scale: likewise.
        h: [B, S, r]; None without an adapter, and for codes.
        up: [F, r]; likewise.
        fmt: of the codes, "e4m3" or "e5m2"; "none" with the granularity "none".
        granularity: of the codes, "none", "per_row" or "per_tensor".
        saved_format: of what is kept, "e4m3", "e5m2" or "none".
        group_size: G of the codes that are read, or kept.
        dtype: of the values.

    Returns:
        values [B, S, D + F] of `dtype`; their codes; the scale of the codes; attention's codes as kept, of shape [0]
        without attention, and their scale; the codes as kept of mlp + h upᵀ, and their scale.

    Raises:
        ValueError: unknown format, granularity or group size.

    Numerics: the reference has the bits of torch's GELU. The kernel takes sigmoid(2u) for (1 + tanh(u))/2, which
    differs by at most tests/tolerances.py's GELU_RTOL times abs(x).
    Source: FLUX's single blocks, diffusers models/transformers/transformer_flux.py; what is kept: arXiv 2410.19313,
    section 5.
    """
    mlp = with_adapter(values_of(mlp, mlp_scale, group_size, dtype), h, up)
    values = torch.nn.functional.gelu(mlp, approximate="tanh").contiguous()
    attention_saved = no_codes(mlp, "none")
    if attention is not None:
        attention = values_of(attention, attention_scale, group_size, dtype)
        values = torch.cat([attention, values], dim=-1)
        attention_saved = saved_codes_of(attention, saved_format, group_size)
    codes = codes_of(values, fmt, granularity)
    return values, *codes, *attention_saved, *saved_codes_of(mlp, saved_format, group_size)


@mlp_activation.register_fake
def _(
    attention: Tensor | None,
    attention_scale: Tensor | None,
    mlp: Tensor,
    mlp_scale: Tensor | None,
    h: Tensor | None,
    up: Tensor | None,
    fmt: str,
    granularity: str,
    saved_format: str,
    group_size: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    width = mlp.shape[-1] + (0 if attention is None else attention.shape[-1])
    values = mlp.new_empty((*mlp.shape[:-1], width), dtype=dtype)
    codes = fake_codes_of(values, fmt, granularity)
    attention_saved = no_codes(mlp, "none")
    if attention is not None:
        attention_saved = fake_saved_codes_of(attention, saved_format, group_size)
    return values, *codes, *attention_saved, *fake_saved_codes_of(mlp, saved_format, group_size)


@declares(mlp_activation)
def _(
    out: tuple[Tensor, ...],
    attention: Tensor | None,
    attention_scale: Tensor | None,
    mlp: Tensor,
    mlp_scale: Tensor | None,
    h: Tensor | None,
    up: Tensor | None,
    fmt: str,
    granularity: str,
    saved_format: str,
    group_size: int,
    dtype: torch.dtype,
) -> tuple[Cast, ...]:
    cast = cast_of(INPUT, out, granularity)
    casts = [] if cast is None else [cast]
    if saved_format != "none":
        casts += () if attention is None else saved_cast_of(attention, out[3:5], group_size)
        casts += saved_cast_of(with_adapter(mlp, h, up), out[5:], group_size)
    return tuple(casts)


@operator("coat::mlp_activation_backward")
def mlp_activation_backward(
    grad: Tensor,
    dh: Tensor | None,
    down: Tensor | None,
    mlp: Tensor,
    mlp_scale: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of mlp + h upᵀ.

        g = grad + dh·down,   dmlp = g·(s + x·s·(1 - s)·2u'),   x = mlp + h upᵀ
        s = (1 + tanh(u))/2,   u' = sqrt(2/π)·(1 + 3·0.044715·x²)

    Args:
        grad: of GELU(mlp) without the adapter of the linear that reads it [B, S, F].
        dh: of that adapter [B, S, r], in grad's dtype; None without one.
        down: that adapter's down-projection [r, F]; a slice of a wider one is read in place.
        mlp: what GELU read [B, S, F], values or codes of 1×G groups.
        mlp_scale: of the codes, fp32 [B, S, ceil(F / G)]; None where mlp is values.
        group_size: G.
        dtype: of the values.

    Returns:
        dmlp [B, S, F] of `dtype`, computed in fp32 and rounded once; g is rounded to grad's dtype.
    """
    mlp = values_of(mlp, mlp_scale, group_size, dtype).to(torch.float32)
    g = with_adapter(grad, dh, None if down is None else down.t()).to(torch.float32)
    values: Tensor = torch.ops.aten.gelu_backward(g, mlp, approximate="tanh").to(dtype).contiguous()
    return values


@mlp_activation_backward.register_fake
def _(
    grad: Tensor,
    dh: Tensor | None,
    down: Tensor | None,
    mlp: Tensor,
    mlp_scale: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    return mlp.new_empty(mlp.shape, dtype=dtype)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what the linear after an MLP's activation reads: the codes of the values, and their down-projection.

        values = [attention | GELU(mlp + h upᵀ)],   h_next = values downᵀ

    Args:
        attention: floating [B, S, D]; None for GELU alone.
        mlp: floating [B, S, F].
        h: [B, S, r]; None without an adapter of mlp.
        up: [F, r]; likewise.
        down: of the next linear's adapters [R, D + F], R from 1 to 256, in `dtype`.
        fmt: of the codes, "e4m3" or "e5m2".
        granularity: of the codes, "per_row" or "per_tensor".
        saved_format: of what is kept, "e4m3", "e5m2" or "none".
        group_size: G of what is kept.
        dtype: of the values.

    Returns:
        h_next [B, S, R] of `dtype`; then as `mlp_activation` without its values.

    Raises:
        ValueError: unknown format or group size, another granularity, or a down-projection of another width.

    Numerics: codes as `mlp_activation`. The kernel sums h_next in fp32 in an order that depends on the shapes alone and
    rounds once; the reference has the bits of torch's linear.
    """
    check_down(attention, mlp, down, granularity)
    found = mlp_activation._init_fn(
        attention, None, mlp, None, h, up, fmt, granularity, saved_format, group_size, dtype
    )
    with without_autocast(mlp.device):
        return torch.nn.functional.linear(found[0], down), *found[1:]


@mlp_activation_down.register_fake
def _(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    check_down(attention, mlp, down, granularity)
    how = (fmt, granularity, saved_format, group_size, dtype)
    found = mlp_activation._abstract_fn(attention, None, mlp, None, h, up, *how)
    return mlp.new_empty((*mlp.shape[:-1], len(down)), dtype=dtype), *found[1:]


@declares(mlp_activation_down)
def _(
    out: tuple[Tensor, ...],
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
) -> Declared:
    given = (attention, None, mlp, None, h, up)
    values = mlp_activation._init_fn(*given, "none", "none", "none", group_size, dtype)[0]
    how = (fmt, granularity, saved_format, group_size, dtype)
    return declarations["coat::mlp_activation"]((values, *out[1:]), *given, *how)


def check_down(attention: Tensor | None, mlp: Tensor, down: Tensor, granularity: str) -> None:
    """Raise ValueError unless `mlp_activation_down` takes such a down-projection and granularity."""
    if granularity not in ("per_row", "per_tensor"):
        raise ValueError(f"granularity={granularity!r}: must be per_row or per_tensor; mlp_activation makes values")
    width = mlp.shape[-1] + (0 if attention is None else attention.shape[-1])
    if down.shape[-1] != width:
        raise ValueError(f"down of shape {tuple(down.shape)}: must have a column for each of {width} values of a row")


run_by_triton(mlp_activation, "gelu.mlp_activation")
run_by_triton(mlp_activation_backward, "gelu.mlp_activation_backward")
run_by_triton(mlp_activation_down, "mlp_activation_down.mlp_activation_down")
