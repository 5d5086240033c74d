"""Rotate and quantize to INT8, rotate back, and the INT8 GEMM with scales in its epilogue.

torch's own INT8 product writes int32, which a second kernel would read, scale and round: for a single block of FLUX.1
at 1024 px 0.8 GB of traffic in each pass, against a GEMM of 0.3 TFLOP. Here the sums stay in registers.

Shapes: x [rows, K]; a [M, K], b [N, K], y [M, N].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core.int8 import INT8_MAX, check_rotation
from coat_core.ops.launch import blocks, empty, empty_values, finished, launch, power_of_two
from coat_core.ops.rows import with_row_stride
from coat_core.ops.scaled_mm import check_shapes, rows_in_one_piece

ROW_BLOCK = 2048  # of four warps 16 elements a thread: a rotation of 256 stays inside a warp
LARGEST = tl.constexpr(INT8_MAX)
HALF_INTEGERS = tl.constexpr(1.5 * 2.0**23)
# of the product: rows, columns and depth of a tile, warps, stages; an RTX 3090's multiprocessor holds one and two
WIDE, NARROW = (256, 128, 64, 8, 4), (64, 128, 64, 4, 4)
PROGRAMS = 128  # wide tiles keep the multiprocessors of a large GPU busy from so many on
TILES_IN_A_COLUMN = 8  # that follow each other, so that they share columns of b in the cache


@triton.jit
def _rotated(x, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    """X H for x [BLOCK], H of 4^STAGES neighbours: `coat_core.int8.rotate`."""
    for stage in tl.static_range(STAGES):
        x = tl.reshape(x, (BLOCK // 4 ** (stage + 1), 2, 2, 4**stage))
        total = tl.sum(tl.sum(x, axis=2, keep_dims=True), axis=1, keep_dims=True)
        x = total * 0.5 - x
    return tl.reshape(x, (BLOCK,))


@triton.jit
def _quantize_int8_fwd_kernel(
    x_ptr, factor_ptr, codes_ptr, scale_ptr, K, x_stride, STAGES: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program: amax of the rotated row, then its codes; the row is rotated twice and read from the cache."""
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
    """A stretch of a row a program."""
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    y = _load_rotated(x_ptr + row * K, None, start, K, STAGES, BLOCK)
    columns = start + tl.arange(0, BLOCK)
    tl.store(y_ptr + row * K + columns, y.to(y_ptr.dtype.element_ty), mask=columns < K)


@triton.jit
def _int8_mm_fwd_kernel(
    a_ptr,
    a_scale_ptr,
    b_ptr,
    b_scale_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    K,
    b_scale_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A tile of y a program; GROUP tiles of a column follow each other."""
    program, down, across = tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = program // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    in_group = program % (GROUP * across)
    rows = (first + in_group % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = in_group // height * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    a_rows = a_ptr + tl.minimum(rows, M - 1).to(tl.int64)[:, None] * K + depth[None, :]
    b_rows = b_ptr + tl.minimum(columns, N - 1).to(tl.int64)[:, None] * K + depth[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for start in range(0, K, BLOCK_K):
        if EVEN:
            a, b = tl.load(a_rows), tl.load(b_rows)
        else:
            inside = depth < K - start
            a = tl.load(a_rows, mask=inside[None, :], other=0)
            b = tl.load(b_rows, mask=inside[None, :], other=0)
        # read along K and turned here: fragments of a [K, N] tile would be fetched ahead, and fill sm_8x's registers
        total = tl.dot(a, tl.trans(b), acc=total, out_dtype=tl.int32)
        a_rows += BLOCK_K
        b_rows += BLOCK_K
    a_scale = tl.load(a_scale_ptr + rows, mask=rows < M, other=0.0)
    b_scale = tl.load(b_scale_ptr + columns * b_scale_stride, mask=columns < N, other=0.0)
    y = total.to(tl.float32) * a_scale[:, None] * b_scale[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    places = y_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(places, y.to(y_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


def quantize_int8(x: Tensor, size: int, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Launcher of `coat::quantize_int8`."""
    check_rotation(x, size)
    (x, stride), width = with_row_stride(x), x.shape[-1]
    codes, scale = empty(tuple(x.shape), torch.int8, x.device), empty((*x.shape[:-1], 1), torch.float32, x.device)
    factors = None if factors is None else factors.contiguous()
    options = {"STAGES": _stages(size), "BLOCK": _row_block(width)}
    launch(_quantize_int8_fwd_kernel, (x.numel() // width,), x, factors, codes, scale, width, stride, **options)
    return codes, scale


def rotate(x: Tensor, size: int) -> Tensor:
    """Launcher of `coat::rotate`."""
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


def int8_mm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    forward: bool = False,
) -> Tensor:
    """Launcher of `coat::int8_mm`."""
    check_shapes(a, a_scale, b, b_scale, bias)
    b = rows_in_one_piece(b)
    a, a_scale, b_scale, (m, k), n = a.contiguous(), a_scale.contiguous(), b_scale.contiguous(), a.shape, b.shape[0]
    y = empty_values((m, n), out_dtype, a.device)
    is_wide = blocks(m, WIDE[0]) * blocks(n, WIDE[1]) >= PROGRAMS
    block_m, block_n, block_k, warps, stages = WIDE if is_wide else NARROW
    launch(
        _int8_mm_fwd_kernel,
        (blocks(m, block_m) * blocks(n, block_n),),
        a,
        a_scale,
        b,
        b_scale,
        bias,
        y,
        m,
        n,
        k,
        b_scale.ndim // 2,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EVEN=k % block_k == 0,
        GROUP=TILES_IN_A_COLUMN,
        num_warps=warps,
        num_stages=stages,
    )
    return finished(y, out_dtype)
