"""The activation of an MLP with its adapter, beside attention's output, quantized and saved; and its gradients.

GELU(x) = x·s(x) with s(x) = sigmoid(2u), u = sqrt(2/π)·(x + 0.044715·x³): the same as x/2·(1 + tanh u) without its
cancellation at large negative x. SwiGLU (GATED) reads two tiles, one from each half of mlp.

A program takes a tile of LOW_RANK_ROWS rows, so that tl.dot multiplies the adapter, and leaves each row's amax over its
columns; the cast is a second launch. (Programs over whole rows could cast too, but 288 at 1024 px and 32 for the text
are too few to keep a GPU's memory busy.)

The codes of [attention | act(mlp)] and its product with a down-projection, without the values in memory: the first
kernel computes the values tile by tile, multiplies them, saves the codes for backward, and leaves each row's amax and
its part of the product over a stretch of columns. The second recomputes the values, casts them, and adds up the parts.
Both read every input once (the first for each NEXT_BLOCK of the product's columns), and write no values.

The gradient of a down-projection, dhᵀ [attention | act(mlp)], recomputes the values from the saved tensors, tile by
tile, once for up to 64 ranks. A program takes DOWN_BLOCK columns and a share of the rows. Torch adds them up in order.

Shapes: attention [B, S, D], mlp [..., N], dh [..., r], each read as rows, N = F or, of SwiGLU, 2·F; down [NEXT, D + F].
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core.autograd import without_autocast
from coat_core.formats import get_format
from coat_core.ops import gelu as operators
from coat_core.ops.codes import codes_of
from coat_core.ops.device import (
    LOW_RANK_ROWS,
    TL_DTYPES,
    Codes,
    adapter,
    add_low_rank,
    as_values,
    cast_by_amax,
    finite_abs,
    load_saved,
    quantize_rows,
    quantized,
    rank_options,
    rounded,
    saved_groups,
    scale_from_amax,
    store_group_codes,
    warps,
    with_row_stride,
)
from coat_core.ops.dispatch import launcher
from coat_core.ops.gelu import activated_width
from coat_core.ops.launch import dot_operand, empty, empty_values, finished, launch, power_of_two
from coat_core.ops.packing import n_blocks

GATED = tl.constexpr("silu_and_mul")
LOW_RANK_BLOCK = 128  # columns of LOW_RANK_ROWS rows

# of the product with a down-projection
TILE = 4096  # elements: the adapters' matrices are read from the cache once for its rows, 32 in most cases
STRETCH = 1024  # columns of a row that one program goes over, at least
COLUMNS_A_SUM = 32  # of such a stretch for each fp32 sum that it leaves: a sixteenth of the bytes that it reads
ADAPTER_RANKS_AT_ONCE = 32  # of mlp's adapter: with more, registers are few next to everything else
RANKS_AT_ONCE = 128  # of the down-projection; fewer where wide groups or fp32 take the registers

# of the gradient of a down-projection
DOWN_ROWS = 32
DOWN_BLOCK = 64
DOWN_WARPS = 8
PROGRAMS = 512  # that a large GPU runs at once: four on each multiprocessor, with the registers of these kernels
# of a share, for each of the ranks, at least: a column of a part is written and read again in 8 bytes a rank, that of
# codes is as many bytes as there are rows
ROWS_OF_A_RANK = 64


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def gate_of_gelu(x):
    return sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def activated(gate, x, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """GELU(x), or silu(gate)·x rounded as torch rounds it, in DTYPE."""
    if ACTIVATION == GATED:
        x = (gate * sigmoid(gate)).to(DTYPE).to(tl.float32) * x
    else:
        x = x * gate_of_gelu(x)
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
    TURNED: tl.constexpr = False,
):
    """A tile [R, BLOCK] of the `width` values of attention or, of an ACTIVATION, of mlp with its adapter; save both.

    `source` has the tensor and the distance of its rows. TURNED computes the adapter's product transposed: before a
    product with the values Triton would split both by rows alone, and spill.
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
            h_rows = rows * h_stride
            if TURNED:
                for first_rank in tl.range(0, RANK, RANK_BLOCK, num_stages=1):
                    rank = first_rank + tl.arange(0, RANK_BLOCK)
                    of_h = (rank < RANK)[:, None] & are_rows[None, :]
                    of_up = (in_row < end)[:, None] & (rank < RANK)[None, :]
                    h = tl.load(half_h_ptr + h_rows[None, :] + rank[:, None], mask=of_h, other=0.0)
                    up = tl.load(up_ptr + in_row[:, None] * RANK + rank[None, :], mask=of_up, other=0.0)
                    x += tl.trans(tl.dot(up, h, input_precision="ieee"))
            else:
                up_rows = in_row * RANK
                x = add_low_rank(x, half_h_ptr, up_ptr, h_rows, up_rows, 1, are_rows, in_row < end, RANK, RANK_BLOCK)
        x = x.to(DTYPE).to(tl.float32)
        all_columns = 2 * width if ACTIVATION == GATED else width
        store_group_codes(x, saved_ptr, saved_scale_ptr, row + rows, are_rows, start, end, all_columns, SAVED_MAX, G)
    if ACTIVATION is not None:
        x = activated(gate, x, ACTIVATION, DTYPE).to(tl.float32)
    return x


