"""Quantize per tensor, per row or per group, dequantize, and transpose codes.

Shapes: x [M, K] (leading dimensions joined), n groups a row. Each kernel reads x from memory once or, per row, once and
again from the cache; per tensor takes two launches: amax of each program's share, then the cast.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core.formats import E4M3, get_format
from coat_core.granularity import Granularity
from coat_core.ops.device import as_codes, as_values, finite_abs, saturated, scale_from_amax
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

ROW_BLOCK = 2048
GROUPS_ELEMENTS = 2048
SHARE_BLOCK = 2048
SHARES_MAX = 1024
TILE = 64


@triton.jit
def _load(x_ptr, factor_ptr, offsets, columns, inside):
    """Read x in fp32, times its column's factor where there are factors."""
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if factor_ptr is not None:
        x *= tl.load(factor_ptr + columns, mask=inside, other=0.0)
    return x


@triton.jit
def _quantize_rows_fwd_kernel(
    x_ptr, factor_ptr, codes_ptr, scale_ptr, K, FORMAT_MAX: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program: amax over the row, then the cast."""
    row = tl.program_id(0).to(tl.int64)
    in_block = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        columns = start + in_block
        x = _load(x_ptr, factor_ptr, row * K + columns, columns, columns < K)
        largest = tl.maximum(largest, finite_abs(x))
    scale = scale_from_amax(tl.max(largest, axis=0), FORMAT_MAX)
    tl.store(scale_ptr + row, scale)
    for start in range(0, K, BLOCK):
        columns = start + in_block
        offsets, inside = row * K + columns, columns < K
        x = _load(x_ptr, factor_ptr, offsets, columns, inside)
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
    """N groups of G a program; the last group of a row may be shorter."""
    group = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    row, place = group // groups_per_row, group % groups_per_row
    columns = place[:, None] * G + tl.arange(0, G)[None, :]
    inside = (group[:, None] < total) & (columns < K)
    offsets = row[:, None] * K + columns
    x = _load(x_ptr, factor_ptr, offsets, columns, inside)
    scale = scale_from_amax(tl.max(finite_abs(x), axis=1), FORMAT_MAX)
    tl.store(scale_ptr + group, scale, mask=group < total)
    codes = saturated(tl.div_rn(x, scale[:, None]), FORMAT_MAX)
    tl.store(codes_ptr + offsets, as_codes(codes, codes_ptr), mask=inside)


@triton.jit
def _share_amax_fwd_kernel(x_ptr, factor_ptr, amax_ptr, K, total, rounds, BLOCK: tl.constexpr):
    """Amax over each program's rounds·BLOCK consecutive elements."""
    share = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.float32)
    for turn in range(rounds):
        offsets = (share * rounds + turn) * BLOCK + tl.arange(0, BLOCK)
        x = _load(x_ptr, factor_ptr, offsets, offsets % K, offsets < total)
        largest = tl.maximum(largest, finite_abs(x))
    tl.store(amax_ptr + share, tl.max(largest, axis=0))


