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
    as_codes,
    finite_abs,
    saturated,
    scale_from_amax,
    store_group_codes,
    warps,
    with_row_stride,
)
from coat_core.ops.dispatch import launcher
from coat_core.ops.gelu import activated_width, columns_of_up
from coat_core.ops.gelu_kernel import LOW_RANK_BLOCK, gate_of_gelu, gated, mlp_activation, splits_groups
from coat_core.ops.launch import blocks, dot_operand, empty, empty_codes, empty_values, finished, launch, power_of_two

TILE = 4096  # elements: the adapters' matrices are read from the cache once for its rows, 32 in most cases
STRETCH = 1024  # columns of a row that one program goes over, at least
COLUMNS_A_SUM = 32  # of such a stretch for each fp32 sum that it leaves: a sixteenth of the bytes that it reads
ADAPTER_RANKS_AT_ONCE = 32  # of mlp's adapter: with more, registers are few next to everything else
RANKS_AT_ONCE = 128  # of the down-projection; fewer where wide groups or fp32 take the registers


@triton.jit
def _values_tile(
    x_ptr,
    h_ptr,
    up_ptr,
    saved_ptr,
    saved_scale_ptr,
    row,
    rows,
    are_rows,
    first,
    stride,
    h_stride,
    width,
    IS_MLP: tl.constexpr,
    GATED: tl.constexpr,
    DTYPE: tl.constexpr,
    SAVED_MAX: tl.constexpr,
    G: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    SECOND: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile [R, BLOCK] of the `width` values of attention or of the activation, from column `first` on.

    The adapter's product is transposed: Triton would else see two chained products, split by rows alone, and spill.
    """
    x = tl.zeros([R, BLOCK], tl.float32)
    for half in tl.static_range(2 if GATED else 1):
        gate, in_row, end = x, half * width + first + tl.arange(0, BLOCK), half * width + width
        inside = are_rows[:, None] & (in_row < end)[None, :]
        places = x_ptr + row * stride + rows[:, None] * stride + in_row[None, :]
        x = tl.load(places, mask=inside, other=0.0).to(tl.float32)
        if h_ptr is not None:
            half_h_ptr = h_ptr + half * SECOND + row * h_stride
            for start in tl.range(0, RANK, RANK_BLOCK, num_stages=1):
                rank = start + tl.arange(0, RANK_BLOCK)
                of_h = (rank < RANK)[:, None] & are_rows[None, :]
                of_up = (in_row < end)[:, None] & (rank < RANK)[None, :]
                h = tl.load(half_h_ptr + rows[None, :] * h_stride + rank[:, None], mask=of_h, other=0.0)
                up = tl.load(up_ptr + in_row[:, None] * RANK + rank[None, :], mask=of_up, other=0.0)
                x += tl.trans(tl.dot(up, h, input_precision="ieee"))
        x = x.to(DTYPE).to(tl.float32)
        if saved_ptr is not None:
            of_rows = width + width if GATED else width
            start_column, all_rows = half * width + first, row + rows
            store_group_codes(
                x, saved_ptr, saved_scale_ptr, all_rows, are_rows, start_column, end, of_rows, SAVED_MAX, G, R, BLOCK
            )
    if IS_MLP and GATED:
        x = gated(gate, x, DTYPE).to(DTYPE).to(tl.float32)
    elif IS_MLP:
        x = (x * gate_of_gelu(x)).to(DTYPE).to(tl.float32)
    return x


@triton.jit
def _stretch(
    x_ptr,
    h_ptr,
    up_ptr,
    saved_ptr,
    saved_scale_ptr,
    down_ptr,
    amax_ptr,
    sums_ptr,
    row,
    rows,
    are_rows,
    ranks,
    first,
    stride,
    h_stride,
    down_stride,
    width,
    part,
    parts,
    IS_MLP: tl.constexpr,
    GATED: tl.constexpr,
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
    """Process LENGTH columns of R rows; leave their amax and the sums of their products.

    On a GPU fp32 is multiplied as three products of TF32, within 2^-21 of each product: from registers it would spill.
    """
    sums = tl.zeros([R, NEXT_BLOCK], tl.float32)
    largest = tl.zeros([R], tl.float32)
    for start in range(first, tl.minimum(first + LENGTH, width), BLOCK):
        x = _values_tile(
            x_ptr,
            h_ptr,
            up_ptr,
            saved_ptr,
            saved_scale_ptr,
            row,
            rows,
            are_rows,
            start,
            stride,
            h_stride,
            width,
            IS_MLP,
            GATED,
            DTYPE,
            SAVED_MAX,
            G,
            RANK,
            RANK_BLOCK,
            SECOND,
            R,
            BLOCK,
        )
        largest = tl.maximum(largest, tl.max(finite_abs(x), axis=1))
        columns = start + tl.arange(0, BLOCK)
        down = tl.load(
            down_ptr + columns[:, None] + ranks[None, :] * down_stride,
            mask=(columns < width)[:, None] & (ranks < NEXT)[None, :],
            other=0.0,
        )
        sums = tl.dot(x.to(down_ptr.dtype.element_ty), down, acc=sums, input_precision="tf32x3")
    tl.store(amax_ptr + row * parts + rows * parts + part, largest, mask=are_rows)
    places = (rows * parts + part)[:, None] * NEXT + ranks[None, :]
    tl.store(sums_ptr + row * parts * NEXT + places, sums, mask=are_rows[:, None] & (ranks < NEXT)[None, :])


@triton.jit
def _cast_tile(
    x, codes_ptr, scale, row, rows, are_rows, first, end, width, FORMAT_MAX: tl.constexpr, BLOCK: tl.constexpr
):
    columns = first + tl.arange(0, BLOCK)[None, :]
    codes = saturated(tl.div_rn(x, scale[:, None]), FORMAT_MAX)
    places = codes_ptr + row * width + rows[:, None] * width + columns
    tl.store(places, as_codes(codes, codes_ptr), mask=are_rows[:, None] & (columns < end))


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
    DTYPE: tl.constexpr,
    GATED: tl.constexpr,
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
    row, part, parts = tl.program_id(0).to(tl.int64) * R, tl.program_id(1), tl.num_programs(1)
    rows, ranks = tl.arange(0, R), tl.program_id(2) * NEXT_BLOCK + tl.arange(0, NEXT_BLOCK)
    are_rows, before = tl.program_id(0) * R + rows < total, tl.cdiv(D, LENGTH)
    if part < before:
        if attention_ptr is not None:
            _stretch(
                attention_ptr,
                None,
                None,
                saved_attention_ptr,
                saved_attention_scale_ptr,
                down_ptr,
                amax_ptr,
                sums_ptr,
                row,
                rows,
                are_rows,
                ranks,
                part * LENGTH,
                attention_stride,
                0,
                down_stride,
                D,
                part,
                parts,
                False,
                False,
                DTYPE,
                SAVED_MAX,
                G,
                0,
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
            mlp_ptr,
            h_ptr,
            up_ptr,
            saved_mlp_ptr,
            saved_mlp_scale_ptr,
            down_ptr + D,
            amax_ptr,
            sums_ptr,
            row,
            rows,
            are_rows,
            ranks,
            (part - before) * LENGTH,
            mlp_stride,
            h_stride,
            down_stride,
            F,
            part,
            parts,
            True,
            GATED,
            DTYPE,
            SAVED_MAX,
            G,
            RANK,
            RANK_BLOCK,
            SECOND,
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
    DTYPE: tl.constexpr,
    GATED: tl.constexpr,
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
    row, tile = tl.program_id(0).to(tl.int64) * R, tl.program_id(1)
    rows, place = tl.arange(0, R), tl.arange(0, PARTS_BLOCK)
    are_rows, before = tl.program_id(0) * R + rows < total, tl.cdiv(D, BLOCK)
    if BY_ROW:
        amax_ptr += row * parts + rows[:, None] * parts + place[None, :]
        amax = tl.max(tl.load(amax_ptr, mask=are_rows[:, None] & (place < parts)[None, :], other=0.0), axis=1)
    else:
        amax = tl.load(amax_ptr + rows * 0)
    scale = scale_from_amax(amax, FORMAT_MAX)
    if tile < before:
        if attention_ptr is not None:
            first = tile * BLOCK
            x = _values_tile(
                attention_ptr,
                None,
                None,
                None,
                None,
                row,
                rows,
                are_rows,
                first,
                attention_stride,
                0,
                D,
                False,
                False,
                DTYPE,
                0.0,
                1,
                0,
                0,
                0,
                R,
                BLOCK,
            )
            _cast_tile(x, codes_ptr, scale, row, rows, are_rows, first, D, D + F, FORMAT_MAX, BLOCK)
    else:
        first = (tile - before) * BLOCK
        x = _values_tile(
            mlp_ptr,
            h_ptr,
            up_ptr,
            None,
            None,
            row,
            rows,
            are_rows,
            first,
            mlp_stride,
            h_stride,
            F,
            True,
            GATED,
            DTYPE,
            0.0,
            1,
            RANK,
            RANK_BLOCK,
            SECOND,
            R,
            BLOCK,
        )
        _cast_tile(x, codes_ptr + D, scale, row, rows, are_rows, first, F, D + F, FORMAT_MAX, BLOCK)
    if tile == 0:
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
        arguments = {name: value for name, value in vars(a).items() if name != "down"}
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
    codes = empty_codes((*shape, d + f), form, device)
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
        "GATED": is_gated,
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