@triton.jit
def _store_tile(x, values_ptr, amax_ptr, tile, first, end, width):
    row, rows, are_rows = tile
    columns = first + tl.arange(0, x.shape[1])[None, :]
    inside = are_rows[:, None] & (columns < end)
    values_ptr += row * width
    tl.store(values_ptr + rows[:, None] * width + columns, x, mask=inside)
    if amax_ptr is not None:
        part, parts = tl.program_id(1), tl.num_programs(1)
        tl.store(amax_ptr + row * parts + rows * parts + part, tl.max(finite_abs(x), axis=1), mask=are_rows)


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
            _store_tile(x, values_ptr, amax_ptr, tile, first, D, D + F)
    else:
        first = (part - before) * BLOCK
        mlp = (mlp_ptr, mlp_stride)
        adapter = (h_ptr, up_ptr, h_stride, SECOND)
        saved = saved_mlp_ptr, saved_mlp_scale_ptr
        x = values_tile(mlp, adapter, saved, tile, first, F, ACTIVATION, DTYPE, SAVED_MAX, G, RANK, RANK_BLOCK, BLOCK)
        _store_tile(x, values_ptr + D, amax_ptr, tile, first, F, D + F)


@launcher(operators.mlp_activation)
def mlp_activation(a: Any) -> tuple[Tensor, ...]:
    d = 0 if a.attention is None else a.attention.shape[-1]
    n = a.mlp.shape[-1]
    f = activated_width(a.mlp, a.activation)
    if a.saved_format != "none" and splits_groups(n, f, a.group_size):
        return operators.mlp_activation._init_fn(*a)
    device, shape = a.mlp.device, a.mlp.shape[:-1]
    rows = a.mlp.numel() // n
    block = max(LOW_RANK_BLOCK, a.group_size)
    parts = n_blocks(d, block) + n_blocks(f, block)
    values = empty_values((*shape, d + f), a.dtype, device)
    amax = None if a.granularity == "none" else empty((rows, parts), torch.float32, device)
    saved_mlp = Codes((*shape, n), device, a.saved_format, "per_group", a.group_size)
    saved_attention = Codes((*shape, d), device, a.saved_format if d else "none", "per_group", a.group_size)
    inputs, strides, constants = _inputs(a)
    launch(
        _mlp_activation_fwd_kernel,
        (n_blocks(rows, LOW_RANK_ROWS), parts),
        *inputs,
        *(values, amax),
        *(saved_attention.codes, saved_attention.scale, saved_mlp.codes, saved_mlp.scale),
        *strides,
        *(rows, d, f),
        SAVED_MAX=saved_mlp.format_max,
        G=a.group_size,
        **constants,
        R=LOW_RANK_ROWS,
        BLOCK=block,
        num_warps=warps(LOW_RANK_ROWS * block),
        num_stages=1,
    )
    values = finished(values, a.dtype)
    if amax is None:
        codes, scale = codes_of(values, a.fmt, "none")
    elif a.granularity == "per_tensor":
        codes, scale = cast_by_amax(values, amax.view(-1).amax(0, keepdim=True), a.fmt)
    else:
        codes, scale = quantize_rows(values, a.fmt, None, amax)
    return values, codes, scale, *saved_attention.results(), *saved_mlp.results()


