"""A few rows times an FP8 weight, by its codes. Many rows go through the dequantized weight instead.

Shapes: x [M, K], codes [N, K], y [M, N]; M is padded to the 16 rows of a matrix instruction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core.autograd import without_autocast
from coat_core.ops.device import as_values
from coat_core.ops.launch import blocks, empty_values, finished, launch
from coat_core.ops.quantize_kernel import dequantize

FEW_ROWS = 16
BLOCK_N, BLOCK_K = 32, 128


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
    rows, features = tl.arange(0, ROWS), tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
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
    tl.store(y_ptr + rows[:, None] * N + features[None, :], total.to(y_ptr.dtype.element_ty), mask=inside)


def weight_only_linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    (n, k), lead = codes.shape, x.shape[:-1]
    rows = x if x.ndim == 2 else x.reshape(-1, k)
    rows = (rows if rows.dtype == dtype else rows.to(dtype)).contiguous()
    m = rows.shape[0]
    if m > FEW_ROWS:
        granularity = "per_row" if scale.ndim else "per_tensor"
        weight = dequantize(codes, scale, granularity, k, dtype)
        with without_autocast(x.device):
            return torch.nn.functional.linear(rows, weight, None if bias is None else bias.to(dtype)).view(*lead, n)
    y = empty_values((m, n), dtype, x.device)
    sizes, options = (m, n, k, scale.ndim // 2), {"ROWS": FEW_ROWS, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K}
    grid = (blocks(n, BLOCK_N),)
    launch(_weight_only_linear_fwd_kernel, grid, rows, codes.contiguous(), scale, bias, y, *sizes, **options)
    y = finished(y, dtype)
    return y if x.ndim == 2 else y.view(*lead, n)
