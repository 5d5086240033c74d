"""Gradient of a down-projection: the product of dhᵀ with values recomputed from the saved tensors, tile by tile.

A program takes BLOCK columns and a share of the rows. Torch adds up the shares, always in the same order. Values are
computed once for up to 64 ranks.

Shapes: dh [B, S, r], attention [B, S, D], mlp [B, S, N], each read as rows.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core.ops.device import as_values
from coat_core.ops.gelu import activated_width
from coat_core.ops.gelu_kernel import gate_of_gelu, gated, splits_groups
from coat_core.ops.launch import blocks, dot_operand, empty_values, finished, launch
from coat_core.ops.mlp_gradient import mlp_down_gradient as operator
from coat_core.ops.rows import TL_DTYPES, rank_options, saved_groups, with_row_stride

ROWS = 32
BLOCK = 64
WARPS = 8
PROGRAMS = 512  # that a large GPU runs at once: four on each multiprocessor, with the registers of these kernels
# of a share, for each of the ranks, at least: a column of a part is written and read again in 8 bytes a rank, that of
# codes is as many bytes as there are rows
ROWS_OF_A_RANK = 64


@triton.jit
def _load_tile(
    x_ptr,
    scale_ptr,
    stride,
    scales_per_row,
    first,
    end,
    places,
    are_rows,
    DTYPE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Read a tile [R, BLOCK] in columns first to end as `device.load_saved` does, each scale once: SCALES a row."""
    if SCALES > 1:
        groups = first // GROUP + tl.arange(0, SCALES)[None, :]
        exist = are_rows[:, None] & (groups * GROUP < end)
        columns = groups[:, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
        inside = are_rows[:, None, None] & (columns < end)
        x = as_values(tl.load(x_ptr + places[:, None, None] * stride + columns, mask=inside, other=0.0))
        x *= tl.load(scale_ptr + places[:, None] * scales_per_row + groups, mask=exist, other=0.0)[:, :, None]
        x = tl.reshape(x, (R, BLOCK))
    else:
        columns = first + tl.arange(0, BLOCK)[None, :]
        inside = are_rows[:, None] & (columns < end)
        x = as_values(tl.load(x_ptr + places[:, None] * stride + columns, mask=inside, other=0.0))
        if scale_ptr is not None:
            x *= tl.load(scale_ptr + places * scales_per_row + first // GROUP, mask=are_rows, other=0.0)[:, None]
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _product(
    dh_ptr,
    x_ptr,
    scale_ptr,
    parts_ptr,
    dh_stride,
    stride,
    scales_per_row,
    first,
    width,
    parts_width,
    total,
    rounds,
    ACTIVATED: tl.constexpr,
    GATED: tl.constexpr,
    DTYPE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    share, ranks = tl.program_id(1).to(tl.int64), tl.program_id(2) * RANK_BLOCK + tl.arange(0, RANK_BLOCK)
    in_row, places = first + tl.arange(0, BLOCK), tl.arange(0, R)
    columns = in_row[None, :]
    product = tl.zeros([RANK_BLOCK, BLOCK], tl.float32)
    for turn in range(rounds):
        row = (share * rounds + turn) * R
        are_rows = row + places < total
        scales = scale_ptr
        if scale_ptr is not None:
            scales += row * scales_per_row
        x = tl.zeros([R, BLOCK], tl.float32)
        for half in tl.static_range(2 if GATED else 1):
            gate = x
            x = _load_tile(
                x_ptr + row * stride,
                scales,
                stride,
                scales_per_row,
                half * width + first,
                half * width + width,
                places,
                are_rows,
                DTYPE,
                GROUP,
                SCALES,
                R,
                BLOCK,
            )
        if GATED:
            x = gated(gate, x, DTYPE).to(DTYPE)
        elif ACTIVATED:
            x = (x * gate_of_gelu(x)).to(DTYPE)
        dh = tl.load(
            dh_ptr + row * dh_stride + places[None, :] * dh_stride + ranks[:, None],
            mask=are_rows[None, :] & (ranks < RANK)[:, None],
            other=0.0,
        )
        product = tl.dot(dh, x.to(dh.dtype), acc=product, input_precision="ieee")
    offsets = (share * RANK + ranks)[:, None] * parts_width + columns
    inside = (ranks < RANK)[:, None] & (columns < width)
    tl.store(parts_ptr + offsets, product.to(parts_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _mlp_down_gradient_kernel(
    dh_ptr,
    attention_ptr,
    attention_scale_ptr,
    mlp_ptr,
    mlp_scale_ptr,
    parts_ptr,
    dh_stride,
    attention_stride,
    mlp_stride,
    attention_scales_per_row,
    mlp_scales_per_row,
    total,
    rounds,
    D,
    F,
    DTYPE: tl.constexpr,
    GATED: tl.constexpr,
    ATTENTION_GROUP: tl.constexpr,
    ATTENTION_SCALES: tl.constexpr,
    MLP_GROUP: tl.constexpr,
    MLP_SCALES: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    stretch, before = tl.program_id(0), tl.cdiv(D, BLOCK)
    if stretch < before:
        if attention_ptr is not None:
            _product(
                dh_ptr,
                attention_ptr,
                attention_scale_ptr,
                parts_ptr,
                dh_stride,
                attention_stride,
                attention_scales_per_row,
                stretch * BLOCK,
                D,
                D + F,
                total,
                rounds,
                False,
                False,
                DTYPE,
                ATTENTION_GROUP,
                ATTENTION_SCALES,
                RANK,
                RANK_BLOCK,
                R,
                BLOCK,
            )
    else:
        _product(
            dh_ptr,
            mlp_ptr,
            mlp_scale_ptr,
            parts_ptr + D,
            dh_stride,
            mlp_stride,
            mlp_scales_per_row,
            (stretch - before) * BLOCK,
            F,
            D + F,
            total,
            rounds,
            True,
            GATED,
            DTYPE,
            MLP_GROUP,
            MLP_SCALES,
            RANK,
            RANK_BLOCK,
            R,
            BLOCK,
        )


@functools.cache
def _shared(rows: int, rank: int, programs: int) -> tuple[int, int]:
    most = max(rows // (ROWS_OF_A_RANK * rank), 1)
    tiles = max(blocks(rows, ROWS), 1)
    rounds = blocks(tiles, min(max(PROGRAMS // programs, 1), most))
    return blocks(tiles, rounds), rounds


def _scales(group: int, per_row: int) -> int:
    return 1 if per_row <= 1 else max(BLOCK // group, 1)


def mlp_down_gradient(
    dh: Tensor,
    attention: Tensor | None,
    attention_scale: Tensor | None,
    mlp: Tensor,
    mlp_scale: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
    dtype_down: torch.dtype,
    activation: str = "gelu_tanh",
) -> Tensor:
    rank, n, d = dh.shape[-1], mlp.shape[-1], 0 if attention is None else attention.shape[-1]
    f = activated_width(mlp, activation)
    if mlp_scale is not None and splits_groups(n, f, group_size):
        how = (group_size, dtype, dtype_down, activation)
        return operator._init_fn(dh, attention, attention_scale, mlp, mlp_scale, *how)
    rows, ranks, stretches = mlp.numel() // n, rank_options(dh), blocks(d, BLOCK) + blocks(f, BLOCK)
    chunks = blocks(rank, ranks["RANK_BLOCK"])
    shares, rounds = _shared(rows, rank, stretches * chunks)
    (dh, dh_stride), (mlp, mlp_stride) = with_row_stride(dot_operand(dh)), with_row_stride(mlp)
    attention, attention_stride = (None, 0) if attention is None else with_row_stride(attention)
    attention_scale, attention_scales, attention_group = saved_groups(attention_scale, group_size, max(d, 1))
    mlp_scale, mlp_scales, mlp_group = saved_groups(mlp_scale, group_size, n)
    parts_dtype = dtype_down if shares == 1 else torch.float32
    parts = empty_values((shares, rank, d + f), parts_dtype, dh.device)
    tensors = (dh, attention, attention_scale, mlp, mlp_scale, parts)
    strides = (dh_stride, attention_stride, mlp_stride, attention_scales, mlp_scales)
    launch(
        _mlp_down_gradient_kernel,
        (stretches, shares, chunks),
        *tensors,
        *strides,
        rows,
        rounds,
        d,
        f,
        DTYPE=TL_DTYPES[dtype],
        GATED=n > f,
        ATTENTION_GROUP=attention_group,
        ATTENTION_SCALES=_scales(attention_group, attention_scales),
        MLP_GROUP=mlp_group,
        MLP_SCALES=_scales(mlp_group, mlp_scales),
        **ranks,
        R=ROWS,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    parts = finished(parts, parts_dtype)
    return parts[0] if shares == 1 else parts.sum(0).to(dtype_down)