def _inputs(a: Any) -> tuple[tuple[Any, ...], tuple[int, ...], dict[str, Any]]:
    attention, attention_stride = with_row_stride(a.attention)
    mlp, mlp_stride = with_row_stride(a.mlp)
    h, h_stride, up, constants = adapter(a.h, a.up)
    second = 0  # first column of h that the second half of mlp reads; 0 where both halves share one adapter
    if h is not None and up is not None and h.shape[-1] != up.shape[-1]:
        second = up.shape[-1]
    constants = {**constants, "DTYPE": TL_DTYPES[a.dtype], "ACTIVATION": a.activation, "SECOND": second}
    return (attention, mlp, h, up), (attention_stride, mlp_stride, h_stride), constants


def splits_groups(width: int, activated: int, group_size: int) -> bool:
    """Whether a group of codes spans both halves, which no program sees together: small models only."""
    return width > activated and group_size > 0 and activated % group_size > 0


@triton.jit
def _store_codes(x, codes_ptr, scale, tile, first, end, width, FORMAT_MAX: tl.constexpr):
    row, rows, are_rows = tile
    columns = first + tl.arange(0, x.shape[1])[None, :]
    places = codes_ptr + row * width + rows[:, None] * width + columns
    codes = quantized(x, scale[:, None], codes_ptr, FORMAT_MAX)
    tl.store(places, codes, mask=are_rows[:, None] & (columns < end))


