"""The activation of an MLP with its adapter, beside attention's output, quantized and saved; and its gradients.

GELU(x) = x·s(x) with s(x) = sigmoid(2u), u = sqrt(2/π)·(x + 0.044715·x³): the same as x/2·(1 + tanh u) without its
cancellation at large negative x. SwiGLU (GATED) reads two tiles, one from each half of mlp.

A program takes a tile of LOW_RANK_ROWS rows, so that tl.dot multiplies the adapter, writes its values, and leaves each
row's amax over its columns; the cast is a second launch, which with a down-projection also multiplies by it and leaves
its part of the product over a stretch of columns. (Programs over whole rows could cast too, but 288 at 1024 px and 32
for the text are too few to keep a GPU's memory busy. Recomputing the values in the second launch instead of reading
them costs more instructions than it saves bytes: RESULTS.md, Any card.)

The gradient of a down-projection, dhᵀ [attention | act(mlp)], recomputes the values from the saved tensors, tile by
tile, once for up to 64 ranks. A program takes DOWN_BLOCK columns and a share of the rows. Torch adds them up in order.

Shapes: attention [B, S, D], mlp [..., N], dh [..., r], each read as rows, N = F or, of SwiGLU, 2·F; down [NEXT, D + F].
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core.formats import INT8
from coat_core.int8 import rotation_size
from coat_core.ops import gelu as operators
from coat_core.ops.codes import code_format, codes_of
from coat_core.ops.device import (
    LOW_RANK_ROWS,
    TL_DTYPES,
    Codes,
    adapter,
    add_low_rank,
    amax_of,
    cast_by_amax,
    load_groups,
    load_saved,
    quantize_rows,
    quantized,
    rank_options,
    rotated,
    rotation_stages,
    rounded,
    saved_groups,
    scale_from_amax,
    store_group_codes,
    warps,
    with_row_stride,
)
from coat_core.ops.dispatch import launcher
from coat_core.ops.gelu import activated_width
from coat_core.ops.launch import dot_operand, empty, empty_values, finished, launch, n_blocks, power_of_two
from coat_core.ops.quantize_kernel import quantize_int8

GATED = tl.constexpr("silu_and_mul")
LOG2_E = tl.constexpr(math.log2(math.e))
TWICE_U = tl.constexpr(2 * math.sqrt(2 / math.pi))  # 2u of a small x
LOW_RANK_BLOCK = 128  # columns of LOW_RANK_ROWS rows

# of the product with a down-projection
STRETCH = 2048  # columns of a row that one program goes over, at least
COLUMNS_A_SUM = 32  # of such a stretch for each fp32 sum that it leaves: a sixteenth of the bytes that it reads
RANKS_AT_ONCE = 128
FP32_BLOCK = 32  # in place of LOW_RANK_BLOCK: a tile of 128 ranks spills, and has more shared memory than an RTX 4090

# of the gradient of a down-projection
DOWN_ROWS = 32
DOWN_BLOCK = 64
DOWN_WARPS = 8
PROGRAMS = 512  # that a large GPU runs at once: four on each multiprocessor, with the registers of these kernels
# of a share, for each of the ranks, at least: a column of a part is written and read again in 8 bytes a rank, that of
# codes is as many bytes as there are rows
ROWS_OF_A_RANK = 64


@triton.jit
def reciprocal(x):
    """1 / x of positive x as the square of a root: two instructions, where a division has eight."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def sigmoid(x):
    return reciprocal(1.0 + tl.exp2(x * -LOG2_E))


@triton.jit
def gelu_exponent(x):
    """-2u in powers of two."""
    return x * tl.fma(x * x, -0.044715 * TWICE_U * LOG2_E, -TWICE_U * LOG2_E)


