"""Pieces of `coat::mlp_activation_down`: tiles of [attention | act(mlp)], their product, their cast."""

from __future__ import annotations

import triton
import triton.language as tl

from coat_core.ops.device import as_codes, finite_abs, saturated, store_group_codes
from coat_core.ops.gelu_kernel import gate_of_gelu, gated


@triton.jit
def _complete_tile(
    x_ptr,
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
    width,
    DTYPE: tl.constexpr,
    SAVED_MAX: tl.constexpr,
    G: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile [R, BLOCK] of rows of `width` in columns first to end, with its adapter, which it keeps.

    The adapter's product is made turned: Triton would else see two products in a chain, share the tile by rows alone
    among the warps, and spill registers.
    """
    in_row = first + tl.arange(0, BLOCK)
    inside = are_rows[:, None] & (in_row < end)[None, :]
    places = x_ptr + row * stride + rows[:, None] * stride + in_row[None, :]
    x = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    if h_ptr is not None:
        for start in tl.range(0, RANK, RANK_BLOCK, num_stages=1):
            rank = start + tl.arange(0, RANK_BLOCK)
            of_h, of_up = (rank < RANK)[:, None] & are_rows[None, :], (in_row < end)[:, None] & (rank < RANK)[None, :]
            h = tl.load(h_ptr + row * h_stride + rows[None, :] * h_stride + rank[:, None], mask=of_h, other=0.0)
            up = tl.load(up_ptr + in_row[:, None] * RANK + rank[None, :], mask=of_up, other=0.0)
            x += tl.trans(tl.dot(up, h, input_precision="ieee"))
    x = x.to(DTYPE).to(tl.float32)
    if saved_ptr is not None:
        store_group_codes(
            x, saved_ptr, saved_scale_ptr, row + rows, are_rows, first, end, width, SAVED_MAX, G, R, BLOCK
        )
    return x


@triton.jit
def values_tile(
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
    """A tile [R, BLOCK] of the `width` values of attention or of the activation, from column `first` on."""
    of_rows = width + width if IS_MLP and GATED else width
    x = _complete_tile(
        x_ptr,
        h_ptr,
        up_ptr,
        saved_ptr,
        saved_scale_ptr,
        row,
        rows,
        are_rows,
        first,
        width,
        stride,
        h_stride,
        of_rows,
        DTYPE,
        SAVED_MAX,
        G,
        RANK,
        RANK_BLOCK,
        R,
        BLOCK,
    )
    if IS_MLP and GATED:
        second_h_ptr = h_ptr
        if h_ptr is not None:
            second_h_ptr += SECOND  # where the adapter of mlp's second half has its columns of h
        multiplied = _complete_tile(
            x_ptr,
            second_h_ptr,
            up_ptr,
            saved_ptr,
            saved_scale_ptr,
            row,
            rows,
            are_rows,
            width + first,
            of_rows,
            stride,
            h_stride,
            of_rows,
            DTYPE,
            SAVED_MAX,
            G,
            RANK,
            RANK_BLOCK,
            R,
            BLOCK,
        )
        x = gated(x, multiplied, DTYPE).to(DTYPE).to(tl.float32)
    elif IS_MLP:
        x = (x * gate_of_gelu(x)).to(DTYPE).to(tl.float32)
    return x


@triton.jit
def stretch(
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
    """Go over LENGTH columns of R rows; leave their amax and the sums of their products.

    On a GPU fp32 is multiplied as three products of TF32, within 2^-21 of each product: from registers it would spill.
    """
    sums = tl.zeros([R, NEXT_BLOCK], tl.float32)
    largest = tl.zeros([R], tl.float32)
    for start in range(first, tl.minimum(first + LENGTH, width), BLOCK):
        x = values_tile(
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
def cast_tile(
    x, codes_ptr, scale, row, rows, are_rows, first, end, width, FORMAT_MAX: tl.constexpr, BLOCK: tl.constexpr
):
    """Store the codes of a tile of rows of `width` in columns first to end, by each row's scale."""
    columns = first + tl.arange(0, BLOCK)[None, :]
    codes = saturated(tl.div_rn(x, scale[:, None]), FORMAT_MAX)
    places = codes_ptr + row * width + rows[:, None] * width + columns
    tl.store(places, as_codes(codes, codes_ptr), mask=are_rows[:, None] & (columns < end))
