"""Rotate and quantize to INT8, and rotate back; x [rows, K]."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core.int8 import INT8_MAX, check_rotation
from coat_core.ops.launch import blocks, empty, empty_values, finished, launch, power_of_two
from coat_core.ops.rows import with_row_stride

ROW_BLOCK = 2048  # of four warps 16 elements a thread: a rotation of 256 stays inside a warp
LARGEST = tl.constexpr(INT8_MAX)
HALF_INTEGERS = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def _rotated(x, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    for stage in tl.static_range(STAGES):
        x = tl.reshape(x, (BLOCK // 4 ** (stage + 1), 2, 2, 4**stage))
        total = tl.sum(tl.sum(x, axis=2, keep_dims=True), axis=1, keep_dims=True)
        x = total * 0.5 - x
    return tl.reshape(x, (BLOCK,))


@triton.jit
def _quantize_int8_fwd_kernel(
    x_ptr, factor_ptr, codes_ptr, scale_ptr, K, x_stride, STAGES: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program: amax of the rotated row, then its codes; the row is rotated twice, then from cache."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        x = _load_rotated(x_ptr + row * x_stride, factor_ptr, start, K, STAGES, BLOCK)
        magnitude = tl.abs(x)
        largest = tl.maximum(largest, tl.where(magnitude < float("inf"), magnitude, float("inf")))
    amax = tl.max(largest, axis=0)
    scale = tl.div_rn(amax, LARGEST)
    scale = tl.where(scale > 0, scale, 1.0)
    tl.store(scale_ptr + row, tl.where(amax < float("inf"), scale, float("nan")))
    for start in range(0, K, BLOCK):
        x = _load_rotated(x_ptr + row * x_stride, factor_ptr, start, K, STAGES, BLOCK)
        codes = (tl.div_rn(x, scale) + HALF_INTEGERS) - HALF_INTEGERS
        codes = tl.where(codes == codes, tl.clamp(codes, -LARGEST, LARGEST), 0.0)
        columns = start + tl.arange(0, BLOCK)
        tl.store(codes_ptr + row * K + columns, codes.to(tl.int8), mask=columns < K)


@triton.jit
def _load_rotated(row_ptr, factor_ptr, start, K, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    columns = start + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)
    if factor_ptr is not None:
        x *= tl.load(factor_ptr + columns, mask=columns < K, other=0.0)
    return _rotated(x, STAGES, BLOCK)


@triton.jit
def _rotate_fwd_kernel(x_ptr, y_ptr, K, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    y = _load_rotated(x_ptr + row * K, None, start, K, STAGES, BLOCK)
    columns = start + tl.arange(0, BLOCK)
    tl.store(y_ptr + row * K + columns, y.to(y_ptr.dtype.element_ty), mask=columns < K)


def quantize_int8(x: Tensor, size: int, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    check_rotation(x, size)
    (x, stride), width = with_row_stride(x), x.shape[-1]
    codes, scale = empty(tuple(x.shape), torch.int8, x.device), empty((*x.shape[:-1], 1), torch.float32, x.device)
    factors = None if factors is None else factors.contiguous()
    options = {"STAGES": _stages(size), "BLOCK": _row_block(width)}
    launch(_quantize_int8_fwd_kernel, (x.numel() // width,), x, factors, codes, scale, width, stride, **options)
    return codes, scale


def rotate(x: Tensor, size: int) -> Tensor:
    check_rotation(x, size)
    x, width = x.contiguous(), x.shape[-1]
    y, block = empty_values(tuple(x.shape), x.dtype, x.device), _row_block(width)
    grid = (x.numel() // width, blocks(width, block))
    launch(_rotate_fwd_kernel, grid, x, y, width, STAGES=_stages(size), BLOCK=block)
    return finished(y, x.dtype)


def _stages(size: int) -> int:
    return (size.bit_length() - 1) // 2


def _row_block(width: int) -> int:
    return min(power_of_two(width), ROW_BLOCK)
