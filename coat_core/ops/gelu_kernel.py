"""The activation of an MLP with its adapter, beside attention's output, quantized and saved; and its gradient.

GELU(x) = x·s(x) with s(x) = sigmoid(2u), u = sqrt(2/π)·(x + 0.044715·x³): the same as x/2·(1 + tanh u) without its
cancellation at large negative x. SwiGLU (GATED) reads two tiles, one from each half of mlp.

A program takes a tile of LOW_RANK_ROWS rows, so that tl.dot multiplies the adapter, and leaves each row's amax over its
columns; the cast is a second launch. (Programs over whole rows could cast too, but 288 at 1024 px and 32 for the text
are too few to keep a GPU's memory busy.)

Shapes: attention [B, S, D], mlp [..., N], each read as rows; N is F, and 2·F of SwiGLU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core.ops.codes import check_granularity, no_codes
from coat_core.ops.device import add_low_rank, finite_abs, load_saved, rounded, store_group_codes
from coat_core.ops.gelu import activated_width, columns_of_up
from coat_core.ops.gelu import mlp_activation as operator
from coat_core.ops.launch import blocks, dot_operand, empty, empty_values, finished, launch, power_of_two
from coat_core.ops.rows import (
    LOW_RANK_ROWS,
    TL_DTYPES,
    GroupCodes,
    cast_by_amax,
    cast_rows_by_amax,
    rank_options,
    saved_groups,
    warps,
    with_row_stride,
)

LOW_RANK_BLOCK = 128  # columns of LOW_RANK_ROWS rows


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def gate_of_gelu(x):
    return sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def gated(gate, up, DTYPE: tl.constexpr):
    return (gate * sigmoid(gate)).to(DTYPE).to(tl.float32) * up


@triton.jit
def _store_tile(
    x,
    values_ptr,
    amax_ptr,
    rows,
    are_rows,
    first,
    end,
    width,
    part,
    parts,
    BLOCK: tl.constexpr,
):
    columns = first + tl.arange(0, BLOCK)[None, :]
    inside = are_rows[:, None] & (columns < end)
    tl.store(values_ptr + rows[:, None] * width + columns, x.to(values_ptr.dtype.element_ty), mask=inside)
    if amax_ptr is not None:
        tl.store(amax_ptr + rows * parts + part, tl.max(finite_abs(x), axis=1), mask=are_rows)


@triton.jit
def _complete_tile(
    x_ptr,
    scale_ptr,
    h_ptr,
    up_ptr,
    saved_ptr,
    saved_scale_ptr,
    row,
    rows,
    are_rows,
    first,
    end,
    stride,
    h_stride,
    scales_per_row,
    width,
    DTYPE: tl.constexpr,
    GROUP: tl.constexpr,
    SAVED_MAX: tl.constexpr,
    G: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    in_row = first + tl.arange(0, BLOCK)
    columns = in_row[None, :]
    inside = are_rows[:, None] & (columns < end)
    groups = (row + rows[:, None]) * scales_per_row + columns // GROUP
    x = load_saved(x_ptr + row * stride, scale_ptr, rows[:, None] * stride + columns, groups, inside, DTYPE)
    if h_ptr is not None:
        h_row, h_rows, up_rows = h_ptr + row * h_stride, rows * h_stride, in_row * RANK
        x = add_low_rank(x, h_row, up_ptr, h_rows, up_rows, 1, are_rows, in_row < end, RANK, RANK_BLOCK)
    x = x.to(DTYPE).to(tl.float32)
    if saved_ptr is not None:
        store_group_codes(
            x, saved_ptr, saved_scale_ptr, row + rows, are_rows, first, end, width, SAVED_MAX, G, R, BLOCK
        )
    return x


@triton.jit
def _mlp_activation_fwd_kernel(
    attention_ptr,
    attention_scale_ptr,
    mlp_ptr,
    mlp_scale_ptr,
    h_ptr,
    up_ptr,
    values_ptr,
    amax_ptr,
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
    GATED: tl.constexpr,
    ATTENTION_GROUP: tl.constexpr,
    MLP_GROUP: tl.constexpr,
    SAVED_MAX: tl.constexpr,
    G: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    SECOND: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of R rows of attention or of mlp a program; D is 0 without attention. Tile offsets fit 32 bits."""
    row, part, parts = tl.program_id(0).to(tl.int64) * R, tl.program_id(1), tl.num_programs(1)
    rows = tl.arange(0, R)
    are_rows, before = row + rows < total, tl.cdiv(D, BLOCK)
    values_ptr += row * (D + F)
    if amax_ptr is not None:
        amax_ptr += row * parts
    if part < before:
        if attention_ptr is not None:
            x = _complete_tile(
                attention_ptr,
                attention_scale_ptr,
                None,
                None,
                saved_attention_ptr,
                saved_attention_scale_ptr,
                row,
                rows,
                are_rows,
                part * BLOCK,
                D,
                attention_stride,
                0,
                attention_scales_per_row,
                D,
                DTYPE,
                ATTENTION_GROUP,
                SAVED_MAX,
                G,
                0,
                0,
                R,
                BLOCK,
            )
            _store_tile(x, values_ptr, amax_ptr, rows, are_rows, part * BLOCK, D, D + F, part, parts, BLOCK)
    else:
        first, width, x = (part - before) * BLOCK, F + F if GATED else F, tl.zeros([R, BLOCK], tl.float32)
        for half in tl.static_range(2 if GATED else 1):
            gate, half_h_ptr = x, h_ptr
            if h_ptr is not None:
                half_h_ptr += half * SECOND
            x = _complete_tile(
                mlp_ptr,
                mlp_scale_ptr,
                half_h_ptr,
                up_ptr,
                saved_mlp_ptr,
                saved_mlp_scale_ptr,
                row,
                rows,
                are_rows,
                half * F + first,
                half * F + F,
                mlp_stride,
                h_stride,
                mlp_scales_per_row,
                width,
                DTYPE,
                MLP_GROUP,
                SAVED_MAX,
                G,
                RANK,
                RANK_BLOCK,
                R,
                BLOCK,
            )
        if GATED:
            x = gated(gate, x, DTYPE).to(DTYPE).to(tl.float32)
        else:
            x = (x * gate_of_gelu(x)).to(DTYPE).to(tl.float32)
        _store_tile(x, values_ptr + D, amax_ptr, rows, are_rows, first, F, D + F, part, parts, BLOCK)


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
    activation: str = "gelu_tanh",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    check_granularity(granularity)
    device, d = mlp.device, 0 if attention is None else attention.shape[-1]
    n, f = mlp.shape[-1], activated_width(mlp, activation)
    if saved_format != "none" and splits_groups(n, f, group_size):
        how = (fmt, granularity, saved_format, group_size, dtype, activation)
        return operator._init_fn(attention, attention_scale, mlp, mlp_scale, h, up, *how)
    rows, shape = mlp.numel() // n, (*mlp.shape[:-1], d + f)
    block = max(LOW_RANK_BLOCK, group_size)
    parts, values = blocks(d, block) + blocks(f, block), empty_values(shape, dtype, device)
    amax = None if granularity == "none" else empty((rows, parts), torch.float32, device)
    saved_mlp = GroupCodes(tuple(mlp.shape), saved_format, group_size, device)
    saved_attention = GroupCodes((*shape[:-1], d), saved_format if d else "none", group_size, device)
    mlp, mlp_stride = with_row_stride(mlp)
    attention, attention_stride = (None, 0) if attention is None else with_row_stride(attention)
    h, h_stride = (None, 0) if h is None else with_row_stride(dot_operand(h))
    up = None if up is None else dot_operand(up).contiguous()
    attention_scale, attention_scales, attention_group = saved_groups(attention_scale, group_size, max(d, 1))
    mlp_scale, mlp_scales, mlp_group = saved_groups(mlp_scale, group_size, n)
    inputs = (attention, attention_scale, mlp, mlp_scale, h, up)
    saved = (saved_attention.codes, saved_attention.scale, saved_mlp.codes, saved_mlp.scale)
    strides = (attention_stride, mlp_stride, h_stride, attention_scales, mlp_scales)
    launch(
        _mlp_activation_fwd_kernel,
        (blocks(rows, LOW_RANK_ROWS), parts),
        *inputs,
        values,
        amax,
        *saved,
        *strides,
        rows,
        d,
        f,
        DTYPE=TL_DTYPES[dtype],
        GATED=n > f,
        ATTENTION_GROUP=attention_group,
        MLP_GROUP=mlp_group,
        SAVED_MAX=saved_mlp.format_max,
        G=group_size,
        **rank_options(up),
        SECOND=columns_of_up(h, up),
        R=LOW_RANK_ROWS,
        BLOCK=block,
        num_warps=warps(LOW_RANK_ROWS * block),
        num_stages=1,
    )
    values = finished(values, dtype)
    return values, *_codes_of(values, amax, fmt, granularity), *saved_attention.results(), *saved_mlp.results()


