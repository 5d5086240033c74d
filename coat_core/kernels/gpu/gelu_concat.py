"""GELU-tanh, forward (next to attention's output, and quantized) and backward, without what `gpu.gelu` adds.

Shapes: attention [B, S, D], mlp [..., F], each read as rows. A program passes over a row in blocks, and once more over
the values it has just written to cast them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core.kernels.gpu.codes import RowCodes, with_row_stride
from coat_core.kernels.gpu.common import finite_abs, rounded, saturated, scale_from_amax
from coat_core.kernels.gpu.gelu import gate_of_gelu
from coat_core.kernels.gpu.runtime import blocks, empty_values, finished, launch, power_of_two

WIDEST_BLOCK = 1024
WARPS = 4


@triton.jit
def _cast_row(values_ptr, codes_ptr, scale_ptr, row, width, amax, FORMAT_MAX: tl.constexpr, BLOCK: tl.constexpr):
    """Cast a row that this program has written; without codes, leave its amax."""
    if codes_ptr is None:
        tl.store(scale_ptr + row, amax)
    else:
        scale = scale_from_amax(amax, FORMAT_MAX)
        tl.store(scale_ptr + row, scale)
        tl.debug_barrier()  # other threads wrote what this one reads
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            values = tl.load(values_ptr + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
            codes = saturated(tl.div_rn(values, scale), FORMAT_MAX)
            tl.store(codes_ptr + row * width + columns, codes.to(codes_ptr.dtype.element_ty), mask=columns < width)


@triton.jit
def _gelu_concat_fwd_kernel(
    attention_ptr,
    mlp_ptr,
    values_ptr,
    codes_ptr,
    scale_ptr,
    attention_stride,
    mlp_stride,
    D,
    F,
    FORMAT_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program; D is 0 without attention."""
    row = tl.program_id(0).to(tl.int64)
    out = values_ptr + row * (D + F)
    largest = tl.zeros([BLOCK], tl.float32)
    if attention_ptr is not None:
        for start in range(0, D, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            copied = tl.load(attention_ptr + row * attention_stride + columns, mask=columns < D, other=0.0)
            tl.store(out + columns, copied.to(values_ptr.dtype.element_ty), mask=columns < D)
            largest = tl.maximum(largest, finite_abs(copied.to(tl.float32)))
    for start in range(0, F, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(mlp_ptr + row * mlp_stride + columns, mask=columns < F, other=0.0).to(tl.float32)
        values = rounded(x * gate_of_gelu(x), mlp_ptr)
        tl.store(out + D + columns, values.to(values_ptr.dtype.element_ty), mask=columns < F)
        largest = tl.maximum(largest, finite_abs(values))
    if scale_ptr is not None:
        _cast_row(values_ptr, codes_ptr, scale_ptr, row, D + F, tl.max(largest, axis=0), FORMAT_MAX, BLOCK)


@triton.jit
def _gelu_bwd_kernel(grad_ptr, mlp_ptr, dmlp_ptr, grad_stride, mlp_stride, F, BLOCK: tl.constexpr):
    """A stretch of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(mlp_ptr + row * mlp_stride + columns, mask=columns < F, other=0.0).to(tl.float32)
    g = tl.load(grad_ptr + row * grad_stride + columns, mask=columns < F, other=0.0).to(tl.float32)
    s = gate_of_gelu(x)
    slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    dmlp = g * (s + x * (s * (1.0 - s)) * slope)
    tl.store(dmlp_ptr + row * F + columns, dmlp.to(dmlp_ptr.dtype.element_ty), mask=columns < F)


def gelu_concat_quantize(
    attention: Tensor | None, mlp: Tensor, fmt: str, granularity: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Launcher of `coat::gelu_concat_quantize`."""
    mlp, mlp_stride = with_row_stride(mlp)
    d, f, attention_stride, dtype = 0, mlp.shape[-1], 0, mlp.dtype
    if attention is not None:
        attention, attention_stride = with_row_stride(attention)
        d, dtype = attention.shape[-1], torch.promote_types(attention.dtype, mlp.dtype)
    shape = (*mlp.shape[:-1], d + f)
    values, codes = empty_values(shape, dtype, mlp.device), RowCodes(shape, fmt, granularity, mlp.device)
    launch(
        _gelu_concat_fwd_kernel,
        (mlp.numel() // f,),
        attention,
        mlp,
        values,
        codes.codes,
        codes.scale,
        attention_stride,
        mlp_stride,
        d,
        f,
        FORMAT_MAX=codes.format_max,
        BLOCK=min(power_of_two(f), WIDEST_BLOCK),
        num_warps=WARPS,
    )
    values = finished(values, dtype)
    return values, *codes.results(values)


def gelu_backward(grad: Tensor, mlp: Tensor) -> Tensor:
    """Launcher of `coat::gelu_backward`."""
    (grad, grad_stride), (mlp, mlp_stride) = with_row_stride(grad), with_row_stride(mlp)
    f, block = mlp.shape[-1], min(power_of_two(mlp.shape[-1]), WIDEST_BLOCK)
    dmlp = empty_values(tuple(mlp.shape), mlp.dtype, mlp.device)
    grid, options = (mlp.numel() // f, blocks(f, block)), {"BLOCK": block, "num_warps": WARPS}
    launch(_gelu_bwd_kernel, grid, grad, mlp, dmlp, grad_stride, mlp_stride, f, **options)
    return finished(dmlp, mlp.dtype)
