"""The activation between the linears of an MLP: the next linear's input, quantized, and gradients.

`activation` is one of

    gelu_tanh       act(x) = x/2·(1 + tanh(u)),   u = sqrt(2/π)·(x + 0.044715·x³)
    silu_and_mul    act([gate | up]) = silu(gate)·up,   silu(x) = x/(1 + exp(-x)):   SwiGLU, of two halves of mlp

Shapes: attention [..., D]; mlp [..., N]; act(mlp) [..., F], with N = F of GELU and N = 2·F of SwiGLU; its adapter
h [..., r], up [N, r], or h [..., 2·r] where SwiGLU's halves are of two linears: r columns for each; `fmt`,
`granularity`, `saved_format` and `group_size` as in `ops.codes`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coat_core.autograd import without_autocast
from coat_core.casts import INPUT, Cast, Declared, declarations, declares
from coat_core.ops.codes import cast_of, codes_of, product, values_of, with_adapter
from coat_core.ops.dispatch import operator


def activated_width(mlp: Tensor, activation: str) -> int:
    """Return F of mlp [..., N]."""
    width = mlp.shape[-1]
    return width if activation == "gelu_tanh" else width // 2


@operator("coat::mlp_activation")
def mlp_activation(
    attention: Tensor | None,
    mlp: Tensor,
    h: Tensor | None,
    up: Tensor | None,
    fmt: str,
    granularity: str,
    saved_format: str,
    group_size: int,
    dtype: torch.dtype,
    activation: str = "gelu_tanh",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return [attention | act(mlp + h upᵀ)] along the features, its codes, and the codes saved for backward.

    attention [B, S, D], None for the activation alone; mlp [B, S, N]; h and up are None without an adapter. Returns
    values [B, S, D + F] of `dtype`; their codes and scale; saved codes and scale of attention, and of mlp + h upᵀ.

    Numerics: the reference has the bits of torch's GELU, or of its SiLU and product. The kernel takes sigmoid(2u) for
    (1 + tanh(u))/2, within GELU_RTOL times abs(x), and rounds SiLU within SILU_RTOL (tests/tolerances.py).
    Source: diffusers' transformer_flux.py and transformer_flux2.py (single blocks); arXiv 2410.19313, section 5.
    """
    mlp = with_adapter(mlp.to(dtype), h, up)
    if activated_width(mlp, activation) == mlp.shape[-1]:
        values = torch.nn.functional.gelu(mlp, approximate="tanh").contiguous()
    else:  # SwiGLU's silu is rounded by itself
        gate, up_half = mlp.chunk(2, dim=-1)
        values = (torch.nn.functional.silu(gate) * up_half).contiguous()
    attention_saved = codes_of(mlp, "none", "none")
    if attention is not None:
        attention = attention.to(dtype)
        values = torch.cat([attention, values], dim=-1)
        attention_saved = codes_of(attention, saved_format, "per_group", group_size)
    codes = codes_of(values, fmt, granularity)
    return values, *codes, *attention_saved, *codes_of(mlp, saved_format, "per_group", group_size)


@declares(mlp_activation)
def _(out: Any, a: Any) -> tuple[Cast, ...]:
    casts = cast_of(INPUT, out[0], out[1:3], a.granularity)
    if a.saved_format == "none":
        return casts
    mlp = with_adapter(a.mlp, a.h, a.up)
    casts += cast_of(None, a.attention, out[3:5], "per_group", a.group_size)
    return casts + cast_of(None, mlp, out[5:], "per_group", a.group_size)


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
    """The codes of the next linear's input, and its adapter's down-projection.

        values = [attention | act(mlp + h upᵀ)],   h_next = values downᵀ

    down is [R, D + F], R from 1 to 256, in `dtype`; granularity "per_row" or "per_tensor"; all else as in
    `mlp_activation`. Returns h_next [B, S, R] of `dtype`; then as `mlp_activation` without its values.

    Numerics: codes as `mlp_activation`. The kernel sums h_next in fp32, always in the same order, and rounds once.
    """
    storage = (fmt, granularity, saved_format, group_size, dtype, activation)
    made = mlp_activation._init_fn(attention, mlp, h, up, *storage)
    with without_autocast(mlp.device):
        return torch.nn.functional.linear(made[0], down), *made[1:]


@declares(mlp_activation_down)
def _(out: Any, a: Any) -> Declared:
    inputs = (a.attention, a.mlp, a.h, a.up)
    values = mlp_activation._init_fn(*inputs, "none", "none", "none", a.group_size, a.dtype, a.activation)[0]
    storage = (a.fmt, a.granularity, a.saved_format, a.group_size, a.dtype, a.activation)
    return declarations["coat::mlp_activation"]((values, *out[1:]), *inputs, *storage)


@operator("coat::mlp_activation_backward")
def mlp_activation_backward(
    grad: Tensor,
    dh: Tensor | None,
    down: Tensor | None,
    mlp: Tensor,
    mlp_scale: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
    activation: str = "gelu_tanh",
) -> Tensor:
    """The gradient of mlp + h upᵀ, adding that of the next linear's adapter.

        g = grad + dh·down,   x = mlp + h upᵀ, of SwiGLU [gate | up]
        GELU      dmlp = g·(s + x·s·(1 - s)·2u'),   s = (1 + tanh(u))/2,   u' = sqrt(2/π)·(1 + 3·0.044715·x²)
        SwiGLU    dmlp = [g·up·s·(1 + gate·(1 - s)) | g·gate·s],   s = 1/(1 + exp(-gate))

    grad [B, S, F] is without that adapter, dh [B, S, r] and down [r, F] (possibly a slice) are its gradient and
    down-projection. `mlp` is x [B, S, N], values or codes of 1×G groups with their scale. Returns dmlp [B, S, N] of
    `dtype`, computed in fp32 and rounded once; g is rounded to grad's dtype.
    """
    mlp = values_of(mlp, mlp_scale, group_size, dtype).to(torch.float32)
    g = with_adapter(grad, dh, None if down is None else down.t()).to(torch.float32)
    if activated_width(mlp, activation) == mlp.shape[-1]:
        dmlp: Tensor = torch.ops.aten.gelu_backward(g, mlp, approximate="tanh")
    else:
        gate, up = mlp.chunk(2, dim=-1)
        dmlp = torch.cat([torch.ops.aten.silu_backward(g * up, gate), g * torch.nn.functional.silu(gate)], dim=-1)
    return dmlp.to(dtype).contiguous()


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

    dh: floating [B, S, r]; attention (or None) and mlp as in `mlp_activation`, or codes of 1×G groups and scales.

    Numerics: the values are those of `mlp_activation`; the kernel sums in fp32 and rounds once, always in the same
    order. The reference has the bits of torch's matrix product of the values.
    """
    if attention is not None:
        attention = values_of(attention, attention_scale, group_size, dtype)
    mlp = values_of(mlp, mlp_scale, group_size, dtype)
    storage = (None, None, "none", "none", "none", group_size, dtype, activation)
    values = mlp_activation._init_fn(attention, mlp, *storage)[0]
    return product(dh.flatten(0, -2).t(), values.to(dh.dtype).flatten(0, -2), dtype_down)
