"""LayerNorm with adaLN modulation, forward (and quantized) and backward.

Shapes: x [B, S, D], read as B·S rows; scale, shift [B, D]. A program holds whole rows: several where D is small. In the
backward pass each program takes a share of one image's rows and leaves its part of the sums over S, added up by torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core.kernels.gpu.codes import RowCodes, check_width, shared_rows, tile_rows, warps, with_row_stride
from coat_core.kernels.gpu.common import rounded, store_row_codes
from coat_core.kernels.gpu.runtime import blocks, empty, empty_values, finished, launch, power_of_two


@triton.jit
def _normalized(x, inside, D, eps):
    """(x - mean)·rstd of rows, and rstd; 0 outside."""
    mean = tl.div_rn(tl.sum(x, axis=1), D * 1.0)
    centred = tl.where(inside, x - mean[:, None], 0.0)
    variance = tl.div_rn(tl.sum(centred * centred, axis=1), D * 1.0)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
    return centred * rstd[:, None], rstd


@triton.jit
def _layer_norm_modulate_fwd_kernel(
    x_ptr,
    scale_ptr,
    shift_ptr,
    n_ptr,
    codes_ptr,
    code_scale_ptr,
    scale_stride,
    shift_stride,
    total,
    S,
    D,
    eps,
    FORMAT_MAX: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """R rows a program; rounds where eager PyTorch does."""
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (rows[:, None] < total) & (columns < D)
    offsets = rows[:, None] * D + columns
    image = (rows // S)[:, None]
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + image * scale_stride + columns, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + image * shift_stride + columns, mask=inside, other=0.0).to(tl.float32)
    normed = rounded(_normalized(x, inside, D, eps)[0], x_ptr)
    n = normed * rounded(1.0 + scale, scale_ptr)
    if x_ptr.dtype.element_ty == scale_ptr.dtype.element_ty:
        n = rounded(n, x_ptr)
    n += shift
    if x_ptr.dtype.element_ty == scale_ptr.dtype.element_ty:
        n = rounded(n, x_ptr)
    tl.store(n_ptr + offsets, n.to(n_ptr.dtype.element_ty), mask=inside)
    store_row_codes(n, codes_ptr, code_scale_ptr, rows, rows < total, offsets, inside, FORMAT_MAX)


@triton.jit
def _layer_norm_modulate_bwd_kernel(
    grad_ptr,
    x_ptr,
    scale_ptr,
    dx_ptr,
    dscale_ptr,
    dshift_ptr,
    scale_stride,
    S,
    D,
    eps,
    rounds,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """rounds·R rows of one image a program."""
    image, share = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    dscale = tl.zeros([R, BLOCK], tl.float32)
    dshift = tl.zeros([R, BLOCK], tl.float32)
    for turn in range(rounds):
        rows = ((share * rounds + turn) * R + tl.arange(0, R))[:, None]
        inside = (rows < S) & (columns < D)
        offsets = (image * S + rows) * D + columns
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        z, rstd = _normalized(x, inside, D, eps)
        scale = tl.load(scale_ptr + image * scale_stride + columns, mask=columns < D, other=0.0)
        dz = g * (1.0 + scale.to(tl.float32))
        mean_dz = tl.div_rn(tl.sum(dz, axis=1), D * 1.0)[:, None]
        mean_dz_z = tl.div_rn(tl.sum(dz * z, axis=1), D * 1.0)[:, None]
        dx = rstd[:, None] * (dz - mean_dz - z * mean_dz_z)
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        dscale += g * z
        dshift += g
    part = (image * tl.num_programs(1) + share) * D + columns
    tl.store(dscale_ptr + part, tl.sum(dscale, axis=0)[None, :], mask=columns < D)
    tl.store(dshift_ptr + part, tl.sum(dshift, axis=0)[None, :], mask=columns < D)


def layer_norm_modulate(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Launcher of `coat::layer_norm_modulate`."""
    return layer_norm_modulate_quantize(x, scale, shift, eps, "e4m3", "none")[0]


def layer_norm_modulate_quantize(
    x: Tensor, scale: Tensor, shift: Tensor, eps: float, fmt: str, granularity: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Launcher of `coat::layer_norm_modulate_quantize`."""
    check_width(x.shape[-1])
    x, (scale, scale_stride), (shift, shift_stride) = x.contiguous(), with_row_stride(scale), with_row_stride(shift)
    (_, s, d), shape = x.shape, tuple(x.shape)
    rows, block = x.numel() // d, power_of_two(d)
    tile = tile_rows(block)
    dtype = torch.promote_types(x.dtype, scale.dtype)
    n, codes = empty_values(shape, dtype, x.device), RowCodes(shape, fmt, granularity, x.device)
    launch(
        _layer_norm_modulate_fwd_kernel,
        (blocks(rows, tile),),
        x,
        scale,
        shift,
        n,
        codes.codes,
        codes.scale,
        scale_stride,
        shift_stride,
        rows,
        s,
        d,
        eps,
        FORMAT_MAX=codes.format_max,
        R=tile,
        BLOCK=block,
        num_warps=warps(tile * block),
    )
    n = finished(n, dtype)
    return n, *codes.results(n)


def layer_norm_modulate_backward(grad: Tensor, x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Launcher of `coat::layer_norm_modulate_backward`."""
    check_width(x.shape[-1])
    grad, x, (scale, scale_stride) = grad.contiguous(), x.contiguous(), with_row_stride(scale)
    images, s, d = x.shape
    block = power_of_two(d)
    tile = tile_rows(block)
    programs, rounds = shared_rows(images, s, tile)
    dx = empty_values(tuple(x.shape), x.dtype, x.device)
    dscale, dshift = (empty((images, programs, d), torch.float32, x.device) for _ in range(2))
    launch(
        _layer_norm_modulate_bwd_kernel,
        (images, programs),
        grad,
        x,
        scale,
        dx,
        dscale,
        dshift,
        scale_stride,
        s,
        d,
        eps,
        rounds,
        R=tile,
        BLOCK=block,
        num_warps=warps(tile * block),
    )
    return finished(dx, x.dtype), dscale.sum(1).to(scale.dtype), dshift.sum(1).to(scale.dtype)
