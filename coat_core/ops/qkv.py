"""From the linears' q, k, v to attention's, and back: adapters, QK-RMSNorm, rotary embedding, saved codes.

A stream's q, k and v are side by side, as one GEMM writes them: [B, S_i, (H + 2·H_kv)·d], heads of d; H_kv, the heads
of k and of v, is H except in grouped-query attention. The bodies are the reference. The forward pass rounds where
diffusers' FLUX blocks do; backward is in fp32, rounded once.

Shapes: one or two streams i of S_i tokens, the text first, S tokens together; q [B, S, H, d]; k, v [B, S, H_kv, d];
weight [d]; cos, sin [S, d], or [B, S, d] where images have their own, each rotary angle repeated for its pair of
neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from coat_core.autograd import without_autocast
from coat_core.casts import Cast, declares
from coat_core.ops.codes import cast_of, codes_of, values_of, with_adapter
from coat_core.ops.dispatch import operator
from coat_core.ops.gelu import mlp_activation_backward


def _turned(x: Tensor) -> Tensor:
    """(a, b) → (-b, a) for each pair of neighbours."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([-b, a], dim=-1).flatten(-2)


def norm_and_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Return RMSNorm(x)·weight, rotated."""
    with without_autocast(x.device):
        normed = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        return (normed.to(torch.float32) * cos + _turned(normed).to(torch.float32) * sin).to(x.dtype)


def norm_and_rotate_backward(grad: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Return dx in fp32: g = (gradient rotated back)·weight, z = x·rstd, dx = rstd·(g - z·mean(g·z))."""
    g, values = grad.to(torch.float32), x.to(torch.float32)
    back = g * cos.unsqueeze(-2) - _turned(g * sin.unsqueeze(-2))
    weighted = back * weight.to(torch.float32)
    rstd = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    z = values * rstd
    return rstd * (weighted - z * (weighted * z).mean(-1, keepdim=True))


def _streams(
    ys: list[Tensor], y_scales: list[Tensor], cos: Tensor, sin: Tensor, group_size: int, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor, tuple[Tensor, Tensor]]]:
    """Yield each stream's place among all tokens, its [q|k|v] of `dtype`, and its rotary tables."""
    start = 0
    for i, y in enumerate(ys):
        tokens = slice(start, start + y.shape[1])
        start = tokens.stop
        values = values_of(y, y_scales[i] if y_scales else None, group_size, dtype)
        yield tokens, values, (cos[..., tokens, :], sin[..., tokens, :])


@operator("coat::qkv_rope")
def qkv_rope(
    ys: list[Tensor],
    y_scales: list[Tensor],
    hs: list[Tensor],
    ups: list[Tensor],
    weights: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    eps: float,
    saved_format: str,
    group_size: int,
    dtype: torch.dtype,
    kv_groups: int = 1,
) -> list[Tensor]:
    """Return attention's q, k, v, and the codes saved for backward.

        [q|k|v] = y + h upᵀ of each third,   q ← rotate(RMSNorm(q)·weight), k likewise, v unchanged

    Per stream ys (rows may be the beginning of wider ones), values, or codes of 1×G groups with y_scales; hs
    [B, S_i, 3·r] and ups [3·H·d, r], empty without adapters and for codes, and where kv_groups, H / H_kv, is not 1;
    norm_q's and norm_k's weights [d]. cos, sin: fp32, of the tokens of all streams. Returns q, k, v of `dtype`; then,
    unless the format is "none", for each stream the codes and scale of the complete [q|k|v] before the norm.

    Numerics: on a CPU bit-equal to addmm, torch.nn.RMSNorm and diffusers' apply_rotary_emb in sequence.
    Source: diffusers' transformer_flux.py (QK norm, rotary embedding); saved codes: arXiv 2410.19313, section 5.
    """
    qkv: tuple[list[Tensor], ...] = ([], [], [])
    saved: list[Tensor] = []
    for i, (_, y, angles) in enumerate(_streams(ys, y_scales, cos, sin, group_size, dtype)):
        y = with_adapter(y, hs[i], ups[i]) if hs else y
        if saved_format != "none":
            saved += codes_of(y, saved_format, "per_group", group_size)
        heads = y.unflatten(-1, (-1, weights[0].shape[0]))
        of_k = heads.shape[2] // (kv_groups + 2)
        q, k, v = heads.split((kv_groups * of_k, of_k, of_k), dim=2)
        qkv[0].append(norm_and_rotate(q, weights[2 * i], *angles, eps))
        qkv[1].append(norm_and_rotate(k, weights[2 * i + 1], *angles, eps))
        qkv[2].append(v)
    return [torch.cat(qkv[0], dim=1), torch.cat(qkv[1], dim=1), torch.cat(qkv[2], dim=1), *saved]


@declares(qkv_rope)
def _(out: Any, a: Any) -> tuple[Cast, ...]:
    casts: list[Cast] = []
    if a.saved_format != "none":
        for i, y in enumerate(a.ys):
            y = with_adapter(y, a.hs[i], a.ups[i]) if a.hs else y
            casts += cast_of(None, y, out[3 + 2 * i : 5 + 2 * i], "per_group", a.group_size)
    return tuple(casts)


@operator("coat::qkv_rope_backward")
def qkv_rope_backward(
    grads: list[Tensor],
    ys: list[Tensor],
    y_scales: list[Tensor],
    weights: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    eps: float,
    group_size: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Return dy of each stream's complete [q|k|v], like it and of `dtype`, computed in fp32 and rounded once.

        g = (gradient rotated back)·weight,   z = q·rstd,   dq = rstd·(g - z·mean(g·z)),   dk likewise

    grads are of q, k, v; ys the complete [q|k|v], values or codes with y_scales.
    """
    grad_q, grad_k, grad_v = grads
    results = []
    for i, (tokens, y, angles) in enumerate(_streams(ys, y_scales, cos, sin, group_size, dtype)):
        heads = y.unflatten(-1, (-1, weights[0].shape[0]))
        q, k, _ = heads.split([grad.shape[2] for grad in grads], dim=2)
        dq = norm_and_rotate_backward(grad_q[:, tokens], q, weights[2 * i], *angles, eps).to(dtype)
        dk = norm_and_rotate_backward(grad_k[:, tokens], k, weights[2 * i + 1], *angles, eps).to(dtype)
        results.append(torch.cat([dq, dk, grad_v[:, tokens].to(dtype)], dim=2).flatten(2))
    return results


@operator("coat::qkv_mlp_backward")
def qkv_mlp_backward(
    grads: list[Tensor],
    y: Tensor,
    y_scale: Tensor | None,
    weights: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    eps: float,
    grad_mlp: Tensor,
    dh: Tensor | None,
    down: Tensor | None,
    mlp: Tensor,
    mlp_scale: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
    activation: str = "gelu_tanh",
) -> Tensor:
    """Return [dq|dk|dv|dmlp] of a single block, [B, S, 3·H·d + N] of `dtype`: the input of its linears' one dgrad.

    grads, y, y_scale as one stream's in `qkv_rope_backward`; grad_mlp (its `grad`), dh, down, mlp, mlp_scale and
    activation as in `mlp_activation_backward`; `group_size` is G of both.
    """
    scales = [] if y_scale is None else [y_scale]
    (dy,) = qkv_rope_backward(grads, [y], scales, weights, cos, sin, eps, group_size, dtype)
    dmlp = mlp_activation_backward(grad_mlp, dh, down, mlp, mlp_scale, group_size, dtype, activation)
    return torch.cat([dy, dmlp], dim=-1)
