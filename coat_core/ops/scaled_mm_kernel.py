"""The INT8 GEMM with scales in its epilogue; a [M, K], b [N, K], y [M, N]. A few rows times an FP8 weight.

torch's own INT8 product writes int32 for a second kernel to scale and round: 0.8 GB of traffic a pass of a single block
of FLUX.1 at 1024 px, against a GEMM of 0.3 TFLOP. Here the sums stay in registers.

A few rows are multiplied by W's codes, M padded to the 16 rows of a matrix instruction; many by the dequantized W.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core.autograd import without_autocast
from coat_core.ops import scaled_mm as operators
from coat_core.ops.device import as_values, rotated, stages_of
from coat_core.ops.dispatch import launcher
from coat_core.ops.launch import empty_values, finished, launch, n_blocks
from coat_core.ops.quantize_kernel import dequantize

FEW_ROWS, FEW_ROWS_N, FEW_ROWS_K = 16, 32, 128  # of a tile of few rows: M, N and K
# of the product: rows, columns and depth of a tile, warps, stages; an RTX 3090's multiprocessor holds one and two
WIDE, NARROW = (256, 128, 64, 8, 4), (64, 128, 64, 4, 4)
ROTATED_WIDE, ROTATED_NARROW = (128, 256, 64, 8, 4), (64, 256, 64, 8, 4)  # hold whole blocks of the rotation
PROGRAMS = 128  # wide tiles keep the multiprocessors of a large GPU busy from so many on
TILES_IN_A_COLUMN = 8  # that follow each other, so that they share columns of b in the cache


@triton.jit
def _store_tile(y, bias_ptr, y_ptr, rows, columns, M, N):
    if bias_ptr is not None:
        y += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    places = y_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(places, y, mask=(rows < M)[:, None] & (columns < N)[None, :])


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
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    down = tl.cdiv(M, BLOCK_M)
    across = tl.cdiv(N, BLOCK_N)
    first = program // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    in_group = program % (GROUP * across)
    row = (first + in_group % height) * BLOCK_M
    rows = row + tl.arange(0, BLOCK_M)
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
    if STAGES == 0:
        _store_tile(y, bias_ptr, y_ptr, rows, columns, M, N)
    else:  # a quarter after the other: the whole tile and what the rotation needs would spill
        HALF: tl.constexpr = BLOCK_M // 2
        QUARTER: tl.constexpr = BLOCK_M // 4
        halves = tl.split(tl.permute(tl.reshape(y, (2, HALF, BLOCK_N)), (1, 2, 0)))
        for quarter in tl.static_range(4):
            pair = tl.split(tl.permute(tl.reshape(halves[quarter // 2], (2, QUARTER, BLOCK_N)), (1, 2, 0)))
            rows = row + quarter * QUARTER + tl.arange(0, QUARTER)
            _store_tile(rotated(pair[quarter % 2], STAGES), bias_ptr, y_ptr, rows, columns, M, N)


@launcher(operators.int8_mm)
def int8_mm(a: Any) -> Tensor:
    left = a.a.contiguous()
    right = operators.rows_in_one_piece(a.b)
    (m, k), n = left.shape, len(right)
    y = empty_values((m, n), a.out_dtype, left.device)
    is_wide = n_blocks(m, WIDE[0]) * n_blocks(n, WIDE[1]) >= PROGRAMS
    block_m, block_n, block_k, num_warps, num_stages = WIDE if is_wide else NARROW
    if a.rotation > 1:
        block_m, block_n, block_k, num_warps, num_stages = ROTATED_WIDE if is_wide else ROTATED_NARROW
    launch(
        _int8_mm_fwd_kernel,
        (n_blocks(m, block_m) * n_blocks(n, block_n),),
        *(left, a.a_scale.contiguous(), right, a.b_scale.contiguous(), a.bias, y),
        *(m, n, k, a.b_scale.ndim // 2),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EVEN=k % block_k == 0,
        GROUP=TILES_IN_A_COLUMN,
        STAGES=stages_of(a.rotation),
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return finished(y, a.out_dtype)


@triton.jit
def _weight_only_linear_fwd_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    K,
    scale_stride,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    features = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + rows[:, None] * K + k[None, :], mask=(rows[:, None] < M) & (k[None, :] < K), other=0.0)
        inside = (features[:, None] < N) & (k[None, :] < K)
        codes = tl.load(codes_ptr + features[:, None] * K + k[None, :], mask=inside, other=0.0)
        weight = as_values(codes).to(x_ptr.dtype.element_ty)  # by way of fp32 the GPU has an instruction for both
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    total *= tl.load(scale_ptr + features * scale_stride, mask=features < N, other=0.0)[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + features, mask=features < N, other=0.0).to(tl.float32)[None, :]
    inside = (rows[:, None] < M) & (features[None, :] < N)
    tl.store(y_ptr + rows[:, None] * N + features[None, :], total, mask=inside)


@launcher(operators.weight_only_linear)
def weight_only_linear(a: Any) -> Tensor:
    n, k = a.codes.shape
    lead = a.x.shape[:-1]
    dtype = a.dtype
    rows = a.x.reshape(-1, k).to(dtype).contiguous()
    m = rows.shape[0]
    if m > FEW_ROWS:
        granularity = "per_row" if a.scale.ndim else "per_tensor"
        weight = dequantize(a.codes, a.scale, granularity, k, dtype)
        bias = None if a.bias is None else a.bias.to(dtype)
        with without_autocast(a.x.device):
            return torch.nn.functional.linear(rows, weight, bias).view(*lead, n)
    y = empty_values((m, n), dtype, a.x.device)
    launch(
        _weight_only_linear_fwd_kernel,
        (n_blocks(n, FEW_ROWS_N),),
        *(rows, a.codes.contiguous(), a.scale, a.bias, y),
        *(m, n, k, a.scale.ndim // 2),
        ROWS=FEW_ROWS,
        BLOCK_N=FEW_ROWS_N,
        BLOCK_K=FEW_ROWS_K,
    )
    return finished(y, dtype).view(*lead, n)