@triton.jit
def _cast_by_amax_fwd_kernel(
    x_ptr,
    factor_ptr,
    amax_ptr,
    codes_ptr,
    scale_ptr,
    K,
    total,
    parts,
    FORMAT_MAX: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The cast with one scale for all, from the amax of parts (shares, or rows from a fused producer)."""
    largest = tl.zeros([PARTS_BLOCK], tl.float32)
    for start in range(0, parts, PARTS_BLOCK):
        index = start + tl.arange(0, PARTS_BLOCK)
        largest = tl.maximum(largest, tl.load(amax_ptr + index, mask=index < parts, other=0.0))
    scale = scale_from_amax(tl.max(largest, axis=0), FORMAT_MAX)
    block = tl.program_id(0).to(tl.int64)
    tl.store(scale_ptr, scale, mask=block == 0)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < total
    x = _load(x_ptr, factor_ptr, offsets, offsets % K, inside)
    codes = saturated(tl.div_rn(x, scale), FORMAT_MAX)
    tl.store(codes_ptr + offsets, as_codes(codes, codes_ptr), mask=inside)


@triton.jit
def _cast_rows_by_amax_fwd_kernel(
    x_ptr,
    amax_ptr,
    codes_ptr,
    scale_ptr,
    K,
    parts,
    FORMAT_MAX: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The cast of one row a program, from the amax of its parts."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PARTS_BLOCK)
    amax = tl.max(tl.load(amax_ptr + row * parts + place, mask=place < parts, other=0.0), axis=0)
    scale = scale_from_amax(amax, FORMAT_MAX)
    tl.store(scale_ptr + row, scale)
    for start in range(0, K, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        offsets, inside = row * K + columns, columns < K
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        codes = saturated(tl.div_rn(x, scale), FORMAT_MAX)
        tl.store(codes_ptr + offsets, as_codes(codes, codes_ptr), mask=inside)


def quantize(x: Tensor, fmt: str, granularity: str, group_size: int, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Launcher of `coat::quantize`."""
    x, form = x.contiguous(), get_format(fmt)
    factors = None if factors is None else factors.contiguous()
    k = x.shape[-1]
    rows = x.numel() // k
    codes = empty_codes(tuple(x.shape), form, x.device)
    scale = empty(Granularity(granularity, group_size).scale_shape(tuple(x.shape)), torch.float32, x.device)
    if granularity == "per_row":
        options = {"FORMAT_MAX": form.max, "BLOCK": _row_block(k)}
        launch(_quantize_rows_fwd_kernel, (rows,), x, factors, codes, scale, k, **options)
    elif granularity == "per_group":
        per_row, n = blocks(k, group_size), GROUPS_ELEMENTS // group_size
        grid = (blocks(rows * per_row, n),)
        options = {"FORMAT_MAX": form.max, "G": group_size, "N": n}
        launch(_quantize_groups_fwd_kernel, grid, x, factors, codes, scale, k, per_row, rows * per_row, **options)
    else:
        _cast_by_amax(x, factors, _share_amax(x, factors), codes, scale, form.max)
    return finished(codes, form.dtype), scale


def cast_by_amax(x: Tensor, amax: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """Quantize x per tensor where a fused producer has left the amax of its parts.

    Args:
        x: floating, any shape, contiguous.
        amax: fp32, the finite amax of parts that cover x, of any number.
        fmt: name of the format.

    Returns:
        codes FP8 like x, scale fp32 [].
    """
    form = get_format(fmt)
    codes, scale = empty_codes(tuple(x.shape), form, x.device), empty((), torch.float32, x.device)
    _cast_by_amax(x, None, amax, codes, scale, form.max)
    return finished(codes, form.dtype), scale


def cast_rows_by_amax(x: Tensor, amax: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """Quantize x per row where a fused producer has left the amax of each row's parts.

    Args:
        x: floating [..., K], contiguous.
        amax: fp32 [rows, parts].
        fmt: name of the format.

    Returns:
        codes FP8 like x, scale fp32 [..., 1].
    """
    form, k, (rows, parts) = get_format(fmt), x.shape[-1], amax.shape
    codes, scale = empty_codes(tuple(x.shape), form, x.device), empty((*x.shape[:-1], 1), torch.float32, x.device)
    options = {"FORMAT_MAX": form.max, "PARTS_BLOCK": power_of_two(parts), "BLOCK": _row_block(k)}
    launch(_cast_rows_by_amax_fwd_kernel, (rows,), x, amax, codes, scale, k, parts, **options)
    return finished(codes, form.dtype), scale


def _share_amax(x: Tensor, factors: Tensor | None) -> Tensor:
    rounds = blocks(blocks(x.numel(), SHARE_BLOCK), SHARES_MAX)
    shares = blocks(x.numel(), rounds * SHARE_BLOCK)
    amax, k = empty((shares,), torch.float32, x.device), x.shape[-1]
    launch(_share_amax_fwd_kernel, (shares,), x, factors, amax, k, x.numel(), rounds, BLOCK=SHARE_BLOCK)
    return amax


def _cast_by_amax(
    x: Tensor, factors: Tensor | None, amax: Tensor, codes: Tensor, scale: Tensor, format_max: float
) -> None:
    grid, parts, k = (blocks(x.numel(), SHARE_BLOCK),), amax.numel(), x.shape[-1]
    options = {"FORMAT_MAX": format_max, "PARTS_BLOCK": SHARES_MAX, "BLOCK": SHARE_BLOCK}
    launch(_cast_by_amax_fwd_kernel, grid, x, factors, amax, codes, scale, k, x.numel(), parts, **options)


def _row_block(k: int) -> int:
    return min(power_of_two(k), ROW_BLOCK)


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
    """Launcher of `coat::dequantize`."""
    codes, scale, k = codes.contiguous(), scale.contiguous(), codes.shape[-1]
    out = empty_values(tuple(codes.shape), dtype, codes.device)
    if granularity == "per_group":
        per_row, group = blocks(k, group_size), group_size
    else:
        per_row, group = (1 if granularity == "per_row" else 0), 0
    block = _row_block(k)
    launch(
        _dequantize_fwd_kernel,
        (codes.numel() // k, blocks(k, block)),
        codes,
        scale,
        out,
        k,
        per_row,
        GROUP=group,
        BLOCK=block,
    )
    return finished(out, dtype)


@triton.jit
def _transpose_codes_fwd_kernel(codes_ptr, out_ptr, N, K, TILE: tl.constexpr):
    """One square tile a program."""
    rows = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (rows[:, None] < N) & (columns[None, :] < K)
    tile = tl.load(codes_ptr + rows[:, None] * K + columns[None, :], mask=inside, other=0)
    tl.store(out_ptr + columns[:, None] * N + rows[None, :], tl.trans(tile), mask=tl.trans(inside))


def transpose_codes(codes: Tensor) -> Tensor:
    """Launcher of `coat::transpose_codes`."""
    bits = codes.contiguous().view(torch.uint8)
    n, k = bits.shape
    out = empty((k, n), torch.uint8, codes.device)
    launch(_transpose_codes_fwd_kernel, (blocks(n, TILE), blocks(k, TILE)), bits, out, n, k, TILE=TILE)
    return out.view(codes.dtype)


def agrees_with_reference(device: torch.device) -> bool:
    """Whether a few hundred numbers get the reference's codes on this device."""
    from coat_core.quantize import quantize as reference

    x = torch.linspace(-3.0, 3.0, 300, dtype=torch.float32, device="cpu").exp().view(3, 100)  # whatever the defaults
    expected = reference(x, E4M3, Granularity("per_row"))
    with waiting_allowed(device):
        codes, scale = (found.cpu() for found in quantize(x.to(device), E4M3.name, "per_row", 128, None))
    return torch.equal(codes.view(torch.uint8), expected.codes.view(torch.uint8)) and torch.equal(scale, expected.scale)
