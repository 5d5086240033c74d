"""Gate and residual, forward (with the result's adapter, and saving it in passing) and backward (quantized).

Shapes: residual, result, grad [B, S, D], gate [B, D], h [B, S, r], up [D, r]. In the backward pass a program holds
whole rows, takes a share of one image's and leaves its part of the sum over S, added up by torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core.kernels.gpu.codes import (
    LOW_RANK_ROWS,
    TL_DTYPES,
    GroupCodes,
    RowCodes,
    check_width,
    rank_options,
    saved_groups,
    shared_rows,
    tile_rows,
    warps,
    with_row_stride,
)
from coat_core.kernels.gpu.common import add_low_rank, load_saved, rounded, store_group_codes, store_row_codes
from coat_core.kernels.gpu.runtime import blocks, dot_operand, empty, empty_values, finished, launch, power_of_two

WIDEST_BLOCK = 1024
WIDEST_LOW_RANK_BLOCK = 256  # also the largest group


@triton.jit
def _gated_sum_fwd_kernel(
    residual_ptr,
    gate_ptr,
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
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    SAVED_MAX: tl.constexpr,
    SAVED_GROUP: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of R rows of one image a program; rounds where eager PyTorch does."""
    image, place = tl.program_id(2).to(tl.int64), tl.program_id(0) * R + tl.arange(0, R)
    rows, first = image * S + place, tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    inside = (place < S)[:, None] & (columns < D)[None, :]
    offsets = rows[:, None] * D + columns[None, :]
    result = tl.load(result_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if h_ptr is not None:
        result = add_low_rank(
            result, h_ptr, up_ptr, rows * h_stride, columns * RANK, 1, place < S, columns < D, RANK, RANK_BLOCK
        )
        result = rounded(result, result_ptr)
    if saved_ptr is not None:
        store_group_codes(
            result, saved_ptr, saved_scale_ptr, rows, place < S, first, D, D, SAVED_MAX, SAVED_GROUP, R, BLOCK
        )
    gate = tl.load(gate_ptr + image * gate_stride + columns, mask=columns < D, other=0.0).to(tl.float32)
    product = gate[None, :] * result
    if gate_ptr.dtype.element_ty == result_ptr.dtype.element_ty:
        product = rounded(product, gate_ptr)
    y = tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32) + product
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gated_sum_bwd_kernel(
    grad_ptr,
    gate_ptr,
    result_ptr,
    result_scale_ptr,
    dy_ptr,
    codes_ptr,
    code_scale_ptr,
    dgate_ptr,
    gate_stride,
    scales_per_row,
    S,
    D,
    rounds,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """rounds·R rows of one image a program."""
    image, share = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    gate = tl.load(gate_ptr + image * gate_stride + columns, mask=columns < D, other=0.0).to(tl.float32)
    dgate = tl.zeros([R, BLOCK], tl.float32)
    for turn in range(rounds):
        place = (share * rounds + turn) * R + tl.arange(0, R)
        rows = image * S + place
        inside = (place[:, None] < S) & (columns < D)
        offsets = rows[:, None] * D + columns
        g = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        dy = g * gate
        if grad_ptr.dtype.element_ty == gate_ptr.dtype.element_ty:
            dy = rounded(dy, grad_ptr)
        dy = dy.to(DTYPE).to(tl.float32)
        tl.store(dy_ptr + offsets, dy.to(dy_ptr.dtype.element_ty), mask=inside)
        if result_ptr is not None:
            groups = rows[:, None] * scales_per_row + columns // GROUP
            dgate += g * load_saved(result_ptr, result_scale_ptr, offsets, groups, inside, DTYPE)
        store_row_codes(dy, codes_ptr, code_scale_ptr, rows, place < S, offsets, inside, FORMAT_MAX)
    if result_ptr is not None:
        part = (image * tl.num_programs(1) + share) * D + columns
        tl.store(dgate_ptr + part, tl.sum(dgate, axis=0)[None, :], mask=columns < D)


def gated_sum(
    residual: Tensor,
    gate: Tensor,
    result: Tensor,
    h: Tensor | None,
    up: Tensor | None,
    saved_format: str,
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launcher of `coat::gated_sum`."""
    residual, result, (gate, gate_stride) = residual.contiguous(), result.contiguous(), with_row_stride(gate)
    (images, s, d), shape = residual.shape, tuple(residual.shape)
    dtype = torch.promote_types(residual.dtype, torch.promote_types(gate.dtype, result.dtype))
    h, h_stride = (None, 0) if h is None else with_row_stride(dot_operand(h))
    block = min(power_of_two(d), WIDEST_BLOCK if h is None else WIDEST_LOW_RANK_BLOCK)
    tile = tile_rows(block) if h is None else max(tile_rows(block), LOW_RANK_ROWS)
    y, saved = empty_values(shape, dtype, residual.device), GroupCodes(shape, saved_format, group_size, residual.device)
    launch(
        _gated_sum_fwd_kernel,
        (blocks(s, tile), blocks(d, block), images),
        residual,
        gate,
        result,
        h,
        None if up is None else dot_operand(up).contiguous(),
        y,
        saved.codes,
        saved.scale,
        gate_stride,
        h_stride,
        s,
        d,
        **rank_options(up),
        SAVED_MAX=saved.format_max,
        SAVED_GROUP=min(group_size, block),
        R=tile,
        BLOCK=block,
        num_warps=warps(tile * block),
    )
    return finished(y, dtype), *saved.results()


def gated_sum_backward(
    grad: Tensor,
    gate: Tensor,
    result: Tensor | None,
    result_scale: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
    fmt: str,
    granularity: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launcher of `coat::gated_sum_backward`."""
    check_width(grad.shape[-1])
    grad, (gate, gate_stride) = grad.contiguous(), with_row_stride(gate)
    (images, s, d), shape = grad.shape, tuple(grad.shape)
    result = None if result is None else result.contiguous()
    result_scale, per_row, group = saved_groups(result_scale, group_size, d)
    block = power_of_two(d)
    tile = tile_rows(block)
    programs, rounds = shared_rows(images, s, tile)
    dy, codes = empty_values(shape, dtype, grad.device), RowCodes(shape, fmt, granularity, grad.device)
    dgate = None if result is None else empty((images, programs, d), torch.float32, grad.device)
    launch(
        _gated_sum_bwd_kernel,
        (images, programs),
        grad,
        gate,
        result,
        result_scale,
        dy,
        codes.codes,
        codes.scale,
        dgate,
        gate_stride,
        per_row,
        s,
        d,
        rounds,
        GROUP=group,
        DTYPE=TL_DTYPES[dtype],
        FORMAT_MAX=codes.format_max,
        R=tile,
        BLOCK=block,
        num_warps=warps(tile * block),
    )
    dy = finished(dy, dtype)
    found = gate.new_empty(0, dtype=torch.float32) if dgate is None else dgate.sum(1)
    return dy, *codes.results(dy), found
