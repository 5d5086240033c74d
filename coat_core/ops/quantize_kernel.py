"""Quantize per tensor, per row or per group, also saving x for backward; dequantize; transpose codes.

Each kernel reads x [M, K] from memory once or, per row, once and again from the cache; per tensor takes two launches:
amax of each program's share, then the cast.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core.formats import E4M3, get_format
from coat_core.granularity import Granularity
from coat_core.ops.device import (
    as_codes,
    as_values,
    finite_abs,
    saturated,
    scale_from_amax,
    store_group_codes,
    store_row_codes,
)
from coat_core.ops.launch import (
    blocks,
    empty,
    empty_codes,
    empty_values,
    finished,
    launch,
    power_of_two,
    waiting_allowed,
)
from coat_core.ops.rows import (
    SHARE_BLOCK,
    SHARES_MAX,
    GroupCodes,
    RowCodes,
    cast_all_by_amax,
    check_width,
    load_scaled,
    row_block,
    tile_rows,
    warps,
)

GROUPS_ELEMENTS = 2048
TILE = 64


@triton.jit
def _quantize_rows_fwd_kernel(
    x_ptr, factor_ptr, codes_ptr, scale_ptr, K, FORMAT_MAX: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    in_block = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        columns = start + in_block
        x = load_scaled(x_ptr, factor_ptr, row * K + columns, columns, columns < K)
        largest = tl.maximum(largest, finite_abs(x))
    scale = scale_from_amax(tl.max(largest, axis=0), FORMAT_MAX)
    tl.store(scale_ptr + row, scale)
    for start in range(0, K, BLOCK):
        columns = start + in_block
        offsets, inside = row * K + columns, columns < K
        x = load_scaled(x_ptr, factor_ptr, offsets, columns, inside)
        codes = saturated(tl.div_rn(x, scale), FORMAT_MAX)
        tl.store(codes_ptr + offsets, as_codes(codes, codes_ptr), mask=inside)


@triton.jit
def _quantize_groups_fwd_kernel(
    x_ptr,
    factor_ptr,
    codes_ptr,
    scale_ptr,
    K,
    groups_per_row,
    total,
    FORMAT_MAX: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    row, place = group // groups_per_row, group % groups_per_row
    columns = place[:, None] * G + tl.arange(0, G)[None, :]
    inside = (group[:, None] < total) & (columns < K)
    offsets = row[:, None] * K + columns
    x = load_scaled(x_ptr, factor_ptr, offsets, columns, inside)
    scale = scale_from_amax(tl.max(finite_abs(x), axis=1), FORMAT_MAX)
    tl.store(scale_ptr + group, scale, mask=group < total)
    codes = saturated(tl.div_rn(x, scale[:, None]), FORMAT_MAX)
    tl.store(codes_ptr + offsets, as_codes(codes, codes_ptr), mask=inside)


@triton.jit
def _share_amax_fwd_kernel(x_ptr, factor_ptr, amax_ptr, K, total, rounds, BLOCK: tl.constexpr):
    share = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.float32)
    for turn in range(rounds):
        offsets = (share * rounds + turn) * BLOCK + tl.arange(0, BLOCK)
        x = load_scaled(x_ptr, factor_ptr, offsets, offsets % K, offsets < total)
        largest = tl.maximum(largest, finite_abs(x))
    tl.store(amax_ptr + share, tl.max(largest, axis=0))


def quantize(x: Tensor, fmt: str, granularity: str, group_size: int, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    x, form = x.contiguous(), get_format(fmt)
    factors = None if factors is None else factors.contiguous()
    k = x.shape[-1]
    rows = x.numel() // k
    codes = empty_codes(tuple(x.shape), form, x.device)
    scale = empty(Granularity(granularity, group_size).scale_shape(tuple(x.shape)), torch.float32, x.device)
    if granularity == "per_row":
        options = {"FORMAT_MAX": form.max, "BLOCK": row_block(k)}
        launch(_quantize_rows_fwd_kernel, (rows,), x, factors, codes, scale, k, **options)
    elif granularity == "per_group":
        per_row, n = blocks(k, group_size), GROUPS_ELEMENTS // group_size
        grid = (blocks(rows * per_row, n),)
        options = {"FORMAT_MAX": form.max, "G": group_size, "N": n}
        launch(_quantize_groups_fwd_kernel, grid, x, factors, codes, scale, k, per_row, rows * per_row, **options)
    else:
        cast_all_by_amax(x, factors, _share_amax(x, factors), codes, scale, form.max)
    return finished(codes, form.dtype), scale


def _share_amax(x: Tensor, factors: Tensor | None) -> Tensor:
    rounds = blocks(blocks(x.numel(), SHARE_BLOCK), SHARES_MAX)
    shares = blocks(x.numel(), rounds * SHARE_BLOCK)
    amax, k = empty((shares,), torch.float32, x.device), x.shape[-1]
    launch(_share_amax_fwd_kernel, (shares,), x, factors, amax, k, x.numel(), rounds, BLOCK=SHARE_BLOCK)
    return amax


@triton.jit
def _dequantize_fwd_kernel(codes_ptr, scale_ptr, out_ptr, K, scales_per_row, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """One stretch of a row a program; GROUP is 0 where a row has one scale, scales_per_row where all rows share it."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < K
    codes = as_values(tl.load(codes_ptr + row * K + columns, mask=inside, other=0.0))
    if GROUP > 0:
        scale = tl.load(scale_ptr + row * scales_per_row + columns // GROUP, mask=inside, other=1.0)
    else:
        scale = tl.load(scale_ptr + row * scales_per_row)
    tl.store(out_ptr + row * K + columns, (codes * scale).to(out_ptr.dtype.element_ty), mask=inside)


def dequantize(codes: Tensor, scale: Tensor, granularity: str, group_size: int, dtype: torch.dtype) -> Tensor:
    codes, scale, k = codes.contiguous(), scale.contiguous(), codes.shape[-1]
    out = empty_values(tuple(codes.shape), dtype, codes.device)
    if granularity == "per_group":
        per_row, group = blocks(k, group_size), group_size
    else:
        per_row, group = (1 if granularity == "per_row" else 0), 0
    block = row_block(k)
    grid = (codes.numel() // k, blocks(k, block))
    launch(_dequantize_fwd_kernel, grid, codes, scale, out, k, per_row, GROUP=group, BLOCK=block)
    return finished(out, dtype)


@triton.jit
def _transpose_codes_fwd_kernel(codes_ptr, out_ptr, N, K, TILE: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (rows[:, None] < N) & (columns[None, :] < K)
    tile = tl.load(codes_ptr + rows[:, None] * K + columns[None, :], mask=inside, other=0)
    tl.store(out_ptr + columns[:, None] * N + rows[None, :], tl.trans(tile), mask=tl.trans(inside))


def transpose_codes(codes: Tensor) -> Tensor:
    bits = codes.contiguous().view(torch.uint8)
    n, k = bits.shape
    out = empty((k, n), torch.uint8, codes.device)
    launch(_transpose_codes_fwd_kernel, (blocks(n, TILE), blocks(k, TILE)), bits, out, n, k, TILE=TILE)
    return out.view(codes.dtype)


@triton.jit
def _quantize_and_save_fwd_kernel(
    x_ptr,
    codes_ptr,
    code_scale_ptr,
    saved_ptr,
    saved_scale_ptr,
    stride_b,
    stride_s,
    total,
    S,
    K,
    FORMAT_MAX: tl.constexpr,
    CODE_GROUP: tl.constexpr,
    SAVED_MAX: tl.constexpr,
    SAVED_GROUP: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """R rows a program; CODE_GROUP is 0 where the codes have one scale per row, or one for all."""
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    columns = tl.arange(0, BLOCK)[None, :]
    are_rows = rows < total
    inside = are_rows[:, None] & (columns < K)
    starts = rows // S * stride_b + rows % S * stride_s
    x = tl.load(x_ptr + starts[:, None] + columns, mask=inside, other=0.0).to(tl.float32)
    if CODE_GROUP > 0:
        store_group_codes(x, codes_ptr, code_scale_ptr, rows, are_rows, 0, K, K, FORMAT_MAX, CODE_GROUP, R, BLOCK)
    else:
        store_row_codes(x, codes_ptr, code_scale_ptr, rows, are_rows, rows[:, None] * K + columns, inside, FORMAT_MAX)
    if saved_ptr is not None:
        store_group_codes(x, saved_ptr, saved_scale_ptr, rows, are_rows, 0, K, K, SAVED_MAX, SAVED_GROUP, R, BLOCK)


def quantize_and_save(
    x: Tensor, fmt: str, granularity: str, group_size_in: int, saved_format: str, group_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_width(x.shape[-1])
    if x.stride(-1) != 1 or granularity == "per_tensor":  # its second pass reads x as one piece
        x = x.contiguous()
    shape, k, by_image = tuple(x.shape), x.shape[-1], x if x.ndim == 3 else x.reshape(1, -1, x.shape[-1])
    grouped, fmt = granularity == "per_group", "e4m3" if granularity == "none" else fmt
    codes = GroupCodes(shape, fmt, group_size_in, x.device) if grouped else RowCodes(shape, fmt, granularity, x.device)
    saved = GroupCodes(shape, saved_format, group_size, x.device)
    block = power_of_two(k)
    tile, rows = tile_rows(block), x.numel() // k
    tensors = (by_image, codes.codes, codes.scale, saved.codes, saved.scale)
    sizes = (by_image.stride(0), by_image.stride(1), rows, by_image.shape[1], k)
    launch(
        _quantize_and_save_fwd_kernel,
        (blocks(rows, tile),),
        *tensors,
        *sizes,
        FORMAT_MAX=codes.format_max,
        CODE_GROUP=min(group_size_in, block) if grouped else 0,
        SAVED_MAX=saved.format_max,
        SAVED_GROUP=min(group_size, block),
        R=tile,
        BLOCK=block,
        num_warps=warps(tile * block),
    )
    found = codes.results() if isinstance(codes, GroupCodes) else codes.results(x)
    return *found, *saved.results()


def agrees_with_reference(device: torch.device) -> bool:
    from coat_core.quantize import quantize as reference

    x = torch.linspace(-3.0, 3.0, 300, dtype=torch.float32, device="cpu").exp().view(3, 100)  # whatever the defaults
    expected = reference(x, E4M3, Granularity("per_row"))
    with waiting_allowed(device):
        codes, scale = (found.cpu() for found in quantize(x.to(device), E4M3.name, "per_row", 128, None))
    return torch.equal(codes.view(torch.uint8), expected.codes.view(torch.uint8)) and torch.equal(scale, expected.scale)
