"""Gate and residual, forward (with the result's adapter and its saved codes) and backward (quantized).

With a norm, forward reads its rows twice, for the mean square and for the sum; the second reading hits the cache. In
the backward pass a program holds whole rows, takes a share of one image's and leaves its part of the sum over S.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core.ops import gate as operators
from coat_core.ops.device import (
    LOW_RANK_ROWS,
    TILE_ELEMENTS,
    TL_DTYPES,
    Codes,
    adapter,
    add_low_rank,
    contiguous,
    load_groups,
    rotated,
    rounded,
    row_columns,
    rstd_of,
    saved_groups,
    shared_rows,
    store_group_codes,
    store_row_codes,
    warps,
    whole_rows,
    with_row_stride,
)
from coat_core.ops.dispatch import launcher
from coat_core.ops.launch import empty, empty_values, finished, launch, n_blocks, power_of_two

WIDEST_BLOCK = 1024
WIDEST_LOW_RANK_BLOCK = 256  # also the largest group


@triton.jit
def _complete_tile(
    result_ptr,
    h_ptr,
    up_ptr,
    rows,
    are_rows,
    columns,
    h_stride,
    D,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
):
    inside = are_rows[:, None] & (columns < D)[None, :]
    result = tl.load(result_ptr + rows[:, None] * D + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if h_ptr is not None:
        result = add_low_rank(
            result, h_ptr, up_ptr, rows * h_stride, columns * RANK, 1, are_rows, columns < D, RANK, RANK_BLOCK
        )
        result = rounded(result, result_ptr)
    return result


@triton.jit
def _store_sum(residual_ptr, gate_ptr, y_ptr, normed, like_ptr, rows, are_rows, columns, D):
    inside = are_rows[:, None] & (columns < D)[None, :]
    offsets = rows[:, None] * D + columns[None, :]
    gate = tl.load(gate_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
    product = gate[None, :] * normed
    if gate_ptr.dtype.element_ty == like_ptr.dtype.element_ty:
        product = rounded(product, gate_ptr)
    y = tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32) + product
    tl.store(y_ptr + offsets, y, mask=inside)


@triton.jit
def _gated_sum_fwd_kernel(
    residual_ptr,
    gate_ptr,
    weight_ptr,
    result_ptr,
    h_ptr,
    up_ptr,
    y_ptr,
    saved_ptr,
    saved_scale_ptr,
    gate_stride,
    h_stride,
    S,
    D,
    eps,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    SAVED_MAX: tl.constexpr,
    SAVED_GROUP: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """R rows a program: BLOCK of their columns or, with a norm, all of them in turn; tile offsets fit 32 bits."""
    image = tl.program_id(2).to(tl.int64)
    first_row = tl.program_id(0) * R
    row, rows = image * S + first_row, tl.arange(0, R)
    are_rows = rows < S - first_row
    gate_ptr += image * gate_stride
    residual_ptr += row * D
    result_ptr += row * D
    y_ptr += row * D
    if h_ptr is not None:
        h_ptr += row * h_stride
    if saved_ptr is not None:
        saved_ptr += row * D
        saved_scale_ptr += row * tl.cdiv(D, SAVED_GROUP)
    if weight_ptr is None:
        first = tl.program_id(1) * BLOCK
        columns = first + tl.arange(0, BLOCK)
        result = _complete_tile(result_ptr, h_ptr, up_ptr, rows, are_rows, columns, h_stride, D, RANK, RANK_BLOCK)
        store_group_codes(result, saved_ptr, saved_scale_ptr, rows, are_rows, first, D, D, SAVED_MAX, SAVED_GROUP)
        _store_sum(residual_ptr, gate_ptr, y_ptr, result, result_ptr, rows, are_rows, columns, D)
    else:
        squares = tl.zeros([R], tl.float32)
        for first in range(0, D, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            result = _complete_tile(result_ptr, h_ptr, up_ptr, rows, are_rows, columns, h_stride, D, RANK, RANK_BLOCK)
            store_group_codes(result, saved_ptr, saved_scale_ptr, rows, are_rows, first, D, D, SAVED_MAX, SAVED_GROUP)
            squares += tl.sum(result * result, axis=1)
        rstd = rstd_of(squares, D, eps)[:, None]
        for first in range(0, D, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            result = _complete_tile(result_ptr, h_ptr, up_ptr, rows, are_rows, columns, h_stride, D, RANK, RANK_BLOCK)
            weight = tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
            normed = rounded(rounded(result * rstd, weight_ptr) * weight[None, :], weight_ptr)
            _store_sum(residual_ptr, gate_ptr, y_ptr, normed, weight_ptr, rows, are_rows, columns, D)


@triton.jit
def _gated_sum_bwd_kernel(
    grad_ptr,
    gate_ptr,
    weight_ptr,
    result_ptr,
    result_scale_ptr,
    factor_ptr,
    dy_ptr,
    codes_ptr,
    code_scale_ptr,
    dgate_ptr,
    gate_stride,
    scales_per_row,
    S,
    eps,
    rounds,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    STAGES: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1).to(tl.int64)
    columns = row_columns(BLOCK, VECTOR)
    gate = tl.load(gate_ptr + image * gate_stride + columns, mask=columns < D, other=0.0).to(tl.float32)
    dgate = tl.zeros([R, BLOCK], tl.float32)
    for turn in range(rounds):
        place = (share * rounds + turn) * R + tl.arange(0, R)
        rows = image * S + place
        inside = (place[:, None] < S) & (columns < D)
        offsets = rows[:, None] * D + columns
        g = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        if result_ptr is not None:
            source = result_ptr, result_scale_ptr, D, scales_per_row
            normed = load_groups(source, (0, rows, place < S), 0, D, DTYPE, GROUP, BLOCK, VECTOR)
        if weight_ptr is None:
            dy = g * gate
            if grad_ptr.dtype.element_ty == gate_ptr.dtype.element_ty:
                dy = rounded(dy, grad_ptr)
        else:
            rstd = rstd_of(tl.sum(normed * normed, axis=1), D, eps)[:, None]
            weight = tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
            z, dz = normed * rstd, g * (gate * weight)
            dy = rstd * (dz - z * tl.div_rn(tl.sum(dz * z, axis=1), D * 1.0)[:, None])
            normed = z * weight
        dy = dy.to(DTYPE).to(tl.float32)
        tl.store(dy_ptr + offsets, dy, mask=inside)
        if result_ptr is not None:
            dgate += g * normed
        dy = rotated(dy, STAGES)
        if factor_ptr is not None:
            dy *= tl.load(factor_ptr + columns, mask=columns < D, other=0.0)
        store_row_codes(dy, codes_ptr, code_scale_ptr, rows, place < S, offsets, inside, FORMAT_MAX, 0)
    if result_ptr is not None:
        part = (image * tl.num_programs(1) + share) * D + columns
        tl.store(dgate_ptr + part, tl.sum(dgate, axis=0)[None, :], mask=columns < D)


@launcher(operators.gated_sum)
def gated_sum(a: Any) -> tuple[Tensor, ...]:
    images, s, d = a.residual.shape
    device = a.residual.device
    residual = a.residual.contiguous()
    result = a.result.contiguous()
    weight = contiguous(a.weight)
    normed = result if weight is None else weight
    dtype = torch.promote_types(residual.dtype, torch.promote_types(a.gate.dtype, normed.dtype))
    gate, gate_stride = with_row_stride(a.gate)
    h, h_stride, up, ranks = adapter(a.h, a.up)
    is_narrow = h is not None or weight is not None
    block = min(power_of_two(d), WIDEST_LOW_RANK_BLOCK if is_narrow else WIDEST_BLOCK)
    tile = max(TILE_ELEMENTS // block, LOW_RANK_ROWS if is_narrow else 1)
    y = empty_values(residual.shape, dtype, device)
    saved = Codes(residual.shape, device, a.saved_format, "per_group", a.group_size)
    launch(
        _gated_sum_fwd_kernel,
        (n_blocks(s, tile), n_blocks(d, block) if weight is None else 1, images),
        *(residual, gate, weight, result, h, up, y, saved.codes, saved.scale),
        *(gate_stride, h_stride, s, d, a.eps),
        **ranks,
        SAVED_MAX=saved.format_max,
        SAVED_GROUP=min(a.group_size, block),
        R=tile,
        BLOCK=block,
        num_warps=warps(tile * block),
        num_stages=3 if weight is None else 1,
    )
    return finished(y, dtype), *saved.results()


@launcher(operators.gated_sum_backward)
def gated_sum_backward(a: Any) -> tuple[Tensor, ...]:
    images, s, d = a.grad.shape
    device = a.grad.device
    constants = whole_rows(d, sums=True)
    grad = a.grad.contiguous()
    result, weight, factors = contiguous(a.result), contiguous(a.weight), contiguous(a.factors)
    gate, gate_stride = with_row_stride(a.gate)
    result_scale, per_row, group = saved_groups(a.result_scale, a.group_size, d)
    programs, rounds = shared_rows(images, s, constants["R"])
    dy = empty_values(grad.shape, a.dtype, device)
    codes = Codes(grad.shape, device, a.fmt, a.granularity)
    dgate = None if result is None else empty((images, programs, d), torch.float32, device)
    launch(
        _gated_sum_bwd_kernel,
        (images, programs),
        *(grad, gate, weight, result, result_scale, factors),
        *(dy, codes.codes, codes.scale, dgate),
        *(gate_stride, per_row, s, a.eps, rounds),
        GROUP=group,
        DTYPE=TL_DTYPES[a.dtype],
        FORMAT_MAX=codes.format_max,
        STAGES=codes.stages,
        **constants,
    )
    dy = finished(dy, a.dtype)
    total = grad.new_empty(0, dtype=torch.float32) if dgate is None else dgate.sum(1)
    return dy, *codes.results(dy, factors), total
