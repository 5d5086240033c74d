"""The INT8 GEMM with scales in its epilogue; a [M, K], b [N, K], y [M, N].

torch's own INT8 product writes int32 for a second kernel to scale and round: 0.8 GB of traffic a pass of a single block
of FLUX.1 at 1024 px, against a GEMM of 0.3 TFLOP. Here the sums stay in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core.ops.launch import blocks, empty_values, finished, launch
from coat_core.ops.scaled_mm import check_shapes, rows_in_one_piece

# of the product: rows, columns and depth of a tile, warps, stages; an RTX 3090's multiprocessor holds one and two
WIDE, NARROW = (256, 128, 64, 8, 4), (64, 128, 64, 4, 4)
PROGRAMS = 128  # wide tiles keep the multiprocessors of a large GPU busy from so many on
TILES_IN_A_COLUMN = 8  # that follow each other, so that they share columns of b in the cache


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


def int8_mm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    forward: bool = False,
) -> Tensor:
    check_shapes(a, a_scale, b, b_scale, bias)
    b = rows_in_one_piece(b)
    a, a_scale, b_scale, (m, k), n = a.contiguous(), a_scale.contiguous(), b_scale.contiguous(), a.shape, b.shape[0]
    y = empty_values((m, n), out_dtype, a.device)
    is_wide = blocks(m, WIDE[0]) * blocks(n, WIDE[1]) >= PROGRAMS
    block_m, block_n, block_k, warps, stages = WIDE if is_wide else NARROW
    launch(
        _int8_mm_fwd_kernel,
        (blocks(m, block_m) * blocks(n, block_n),),
        *(a, a_scale, b, b_scale, bias, y),
        *(m, n, k, b_scale.ndim // 2),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EVEN=k % block_k == 0,
        GROUP=TILES_IN_A_COLUMN,
        num_warps=warps,
        num_stages=stages,
    )
    return finished(y, out_dtype)
