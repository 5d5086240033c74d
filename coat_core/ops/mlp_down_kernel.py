"""The codes of [attention | act(mlp)] and its product with a down-projection, without the values in memory.

The first kernel computes the values tile by tile, multiplies them, saves the codes for backward, and leaves each row's
amax and its part of the product over a stretch of columns. The second recomputes the values, casts them, and adds up
the parts. Both read every input once (the first once for each NEXT_BLOCK of the product's columns), where values in
memory would be written once and read twice.

Shapes: attention [B, S, D], mlp [B, S, N], each read as rows, N = F or, of SwiGLU (GATED), 2·F; down [NEXT, D + F].
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core.autograd import without_autocast
from coat_core.formats import get_format
from coat_core.ops import mlp_down as operators
from coat_core.ops.device import (
    TL_DTYPES,
    GroupCodes,
    adapter,
    finite_abs,
    quantized,
    scale_from_amax,
    warps,
    with_row_stride,
)
from coat_core.ops.dispatch import launcher
from coat_core.ops.gelu import activated_width, columns_of_up
from coat_core.ops.gelu_kernel import LOW_RANK_BLOCK, mlp_activation, splits_groups, values_tile
from coat_core.ops.launch import blocks, dot_operand, empty, empty_values, finished, launch, power_of_two

TILE = 4096  # elements: the adapters' matrices are read from the cache once for its rows, 32 in most cases
STRETCH = 1024  # columns of a row that one program goes over, at least
COLUMNS_A_SUM = 32  # of such a stretch for each fp32 sum that it leaves: a sixteenth of the bytes that it reads
ADAPTER_RANKS_AT_ONCE = 32  # of mlp's adapter: with more, registers are few next to everything else
RANKS_AT_ONCE = 128  # of the down-projection; fewer where wide groups or fp32 take the registers


@triton.jit
def _stretch(
    source,
    adapter,
    saved,
    tile,
    down,
    results,
    first,
    width,
    ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
    SAVED_MAX: tl.constexpr,
    G: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    NEXT: tl.constexpr,
    NEXT_BLOCK: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """Process LENGTH columns of R rows; leave their amax and the sums of their products.

    On a GPU fp32 is multiplied as three products of TF32, within 2^-21 of each product: from registers it would spill.
    """
    (down_ptr, down_stride), (amax_ptr, sums_ptr) = down, results
    row, rows, are_rows = tile
    part, parts = tl.program_id(1), tl.num_programs(1)
    ranks = tl.program_id(2) * NEXT_BLOCK + tl.arange(0, NEXT_BLOCK)
    sums = tl.zeros([R, NEXT_BLOCK], tl.float32)
    largest = tl.zeros([R], tl.float32)
    for start in range(first, tl.minimum(first + LENGTH, width), BLOCK):
        x = values_tile(
            source,
            adapter,
            saved,
            tile,
            start,
            width,
            ACTIVATION,
            DTYPE,
            1,
            SAVED_MAX,
            G,
            RANK,
            RANK_BLOCK,
            R,
            BLOCK,
            TURNED=True,
        )
        largest = tl.maximum(largest, tl.max(finite_abs(x), axis=1))
        columns = start + tl.arange(0, BLOCK)
        down_tile = tl.load(
            down_ptr + columns[:, None] + ranks[None, :] * down_stride,
            mask=(columns < width)[:, None] & (ranks < NEXT)[None, :],
            other=0.0,
        )
        sums = tl.dot(x.to(down_ptr.dtype.element_ty), down_tile, acc=sums, input_precision="tf32x3")
    tl.store(amax_ptr + row * parts + rows * parts + part, largest, mask=are_rows)
    places = (rows * parts + part)[:, None] * NEXT + ranks[None, :]
    tl.store(sums_ptr + row * parts * NEXT + places, sums, mask=are_rows[:, None] & (ranks < NEXT)[None, :])


@triton.jit
def _store_codes(x, codes_ptr, scale, tile, first, end, width, FORMAT_MAX: tl.constexpr, BLOCK: tl.constexpr):
    row, rows, are_rows = tile
    columns = first + tl.arange(0, BLOCK)[None, :]
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
    part, before, rows = tl.program_id(1), tl.cdiv(D, LENGTH), tl.arange(0, R)
    tile = tl.program_id(0).to(tl.int64) * R, rows, tl.program_id(0) * R + rows < total
    results = amax_ptr, sums_ptr
    if part < before:
        if attention_ptr is not None:
            _stretch(
                (attention_ptr, None, attention_stride, 0),
                (None, None, 0, 0),
                (saved_attention_ptr, saved_attention_scale_ptr),
                tile,
                (down_ptr, down_stride),
                results,
                part * LENGTH,
                D,
                None,
                DTYPE,
                SAVED_MAX,
                G,
                0,
                0,
                NEXT,
                NEXT_BLOCK,
                R,
                BLOCK,
                LENGTH,
            )
    else:
        _stretch(
            (mlp_ptr, None, mlp_stride, 0),
            (h_ptr, up_ptr, h_stride, SECOND),
            (saved_mlp_ptr, saved_mlp_scale_ptr),
            tile,
            (down_ptr + D, down_stride),
            results,
            (part - before) * LENGTH,
            F,
            ACTIVATION,
            DTYPE,
            SAVED_MAX,
            G,
            RANK,
            RANK_BLOCK,
            NEXT,
            NEXT_BLOCK,
            R,
            BLOCK,
            LENGTH,
        )


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
            first, attention, no_adapter = (
                column_tile * BLOCK,
                (attention_ptr, None, attention_stride, 0),
                (None, None, 0, 0),
            )
            x = values_tile(
                attention, no_adapter, none, tile, first, D, None, DTYPE, 1, 0.0, 1, 0, 0, R, BLOCK, TURNED=True
            )
            _store_codes(x, codes_ptr, scale, tile, first, D, D + F, FORMAT_MAX, BLOCK)
    else:
        first = (column_tile - before) * BLOCK
        mlp, adapter = (mlp_ptr, None, mlp_stride, 0), (h_ptr, up_ptr, h_stride, SECOND)
        x = values_tile(
            mlp, adapter, none, tile, first, F, ACTIVATION, DTYPE, 1, 0.0, 1, RANK, RANK_BLOCK, R, BLOCK, TURNED=True
        )
        _store_codes(x, codes_ptr + D, scale, tile, first, F, D + F, FORMAT_MAX, BLOCK)
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
            tl.store(h_next, sums.to(h_next_ptr.dtype.element_ty), mask=inside)


@launcher(operators.mlp_activation_down)
def mlp_activation_down(a: Any) -> tuple[Tensor, ...]:
    operators.check_down(a.attention, a.mlp, a.down, a.granularity, a.activation)
    n = a.mlp.shape[-1]
    f = activated_width(a.mlp, a.activation)
    is_gated, block = n > f, max(LOW_RANK_BLOCK, a.group_size)
    if is_gated and (block > LOW_RANK_BLOCK or splits_groups(n, f, a.group_size)):
        # two tiles of wide groups would spill registers here
        arguments = a._asdict()
        del arguments["down"]
        values, *codes = mlp_activation(attention_scale=None, mlp_scale=None, **arguments)
        with without_autocast(a.mlp.device):
            return torch.nn.functional.linear(values, a.down), *codes
    device = a.mlp.device
    shape = tuple(a.mlp.shape[:-1])
    form = get_format(a.fmt)
    d = 0 if a.attention is None else a.attention.shape[-1]
    rows, next_rank = a.mlp.numel() // n, len(a.down)
    by_row = a.granularity == "per_row"
    length = power_of_two(max(STRETCH, COLUMNS_A_SUM * next_rank))
    parts = blocks(d, length) + blocks(f, length)
    amax = empty((rows, parts), torch.float32, device)
    sums = empty((rows, parts, next_rank), torch.float32, device)
    saved_mlp = GroupCodes((*shape, n), a.saved_format, a.group_size, device)
    saved_attention = GroupCodes((*shape, d), a.saved_format if d else "none", a.group_size, device)
    codes = empty_values((*shape, d + f), form.dtype, device)
    scale = empty((*shape, 1) if by_row else (), torch.float32, device)
    h_next = empty_values((*shape, next_rank), a.dtype, device)
    mlp, mlp_stride = with_row_stride(a.mlp)
    attention, attention_stride = with_row_stride(a.attention)
    h, h_stride, up, ranks = adapter(a.h, a.up)
    down, down_stride = with_row_stride(dot_operand(a.down))
    is_large = block > LOW_RANK_BLOCK or a.down.dtype == torch.float32
    next_block = min(max(power_of_two(next_rank), 16), 16 if is_large else RANKS_AT_ONCE)
    tile_rows = TILE // block
    inputs = (attention, mlp, h, up)
    strides = (attention_stride, mlp_stride, h_stride)
    options = {
        "DTYPE": TL_DTYPES[a.dtype],
        "ACTIVATION": a.activation,
        "RANK": ranks["RANK"],
        "RANK_BLOCK": min(ranks["RANK_BLOCK"], ADAPTER_RANKS_AT_ONCE),
        "SECOND": columns_of_up(h, up),
        "NEXT": next_rank,
        "R": tile_rows,
        "BLOCK": block,
        "num_warps": warps(TILE),
        "num_stages": 1,
    }
    launch(
        _mlp_down_fwd_kernel,
        (blocks(rows, tile_rows), parts, blocks(next_rank, next_block)),
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
        (blocks(rows, tile_rows), blocks(d, block) + blocks(f, block)),
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
