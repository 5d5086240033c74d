"""QK-RMSNorm with rotary embedding, forward and backward.

Shapes: x and grad [B, S, H, d], of any strides with neighbours side by side; weight [d]; cos, sin [S, d]. A program
takes up to HEADS heads of one token. It reads weight and angles once for each head, from the cache: in the layout of x
no thread needs another's numbers but in the mean.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from coat_core.kernels.gpu.codes import warps
from coat_core.kernels.gpu.common import rounded
from coat_core.kernels.gpu.qkv import rstd_of, turned
from coat_core.kernels.gpu.runtime import blocks, empty_values, finished, launch, power_of_two

HEADS = 8


@triton.jit
def _rms_norm_rope_fwd_kernel(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    stride_b,
    stride_s,
    stride_h,
    S,
    H,
    d,
    eps,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """HEADS heads of one token a program."""
    row = tl.program_id(0).to(tl.int64)
    image, token = row // S, row % S
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    columns = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (HEADS, BLOCK))
    inside = (heads < H) & (columns < d)
    start = x_ptr + image * stride_b + token * stride_s
    x = tl.load(start + heads * stride_h + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * d + columns, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * d + columns, mask=inside, other=0.0).to(tl.float32)
    normed = rounded(x * rstd_of(x, d, eps) * weight, x_ptr)
    y = normed * cos + turned(normed, HEADS, BLOCK) * sin
    tl.store(y_ptr + (row * H + heads) * d + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_rope_bwd_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    dx_ptr,
    grad_stride_b,
    grad_stride_s,
    grad_stride_h,
    stride_b,
    stride_s,
    stride_h,
    S,
    H,
    d,
    eps,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """HEADS heads of one token a program."""
    row = tl.program_id(0).to(tl.int64)
    image, token = row // S, row % S
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    columns = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (HEADS, BLOCK))
    inside = (heads < H) & (columns < d)
    start = x_ptr + image * stride_b + token * stride_s
    grad_start = grad_ptr + image * grad_stride_b + token * grad_stride_s
    x = tl.load(start + heads * stride_h + columns, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad_start + heads * grad_stride_h + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * d + columns, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * d + columns, mask=inside, other=0.0).to(tl.float32)
    weighted = (g * cos - turned(g * sin, HEADS, BLOCK)) * weight
    rstd = rstd_of(x, d, eps)
    z = x * rstd
    dx = rstd * (weighted - z * tl.div_rn(tl.sum(weighted * z, axis=1), d * 1.0)[:, None])
    tl.store(dx_ptr + (row * H + heads) * d + columns, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def rms_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Launcher of `coat::rms_norm_rope`."""
    x = _with_neighbours(x)
    y = empty_values(tuple(x.shape), x.dtype, x.device)
    tables = (weight.contiguous(), cos.contiguous(), sin.contiguous())
    grid, sizes, options = _geometry(x)
    launch(_rms_norm_rope_fwd_kernel, grid, x, *tables, y, *x.stride()[:3], *sizes, eps, **options)
    return finished(y, x.dtype)


def rms_norm_rope_backward(grad: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Launcher of `coat::rms_norm_rope_backward`."""
    grad, x = _with_neighbours(grad), _with_neighbours(x)
    dx = empty_values(tuple(x.shape), x.dtype, x.device)
    tables = (weight.contiguous(), cos.contiguous(), sin.contiguous())
    grid, sizes, options = _geometry(x)
    strides = (*grad.stride()[:3], *x.stride()[:3])
    launch(_rms_norm_rope_bwd_kernel, grid, grad, x, *tables, dx, *strides, *sizes, eps, **options)
    return finished(dx, x.dtype)


def _with_neighbours(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _geometry(x: Tensor) -> tuple[tuple[int, int], tuple[int, int, int], dict[str, int]]:
    """Grid, (S, H, d), and options."""
    b, s, h, d = x.shape
    block, tile = power_of_two(d), min(power_of_two(h), HEADS)
    return (b * s, blocks(h, tile)), (s, h, d), {"HEADS": tile, "BLOCK": block, "num_warps": warps(tile * block)}
