"""The codes of [attention | act(mlp)] and its product with a down-projection, without the values in memory.

The first kernel computes the values tile by tile, multiplies them, saves the codes for backward, and leaves each row's
amax and its part of the product over a stretch of columns. The second recomputes the values, casts them, and adds up
the parts. Both read every input once (the first once for each NEXT_BLOCK of the product's columns), where values in
memory would be written once and read twice.

Shapes: attention [B, S, D], mlp [B, S, N], each read as rows, N = F or, of SwiGLU (GATED), 2·F; down [NEXT, D + F].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core.autograd import without_autocast
from coat_core.formats import get_format
from coat_core.ops.device import as_codes, finite_abs, saturated, scale_from_amax, store_group_codes
from coat_core.ops.gelu import activated_width, columns_of_up
from coat_core.ops.gelu_kernel import LOW_RANK_BLOCK, gate_of_gelu, gated, mlp_activation, splits_groups
from coat_core.ops.launch import (
    blocks,
    dot_operand,
    empty,
    empty_codes,
    empty_values,
    finished,
    launch,
    power_of_two,
)
from coat_core.ops.mlp_down import check_down
from coat_core.ops.rows import (
    TL_DTYPES,
    GroupCodes,
    rank_options,
    warps,
    with_row_stride,
)

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


def mlp_activation_down(
    attention: Tensor | None,
    mlp: Tensor,
    h: Tensor | None,
    up: Tensor | None,
    down: Tensor,
    fmt: str,
    granularity: str,
    saved_format: str,
    group_size: int,
    dtype: torch.dtype,
    activation: str = "gelu_tanh",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    check_down(attention, mlp, down, granularity, activation)
    device, d, form = mlp.device, 0 if attention is None else attention.shape[-1], get_format(fmt)
    n, f = mlp.shape[-1], activated_width(mlp, activation)
    rows, shape, next_rank, by_row = mlp.numel() // n, tuple(mlp.shape[:-1]), len(down), granularity == "per_row"
    block = max(LOW_RANK_BLOCK, group_size)
    if n > f and (block > LOW_RANK_BLOCK or splits_groups(n, f, group_size)):
        # two tiles of wide groups would spill registers here
        storage = (fmt, granularity, saved_format, group_size, dtype, activation)
        by_values = mlp_activation(attention, None, mlp, None, h, up, *storage)
        with without_autocast(device):
            return torch.nn.functional.linear(by_values[0], down), *by_values[1:]
    tile_rows = TILE // block
    next_block = _at_once(down, block)
    length = power_of_two(max(STRETCH, COLUMNS_A_SUM * next_rank))
    parts = blocks(d, length) + blocks(f, length)
    amax = empty((rows, parts), torch.float32, device)
    sums = empty((rows, parts, next_rank), torch.float32, device)
    saved_mlp = GroupCodes(tuple(mlp.shape), saved_format, group_size, device)
    saved_attention = GroupCodes((*shape, d), saved_format if d else "none", group_size, device)
    codes, h_next = empty_codes((*shape, d + f), form, device), empty_values((*shape, next_rank), dtype, device)
    scale = empty((*shape, 1) if by_row else (), torch.float32, device)
    mlp, mlp_stride = with_row_stride(mlp)
    attention, attention_stride = (None, 0) if attention is None else with_row_stride(attention)
    h, h_stride = (None, 0) if h is None else with_row_stride(dot_operand(h))
    up = None if up is None else dot_operand(up).contiguous()
    down, down_stride = with_row_stride(dot_operand(down))
    inputs, strides = (attention, mlp, h, up), (attention_stride, mlp_stride, h_stride)
    saved = (saved_attention.codes, saved_attention.scale, saved_mlp.codes, saved_mlp.scale)
    rank = rank_options(up)
    options = {
        "DTYPE": TL_DTYPES[dtype],
        "GATED": n > f,
        "RANK": rank["RANK"],
        "RANK_BLOCK": min(rank["RANK_BLOCK"], ADAPTER_RANKS_AT_ONCE),
        "SECOND": columns_of_up(h, up),
        "NEXT": next_rank,
        "NEXT_BLOCK": next_block,
        "R": tile_rows,
        "BLOCK": block,
        "num_warps": warps(TILE),
        "num_stages": 1,
    }
    launch(
        _mlp_down_fwd_kernel,
        (blocks(rows, tile_rows), parts, blocks(next_rank, next_block)),
        *inputs,
        down,
        amax,
        sums,
        *saved,
        *strides,
        down_stride,
        *(rows, d, f),
        SAVED_MAX=saved_mlp.format_max,
        G=group_size,
        LENGTH=length,
        **options,
    )
    launch(
        _mlp_down_cast_fwd_kernel,
        (blocks(rows, tile_rows), blocks(d, block) + blocks(f, block)),
        *inputs,
        amax if by_row else amax.amax(),
        sums,
        *(codes, scale, h_next),
        *strides,
        *(rows, d, f, parts),
        FORMAT_MAX=form.max,
        BY_ROW=by_row,
        PARTS_BLOCK=power_of_two(parts),
        **{**options, "NEXT_BLOCK": min(next_block, 32)},
    )
    found = finished(h_next, dtype), finished(codes, form.dtype), scale
    return *found, *saved_attention.results(), *saved_mlp.results()


def _at_once(down: Tensor, block: int) -> int:
    is_large = block > LOW_RANK_BLOCK or down.dtype == torch.float32
    return min(max(power_of_two(len(down)), 16), 16 if is_large else RANKS_AT_ONCE)
