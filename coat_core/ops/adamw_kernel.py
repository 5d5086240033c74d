"""One AdamW step of many tensors with 8-bit moments in one launch.

A program holds R whole blocks of one tensor in registers: parameter, gradient, codes and numbers are read and written
once. Two tables on the device (`device_table`) give tensor, block, size and row of each program, and the addresses of
parameters and gradients, which change where `zero_grad` drops the gradients; gradients copied into a fixed buffer would
be read and written once more. The compiler cannot infer an address's alignment from a table, so the launcher checks
and passes it: ALIGNED lets a thread read 16 bytes at a time. Without expansion all is rounded as in the reference.

Shapes: tiles [R, P], P the power of two from the block size B on.
"""

from __future__ import annotations

import array
import functools
import math
import operator
from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core.formats import format_of
from coat_core.ops import adamw as operators
from coat_core.ops.device import TL_DTYPES
from coat_core.ops.dispatch import launcher
from coat_core.ops.launch import blocks, device_table, finished, launch, power_of_two
from coat_core.ops.moments_kernel import EXPANDED, FP32, PLAIN, RATIO, form_of, random_bits, read, uniform, write

TILE_ELEMENTS = 1024
ELEMENTS_PER_WARP = 256
REGISTERS = 80  # a thread; left alone, ptxas takes 64 or 72 and spills 16 bytes on some cards
REGISTERS_DRAWN = 96  # with draws; 80 spill 8 to 24 bytes
DROPPED_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # of an fp32 mantissa


@triton.jit
def _rounded_stochastically(x, bits, DROPPED: tl.constexpr):
    noise = bits.to(tl.int32, bitcast=True) & ((1 << DROPPED) - 1)
    rounded = ((x.to(tl.int32, bitcast=True) + noise) & (-1 << DROPPED)).to(tl.float32, bitcast=True)
    if DROPPED == 13:  # fp16: below its normal range on a fixed grid
        on_grid = tl.floor(x * 16777216.0 + noise.to(tl.float32) * (1.0 / 8192.0)) * (1.0 / 16777216.0)
        rounded = tl.where(tl.abs(x) < 2.0**-14, on_grid, rounded)
        rounded = tl.clamp(rounded, -65504.0, 65504.0)
    return tl.where(tl.abs(x) < float("inf"), rounded, x)