def splits_groups(width: int, activated: int, group_size: int) -> bool:
    """Whether a group of codes spans both halves, which no program sees together: small models only."""
    return width > activated and group_size > 0 and activated % group_size > 0


def _codes_of(values: Tensor, amax: Tensor | None, fmt: str, granularity: str) -> tuple[Tensor, Tensor]:
    if amax is None:
        return no_codes(values, fmt)
    if granularity == "per_tensor":
        return cast_by_amax(values, amax.view(-1).amax(0, keepdim=True), fmt)
    return cast_rows_by_amax(values, amax, fmt)


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
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    place = dmlp_ptr + rows[:, None] * dmlp_stride + columns
    if GATED:
        s, groups = sigmoid(x), rows[:, None] * scales_per_row + (F + columns) // GROUP
        up = load_saved(mlp_ptr + F, mlp_scale_ptr, rows[:, None] * mlp_stride + columns, groups, inside, DTYPE)
        up = up.to(DTYPE).to(tl.float32)
        tl.store(place + F, (g * (x * s)).to(dmlp_ptr.dtype.element_ty), mask=inside)
        dmlp = g * up * (s * (1.0 + x * (1.0 - s)))
    else:
        s = gate_of_gelu(x)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        dmlp = g * (s + x * (s * (1.0 - s)) * slope)
    tl.store(place, dmlp.to(dmlp_ptr.dtype.element_ty), mask=inside)


