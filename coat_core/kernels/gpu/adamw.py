"""One AdamW step of many tensors with FP8 moments in one launch.

A program takes R blocks of one tensor, whole blocks in registers: it reads parameter, gradient, codes and the numbers
of its blocks once and writes them once. Two tables on the device tell it where (`tables`): tensor, block, size and row
of each program, and the addresses of parameters and gradients, which change where `zero_grad` drops the gradients.
(Copying gradients into a buffer that stays would need no table, but read and write all of them once more.) Moments need
no addresses, they lie packed. An address from a table tells the compiler nothing of its alignment, so the launcher
looks and says it: ALIGNED lets a thread read 16 bytes at a time.

Powers are exp2(k·log2(x)) by the GPU's own two instructions, where powf takes a hundred. abs(k·log2(x)) < 18; log2 errs
by 2^-22, absolute near 1 and relative elsewhere, so x^k errs by 2^-18 for k about 2 and 2^-14 for the largest k, 256;
neighbouring codes are 2^-4 apart. For the same reason what is divided by a number of its block is multiplied by its
reciprocal. Without expansion all is rounded as in the reference.

Shapes: tiles [R, P], P the power of two from the block size B on.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator
from itertools import chain

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core.expansion import EXPONENT_MIN
from coat_core.formats import format_of
from coat_core.kernels.gpu.common import finite_abs, saturated, scale_from_amax
from coat_core.kernels.gpu.runtime import blocks, finished, launch, power_of_two
from coat_core.kernels.gpu.tables import device_table

TILE_ELEMENTS = 1024
ELEMENTS_PER_WARP = 256
REGISTERS = 80  # a thread; left alone, ptxas takes 64 or 72 and spills 16 bytes on some cards
SEED_MAX = 1 << 31
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
DROPPED_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # of an fp32 mantissa
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
HUGE = tl.constexpr(torch.finfo(torch.float32).max)
SMALLEST_EXPONENT = tl.constexpr(EXPONENT_MIN)


@triton.jit
def _log2(x):
    """log2 of positive fp32, denormal too: libdevice's takes those for 0."""
    small = x < TINY
    return tl.log2(tl.where(small, x * 4294967296.0, x)) - tl.where(small, 32.0, 0.0)


