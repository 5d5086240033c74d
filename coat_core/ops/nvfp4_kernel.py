"""NVFP4 weights decoded to e4m3 by a table: an element's byte depends only on its code and its block's scale.

A block's eight magnitudes are the eight bytes of one word of the table, so one word is read for 16 elements, and each
takes its byte by a shift. Nothing is rounded, so every GPU gets the reference's result, without FP8 instructions.

Shapes: codes [N, K/2], two a byte; block scales [N, K/16]; result [N, K], or [K, N].
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core import nvfp4
from coat_core.formats import E4M3
from coat_core.ops.launch import blocks, empty, launch
from coat_core.ops.tables import device_table

ROWS, BLOCKS = 32, 8  # of W that a program decodes; 8 blocks of 16
NUMBERS = 128  # of E4M3's bits without a sign


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
    first_row, first_block = tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(1).to(tl.int64) * BLOCKS
    rows, places = first_row + tl.arange(0, ROWS), first_block + tl.arange(0, BLOCKS)
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


def decode_nvfp4(codes: Tensor, block_scales: Tensor, transposed: bool) -> Tensor:
    codes, block_scales, device = codes.contiguous(), block_scales.contiguous(), codes.device
    n, k = codes.shape[0], 2 * codes.shape[1]
    words = device_table("NVFP4 words", _words, device)
    out = empty((k, n) if transposed else (n, k), torch.uint8, device)
    grid = blocks(n, ROWS), blocks(k, BLOCKS * nvfp4.BLOCK)
    sizes, options = (n, k), {"TRANSPOSED": transposed, "ROWS": ROWS, "BLOCKS": BLOCKS}
    launch(_decode_nvfp4_fwd_kernel, grid, codes, block_scales, words, out, *sizes, **options)
    return out.view(E4M3.dtype)
