"""Quantize per tensor, per row or per group, also saving x for backward; dequantize; transpose codes; INT8; NVFP4.

Each kernel reads x [M, K] from memory once or, per row, once and again from the cache; per tensor takes two launches.

NVFP4 weights are decoded by a table: an element's byte depends only on its code and its block's scale. A block's eight
magnitudes are the eight bytes of one word of the table, so one word is read for 16 elements, and each takes its byte by
a shift. Nothing is rounded, so every GPU gets the reference's result, without FP8 instructions.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core import nvfp4
from coat_core.formats import E4M3
from coat_core.granularity import PER_ROW
from coat_core.ops import quantize as operators
from coat_core.ops.device import (
    OF_INT8,
    SHARE_BLOCK,
    SHARES_MAX,
    Codes,
    as_values,
    cast_by_amax,
    contiguous,
    finite_abs,
    finite_amax,
    load_scaled,
    quantize_rows,
    quantized,
    rotated,
    row_block,
    row_columns,
    scale_from_amax,
    stages_of,
    store_group_codes,
    store_row_codes,
    whole_rows,
    with_row_stride,
)
from coat_core.ops.dispatch import launcher
from coat_core.ops.launch import device_table, empty, empty_values, finished, launch, n_blocks

GROUPS_ELEMENTS = 2048
TILE = 64
ROWS, BLOCKS = 32, 8  # of an NVFP4 weight that a program decodes; 8 blocks of 16
NUMBERS = 128  # of E4M3's bits without a sign


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
    scale = scale_from_amax(finite_amax(x, 1), FORMAT_MAX)
    tl.store(scale_ptr + group, scale, mask=group < total)
    tl.store(codes_ptr + offsets, quantized(x, scale[:, None], codes_ptr, FORMAT_MAX), mask=inside)


@triton.jit
def _share_amax_fwd_kernel(x_ptr, factor_ptr, amax_ptr, K, total, rounds, BLOCK: tl.constexpr):
    share = tl.program_id(0).to(tl.int64)
    amax = tl.zeros([BLOCK], tl.float32)
    for turn in range(rounds):
        offsets = (share * rounds + turn) * BLOCK + tl.arange(0, BLOCK)
        x = load_scaled(x_ptr, factor_ptr, offsets, offsets % K, offsets < total)
        amax = tl.maximum(amax, finite_abs(x))
    tl.store(amax_ptr + share, tl.max(amax, axis=0))


@launcher(operators._quantize)
def quantize(a: Any) -> tuple[Tensor, Tensor]:
    x = a.x.contiguous()
    factors = contiguous(a.factors)
    k = x.shape[-1]
    if a.granularity == "per_tensor":
        rounds = n_blocks(n_blocks(x.numel(), SHARE_BLOCK), SHARES_MAX)
        shares = n_blocks(x.numel(), rounds * SHARE_BLOCK)
        amax = empty((shares,), torch.float32, x.device)
        launch(_share_amax_fwd_kernel, (shares,), x, factors, amax, k, x.numel(), rounds, BLOCK=SHARE_BLOCK)
        return cast_by_amax(x, amax, a.fmt, factors)
    if a.granularity == "per_row":
        return quantize_rows(x, a.fmt, factors, None)
    per_row = n_blocks(k, a.group_size)
    groups, n = x.numel() // k * per_row, GROUPS_ELEMENTS // a.group_size
    codes = Codes(x.shape, x.device, a.fmt, "per_group", a.group_size)
    launch(
        _quantize_groups_fwd_kernel,
        (n_blocks(groups, n),),
        *(x, factors, codes.codes, codes.scale, k, per_row, groups),
        FORMAT_MAX=codes.format_max,
        G=a.group_size,
        N=n,
    )
    return codes.results()


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
    tl.store(out_ptr + row * K + columns, codes * scale, mask=inside)


@launcher(operators._dequantize)
def dequantize(a: Any) -> Tensor:
    codes = a.codes.contiguous()
    scale = a.scale.contiguous()
    k = a.codes.shape[-1]
    out = empty_values(codes.shape, a.dtype, codes.device)
    per_row, group = 0, 0
    if a.granularity == "per_group":
        per_row, group = n_blocks(k, a.group_size), a.group_size
    elif a.granularity == "per_row":
        per_row = 1
    block = row_block(k)
    grid = (codes.numel() // k, n_blocks(k, block))
    launch(_dequantize_fwd_kernel, grid, codes, scale, out, k, per_row, GROUP=group, BLOCK=block)
    return finished(out, a.dtype)


@triton.jit
def _transpose_codes_fwd_kernel(codes_ptr, out_ptr, N, K, TILE: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (rows[:, None] < N) & (columns[None, :] < K)
    tile = tl.load(codes_ptr + rows[:, None] * K + columns[None, :], mask=inside, other=0)
    tl.store(out_ptr + columns[:, None] * N + rows[None, :], tl.trans(tile), mask=tl.trans(inside))


@launcher(operators.transpose_codes)
def transpose_codes(a: Any) -> Tensor:
    bits = a.codes.contiguous().view(torch.uint8)
    n, k = bits.shape
    out = empty((k, n), torch.uint8, bits.device)
    launch(_transpose_codes_fwd_kernel, (n_blocks(n, TILE), n_blocks(k, TILE)), bits, out, n, k, TILE=TILE)
    return out.view(a.codes.dtype)


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
    D: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    STAGES: tl.constexpr,
    SAVED_MAX: tl.constexpr,
    SAVED_GROUP: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    columns = row_columns(BLOCK, VECTOR)
    are_rows = rows < total
    inside = are_rows[:, None] & (columns < D)
    starts = rows // S * stride_b + rows % S * stride_s
    x = tl.load(x_ptr + starts[:, None] + columns, mask=inside, other=0.0).to(tl.float32)
    places = rows[:, None] * D + columns
    store_row_codes(x, codes_ptr, code_scale_ptr, rows, are_rows, places, inside, FORMAT_MAX, STAGES)
    store_group_codes(x, saved_ptr, saved_scale_ptr, rows, are_rows, 0, D, D, SAVED_MAX, SAVED_GROUP)


@launcher(operators.quantize_and_save)
def quantize_and_save(a: Any) -> tuple[Tensor, ...]:
    k = a.x.shape[-1]
    constants = whole_rows(k)
    x = a.x
    if x.stride(-1) != 1 or a.granularity == "per_tensor":  # its second pass reads x as one piece
        x = x.contiguous()
    shape = x.shape
    by_image = x if x.ndim == 3 else x.reshape(1, -1, k)
    codes = Codes(shape, x.device, a.fmt, a.granularity)
    saved = Codes(shape, x.device, a.saved_format, "per_group", a.group_size)
    rows = x.numel() // k
    launch(
        _quantize_and_save_fwd_kernel,
        (n_blocks(rows, constants["R"]),),
        *(by_image, codes.codes, codes.scale, saved.codes, saved.scale),
        *(by_image.stride(0), by_image.stride(1), rows, by_image.shape[1]),
        FORMAT_MAX=codes.format_max,
        STAGES=codes.stages,
        SAVED_MAX=saved.format_max,
        SAVED_GROUP=min(a.group_size, constants["BLOCK"]),
        **constants,
    )
    return *codes.results(x), *saved.results()


@triton.jit
def _load_rotated(row_ptr, factor_ptr, start, K, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    columns = start + tl.arange(0, BLOCK)
    x = rotated(tl.load(row_ptr + columns, mask=columns < K, other=0.0).to(tl.float32), STAGES)
    if factor_ptr is not None:
        x *= tl.load(factor_ptr + columns, mask=columns < K, other=0.0)
    return x


@triton.jit
def _quantize_int8_fwd_kernel(
    x_ptr, factor_ptr, codes_ptr, scale_ptr, K, x_stride, STAGES: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program: amax of the rotated row, then its codes; the row is rotated twice, then from cache."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        x = _load_rotated(x_ptr + row * x_stride, factor_ptr, start, K, STAGES, BLOCK)
        magnitude = tl.abs(x)
        largest = tl.maximum(largest, tl.where(magnitude < float("inf"), magnitude, float("inf")))
    scale = scale_from_amax(tl.max(largest, axis=0), OF_INT8)
    tl.store(scale_ptr + row, scale)
    for start in range(0, K, BLOCK):
        x = _load_rotated(x_ptr + row * x_stride, factor_ptr, start, K, STAGES, BLOCK)
        columns = start + tl.arange(0, BLOCK)
        tl.store(codes_ptr + row * K + columns, quantized(x, scale, codes_ptr, OF_INT8), mask=columns < K)


@triton.jit
def _rotate_fwd_kernel(x_ptr, y_ptr, K, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    y = _load_rotated(x_ptr + row * K, None, start, K, STAGES, BLOCK)
    columns = start + tl.arange(0, BLOCK)
    tl.store(y_ptr + row * K + columns, y, mask=columns < K)


@launcher(operators.quantize_int8)
def quantize_int8(a: Any) -> tuple[Tensor, Tensor]:
    x, stride = with_row_stride(a.x)
    *lead, width = a.x.shape
    codes = empty((*lead, width), torch.int8, x.device)
    scale = empty((*lead, 1), torch.float32, x.device)
    options = {"STAGES": stages_of(a.size), "BLOCK": row_block(width)}
    grid = (x.numel() // width,)
    launch(_quantize_int8_fwd_kernel, grid, x, contiguous(a.factors), codes, scale, width, stride, **options)
    return codes, scale


@launcher(operators.rotate)
def rotate(a: Any) -> Tensor:
    x, width = a.x.contiguous(), a.x.shape[-1]
    y = empty_values(x.shape, x.dtype, x.device)
    block = row_block(width)
    grid = (x.numel() // width, n_blocks(width, block))
    launch(_rotate_fwd_kernel, grid, x, y, width, STAGES=stages_of(a.size), BLOCK=block)
    return finished(y, x.dtype)


@functools.cache
def _words() -> tuple[int, ...]:
    """Return int64 words of the decoded bytes of all magnitudes, one per scale; the first in the lowest byte."""
    scales = torch.arange(NUMBERS, dtype=torch.uint8, device="cpu")
    codes = torch.arange(8, dtype=torch.uint8, device="cpu").expand(NUMBERS, 8)
    return tuple(nvfp4.decode(codes, scales).view(torch.int64).view(-1).tolist())


@triton.jit
def _decode_nvfp4_fwd_kernel(
    codes_ptr, scales_ptr, words_ptr, out_ptr, N, K, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr
):
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    first_block = tl.program_id(1).to(tl.int64) * BLOCKS
    rows = first_row + tl.arange(0, ROWS)
    places = first_block + tl.arange(0, BLOCKS)
    inside = (rows[:, None] < N) & (places[None, :] < K // 16)
    scales = tl.load(scales_ptr + rows[:, None] * (K // 16) + places[None, :], mask=inside, other=0)
    words = tl.load(words_ptr + scales.to(tl.int32))[:, :, None]
    pairs = (rows[:, None] * (K // 2) + places[None, :] * 8)[:, :, None] + tl.arange(0, 8)[None, None, :]
    codes = tl.load(codes_ptr + pairs, mask=inside[:, :, None], other=0).to(tl.int64)
    low = ((words >> ((codes & 7) * 8)) & 127) | ((codes & 8) << 4)
    high = ((words >> (((codes >> 4) & 7) * 8)) & 127) | (codes & 128)
    tile = tl.reshape(tl.join(low.to(tl.uint8), high.to(tl.uint8)), [ROWS, BLOCKS * 16])
    columns = first_block * 16 + tl.arange(0, BLOCKS * 16)
    written = (rows[:, None] < N) & (columns[None, :] < K)
    if TRANSPOSED:
        tl.store(out_ptr + columns[:, None] * N + rows[None, :], tl.trans(tile), mask=tl.trans(written))
    else:
        tl.store(out_ptr + rows[:, None] * K + columns[None, :], tile, mask=written)


@launcher(operators.decode_nvfp4)
def decode_nvfp4(a: Any) -> Tensor:
    codes = a.codes.contiguous()
    block_scales = a.block_scales.contiguous()
    device = a.codes.device
    n, k = codes.shape[0], 2 * codes.shape[1]
    words = device_table("NVFP4 words", _words, device)
    out = empty((k, n) if a.transposed else (n, k), torch.uint8, device)
    launch(
        _decode_nvfp4_fwd_kernel,
        (n_blocks(n, ROWS), n_blocks(k, BLOCKS * nvfp4.BLOCK)),
        *(codes, block_scales, words, out, n, k),
        TRANSPOSED=a.transposed,
        ROWS=ROWS,
        BLOCKS=BLOCKS,
    )
    return out.view(E4M3.dtype)


def agrees_with_reference(device: torch.device) -> bool:
    from coat_core.quantize import quantize as reference

    x = torch.linspace(-3.0, 3.0, 300, dtype=torch.float32, device="cpu").exp().view(3, 100)  # whatever the defaults
    expected = reference(x, E4M3.name, PER_ROW)
    codes, scale = (tensor.cpu() for tensor in quantize(x.to(device), E4M3.name, "per_row", 128, None))
    return torch.equal(codes.view(torch.uint8), expected.codes.view(torch.uint8)) and torch.equal(scale, expected.scale)
