"""GELU-tanh of an MLP with its adapter, forward (next to attention's output, quantized and kept) and backward.

GELU(x) = x·s(x) with s(x) = sigmoid(2u), u = sqrt(2/π)·(x + 0.044715·x³): the same as x/2·(1 + tanh u) without its
cancellation at large negative x. Rows are wide: a program passes over one in blocks, and once more over the values it
has just written to cast them.

With an adapter a program passes over LOW_RANK_ROWS rows together, so that tl.dot multiplies.

Shapes: attention [B, S, D], mlp [..., F], each read as rows.
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
    rank_options,
    saved_groups,
    warps,
    with_row_stride,
)
from coat_core.kernels.gpu.common import (
    add_low_rank,
    finite_abs,
    load_saved,
    rounded,
    saturated,
    scale_from_amax,
    store_group_codes,
)
from coat_core.kernels.gpu.runtime import blocks, dot_operand, empty_values, finished, launch, power_of_two

WIDEST_BLOCK = 1024
LOW_RANK_BLOCK = 256  # columns of LOW_RANK_ROWS rows
WARPS = 4


@triton.jit
def gate_of_gelu(x):
    """sigmoid(2u)."""
    return 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def _cast_rows(
    values_ptr,
    codes_ptr,
    scale_ptr,
    rows,
    are_rows,
    width,
    amax,
    FORMAT_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cast rows [R] that this program has written; without codes, leave their amax."""
    if codes_ptr is None:
        tl.store(scale_ptr + rows, amax, mask=are_rows)
    else:
        scale = scale_from_amax(amax, FORMAT_MAX)
        tl.store(scale_ptr + rows, scale, mask=are_rows)
        tl.debug_barrier()  # other threads wrote what this one reads
        for start in range(0, width, BLOCK):
            columns = (start + tl.arange(0, BLOCK))[None, :]
            offsets, inside = rows[:, None] * width + columns, are_rows[:, None] & (columns < width)
            values = tl.load(values_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
            codes = saturated(tl.div_rn(values, scale[:, None]), FORMAT_MAX)
            tl.store(codes_ptr + offsets, codes.to(codes_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _mlp_activation_fwd_kernel(
    attention_ptr,
    attention_scale_ptr,
    mlp_ptr,
    mlp_scale_ptr,
    h_ptr,
    up_ptr,
    values_ptr,
    codes_ptr,
    scale_ptr,
    saved_attention_ptr,
    saved_attention_scale_ptr,
    saved_mlp_ptr,
    saved_mlp_scale_ptr,
    attention_stride,
    mlp_stride,
    h_stride,
    attention_scales_per_row,
    mlp_scales_per_row,
    total,
    D,
    F,
    DTYPE: tl.constexpr,
    ATTENTION_GROUP: tl.constexpr,
    MLP_GROUP: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    SAVED_MAX: tl.constexpr,
    G: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """R rows a program; D is 0 without attention."""
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    are_rows = rows < total
    out = values_ptr + rows[:, None] * (D + F)
    largest = tl.zeros([R, BLOCK], tl.float32)
    if attention_ptr is not None:
        for start in range(0, D, BLOCK):
            columns = (start + tl.arange(0, BLOCK))[None, :]
            inside = are_rows[:, None] & (columns < D)
            offsets = rows[:, None] * attention_stride + columns
            groups = rows[:, None] * attention_scales_per_row + columns // ATTENTION_GROUP
            x = load_saved(attention_ptr, attention_scale_ptr, offsets, groups, inside, DTYPE)
            x = x.to(DTYPE).to(tl.float32)
            tl.store(out + columns, x.to(values_ptr.dtype.element_ty), mask=inside)
            largest = tl.maximum(largest, finite_abs(x))
            if saved_attention_ptr is not None:
                saved = (saved_attention_ptr, saved_attention_scale_ptr)
                store_group_codes(x, saved[0], saved[1], rows, are_rows, start, D, D, SAVED_MAX, G, R, BLOCK)
    for start in range(0, F, BLOCK):
        in_row = start + tl.arange(0, BLOCK)
        columns = in_row[None, :]
        inside = are_rows[:, None] & (columns < F)
        groups = rows[:, None] * mlp_scales_per_row + columns // MLP_GROUP
        x = load_saved(mlp_ptr, mlp_scale_ptr, rows[:, None] * mlp_stride + columns, groups, inside, DTYPE)
        if h_ptr is not None:
            h_rows, up_rows = rows * h_stride, in_row * RANK
            x = add_low_rank(x, h_ptr, up_ptr, h_rows, up_rows, 1, are_rows, in_row < F, RANK, RANK_BLOCK)
        x = x.to(DTYPE).to(tl.float32)
        if saved_mlp_ptr is not None:
            saved = (saved_mlp_ptr, saved_mlp_scale_ptr)
            store_group_codes(x, saved[0], saved[1], rows, are_rows, start, F, F, SAVED_MAX, G, R, BLOCK)
        x = (x * gate_of_gelu(x)).to(DTYPE).to(tl.float32)
        tl.store(out + D + columns, x.to(values_ptr.dtype.element_ty), mask=inside)
        largest = tl.maximum(largest, finite_abs(x))
    if scale_ptr is not None:
        amax = tl.max(largest, axis=1)
        _cast_rows(values_ptr, codes_ptr, scale_ptr, rows, are_rows, D + F, amax, FORMAT_MAX, BLOCK)


@triton.jit
def _mlp_activation_bwd_kernel(
    grad_ptr,
    dh_ptr,
    down_ptr,
    mlp_ptr,
    mlp_scale_ptr,
    dmlp_ptr,
    grad_stride,
    dh_stride,
    down_stride,
    mlp_stride,
    dmlp_stride,
    scales_per_row,
    total,
    F,
    DTYPE: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of R rows a program."""
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    in_row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    are_rows, columns = rows < total, in_row[None, :]
    inside = are_rows[:, None] & (columns < F)
    g = tl.load(grad_ptr + rows[:, None] * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if dh_ptr is not None:
        g = add_low_rank(
            g, dh_ptr, down_ptr, rows * dh_stride, in_row, down_stride, are_rows, in_row < F, RANK, RANK_BLOCK
        )
        g = rounded(g, grad_ptr)
    groups = rows[:, None] * scales_per_row + columns // GROUP
    x = load_saved(mlp_ptr, mlp_scale_ptr, rows[:, None] * mlp_stride + columns, groups, inside, DTYPE)
    x = x.to(DTYPE).to(tl.float32)
    s = gate_of_gelu(x)
    slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    dmlp = g * (s + x * (s * (1.0 - s)) * slope)
    tl.store(dmlp_ptr + rows[:, None] * dmlp_stride + columns, dmlp.to(dmlp_ptr.dtype.element_ty), mask=inside)


def mlp_activation(
    attention: Tensor | None,
    attention_scale: Tensor | None,
    mlp: Tensor,
    mlp_scale: Tensor | None,
    h: Tensor | None,
    up: Tensor | None,
    fmt: str,
    granularity: str,
    saved_format: str,
    group_size: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launcher of `coat::mlp_activation`."""
    device, f, d = mlp.device, mlp.shape[-1], 0 if attention is None else attention.shape[-1]
    rows, shape = mlp.numel() // f, (*mlp.shape[:-1], d + f)
    values, codes = empty_values(shape, dtype, device), RowCodes(shape, fmt, granularity, device)
    saved_mlp = GroupCodes(tuple(mlp.shape), saved_format, group_size, device)
    saved_attention = GroupCodes((*shape[:-1], d), saved_format if d else "none", group_size, device)
    mlp, mlp_stride = with_row_stride(mlp)
    attention, attention_stride = (None, 0) if attention is None else with_row_stride(attention)
    h, h_stride = (None, 0) if h is None else with_row_stride(dot_operand(h))
    up = None if up is None else dot_operand(up).contiguous()
    attention_scale, attention_scales, attention_group = saved_groups(attention_scale, group_size, max(d, 1))
    mlp_scale, mlp_scales, mlp_group = saved_groups(mlp_scale, group_size, f)
    tile, widest = (1, WIDEST_BLOCK) if up is None else (LOW_RANK_ROWS, LOW_RANK_BLOCK)
    block = max(min(power_of_two(f), widest), group_size)
    launch(
        _mlp_activation_fwd_kernel,
        (blocks(rows, tile),),
        attention,
        attention_scale,
        mlp,
        mlp_scale,
        h,
        up,
        values,
        codes.codes,
        codes.scale,
        saved_attention.codes,
        saved_attention.scale,
        saved_mlp.codes,
        saved_mlp.scale,
        attention_stride,
        mlp_stride,
        h_stride,
        attention_scales,
        mlp_scales,
        rows,
        d,
        f,
        DTYPE=TL_DTYPES[dtype],
        ATTENTION_GROUP=attention_group,
        MLP_GROUP=mlp_group,
        FORMAT_MAX=codes.format_max,
        SAVED_MAX=saved_mlp.format_max,
        G=group_size,
        **rank_options(up),
        R=tile,
        BLOCK=block,
        num_warps=max(warps(tile * block), WARPS),
    )
    values = finished(values, dtype)
    return values, *codes.results(values), *saved_attention.results(), *saved_mlp.results()


def mlp_activation_backward(
    grad: Tensor,
    dh: Tensor | None,
    down: Tensor | None,
    mlp: Tensor,
    mlp_scale: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Launcher of `coat::mlp_activation_backward`."""
    dmlp = empty_values(tuple(mlp.shape), dtype, mlp.device)
    launch_mlp_backward(grad, dh, down, mlp, mlp_scale, group_size, dtype, dmlp)
    return finished(dmlp, dtype)


def launch_mlp_backward(
    grad: Tensor,
    dh: Tensor | None,
    down: Tensor | None,
    mlp: Tensor,
    mlp_scale: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
    dmlp: Tensor,
) -> None:
    """Write the result of `coat::mlp_activation_backward` to dmlp [B, S, F], rows at an even stride."""
    f = mlp.shape[-1]
    (grad, grad_stride), (mlp, mlp_stride) = with_row_stride(grad), with_row_stride(mlp)
    dh, dh_stride = (None, 0) if dh is None else with_row_stride(dot_operand(dh))
    down, down_stride = (None, 0) if down is None else with_row_stride(dot_operand(down))
    mlp_scale, scales_per_row, group = saved_groups(mlp_scale, group_size, f)
    rows, block = mlp.numel() // f, min(power_of_two(f), LOW_RANK_BLOCK)
    launch(
        _mlp_activation_bwd_kernel,
        (blocks(rows, LOW_RANK_ROWS), blocks(f, block)),
        grad,
        dh,
        down,
        mlp,
        mlp_scale,
        dmlp,
        grad_stride,
        dh_stride,
        down_stride,
        mlp_stride,
        dmlp.stride(-2),
        scales_per_row,
        rows,
        f,
        DTYPE=TL_DTYPES[dtype],
        GROUP=group,
        **rank_options(down, dim=0),
        R=LOW_RANK_ROWS,
        BLOCK=block,
        num_warps=warps(LOW_RANK_ROWS * block),
    )
