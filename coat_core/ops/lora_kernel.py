"""Gradients of LoRA's up-projections: dh_i = dy_i up_i and dup_i = dy_iᵀ h_i from one reading of dy.

A program takes a stretch of one linear's columns and a share of the rows. It holds dup of its columns in registers and
writes its columns' part of dh; a second kernel adds the parts up. Parts are fp32, in numbers

    stretches · rows · r + shares · ΣN · r

so wide stretches make the first term small, and few shares the second (`_division`).

Shapes: dy [M, ΣN], h [M, n·r], up [ΣN, r].
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core.ops import lora as operators
from coat_core.ops.device import with_row_stride
from coat_core.ops.dispatch import launcher
from coat_core.ops.launch import dot_operand, empty, empty_values, finished, launch, n_blocks, power_of_two

ROWS = 64  # that a program multiplies at once
STRETCHES = (512, 256, 128)  # columns of a program
STRETCHED = 512 * 16  # columns · ranks of bf16 that fit its registers
FITTING = {ranks: tuple(block for block in STRETCHES if block * ranks <= STRETCHED) for ranks in (16, 32)}
WIDEST_RANK = 32  # beyond it the parts are as many bytes as the second reading of dy that they save
PROGRAMS = 132  # one for each multiprocessor of an H200
PARTS_AT_ONCE, ELEMENTS = 8, 256  # of the sums


@triton.jit
def _lora_up_gradients_kernel(
    dy_ptr,
    h_ptr,
    up_ptr,
    dh_ptr,
    dup_ptr,
    dy_stride,
    h_stride,
    M,
    rounds,
    WIDTHS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """rounds·R rows and BLOCK columns a program; parts dh_ptr [stretches, M, RANK] and dup_ptr [shares, ΣN, RANK]."""
    stretch, share = tl.program_id(0), tl.program_id(1)
    linear, first, end, before, start = 0, 0, 0, 0, 0
    for i in tl.static_range(len(WIDTHS)):
        is_here = stretch >= before
        linear = tl.where(is_here, i, linear)
        first = tl.where(is_here, start + (stretch - before) * BLOCK, first)
        end = tl.where(is_here, start + WIDTHS[i], end)
        before += (WIDTHS[i] + BLOCK - 1) // BLOCK
        start += WIDTHS[i]
    columns, rank = first + tl.arange(0, BLOCK), tl.arange(0, RANK_BLOCK)
    of_up = columns[:, None] * RANK + rank[None, :]
    is_up = (columns < end)[:, None] & (rank < RANK)[None, :]
    up = tl.load(up_ptr + of_up, mask=is_up, other=0.0)
    dup = tl.zeros([BLOCK, RANK_BLOCK], tl.float32)
    place = tl.arange(0, R)
    for turn in range(rounds):
        row = (share * rounds + turn).to(tl.int64) * R
        are_rows = row + place < M
        inside = are_rows[:, None] & (columns < end)[None, :]
        is_h = are_rows[:, None] & (rank < RANK)[None, :]
        dy = tl.load(dy_ptr + row * dy_stride + place[:, None] * dy_stride + columns[None, :], mask=inside, other=0.0)
        h = tl.load(
            h_ptr + row * h_stride + place[:, None] * h_stride + (linear * RANK + rank)[None, :], mask=is_h, other=0.0
        )
        dup = tl.dot(tl.trans(dy), h, acc=dup, input_precision="ieee")
        dh = tl.dot(dy, up, input_precision="ieee")
        tl.store(dh_ptr + (stretch * M + row) * RANK + place[:, None] * RANK + rank[None, :], dh, mask=is_h)
    tl.store(dup_ptr + share.to(tl.int64) * start * RANK + of_up, dup, mask=is_up)


@triton.jit
def _added(parts_ptr, first, count, size, offsets, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, PARTS):
        parts = start + tl.arange(0, PARTS)
        at = (first + parts).to(tl.int64)[:, None] * size + offsets[None, :]
        total += tl.sum(
            tl.load(parts_ptr + at, mask=(parts < count)[:, None] & (offsets < size)[None, :], other=0.0), 0
        )
    return total


@triton.jit
def _add_lora_parts_kernel(
    dh_parts_ptr,
    dup_parts_ptr,
    dh_ptr,
    dup_ptr,
    M,
    shares,
    WIDTHS: tl.constexpr,
    STRETCH: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    which = tl.program_id(1)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first, count, before, columns = 0, 0, 0, 0
    for i in tl.static_range(len(WIDTHS)):
        of_this = (WIDTHS[i] + STRETCH - 1) // STRETCH
        first = tl.where(which == i, before, first)
        count = tl.where(which == i, of_this, count)
        before += of_this
        columns += WIDTHS[i]
    if which < len(WIDTHS):
        dh = _added(dh_parts_ptr, first, count, M * RANK, offsets, PARTS, BLOCK)
        at = (offsets // RANK * len(WIDTHS) + which) * RANK + offsets % RANK
        tl.store(dh_ptr + at, dh, mask=offsets < M * RANK)
    else:
        dup = _added(dup_parts_ptr, 0, shares, columns * RANK, offsets, PARTS, BLOCK)
        tl.store(dup_ptr + offsets, dup, mask=offsets < columns * RANK)


@launcher(operators.lora_up_gradients)
def lora_up_gradients(a: Any) -> tuple[Tensor, Tensor]:
    n, rank = a.up.shape
    if rank > WIDEST_RANK:
        return operators.lora_up_gradients._init_fn(*a)
    shape = a.h.shape
    dtype = a.h.dtype
    device = a.h.device
    m = a.h.numel() // shape[-1]
    dy, dy_stride = with_row_stride(dot_operand(a.dy if a.dy.dtype == dtype else a.dy.to(dtype)))
    h, h_stride = with_row_stride(dot_operand(a.h))
    up = dot_operand(a.up).contiguous()
    widths = tuple(a.widths)
    rank_block = max(power_of_two(rank), 16)
    fitting = FITTING[rank_block] if dtype.itemsize == 2 else (128,)
    block, stretches, shares, rounds = _division(widths, m, rank, fitting, PROGRAMS)
    dh_parts = empty((stretches, m, rank), torch.float32, device)
    dup_parts = empty((shares, n, rank), torch.float32, device)
    launch(
        _lora_up_gradients_kernel,
        (stretches, shares),
        *(dy, h, up, dh_parts, dup_parts),
        *(dy_stride, h_stride, m, rounds),
        WIDTHS=widths,
        RANK=rank,
        RANK_BLOCK=rank_block,
        R=ROWS,
        BLOCK=block,
        num_warps=8 if block * rank_block == STRETCHED or dtype.itemsize > 2 else 4,
        num_stages=2,
    )
    dh = empty_values(shape, dtype, device)
    dup = empty_values((n, rank), a.dtype_up, device)
    launch(
        _add_lora_parts_kernel,
        (n_blocks(max(m, n) * rank, ELEMENTS), len(widths) + 1),
        *(dh_parts, dup_parts, dh, dup),
        *(m, shares),
        WIDTHS=widths,
        STRETCH=block,
        RANK=rank,
        PARTS=PARTS_AT_ONCE,
        BLOCK=ELEMENTS,
    )
    return finished(dh, dtype), finished(dup, a.dtype_up)


@functools.cache
def _division(
    widths: tuple[int, ...], rows: int, rank: int, fitting: tuple[int, ...], programs: int
) -> tuple[int, int, int, int]:
    """Columns of a stretch, stretches, shares of the rows, and tiles of ROWS rows in a share."""
    divisions, tiles, n = [], n_blocks(rows, ROWS), sum(widths)
    for block in fitting:
        stretches = sum(n_blocks(width, block) for width in widths)
        rounds = n_blocks(tiles, max(programs // stretches, 1))
        shares = max(n_blocks(tiles, max(rounds, 1)), 1)
        moved = 2 * rows * n + 8 * rank * (stretches * rows + shares * n)  # of dy, and parts written and read
        divisions.append((moved * max(programs / (stretches * shares), 1.0), block, stretches, shares, rounds))
    return min(divisions)[1:]