@triton.jit
def _fp8_adamw_step_kernel(
    programs_ptr,
    addresses_ptr,
    exp_avg_ptr,
    exp_avg_numbers_ptr,
    exp_avg_sq_ptr,
    exp_avg_sq_numbers_ptr,
    table_ptr,
    draws_ptr,
    param_draws_ptr,
    stride,
    weight1,
    beta2,
    weight2,
    eps,
    decay,
    step_size,
    root,
    PARAM_TYPE: tl.constexpr,
    GRAD_TYPE: tl.constexpr,
    FORM1: tl.constexpr,
    FORM2: tl.constexpr,
    MAX1: tl.constexpr,
    MAX2: tl.constexpr,
    BOUND1_LOG2: tl.constexpr,
    BOUND2_LOG2: tl.constexpr,
    EXACT: tl.constexpr,
    STEP: tl.constexpr,
    EXPONENT_MAX: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DROPPED: tl.constexpr,
    ON_GPU: tl.constexpr,
    ALIGNED: tl.constexpr,
    B: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
):
    """R blocks of one tensor a program; EXACT where every moment's storage rounds as the reference does."""
    program = tl.program_id(0).to(tl.int64)
    tensor, first = tl.load(programs_ptr + 4 * program), tl.load(programs_ptr + 4 * program + 1)
    size, first_row = tl.load(programs_ptr + 4 * program + 2), tl.load(programs_ptr + 4 * program + 3)
    param_ptr = tl.load(addresses_ptr + 2 * tensor).to(tl.pointer_type(PARAM_TYPE))
    grad_ptr = tl.load(addresses_ptr + 2 * tensor + 1).to(tl.pointer_type(GRAD_TYPE))
    if table_ptr is not None:
        decay = tl.load(table_ptr + 3 * tensor)
        step_size, root = tl.load(table_ptr + 3 * tensor + 1), tl.load(table_ptr + 3 * tensor + 2)
        size = tl.where(root == root, size, 0)  # a row of NaN: this tensor is skipped
    if ALIGNED:
        size = tl.multiple_of(size, 16)
        param_ptr, grad_ptr = tl.multiple_of(param_ptr, 16), tl.multiple_of(grad_ptr, 16)
    block, column = first + tl.arange(0, R), tl.arange(0, P)
    offsets = block[:, None] * B + column[None, :]
    inside = (column[None, :] < B) & (offsets < size)
    rows, in_rows = first_row + block, block * B < size
    places = rows[:, None] * B + column[None, :]
    grad = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if MAXIMIZE:
        grad = -grad
    where = places, inside, rows, in_rows
    exp_avg, exp_avg_sq = (exp_avg_ptr, exp_avg_numbers_ptr, stride), (exp_avg_sq_ptr, exp_avg_sq_numbers_ptr, stride)
    v = read(exp_avg_sq, where, FORM2, ON_GPU)
    m = read(exp_avg, where, FORM1, ON_GPU)
    if FORM1 == RATIO:
        m *= tl.sqrt_rn(v)
    small = weight1 < 0.5  # as torch.lerp; it and addcmul round product and sum once
    m = tl.fma(tl.where(small, weight1, weight1 - 1.0), grad - m, tl.where(small, m, grad))
    v = tl.fma(weight2 * grad, grad, v * beta2)
    sqrt_v = tl.sqrt_rn(v)
    param = tl.load(param_ptr + offsets, mask=inside, other=0.0).to(tl.float32) * decay
    if EXACT:
        param += tl.div_rn(m * -step_size, tl.div_rn(sqrt_v, root) + eps)
    else:
        param += m * -step_size / (sqrt_v * tl.div_rn(1.0, root) + eps)
    if DROPPED > 0:
        stream, step = tl.load(param_draws_ptr + 3 * tensor), tl.load(param_draws_ptr + 3 * tensor + 1)
        element = offsets + tl.load(param_draws_ptr + 3 * tensor + 2)
        param = _rounded_stochastically(param, random_bits(stream, step, element), DROPPED)
    tl.store(param_ptr + offsets, param.to(PARAM_TYPE), mask=inside)
    if FORM1 == RATIO:
        usable = (v > 0) & (v < float("inf"))
        m = tl.where(usable, m / tl.where(usable, sqrt_v, 1.0), 0.0)  # `coat_core.moments.update_ratio`
    write(m, None, exp_avg, where, FORM1, MAX1, BOUND1_LOG2, STEP, EXPONENT_MAX, ON_GPU)
    if draws_ptr is None:
        drawn = None
    else:
        stream, step = tl.load(draws_ptr + 3 * tensor), tl.load(draws_ptr + 3 * tensor + 1)
        drawn = uniform(stream, step, offsets + tl.load(draws_ptr + 3 * tensor + 2))
    write(v, drawn, exp_avg_sq, where, FORM2, MAX2, BOUND2_LOG2, STEP, EXPONENT_MAX, ON_GPU)