@triton.jit
def _mlp_down_fwd_kernel(
    attention_ptr,
    mlp_ptr,
    h_ptr,
    up_ptr,
    down_ptr,
    amax_ptr,
    sums_ptr,
    saved_attention_ptr,
    saved_attention_scale_ptr,
    saved_mlp_ptr,
    saved_mlp_scale_ptr,
    attention_stride,
    mlp_stride,
    h_stride,
    down_stride,
    total,
    D,
    F,
    ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
    SAVED_MAX: tl.constexpr,
    G: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    SECOND: tl.constexpr,
    NEXT: tl.constexpr,
    NEXT_BLOCK: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """LENGTH columns of R rows a program, NEXT_BLOCK of the product's: their amax, and the sums of their products.

    On a GPU fp32 is multiplied as three products of TF32, within 2^-21 of each product: from registers it would spill.
    """
    row = tl.program_id(0).to(tl.int64) * R
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    rows, before = tl.arange(0, R), tl.cdiv(D, LENGTH)
    are_rows = tl.program_id(0) * R + rows < total
    ranks = tl.program_id(2) * NEXT_BLOCK + tl.arange(0, NEXT_BLOCK)
    attention = (attention_ptr, attention_stride)
    mlp = (mlp_ptr, mlp_stride)
    adapter = (h_ptr, up_ptr, h_stride, SECOND)
    no_adapter = (None, None, 0, 0)
    saved_attention = (saved_attention_ptr, saved_attention_scale_ptr)
    saved_mlp = (saved_mlp_ptr, saved_mlp_scale_ptr)
    for of_mlp in tl.static_range(2):  # attention's columns, then the activation's
        x_ptr, width = ((attention_ptr, D), (mlp_ptr, F))[of_mlp]
        if x_ptr is not None and (part >= before) == of_mlp:
            first = (part - of_mlp * before) * LENGTH
            sums = tl.zeros([R, NEXT_BLOCK], tl.float32)
            largest = tl.zeros([R], tl.float32)
            for start in range(first, tl.minimum(first + LENGTH, width), BLOCK):
                x = values_tile(
                    (attention, mlp)[of_mlp],
                    (no_adapter, adapter)[of_mlp],
                    (saved_attention, saved_mlp)[of_mlp],
                    (row, rows, are_rows),
                    start,
                    width,
                    ACTIVATION if of_mlp else None,
                    DTYPE,
                    SAVED_MAX,
                    G,
                    RANK,
                    RANK_BLOCK,
                    BLOCK,
                    TURNED=True,
                )
                largest = tl.maximum(largest, tl.max(finite_abs(x), axis=1))
                columns = start + tl.arange(0, BLOCK)
                down = tl.load(
                    down_ptr + of_mlp * D + columns[:, None] + ranks[None, :] * down_stride,
                    mask=(columns < width)[:, None] & (ranks < NEXT)[None, :],
                    other=0.0,
                )
                sums = tl.dot(x.to(down_ptr.dtype.element_ty), down, acc=sums, input_precision="tf32x3")
            tl.store(amax_ptr + row * parts + rows * parts + part, largest, mask=are_rows)
            places = sums_ptr + row * parts * NEXT + (rows * parts + part)[:, None] * NEXT + ranks[None, :]
            tl.store(places, sums, mask=are_rows[:, None] & (ranks < NEXT)[None, :])


@triton.jit
def _mlp_down_cast_fwd_kernel(
    attention_ptr,
    mlp_ptr,
    h_ptr,
    up_ptr,
    amax_ptr,
    sums_ptr,
    codes_ptr,
    scale_ptr,
    h_next_ptr,
    attention_stride,
    mlp_stride,
    h_stride,
    total,
    D,
    F,
    parts,
    ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    BY_ROW: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    SECOND: tl.constexpr,
    NEXT: tl.constexpr,
    NEXT_BLOCK: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column_tile = tl.program_id(0).to(tl.int64) * R, tl.program_id(1)
    rows, place = tl.arange(0, R), tl.arange(0, PARTS_BLOCK)
    are_rows, before = tl.program_id(0) * R + rows < total, tl.cdiv(D, BLOCK)
    if BY_ROW:
        amax_ptr += row * parts + rows[:, None] * parts + place[None, :]
        amax = tl.max(tl.load(amax_ptr, mask=are_rows[:, None] & (place < parts)[None, :], other=0.0), axis=1)
    else:
        amax = tl.load(amax_ptr + rows * 0)
    scale = scale_from_amax(amax, FORMAT_MAX)
    tile, none = (row, rows, are_rows), (None, None)
    if column_tile < before:
        if attention_ptr is not None:
            first = column_tile * BLOCK
            attention = (attention_ptr, attention_stride)
            no_adapter = (None, None, 0, 0)
            x = values_tile(attention, no_adapter, none, tile, first, D, None, DTYPE, 0.0, 1, 0, 0, BLOCK, TURNED=True)
            _store_codes(x, codes_ptr, scale, tile, first, D, D + F, FORMAT_MAX)
    else:
        first = (column_tile - before) * BLOCK
        mlp = (mlp_ptr, mlp_stride)
        adapter = (h_ptr, up_ptr, h_stride, SECOND)
        x = values_tile(
            mlp, adapter, none, tile, first, F, ACTIVATION, DTYPE, 0.0, 1, RANK, RANK_BLOCK, BLOCK, TURNED=True
        )
        _store_codes(x, codes_ptr + D, scale, tile, first, F, D + F, FORMAT_MAX)
    if column_tile == 0:
        if BY_ROW:
            tl.store(scale_ptr + row + rows, scale, mask=are_rows)
        else:
            tl.store(scale_ptr + rows, scale, mask=row + rows == 0)
        for start in range(0, NEXT, NEXT_BLOCK):
            ranks = start + tl.arange(0, NEXT_BLOCK)[None, :]
            inside = are_rows[:, None] & (ranks < NEXT)
            sums = tl.zeros([R, NEXT_BLOCK], tl.float32)
            for part in range(parts):
                places = (rows * parts + part)[:, None] * NEXT + ranks
                sums += tl.load(sums_ptr + row * parts * NEXT + places, mask=inside, other=0.0)
            h_next = h_next_ptr + row * NEXT + rows[:, None] * NEXT + ranks
            tl.store(h_next, sums, mask=inside)


@launcher(operators.mlp_activation_down)
def mlp_activation_down(a: Any) -> tuple[Tensor, ...]:
    n = a.mlp.shape[-1]
    f = activated_width(a.mlp, a.activation)
    is_gated, block = n > f, max(LOW_RANK_BLOCK, a.group_size)
    if is_gated and (block > LOW_RANK_BLOCK or splits_groups(n, f, a.group_size)):
        # two tiles of wide groups would spill registers here
        arguments = a._asdict()
        del arguments["down"]
        values, *codes = mlp_activation(**arguments)
        with without_autocast(a.mlp.device):
            return torch.nn.functional.linear(values, a.down), *codes
    device = a.mlp.device
    shape = a.mlp.shape[:-1]
    form = get_format(a.fmt)
    d = 0 if a.attention is None else a.attention.shape[-1]
    rows, next_rank = a.mlp.numel() // n, len(a.down)
    by_row = a.granularity == "per_row"
    length = power_of_two(max(STRETCH, COLUMNS_A_SUM * next_rank))
    parts = n_blocks(d, length) + n_blocks(f, length)
    amax = empty((rows, parts), torch.float32, device)
    sums = empty((rows, parts, next_rank), torch.float32, device)
    saved_mlp = Codes((*shape, n), device, a.saved_format, "per_group", a.group_size)
    saved_attention = Codes((*shape, d), device, a.saved_format if d else "none", "per_group", a.group_size)
    codes = empty_values((*shape, d + f), form.dtype, device)
    scale = empty((*shape, 1) if by_row else (), torch.float32, device)
    h_next = empty_values((*shape, next_rank), a.dtype, device)
    inputs, strides, constants = _inputs(a)
    down, down_stride = with_row_stride(dot_operand(a.down))
    is_large = block > LOW_RANK_BLOCK or a.down.dtype == torch.float32
    next_block = min(max(power_of_two(next_rank), 16), 16 if is_large else RANKS_AT_ONCE)
    tile_rows = TILE // block
    options = {
        **constants,
        "RANK_BLOCK": min(constants["RANK_BLOCK"], ADAPTER_RANKS_AT_ONCE),
        "NEXT": next_rank,
        "R": tile_rows,
        "BLOCK": block,
        "num_warps": warps(TILE),
        "num_stages": 1,
    }
    launch(
        _mlp_down_fwd_kernel,
        (n_blocks(rows, tile_rows), parts, n_blocks(next_rank, next_block)),
        *inputs,
        *(down, amax, sums),
        *(saved_attention.codes, saved_attention.scale, saved_mlp.codes, saved_mlp.scale),
        *strides,
        *(down_stride, rows, d, f),
        SAVED_MAX=saved_mlp.format_max,
        G=a.group_size,
        NEXT_BLOCK=next_block,
        LENGTH=length,
        **options,
    )
    launch(
        _mlp_down_cast_fwd_kernel,
        (n_blocks(rows, tile_rows), n_blocks(d, block) + n_blocks(f, block)),
        *inputs,
        amax if by_row else amax.amax(),
        *(sums, codes, scale, h_next),
        *strides,
        *(rows, d, f, parts),
        FORMAT_MAX=form.max,
        BY_ROW=by_row,
        PARTS_BLOCK=power_of_two(parts),
        NEXT_BLOCK=min(next_block, 32),
        **options,
    )
    h_next = finished(h_next, a.dtype)
    codes = finished(codes, form.dtype)
    return h_next, codes, scale, *saved_attention.results(), *saved_mlp.results()


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
    if ACTIVATION == GATED:
        s = sigmoid(x)
        groups = rows[:, None] * scales_per_row + (F + columns) // GROUP
        up = load_saved(mlp_ptr + F, mlp_scale_ptr, rows[:, None] * mlp_stride + columns, groups, inside, DTYPE)
        up = up.to(DTYPE).to(tl.float32)
        tl.store(place + F, g * (x * s), mask=inside)
        dmlp = g * up * (s * (1.0 + x * (1.0 - s)))
    else:
        s = gate_of_gelu(x)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        dmlp = g * (s + x * (s * (1.0 - s)) * slope)
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
def _load_groups(source, tile, first, end, DTYPE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Read a tile [R, BLOCK] in columns first to end as `load_saved` does, each scale once."""
    x_ptr, scale_ptr, stride, scales_per_row = source
    row, places, are_rows = tile
    x_ptr += row * stride
    if scale_ptr is not None:
        scale_ptr += row * scales_per_row
    if GROUP < BLOCK:
        groups = first // GROUP + tl.arange(0, BLOCK // GROUP)[None, :]
        exist = are_rows[:, None] & (groups * GROUP < end)
        columns = groups[:, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
        inside = are_rows[:, None, None] & (columns < end)
        x = as_values(tl.load(x_ptr + places[:, None, None] * stride + columns, mask=inside, other=0.0))
        x *= tl.load(scale_ptr + places[:, None] * scales_per_row + groups, mask=exist, other=0.0)[:, :, None]
        x = tl.reshape(x, (places.shape[0], BLOCK))
    else:
        columns = first + tl.arange(0, BLOCK)[None, :]
        inside = are_rows[:, None] & (columns < end)
        x = as_values(tl.load(x_ptr + places[:, None] * stride + columns, mask=inside, other=0.0))
        if scale_ptr is not None:
            x *= tl.load(scale_ptr + places * scales_per_row + first // GROUP, mask=are_rows, other=0.0)[:, None]
    return x.to(DTYPE).to(tl.float32)


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
                    x = _load_groups(source, tile, start, end, DTYPE, MLP_GROUP if of_mlp else ATTENTION_GROUP, BLOCK)
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
