"""Quantize rows for a linear and save them for backward with one reading.

Shapes: x [B, S, K], rows at a stride of their own for each image. A program holds whole rows: several where K is small.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from coat_core.ops.device import store_group_codes, store_row_codes
from coat_core.ops.launch import blocks, launch, power_of_two
from coat_core.ops.rows import GroupCodes, RowCodes, check_width, tile_rows, warps


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
    """R rows a program; CODE_GROUP is 0 where the codes have a scale for each row, or one for all."""
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
    """Launcher of `coat::quantize_and_save`."""
    check_width(x.shape[-1])
    if x.stride(-1) != 1 or granularity == "per_tensor":  # whose second pass reads x as one piece
        x = x.contiguous()
    shape, k, by_image = tuple(x.shape), x.shape[-1], x if x.ndim == 3 else x.reshape(1, -1, x.shape[-1])
    grouped, fmt = granularity == "per_group", "e4m3" if granularity == "none" else fmt
    codes = GroupCodes(shape, fmt, group_size_in, x.device) if grouped else RowCodes(shape, fmt, granularity, x.device)
    saved = GroupCodes(shape, saved_format, group_size, x.device)
    block = power_of_two(k)
    tile, rows = tile_rows(block), x.numel() // k
    launch(
        _quantize_and_save_fwd_kernel,
        (blocks(rows, tile),),
        by_image,
        codes.codes,
        codes.scale,
        saved.codes,
        saved.scale,
        by_image.stride(0),
        by_image.stride(1),
        rows,
        by_image.shape[1],
        k,
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