@triton.jit
def _held(x):
    """X inside fp32's normal range; NaN stays NaN."""
    return tl.clamp(x, TINY, HUGE, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _power(x, exponent, ON_GPU: tl.constexpr):
    """x^exponent as exp2(exponent·log2(x)), x in fp32's normal range; NaN stays NaN."""
    if ON_GPU:
        power = tl.inline_asm_elementwise(
            "{ .reg .f32 t; lg2.approx.ftz.f32 t, $1; mul.f32 t, t, $2; ex2.approx.ftz.f32 $0, t; }",
            "=f,f,f",
            [x, exponent],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        power = tl.exp2(exponent * tl.log2(x))
    return power


@triton.jit
def _with_sign(magnitude, x):
    """Magnitude with the sign of x; 0 where x is 0."""
    signed = magnitude.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -2147483648)
    return tl.where(x == 0, 0.0, signed.to(tl.float32, bitcast=True))


@triton.jit
def _expand(x, center, exponent, ON_GPU: tl.constexpr):
    """sign(x)·abs(x/center)^exponent: `coat_core.expansion.expand`, dividing once a row."""
    shift = tl.where(center < 2.0**-64, 2.0**64, tl.where(center > 2.0**64, 2.0**-64, 1.0))  # 1/center stays normal
    ratio = tl.abs(x) * shift * tl.div_rn(1.0, center * shift)
    return _with_sign(_power(_held(ratio), exponent, ON_GPU), x)


@triton.jit
def _contract(x, center, exponent, ON_GPU: tl.constexpr):
    """Inverse of `_expand`; a nonzero x never gives zero."""
    magnitude = _power(_held(tl.abs(x)), tl.div_rn(1.0, exponent), ON_GPU) * center
    return _with_sign(_held(magnitude), x)


@triton.jit
def _expansion_parameters(magnitude, high, BOUND_LOG2: tl.constexpr, STEP: tl.constexpr, EXPONENT_MAX: tl.constexpr):
    """Center and exponent of each row, [R, 1]: `coat_core.expansion.expansion_parameters`."""
    low = tl.min(tl.where(magnitude > 0, magnitude, float("inf")), axis=1)[:, None]
    spread = _log2(tl.where(high > 0, high, 1.0)) - _log2(tl.where(high > 0, low, 1.0))
    plain = (spread <= 0) | (high == 0)  # no nonzero value, or a single magnitude
    exponent = tl.div_rn(1.0, tl.where(plain, 1.0, spread)) * BOUND_LOG2
    if STEP > 0:
        exponent = tl.floor(tl.div_rn(exponent, STEP)) * STEP
    exponent = tl.clamp(exponent, SMALLEST_EXPONENT, EXPONENT_MAX)
    center = tl.sqrt_rn(high) * tl.sqrt_rn(tl.where(high > 0, low, 1.0))
    usable = (center > 0) & (center < float("inf"))
    return tl.where(plain & (usable == 0), 1.0, center), tl.where(plain, 1.0, exponent)


@triton.jit
def _read(
    codes_ptr,
    numbers_ptr,
    places,
    inside,
    rows,
    in_rows,
    stride,
    MAX: tl.constexpr,
    EXPANDED: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """A moment in fp32 [R, P], from codes and their numbers per block."""
    values = tl.load(codes_ptr + places, mask=inside, other=0.0).to(tl.float32)
    if MAX > 0:
        values *= tl.load(numbers_ptr + rows, mask=in_rows, other=1.0)[:, None]
        if EXPANDED:
            exponent = tl.load(numbers_ptr + stride + rows, mask=in_rows, other=1.0)[:, None]
            center = tl.load(numbers_ptr + 2 * stride + rows, mask=in_rows, other=1.0)[:, None]
            values = _contract(values, center, exponent, ON_GPU)
    return values


@triton.jit
def _write(
    values,
    codes_ptr,
    numbers_ptr,
    places,
    inside,
    rows,
    in_rows,
    stride,
    MAX: tl.constexpr,
    EXPANDED: tl.constexpr,
    BOUND_LOG2: tl.constexpr,
    STEP: tl.constexpr,
    EXPONENT_MAX: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Inverse of `_read`: `coat_core.expansion.quantize_blocks`."""
    if MAX > 0:
        limit = tl.max(finite_abs(values), axis=1)[:, None]
        limit = tl.where(limit > 0, limit, MAX)
        values = tl.clamp(values, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        magnitude = finite_abs(values)
        high = tl.max(magnitude, axis=1)[:, None]
        if EXPANDED:
            center, exponent = _expansion_parameters(magnitude, high, BOUND_LOG2, STEP, EXPONENT_MAX)
            values = _expand(values, center, exponent, ON_GPU)
            high = _expand(high, center, exponent, ON_GPU)  # f is monotone: the amax of the expanded row
            tl.store(numbers_ptr + stride + rows[:, None], exponent, mask=in_rows[:, None])
            tl.store(numbers_ptr + 2 * stride + rows[:, None], center, mask=in_rows[:, None])
        scale = scale_from_amax(high, MAX)
        tl.store(numbers_ptr + rows[:, None], scale, mask=in_rows[:, None])
        values = saturated(values * tl.div_rn(1.0, scale) if EXPANDED else tl.div_rn(values, scale), MAX)
    tl.store(codes_ptr + places, values.to(codes_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rounded_stochastically(x, seed_ptr, places, DROPPED: tl.constexpr):
    """X up or down to what a dtype without fp32's last DROPPED bits holds: `coat_core.quantize.stochastic_cast`."""
    noise = tl.randint(tl.load(seed_ptr), places.to(tl.int32)).to(tl.int32, bitcast=True) & ((1 << DROPPED) - 1)
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
    seed_ptr,
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
    MAX1: tl.constexpr,
    MAX2: tl.constexpr,
    BOUND1_LOG2: tl.constexpr,
    BOUND2_LOG2: tl.constexpr,
    EXPANDED: tl.constexpr,
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
    """R blocks of one tensor a program; MAX is 0 for a moment in fp32."""
    program = tl.program_id(0).to(tl.int64)
    tensor, first = tl.load(programs_ptr + 4 * program), tl.load(programs_ptr + 4 * program + 1)
    size, first_row = tl.load(programs_ptr + 4 * program + 2), tl.load(programs_ptr + 4 * program + 3)
    param_ptr = tl.load(addresses_ptr + 2 * tensor).to(tl.pointer_type(PARAM_TYPE))
    grad_ptr = tl.load(addresses_ptr + 2 * tensor + 1).to(tl.pointer_type(GRAD_TYPE))
    if ALIGNED:
        size = tl.multiple_of(size, 16)
        param_ptr, grad_ptr = tl.multiple_of(param_ptr, 16), tl.multiple_of(grad_ptr, 16)
    if table_ptr is not None:
        decay = tl.load(table_ptr + 3 * tensor)
        step_size, root = tl.load(table_ptr + 3 * tensor + 1), tl.load(table_ptr + 3 * tensor + 2)
    block, column = first + tl.arange(0, R), tl.arange(0, P)
    offsets = block[:, None] * B + column[None, :]
    inside = (column[None, :] < B) & (offsets < size)
    rows, in_rows = first_row + block, block * B < size
    places = rows[:, None] * B + column[None, :]
    grad = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if MAXIMIZE:
        grad = -grad
    m = _read(exp_avg_ptr, exp_avg_numbers_ptr, places, inside, rows, in_rows, stride, MAX1, EXPANDED, ON_GPU)
    small = weight1 < 0.5  # as torch.lerp; it and addcmul round product and sum once
    m = tl.fma(tl.where(small, weight1, weight1 - 1.0), grad - m, tl.where(small, m, grad))
    v = _read(exp_avg_sq_ptr, exp_avg_sq_numbers_ptr, places, inside, rows, in_rows, stride, MAX2, EXPANDED, ON_GPU)
    v = tl.fma(weight2 * grad, grad, v * beta2)
    param = tl.load(param_ptr + offsets, mask=inside, other=0.0).to(tl.float32) * decay
    if EXPANDED:
        param += m * -step_size / (tl.sqrt_rn(v) * tl.div_rn(1.0, root) + eps)
    else:
        param += tl.div_rn(m * -step_size, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    if DROPPED > 0:
        param = _rounded_stochastically(param, seed_ptr, places, DROPPED)
    tl.store(param_ptr + offsets, param.to(PARAM_TYPE), mask=inside)
    _write(m, exp_avg_ptr, exp_avg_numbers_ptr, places, inside, rows, in_rows, stride,
           MAX1, EXPANDED, BOUND1_LOG2, STEP, EXPONENT_MAX, ON_GPU)  # fmt: skip
    _write(v, exp_avg_sq_ptr, exp_avg_sq_numbers_ptr, places, inside, rows, in_rows, stride,
           MAX2, EXPANDED, BOUND2_LOG2, STEP, EXPONENT_MAX, ON_GPU)  # fmt: skip


def fp8_adamw_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avg: Tensor,
    exp_avg_numbers: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sq_numbers: Tensor,
    first_blocks: list[int],
    hyper: list[float],
    table: Tensor | None,
    expansion: list[float],
    maximize: bool,
    stochastic_rounding: bool,
) -> None:
    """Launcher of `coat::fp8_adamw_step`."""
    sizes, block_size, padded = tuple(map(Tensor.numel, params)), exp_avg.shape[1], power_of_two(exp_avg.shape[1])
    if not any(sizes):
        return
    written = [*params, exp_avg, exp_avg_sq]
    own = _launchable(written)
    own_params, (codes1, codes2) = own[:-2], own[-2:]
    own_grads = list(map(Tensor.contiguous, grads))
    device, dropped = exp_avg.device, DROPPED_BITS[params[0].dtype] if stochastic_rounding else 0
    pairs = zip(map(Tensor.data_ptr, own_params), map(Tensor.data_ptr, own_grads), strict=True)
    addresses = tuple(chain.from_iterable(pairs))
    per_program = max(TILE_ELEMENTS // padded, 1)
    places = (sizes, tuple(first_blocks), block_size, per_program)
    programs = device_table(places, lambda: _programs(*places), device)
    launch(
        _fp8_adamw_step_kernel,
        (len(programs) // 4,),
        programs,
        device_table(addresses, lambda: addresses, device),
        codes1,
        exp_avg_numbers,
        codes2,
        exp_avg_sq_numbers,
        table,
        torch.randint(SEED_MAX, (1,), device=device) if dropped else None,
        len(exp_avg),
        *hyper,
        PARAM_TYPE=TYPES[own_params[0].dtype],
        GRAD_TYPE=TYPES[own_grads[0].dtype],
        **_moment_options(exp_avg, exp_avg_sq, max(len(exp_avg_numbers), len(exp_avg_sq_numbers)) == 3, expansion),
        MAXIMIZE=maximize,
        DROPPED=dropped,
        ON_GPU=device.type != "cpu",
        ALIGNED=functools.reduce(operator.or_, (*addresses, *sizes)) % 16 == 0,
        B=block_size,
        R=per_program,
        P=padded,
        num_warps=max(4, padded // ELEMENTS_PER_WARP),
        maxnreg=REGISTERS,
    )
    for tensor, buffer in zip(written, own, strict=True):
        if buffer is not tensor:
            tensor.copy_(finished(buffer, tensor.dtype))


def _launchable(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors themselves where the kernel can write them: contiguous and, in the interpreter, fp32; else copies."""
    if tensors[0].device.type == "cpu":
        tensors = [tensor.to(torch.float32) for tensor in tensors]
    return list(map(Tensor.contiguous, tensors))


def _moment_options(exp_avg: Tensor, exp_avg_sq: Tensor, expanded: bool, expansion: list[float]) -> dict[str, object]:
    """What the kernel is compiled for, by how the moments are stored."""
    fraction, step, exponent_max = expansion
    largest = [0.0 if codes.dtype == torch.float32 else format_of(codes.dtype).max for codes in (exp_avg, exp_avg_sq)]
    bounds = [math.log2(top) * 2 + math.log2(fraction) if top else 0.0 for top in largest]
    return {
        "MAX1": largest[0],
        "MAX2": largest[1],
        "BOUND1_LOG2": bounds[0],
        "BOUND2_LOG2": bounds[1],
        "EXPANDED": expanded,
        "STEP": step,
        "EXPONENT_MAX": exponent_max,
    }


def _programs(
    sizes: tuple[int, ...], first_blocks: tuple[int, ...], block_size: int, per_program: int
) -> Iterator[int]:
    """Yield tensor, first block of it, size and first row of the tensor, for each program."""
    for tensor, (size, row) in enumerate(zip(sizes, first_blocks, strict=True)):
        for block in range(0, blocks(size, block_size), per_program):
            yield from (tensor, block, size, row)