@triton.jit
def activated(gate, x, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """GELU(x), or silu(gate)·x rounded as torch rounds it, in DTYPE."""
    if ACTIVATION == GATED:
        x = (gate * sigmoid(gate)).to(DTYPE).to(tl.float32) * x
    else:
        x *= reciprocal(1.0 + tl.exp2(gelu_exponent(x)))
    return x.to(DTYPE)


@triton.jit
def values_tile(
    source,
    adapter,
    saved,
    tile,
    first,
    width,
    ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
    SAVED_MAX: tl.constexpr,
    G: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile [R, BLOCK] of the `width` values of attention or, of an ACTIVATION, of mlp with its adapter; save both.

    `source` has the tensor and the distance of its rows.
    """
    x_ptr, stride = source
    h_ptr, up_ptr, h_stride, second = adapter
    saved_ptr, saved_scale_ptr = saved
    row, rows, are_rows = tile
    x = tl.zeros([rows.shape[0], BLOCK], tl.float32)
    for half in tl.static_range(2 if ACTIVATION == GATED else 1):
        gate, start, end = x, half * width + first, half * width + width
        in_row = start + tl.arange(0, BLOCK)
        columns = in_row[None, :]
        inside = are_rows[:, None] & (columns < end)
        x = tl.load(x_ptr + row * stride + (rows[:, None] * stride + columns), mask=inside, other=0.0).to(tl.float32)
        if h_ptr is not None:
            half_h_ptr = h_ptr + half * second + row * h_stride
            h_rows, up_rows = rows * h_stride, in_row * RANK
            x = add_low_rank(x, half_h_ptr, up_ptr, h_rows, up_rows, 1, are_rows, in_row < end, RANK, RANK_BLOCK)
        x = x.to(DTYPE).to(tl.float32)
        all_columns = 2 * width if ACTIVATION == GATED else width
        store_group_codes(x, saved_ptr, saved_scale_ptr, row + rows, are_rows, start, end, all_columns, SAVED_MAX, G)
    if ACTIVATION is not None:
        x = activated(gate, x, ACTIVATION, DTYPE).to(tl.float32)
    return x


@triton.jit
def _store_tile(x, values_ptr, amax_ptr, tile, first, end, width, FORMAT_MAX: tl.constexpr, STAGES: tl.constexpr):
    row, rows, are_rows = tile
    columns = first + tl.arange(0, x.shape[1])[None, :]
    inside = are_rows[:, None] & (columns < end)
    values_ptr += row * width
    tl.store(values_ptr + rows[:, None] * width + columns, x, mask=inside)
    if amax_ptr is not None:
        part, parts = tl.program_id(1), tl.num_programs(1)
        amax = amax_of(rotated(x, STAGES), 1, FORMAT_MAX)
        tl.store(amax_ptr + row * parts + rows * parts + part, amax, mask=are_rows)


@triton.jit
def _mlp_activation_fwd_kernel(
    attention_ptr,
    mlp_ptr,
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
    total,
    D,
    F,
    DTYPE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    STAGES: tl.constexpr,
    SAVED_MAX: tl.constexpr,
    G: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    SECOND: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of R rows of attention or of mlp a program; D is 0 without attention. Tile offsets fit 32 bits."""
    row, part = tl.program_id(0).to(tl.int64) * R, tl.program_id(1)
    rows, before = tl.arange(0, R), tl.cdiv(D, BLOCK)
    tile = row, rows, row + rows < total
    if part < before:
        if attention_ptr is not None:
            first, none = part * BLOCK, (None, None, 0, 0)
            attention = attention_ptr, attention_stride
            codes = saved_attention_ptr, saved_attention_scale_ptr
            x = values_tile(attention, none, codes, tile, first, D, None, DTYPE, SAVED_MAX, G, 0, 0, BLOCK)
            _store_tile(x, values_ptr, amax_ptr, tile, first, D, D + F, FORMAT_MAX, STAGES)
    else:
        first = (part - before) * BLOCK
        mlp = (mlp_ptr, mlp_stride)
        adapter = (h_ptr, up_ptr, h_stride, SECOND)
        saved = saved_mlp_ptr, saved_mlp_scale_ptr
        x = values_tile(mlp, adapter, saved, tile, first, F, ACTIVATION, DTYPE, SAVED_MAX, G, RANK, RANK_BLOCK, BLOCK)
        _store_tile(x, values_ptr + D, amax_ptr, tile, first, F, D + F, FORMAT_MAX, STAGES)


def _activated(a: Any) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Values [..., D + F], amax [rows, parts] of the parts of their rows unless they get no codes, and saved codes."""
    d = 0 if a.attention is None else a.attention.shape[-1]
    n = a.mlp.shape[-1]
    f = activated_width(a.mlp, a.activation)
    device, shape = a.mlp.device, a.mlp.shape[:-1]
    rows = a.mlp.numel() // n
    stages = rotation_stages(a.fmt, d + f)
    block = max(LOW_RANK_BLOCK, a.group_size, 4**stages)
    parts = n_blocks(d, block) + n_blocks(f, block)
    values = empty_values((*shape, d + f), a.dtype, device)
    amax = None if a.granularity == "none" else empty((rows, parts), torch.float32, device)
    saved_mlp = Codes((*shape, n), device, a.saved_format, "per_group", a.group_size)
    saved_attention = Codes((*shape, d), device, a.saved_format if d else "none", "per_group", a.group_size)
    attention, attention_stride = with_row_stride(a.attention)
    mlp, mlp_stride = with_row_stride(a.mlp)
    h, h_stride, up, ranks = adapter(a.h, a.up)
    second = 0  # first column of h that the second half of mlp reads; 0 where both halves share one adapter
    if h is not None and up is not None and h.shape[-1] != up.shape[-1]:
        second = up.shape[-1]
    launch(
        _mlp_activation_fwd_kernel,
        (n_blocks(rows, LOW_RANK_ROWS), parts),
        *(attention, mlp, h, up, values, amax),
        *(saved_attention.codes, saved_attention.scale, saved_mlp.codes, saved_mlp.scale),
        *(attention_stride, mlp_stride, h_stride, rows, d, f),
        DTYPE=TL_DTYPES[a.dtype],
        ACTIVATION=a.activation,
        FORMAT_MAX=code_format(a.fmt).max,
        STAGES=stages,
        SAVED_MAX=saved_mlp.format_max,
        G=a.group_size,
        **ranks,
        SECOND=second,
        R=LOW_RANK_ROWS,
        BLOCK=block,
        num_warps=warps(LOW_RANK_ROWS * block),
        num_stages=1,
    )
    return finished(values, a.dtype), amax, [*saved_attention.results(), *saved_mlp.results()]


@launcher(operators.mlp_activation)
def mlp_activation(a: Any) -> tuple[Tensor, ...]:
    if splits_groups(a.mlp.shape[-1], activated_width(a.mlp, a.activation), a.group_size, a.saved_format):
        return operators.mlp_activation._init_fn(*a)
    if a.fmt == INT8.name and a.granularity != "none":
        values, _, saved = _activated(a._replace(granularity="none"))
        return values, *quantize_int8(values, rotation_size(values.shape[-1]), None), *saved
    values, amax, saved = _activated(a)
    if amax is None:
        codes, scale = codes_of(values, a.fmt, "none")
    elif a.granularity == "per_tensor":
        codes, scale = cast_by_amax(values, amax.view(-1).amax(0, keepdim=True), a.fmt)
    else:
        codes, scale = quantize_rows(values, a.fmt, None, amax)
    return values, codes, scale, *saved


def splits_groups(width: int, activated: int, group_size: int, saved_format: str = "") -> bool:
    """Whether a group of codes spans both halves, which no program sees together: small models only."""
    return saved_format != "none" and width > activated and group_size > 0 and activated % group_size > 0


@triton.jit
def _cast_down_fwd_kernel(
    values_ptr,
    down_ptr,
    amax_ptr,
    codes_ptr,
    scale_ptr,
    sums_ptr,
    down_stride,
    total,
    width,
    amax_parts,
    FORMAT_MAX: tl.constexpr,
    STAGES: tl.constexpr,
    BY_ROW: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    NEXT: tl.constexpr,
    NEXT_BLOCK: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """LENGTH columns of R rows a program: codes, and sums of the products with NEXT_BLOCK rows of down.

    On a GPU fp32 is multiplied as three products of TF32, within 2^-21 of each product: from registers it would spill.
    """
    row, part, parts = tl.program_id(0).to(tl.int64) * R, tl.program_id(1), tl.num_programs(1)
    rows, place = tl.arange(0, R), tl.arange(0, PARTS_BLOCK)
    are_rows = row + rows < total
    ranks = tl.program_id(2) * NEXT_BLOCK + tl.arange(0, NEXT_BLOCK)
    if BY_ROW:
        amax_ptr += row * amax_parts + rows[:, None] * amax_parts + place[None, :]
        amax = tl.max(tl.load(amax_ptr, mask=are_rows[:, None] & (place < amax_parts)[None, :], other=0.0), axis=1)
        scale = scale_from_amax(amax, FORMAT_MAX)
        tl.store(scale_ptr + row + rows, scale, mask=are_rows)  # the same from every part
    else:
        scale = scale_from_amax(tl.load(amax_ptr + rows * 0), FORMAT_MAX)
        tl.store(scale_ptr + rows, scale, mask=row + rows == 0)
    values_ptr += row * width
    codes_ptr += row * width
    sums = tl.zeros([R, NEXT_BLOCK], tl.float32)
    for start in range(part * LENGTH, tl.minimum(part * LENGTH + LENGTH, width), BLOCK):
        columns = start + tl.arange(0, BLOCK)
        places = rows[:, None] * width + columns[None, :]
        inside = are_rows[:, None] & (columns < width)[None, :]
        x = tl.load(values_ptr + places, mask=inside, other=0.0)
        codes = quantized(rotated(x.to(tl.float32), STAGES), scale[:, None], codes_ptr, FORMAT_MAX)
        tl.store(codes_ptr + places, codes, mask=inside)
        down = tl.load(
            down_ptr + columns[:, None] + ranks[None, :] * down_stride,
            mask=(columns < width)[:, None] & (ranks < NEXT)[None, :],
            other=0.0,
        )
        sums = tl.dot(x.to(down_ptr.dtype.element_ty), down, acc=sums, input_precision="tf32x3")
    places = (row * parts + rows * parts + part)[:, None] * NEXT + ranks[None, :]
    tl.store(sums_ptr + places, sums, mask=are_rows[:, None] & (ranks < NEXT)[None, :])


@launcher(operators.mlp_activation_down)
def mlp_activation_down(a: Any) -> tuple[Tensor, ...]:
    f, width = activated_width(a.mlp, a.activation), a.down.shape[1]
    stages = rotation_stages(a.fmt, width)
    # no tile holds whole blocks of the rotation, or one of fp32 spills: small models, and those in fp32
    cannot_rotate = f % 4**stages > 0 or (stages > 0 and a.down.itemsize > 2)
    if cannot_rotate or splits_groups(a.mlp.shape[-1], f, a.group_size, a.saved_format):
        return operators.mlp_activation_down._init_fn(*a)
    values, amax, saved = _activated(a)
    assert amax is not None
    device, form = values.device, code_format(a.fmt)
    (rows, amax_parts), next_rank = amax.shape, len(a.down)
    by_row = a.granularity == "per_row"
    length = power_of_two(max(STRETCH, COLUMNS_A_SUM * next_rank))
    parts = n_blocks(width, length)
    codes = empty_values(values.shape, form.dtype, device)
    scale = empty((*values.shape[:-1], 1) if by_row else (), torch.float32, device)
    sums = empty((rows, parts, next_rank), torch.float32, device)
    down, down_stride = with_row_stride(dot_operand(a.down))
    block = max(LOW_RANK_BLOCK if a.down.itemsize == 2 else FP32_BLOCK, 4**stages)
    tile = max(block, LOW_RANK_BLOCK)
    next_block = min(max(power_of_two(next_rank), 16), RANKS_AT_ONCE * LOW_RANK_BLOCK // tile)
    launch(
        _cast_down_fwd_kernel,
        (n_blocks(rows, LOW_RANK_ROWS), parts, n_blocks(next_rank, next_block)),
        *(dot_operand(values), down, amax if by_row else amax.amax()),
        *(codes, scale, sums),
        *(down_stride, rows, width, amax_parts),
        FORMAT_MAX=form.max,
        STAGES=stages,
        BY_ROW=by_row,
        PARTS_BLOCK=power_of_two(amax_parts),
        NEXT=next_rank,
        NEXT_BLOCK=next_block,
        R=LOW_RANK_ROWS,
        BLOCK=block,
        LENGTH=length,
        num_warps=warps(LOW_RANK_ROWS * tile),
    )
    h_next = sums.sum(1).to(a.dtype).view(*values.shape[:-1], next_rank)
    return h_next, finished(codes, form.dtype), scale, *saved


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
    ACTIVATION: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    first = tl.program_id(1) * BLOCK
    in_row = first + tl.arange(0, BLOCK)
    are_rows, columns = rows < total, in_row[None, :]
    inside = are_rows[:, None] & (columns < F)
    g = tl.load(grad_ptr + rows[:, None] * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if dh_ptr is not None:
        g = add_low_rank(
            g, dh_ptr, down_ptr, rows * dh_stride, in_row, down_stride, are_rows, in_row < F, RANK, RANK_BLOCK
        )
        g = rounded(g, grad_ptr)
    source = mlp_ptr, mlp_scale_ptr, mlp_stride, scales_per_row
    x = load_groups(source, (0, rows, are_rows), first, F, DTYPE, GROUP, BLOCK, BLOCK)
    place = dmlp_ptr + rows[:, None] * dmlp_stride + columns
    if ACTIVATION == GATED:
        s = sigmoid(x)
        groups = rows[:, None] * scales_per_row + (F + columns) // GROUP
        up = load_saved(mlp_ptr + F, mlp_scale_ptr, rows[:, None] * mlp_stride + columns, groups, inside, DTYPE)
        up = up.to(DTYPE).to(tl.float32)
        tl.store(place + F, g * (x * s), mask=inside)
        dmlp = g * up * (s * (1.0 + x * (1.0 - s)))
    else:
        exponential = tl.exp2(tl.minimum(gelu_exponent(x), 126.0))
        s = reciprocal(1.0 + exponential)
        slope = tl.fma(x * x, 3 * 0.044715 * TWICE_U, TWICE_U)
        # exponential · s is 1 - s without its cancellation; of a huge x it is 0, and x · slope alone would be inf
        dmlp = g * tl.fma(x * (s * (exponential * s)), slope, s)
    tl.store(place, dmlp, mask=inside)


@launcher(operators.mlp_activation_backward)
def mlp_activation_backward(a: Any) -> Tensor:
    dmlp = empty_values(a.mlp.shape, a.dtype, a.mlp.device)
    launch_mlp_backward(a, a.grad, dmlp)
    return finished(dmlp, a.dtype)


def launch_mlp_backward(a: Any, grad: Tensor, dmlp: Tensor) -> None:
    """Write the gradient of mlp to dmlp; all but grad as `mlp_activation_backward`."""
    n = a.mlp.shape[-1]
    f = activated_width(a.mlp, a.activation)
    rows = a.mlp.numel() // n
    block = min(power_of_two(f), LOW_RANK_BLOCK)
    grad, grad_stride = with_row_stride(grad)
    mlp, mlp_stride = with_row_stride(a.mlp)
    dh = down = None
    ranks = {"RANK": 0, "RANK_BLOCK": 0}
    if a.dh is not None:
        dh, down = dot_operand(a.dh), dot_operand(a.down)
        ranks = rank_options(len(down), down.dtype)
    dh, dh_stride = with_row_stride(dh)
    down, down_stride = with_row_stride(down)
    mlp_scale, scales_per_row, group = saved_groups(a.mlp_scale, a.group_size, n)
    launch(
        _mlp_activation_bwd_kernel,
        (n_blocks(rows, LOW_RANK_ROWS), n_blocks(f, block)),
        *(grad, dh, down, mlp, mlp_scale, dmlp),
        *(grad_stride, dh_stride, down_stride, mlp_stride, dmlp.stride(-2), scales_per_row),
        *(rows, f),
        DTYPE=TL_DTYPES[a.dtype],
        ACTIVATION=a.activation,
        GROUP=group,
        **ranks,
        R=LOW_RANK_ROWS,
        BLOCK=block,
        num_warps=warps(LOW_RANK_ROWS * block),
    )


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
    ACTIVATION: tl.constexpr,
    ATTENTION_GROUP: tl.constexpr,
    MLP_GROUP: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK columns and a share of the rows a program. GROUP is at least BLOCK where a row has one scale or none."""
    stretch, before, all_columns = tl.program_id(0), tl.cdiv(D, BLOCK), D + F
    share = tl.program_id(1).to(tl.int64)
    ranks = tl.program_id(2) * RANK_BLOCK + tl.arange(0, RANK_BLOCK)
    places = tl.arange(0, R)
    attention = attention_ptr, attention_scale_ptr, attention_stride, attention_scales_per_row
    mlp = mlp_ptr, mlp_scale_ptr, mlp_stride, mlp_scales_per_row
    for of_mlp in tl.static_range(2):  # attention's columns, then the activation's
        x_ptr, width = ((attention_ptr, D), (mlp_ptr, F))[of_mlp]
        if x_ptr is not None and (stretch >= before) == of_mlp:
            source = (attention, mlp)[of_mlp]
            first = (stretch - of_mlp * before) * BLOCK
            product = tl.zeros([RANK_BLOCK, BLOCK], tl.float32)
            for turn in range(rounds):
                row = (share * rounds + turn) * R
                are_rows = row + places < total
                tile = row, places, are_rows
                x = tl.zeros([R, BLOCK], tl.float32)
                for half in tl.static_range(2 if of_mlp and ACTIVATION == GATED else 1):
                    gate = x
                    start = half * width + first
                    end = half * width + width
                    x = load_groups(
                        source, tile, start, end, DTYPE, MLP_GROUP if of_mlp else ATTENTION_GROUP, BLOCK, BLOCK
                    )
                if of_mlp:
                    x = activated(gate, x, ACTIVATION, DTYPE)
                dh = tl.load(
                    dh_ptr + row * dh_stride + places[None, :] * dh_stride + ranks[:, None],
                    mask=are_rows[None, :] & (ranks < RANK)[:, None],
                    other=0.0,
                )
                product = tl.dot(dh, x.to(dh.dtype), acc=product, input_precision="ieee")
            columns = (first + tl.arange(0, BLOCK))[None, :]
            offsets = (share * RANK + ranks)[:, None] * all_columns + of_mlp * D + columns
            inside = (ranks < RANK)[:, None] & (columns < width)
            tl.store(parts_ptr + offsets, product, mask=inside)


@functools.cache
def _shared(rows: int, rank: int, programs: int) -> tuple[int, int]:
    most = max(rows // (ROWS_OF_A_RANK * rank), 1)
    tiles = max(n_blocks(rows, DOWN_ROWS), 1)
    rounds = n_blocks(tiles, min(max(PROGRAMS // programs, 1), most))
    return n_blocks(tiles, rounds), rounds


@launcher(operators.mlp_down_gradient)
def mlp_down_gradient(a: Any) -> Tensor:
    rank = a.dh.shape[-1]
    d = 0 if a.attention is None else a.attention.shape[-1]
    n = a.mlp.shape[-1]
    f = activated_width(a.mlp, a.activation)
    if a.mlp_scale is not None and splits_groups(n, f, a.group_size):
        return operators.mlp_down_gradient._init_fn(*a)
    rows = a.mlp.numel() // n
    ranks = rank_options(rank, a.dh.dtype)
    chunks = n_blocks(rank, ranks["RANK_BLOCK"])
    stretches = n_blocks(d, DOWN_BLOCK) + n_blocks(f, DOWN_BLOCK)
    shares, rounds = _shared(rows, rank, stretches * chunks)
    dh, dh_stride = with_row_stride(dot_operand(a.dh))
    mlp, mlp_stride = with_row_stride(a.mlp)
    attention, attention_stride = with_row_stride(a.attention)
    attention_scale, attention_scales, attention_group = saved_groups(
        a.attention_scale, a.group_size, max(d, DOWN_BLOCK)
    )
    mlp_scale, mlp_scales, mlp_group = saved_groups(a.mlp_scale, a.group_size, max(n, DOWN_BLOCK))
    parts_dtype = a.dtype_down if shares == 1 else torch.float32
    parts = empty_values((shares, rank, d + f), parts_dtype, dh.device)
    launch(
        _mlp_down_gradient_kernel,
        (stretches, shares, chunks),
        *(dh, attention, attention_scale, mlp, mlp_scale, parts),
        *(dh_stride, attention_stride, mlp_stride, attention_scales, mlp_scales),
        *(rows, rounds, d, f),
        DTYPE=TL_DTYPES[a.dtype],
        ACTIVATION=a.activation,
        ATTENTION_GROUP=attention_group,
        MLP_GROUP=mlp_group,
        **ranks,
        R=DOWN_ROWS,
        BLOCK=DOWN_BLOCK,
        num_warps=DOWN_WARPS,
    )
    parts = finished(parts, parts_dtype)
    return parts[0] if shares == 1 else parts.sum(0).to(a.dtype_down)
