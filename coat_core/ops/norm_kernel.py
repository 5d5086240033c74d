"""LayerNorm or RMSNorm with adaLN modulation, forward (quantized, saving x's codes) and backward.

A program holds whole rows: several where D is small. In backward each leaves its part of an image's sums over S.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core.ops import norm as operators
from coat_core.ops.device import (
    TL_DTYPES,
    Codes,
    contiguous,
    load_groups,
    rounded,
    row_columns,
    rstd_of,
    saved_groups,
    shared_rows,
    store_group_codes,
    store_row_codes,
    whole_rows,
    with_row_stride,
)
from coat_core.ops.dispatch import launcher
from coat_core.ops.launch import empty, empty_values, finished, launch, n_blocks


@triton.jit
def _normalized(x, inside, D, eps, CENTRES: tl.constexpr):
    if CENTRES:
        mean = tl.div_rn(tl.sum(x, axis=1), D * 1.0)
        x = tl.where(inside, x - mean[:, None], 0.0)
    rstd = rstd_of(tl.sum(x * x, axis=1), D, eps)
    return x * rstd[:, None], rstd


@triton.jit
def _norm_modulate_fwd_kernel(
    x_ptr,
    x_scale_ptr,
    scale_ptr,
    shift_ptr,
    weight_ptr,
    n_ptr,
    codes_ptr,
    code_scale_ptr,
    saved_ptr,
    saved_scale_ptr,
    scales_per_row,
    scale_stride,
    shift_stride,
    total,
    S,
    eps,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    NORMED: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    STAGES: tl.constexpr,
    SAVED_MAX: tl.constexpr,
    SAVED_GROUP: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """R rows a program; rounds where eager PyTorch does. x is or was of DTYPE, the norm of NORMED."""
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    columns = row_columns(BLOCK, VECTOR)
    inside = (rows[:, None] < total) & (columns < D)
    offsets = rows[:, None] * D + columns
    image = (rows // S)[:, None]
    source = x_ptr, x_scale_ptr, D, scales_per_row
    x = load_groups(source, (0, rows, rows < total), 0, D, DTYPE, GROUP, BLOCK, VECTOR)
    store_group_codes(x, saved_ptr, saved_scale_ptr, rows, rows < total, 0, D, D, SAVED_MAX, SAVED_GROUP)
    normed = _normalized(x, inside, D, eps, weight_ptr is None)[0].to(NORMED).to(tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
        normed = (normed * weight).to(NORMED).to(tl.float32)
    scale = tl.load(scale_ptr + image * scale_stride + columns, mask=inside, other=0.0).to(tl.float32)
    n = normed * rounded(1.0 + scale, scale_ptr)
    if scale_ptr.dtype.element_ty == NORMED:
        n = rounded(n, scale_ptr)
    if shift_ptr is not None:
        n += tl.load(shift_ptr + image * shift_stride + columns, mask=inside, other=0.0).to(tl.float32)
        if scale_ptr.dtype.element_ty == NORMED:
            n = rounded(n, scale_ptr)
    tl.store(n_ptr + offsets, n, mask=inside)
    store_row_codes(n, codes_ptr, code_scale_ptr, rows, rows < total, offsets, inside, FORMAT_MAX, STAGES)


@triton.jit
def _norm_modulate_bwd_kernel(
    grad_ptr,
    x_ptr,
    x_scale_ptr,
    scale_ptr,
    weight_ptr,
    residual_ptr,
    dx_ptr,
    dmodulation_ptr,
    scales_per_row,
    scale_stride,
    S,
    eps,
    rounds,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1).to(tl.int64)
    columns = row_columns(BLOCK, VECTOR)
    scale = tl.load(scale_ptr + image * scale_stride + columns, mask=columns < D, other=0.0)
    dscale = tl.zeros([R, BLOCK], tl.float32)
    dshift = tl.zeros([R, BLOCK], tl.float32)
    for turn in range(rounds):
        places = (share * rounds + turn) * R + tl.arange(0, R)
        rows, are_rows = image * S + places, places < S
        inside = are_rows[:, None] & (columns < D)
        offsets = rows[:, None] * D + columns
        source = x_ptr, x_scale_ptr, D, scales_per_row
        x = load_groups(source, (0, rows, are_rows), 0, D, DTYPE, GROUP, BLOCK, VECTOR)
        g = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        z, rstd = _normalized(x, inside, D, eps, weight_ptr is None)
        dz, normed = g * (1.0 + scale.to(tl.float32)), z
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
            dz, normed = dz * weight, z * weight
        mean_dz_z = tl.div_rn(tl.sum(dz * z, axis=1), D * 1.0)[:, None]
        if weight_ptr is None:
            dz -= tl.div_rn(tl.sum(dz, axis=1), D * 1.0)[:, None]
        dx = rstd[:, None] * (dz - z * mean_dz_z)
        if residual_ptr is not None:
            dx += tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offsets, dx, mask=inside)
        dscale += g * normed
        dshift += g
    part = dmodulation_ptr + (image * tl.num_programs(1) + share) * 2 * D + columns
    tl.store(part, tl.sum(dshift, axis=0)[None, :], mask=columns < D)
    tl.store(part + D, tl.sum(dscale, axis=0)[None, :], mask=columns < D)


@launcher(operators.norm_modulate_quantize)
def norm_modulate_quantize(a: Any) -> tuple[Tensor, ...]:
    shape, device = a.x.shape, a.x.device
    codes = Codes(shape, device, a.fmt, a.granularity)
    saved = Codes(shape, device, a.saved_format, "per_group", a.group_size)
    n = _modulated(a, None, a.x.dtype, codes, saved)
    return n, *codes.results(n), *saved.results()


@launcher(operators.norm_modulate)
def norm_modulate(a: Any) -> Tensor:
    no_codes = Codes(a.x.shape, a.x.device, "none", "none")
    return _modulated(a, a.x_scale, a.dtype, no_codes, no_codes)


def _modulated(a: Any, x_scale: Tensor | None, dtype: torch.dtype, codes: Codes, saved: Codes) -> Tensor:
    s, d = a.x.shape[1:]
    constants = whole_rows(d)
    x, weight = a.x.contiguous(), contiguous(a.weight)
    scale, scale_stride = with_row_stride(a.scale)
    shift, shift_stride = with_row_stride(a.shift)
    x_scale, per_row, group = saved_groups(x_scale, a.group_size, d)
    rows = x.numel() // d
    normed = dtype if weight is None else weight.dtype
    n_dtype = torch.promote_types(normed, scale.dtype)
    n = empty_values(x.shape, n_dtype, x.device)
    launch(
        _norm_modulate_fwd_kernel,
        (n_blocks(rows, constants["R"]),),
        *(x, x_scale, scale, shift, weight),
        *(n, codes.codes, codes.scale, saved.codes, saved.scale),
        *(per_row, scale_stride, shift_stride, rows, s, a.eps),
        GROUP=group,
        DTYPE=TL_DTYPES[dtype],
        NORMED=TL_DTYPES[normed],
        FORMAT_MAX=codes.format_max,
        STAGES=codes.stages,
        SAVED_MAX=saved.format_max,
        SAVED_GROUP=min(a.group_size, constants["BLOCK"]),
        **constants,
    )
    return finished(n, n_dtype)


@launcher(operators.norm_modulate_backward)
def norm_modulate_backward(a: Any) -> tuple[Tensor, Tensor]:
    images, s, d = a.x.shape
    constants = whole_rows(d, sums=True)
    grad, x = a.grad.contiguous(), a.x.contiguous()
    weight, residual = contiguous(a.weight), contiguous(a.residual)
    scale, scale_stride = with_row_stride(a.scale)
    x_scale, per_row, group = saved_groups(a.x_scale, a.group_size, d)
    programs, rounds = shared_rows(images, s, constants["R"])
    dx = empty_values(x.shape, a.dtype, x.device)
    dmodulation = empty((images, programs, 2, d), torch.float32, x.device)
    launch(
        _norm_modulate_bwd_kernel,
        (images, programs),
        *(grad, x, x_scale, scale, weight, residual, dx, dmodulation),
        *(per_row, scale_stride, s, a.eps, rounds),
        GROUP=group,
        DTYPE=TL_DTYPES[a.dtype],
        **constants,
    )
    return finished(dx, a.dtype), dmodulation.sum(1)