@launcher(operators._fp8_adamw_step)
def fp8_adamw_step(a: Any) -> None:
    sizes = tuple(map(Tensor.numel, a.params))
    first_blocks = a.first_blocks
    if not any(sizes):
        return
    stride, block_size = a.exp_avg.shape
    exp_avg = a.exp_avg
    exp_avg_sq = a.exp_avg_sq
    numbers = a.exp_avg_numbers
    sq_numbers = a.exp_avg_sq_numbers
    if len(a.params) == 1:  # from its own blocks on, so that tensors of equal size share a table
        rows = slice(first_blocks[0], first_blocks[0] + blocks(sizes[0], block_size))
        first_blocks = [0]
        exp_avg, exp_avg_sq = exp_avg[rows], exp_avg_sq[rows]
        numbers = numbers[:, rows]
        sq_numbers = sq_numbers[:, rows]
    written = [*a.params, exp_avg, exp_avg_sq]
    own = written
    if exp_avg.device.type == "cpu":  # the interpreter writes fp32
        own = [tensor.to(torch.float32) for tensor in written]
    own = list(map(Tensor.contiguous, own))
    *params, codes, sq_codes = own
    grads = list(map(Tensor.contiguous, a.grads))
    device = exp_avg.device
    addresses = tuple(chain.from_iterable(zip(map(Tensor.data_ptr, params), map(Tensor.data_ptr, grads), strict=True)))
    dropped = 0 if a.param_draws is None else DROPPED_BITS[a.params[0].dtype]
    padded = power_of_two(block_size)
    per_program = max(TILE_ELEMENTS // padded, 1)
    places = (sizes, tuple(first_blocks), block_size, per_program)
    programs = device_table(places, lambda: _programs(*places), device)
    launch(
        _fp8_adamw_step_kernel,
        (len(programs) // 4,),
        programs,
        device_table(addresses, lambda: addresses, device),
        *(codes, numbers, sq_codes, sq_numbers),
        *(a.table, a.draws, a.param_draws if dropped else None),
        stride,
        *a.hyper,
        PARAM_TYPE=TL_DTYPES[params[0].dtype],
        GRAD_TYPE=TL_DTYPES[grads[0].dtype],
        **_moment_options((exp_avg, exp_avg_sq), (len(numbers), len(sq_numbers)), a.expansion),
        MAXIMIZE=a.maximize,
        DROPPED=dropped,
        ON_GPU=device.type != "cpu",
        ALIGNED=functools.reduce(operator.or_, (*addresses, *sizes)) % 16 == 0,
        B=block_size,
        R=per_program,
        P=padded,
        num_warps=max(4, padded // ELEMENTS_PER_WARP),
        maxnreg=REGISTERS if a.draws is None else REGISTERS_DRAWN,
    )
    for tensor, buffer in zip(written, own, strict=True):
        if buffer is not tensor:
            tensor.copy_(finished(buffer, tensor.dtype))


def _moment_options(
    moments: tuple[Tensor, Tensor], numbers: tuple[int, int], expansion: list[float]
) -> dict[str, object]:
    fraction, step, exponent_max = expansion
    options: dict[str, object] = {"STEP": step, "EXPONENT_MAX": exponent_max}
    forms = [form_of(codes.dtype, count) for codes, count in zip(moments, numbers, strict=True)]
    for number, (form, codes) in enumerate(zip(forms, moments, strict=True), start=1):
        is_fp8 = form in (PLAIN.value, EXPANDED.value)
        largest = format_of(codes.dtype).max if is_fp8 else 0.0
        options[f"FORM{number}"] = form
        options[f"MAX{number}"] = largest
        options[f"BOUND{number}_LOG2"] = math.log2(largest) * 2 + math.log2(fraction) if is_fp8 else 0.0
    options["EXACT"] = set(forms) <= {FP32.value, PLAIN.value}
    return options


def _programs(
    sizes: tuple[int, ...], first_blocks: tuple[int, ...], block_size: int, per_program: int
) -> array.array[int]:
    """Return tensor, first block of it, size and first row of the tensor, for each program; as columns of numbers."""
    table = array.array("q")
    for tensor, (size, row) in enumerate(zip(sizes, first_blocks, strict=True)):
        firsts = array.array("q", range(0, blocks(size, block_size), per_program))
        part = array.array("q", bytes(4 * firsts.itemsize * len(firsts)))
        for column, value in ((0, tensor), (2, size), (3, row)):
            part[column::4] = array.array("q", [value]) * len(firsts)
        part[1::4] = firsts
        table += part
    return table