def mlp_activation_backward(
    grad: Tensor,
    dh: Tensor | None,
    down: Tensor | None,
    mlp: Tensor,
    mlp_scale: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
    activation: str = "gelu_tanh",
) -> Tensor:
    dmlp = empty_values(tuple(mlp.shape), dtype, mlp.device)
    launch_mlp_backward(grad, dh, down, mlp, mlp_scale, group_size, dtype, activation, dmlp)
    return finished(dmlp, dtype)


def launch_mlp_backward(
    grad: Tensor,
    dh: Tensor | None,
    down: Tensor | None,
    mlp: Tensor,
    mlp_scale: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
    activation: str,
    dmlp: Tensor,
) -> None:
    n, f = mlp.shape[-1], activated_width(mlp, activation)
    (grad, grad_stride), (mlp, mlp_stride) = with_row_stride(grad), with_row_stride(mlp)
    dh, dh_stride = (None, 0) if dh is None else with_row_stride(dot_operand(dh))
    down, down_stride = (None, 0) if down is None else with_row_stride(dot_operand(down))
    mlp_scale, scales_per_row, group = saved_groups(mlp_scale, group_size, n)
    rows, block = mlp.numel() // n, min(power_of_two(f), LOW_RANK_BLOCK)
    strides = (grad_stride, dh_stride, down_stride, mlp_stride, dmlp.stride(-2), scales_per_row)
    launch(
        _mlp_activation_bwd_kernel,
        (blocks(rows, LOW_RANK_ROWS), blocks(f, block)),
        *(grad, dh, down, mlp, mlp_scale, dmlp),
        *strides,
        rows,
        f,
        DTYPE=TL_DTYPES[dtype],
        GATED=n > f,
        GROUP=group,
        **rank_options(down, dim=0),
        R=LOW_RANK_ROWS,
        BLOCK=block,
        num_warps=warps(LOW_RANK_ROWS * block),
    )
