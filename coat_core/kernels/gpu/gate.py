"""Gate and residual, forward and backward (with the gate's gradient, and quantized).

Shapes: residual, result, grad [B, S, D], gate [B, D]. In the backward pass a program holds whole rows, takes a share of
one image's and leaves its part of the sum over S, added up by torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core.kernels.gpu.codes import TL_DTYPES, RowCodes, check_width, shared_rows, tile_rows, warps, with_row_stride
from coat_core.kernels.gpu.common import rounded, store_row_codes
from coat_core.kernels.gpu.runtime import blocks, empty, empty_values, finished, launch, power_of_two

WIDEST_BLOCK = 1024


@triton.jit
def _gate_residual_fwd_kernel(
    residual_ptr, gate_ptr, result_ptr, y_ptr, gate_stride, total, S, D, R: tl.constexpr, BLOCK: tl.constexpr
):
    """A tile of R rows a program; rounds where eager PyTorch does."""
    rows = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]
    columns = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (rows < total) & (columns < D)
    offsets = rows * D + columns
    gate = tl.load(gate_ptr + rows // S * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    product = gate * tl.load(result_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if gate_ptr.dtype.element_ty == result_ptr.dtype.element_ty:
        product = rounded(product, gate_ptr)
    y = tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32) + product
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gate_residual_bwd_kernel(
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
    """rounds·R rows of one image a program.

    result is codes where it has scales, one for each GROUP of a row; scales_per_row is 0 where one serves all rows.
    """
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
            result = tl.load(result_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
            if result_scale_ptr is not None:
                groups = rows[:, None] * scales_per_row + columns // GROUP
                result = result * tl.load(result_scale_ptr + groups, mask=inside, other=0.0)
                result = result.to(DTYPE).to(tl.float32)
            dgate += g * result
        store_row_codes(dy, codes_ptr, code_scale_ptr, rows, place < S, offsets, inside, FORMAT_MAX)
    if result_ptr is not None:
        part = (image * tl.num_programs(1) + share) * D + columns
        tl.store(dgate_ptr + part, tl.sum(dgate, axis=0)[None, :], mask=columns < D)


def gate_residual(residual: Tensor, gate: Tensor, result: Tensor) -> Tensor:
    """Launcher of `coat::gate_residual`."""
    residual, result, (gate, gate_stride) = residual.contiguous(), result.contiguous(), with_row_stride(gate)
    _, s, d = residual.shape
    dtype = torch.promote_types(residual.dtype, torch.promote_types(gate.dtype, result.dtype))
    y = empty_values(tuple(residual.shape), dtype, residual.device)
    rows, block = residual.numel() // d, min(power_of_two(d), WIDEST_BLOCK)
    tile = tile_rows(block)
    options = {"R": tile, "BLOCK": block, "num_warps": warps(tile * block)}
    grid = (blocks(rows, tile), blocks(d, block))
    launch(_gate_residual_fwd_kernel, grid, residual, gate, result, y, gate_stride, rows, s, d, **options)
    return finished(y, dtype)


def gate_residual_backward(
    grad: Tensor,
    gate: Tensor,
    result: Tensor | None,
    result_scale: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
    fmt: str,
    granularity: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launcher of `coat::gate_residual_backward`."""
    check_width(grad.shape[-1])
    grad, (gate, gate_stride) = grad.contiguous(), with_row_stride(gate)
    (images, s, d), shape = grad.shape, tuple(grad.shape)
    result = None if result is None else result.contiguous()
    per_row = 0 if result_scale is None or result_scale.ndim == 0 else result_scale.shape[-1]
    block = power_of_two(d)
    tile = tile_rows(block)
    programs, rounds = shared_rows(images, s, tile)
    dy, codes = empty_values(shape, dtype, grad.device), RowCodes(shape, fmt, granularity, grad.device)
    dgate = None if result is None else empty((images, programs, d), torch.float32, grad.device)
    launch(
        _gate_residual_bwd_kernel,
        (images, programs),
        grad,
        gate,
        result,
        None if result_scale is None else result_scale.contiguous(),
        dy,
        codes.codes,
        codes.scale,
        dgate,
        gate_stride,
        per_row,
        s,
        d,
        rounds,
        GROUP=group_size if per_row > 1 else d,
        DTYPE=TL_DTYPES[dtype],
        FORMAT_MAX=codes.format_max,
        R=tile,
        BLOCK=block,
        num_warps=warps(tile * block),
    )
    dy = finished(dy, dtype)
    found = gate.new_empty(0) if dgate is None else dgate.sum(1).to(gate.dtype)
    return dy, *codes.results(dy), found
