"""One AdamW step of many tensors with 8-bit moments in one launch.

A program holds R whole blocks of one tensor in registers: parameter, gradient, codes and numbers are read and written
once. Two tables on the device (`device_table`) give tensor, block, size and row of each program, and the addresses of
parameters and gradients, which change where `zero_grad` drops the gradients; gradients copied into a fixed buffer would
be read and written once more. The compiler cannot infer an address's alignment from a table, so the launcher checks
and passes it: ALIGNED lets a thread read 16 bytes at a time.

Without expansion all is rounded as in the reference, and draws have its bits. Powers are exp2(k·log2(x)) by the GPU's
own two instructions, where powf takes a hundred. abs(k·log2(x)) < 18; log2 errs by 2^-22, absolute near 1 and relative
elsewhere, so x^k errs by 2^-18 for k about 2 and 2^-14 for the largest k, 256; neighbouring codes are 2^-4 apart.
Division by a number of the block is multiplication by its reciprocal, for the same reason.

Shapes: tiles [R, P], P the power of two from the block size B on; numbers of a block [R].
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

from coat_core.expansion import EXPONENT_MIN
from coat_core.formats import E4M3, E5M2, INT8_RATIO, UINT8_LOG, format_of
from coat_core.moments import LOG_MAX, LOG_NAN, RATIO_MAX, RATIO_NAN
from coat_core.ops import adamw as operators
from coat_core.ops.adamw import Moment
from coat_core.ops.device import TL_DTYPES, as_codes, as_values, finite_abs, nearest, saturated, scale_from_amax
from coat_core.ops.dispatch import launcher
from coat_core.ops.launch import device_table, finished, launch, n_blocks, power_of_two
from coat_core.rounding import MULTIPLIER_1, MULTIPLIER_2

TILE_ELEMENTS = 1024
ELEMENTS_PER_WARP = 256
REGISTERS = 80  # a thread; left alone, ptxas takes 64 or 72 and spills 16 bytes on some cards
REGISTERS_DRAWN = 96  # with draws; 80 spill 8 to 24 bytes
DROPPED_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # of an fp32 mantissa


# how a moment is stored
FP32, PLAIN, EXPANDED, RATIO, LOG = (tl.constexpr(form) for form in range(5))
INTEGER_FORMS = {INT8_RATIO.dtype: RATIO, UINT8_LOG.dtype: LOG}

TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
HUGE = tl.constexpr(torch.finfo(torch.float32).max)
SMALLEST_EXPONENT = tl.constexpr(EXPONENT_MIN)
RATIO_TOP, RATIO_NOT_A_NUMBER = tl.constexpr(RATIO_MAX), tl.constexpr(RATIO_NAN)
LOG_TOP, LOG_NOT_A_NUMBER = tl.constexpr(LOG_MAX), tl.constexpr(LOG_NAN)
E4M3_MAX, E4M3_SMALLEST, E4M3_BITS = map(tl.constexpr, (E4M3.max, E4M3.smallest_normal, E4M3.mantissa_bits))
E5M2_SMALLEST, E5M2_BITS = tl.constexpr(E5M2.smallest_normal), tl.constexpr(E5M2.mantissa_bits)
FIRST_FACTOR, SECOND_FACTOR = tl.constexpr(MULTIPLIER_1), tl.constexpr(MULTIPLIER_2)


@triton.jit
def _log2(x):
    """log2 of positive fp32, denormal too: libdevice's takes those for 0."""
    small = x < TINY
    return tl.log2(tl.where(small, x * 4294967296.0, x)) - tl.where(small, 32.0, 0.0)


@triton.jit
def _held(x):
    return tl.clamp(x, TINY, HUGE, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _power(x, exponent, ON_GPU: tl.constexpr):
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
    signed = magnitude.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -2147483648)
    return tl.where(x == 0, 0.0, signed.to(tl.float32, bitcast=True))


@triton.jit
def _expand(x, center, exponent, ON_GPU: tl.constexpr):
    shift = tl.where(center < 2.0**-64, 2.0**64, tl.where(center > 2.0**64, 2.0**-64, 1.0))  # 1/center stays normal
    ratio = tl.abs(x) * shift * tl.div_rn(1.0, center * shift)
    return _with_sign(_power(_held(ratio), exponent, ON_GPU), x)


@triton.jit
def _contract(x, center, exponent, ON_GPU: tl.constexpr):
    magnitude = _power(_held(tl.abs(x)), tl.div_rn(1.0, exponent), ON_GPU) * center
    return _with_sign(_held(magnitude), x)


@triton.jit
def _expansion_parameters(magnitude, high, BOUND_LOG2: tl.constexpr, STEP: tl.constexpr, EXPONENT_MAX: tl.constexpr):
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
def _largest(x):
    return tl.max(finite_abs(x), axis=1)[:, None]


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * FIRST_FACTOR
    x = (x ^ (x >> 13)) * SECOND_FACTOR
    return x ^ (x >> 16)


@triton.jit
def _random_bits(draws_ptr, tensor, elements):
    """32 bits for each element, from the tensor's row of draws: stream, step, first element."""
    stream = tl.load(draws_ptr + 3 * tensor)
    step = tl.load(draws_ptr + 3 * tensor + 1)
    elements += tl.load(draws_ptr + 3 * tensor + 2)
    stream = stream.to(tl.uint32, bitcast=True)
    step = step.to(tl.uint32, bitcast=True)
    return _mix(_mix(elements.to(tl.uint32) ^ stream) + _mix(step ^ _mix(stream)))


@triton.jit
def _neighbours(x, MAX: tl.constexpr):
    SMALLEST: tl.constexpr = E4M3_SMALLEST if MAX == E4M3_MAX else E5M2_SMALLEST
    BITS: tl.constexpr = E4M3_BITS if MAX == E4M3_MAX else E5M2_BITS
    exponent = (tl.maximum(x, SMALLEST).to(tl.int32, bitcast=True) & 0x7F800000) - (BITS << 23)
    spacing = exponent.to(tl.float32, bitcast=True)
    per_spacing = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    lower = tl.floor(x * per_spacing) * spacing
    return lower, tl.minimum(lower + spacing, MAX)


@triton.jit
def _log_values(codes, scale, exponent):
    root = tl.exp2(exponent * 0.5 * (codes - LOG_TOP))
    return _held(root * scale * root)


@triton.jit
def _read(moment, where, FORM: tl.constexpr, ON_GPU: tl.constexpr):
    """A moment in fp32 [R, P], from codes and their numbers per block; in RATIO its ratio to sqrt(exp_avg_sq).

    `moment`: its two pointers, and the distance of a block's numbers; `where`: places of a tile's codes, its blocks.
    """
    codes_ptr, numbers_ptr, stride = moment
    places, inside, rows, in_rows = where
    codes = tl.load(codes_ptr + places, mask=inside, other=0.0)
    values = codes.to(tl.float32) if FORM == LOG else as_values(codes)
    if FORM != FP32:
        scale = tl.load(numbers_ptr + rows, mask=in_rows, other=1.0)[:, None]
        if FORM == RATIO:
            values = tl.where(values == RATIO_NOT_A_NUMBER, float("nan"), values * scale)
        elif FORM == LOG:
            exponent = tl.load(numbers_ptr + stride + rows, mask=in_rows, other=0.0)[:, None]
            magnitude = tl.where(values == 0, 0.0, _log_values(values, scale, exponent))
            values = tl.where(values == LOG_NOT_A_NUMBER, float("nan"), magnitude)
        else:
            values *= scale
            if FORM == EXPANDED:
                exponent = tl.load(numbers_ptr + stride + rows, mask=in_rows, other=1.0)[:, None]
                center = tl.load(numbers_ptr + 2 * stride + rows, mask=in_rows, other=1.0)[:, None]
                values = _contract(values, center, exponent, ON_GPU)
    return values


@triton.jit
def _log_codes(values, drawn):
    high = _largest(values)
    high = tl.where(high > 0, high, 1.0)
    positive = values > 0
    low = tl.min(tl.where(positive, values, high), axis=1)[:, None]
    high_log2 = _log2(high)
    exponent = tl.div_rn(high_log2 - _log2(tl.minimum(low, high)), LOG_TOP - 1.0)
    per_code = tl.div_rn(1.0, tl.where(exponent > 0, exponent, 1.0))
    below = (high_log2 - _log2(tl.where(positive, saturated(values, high), high))) * per_code
    if drawn is None:
        codes = tl.clamp(-nearest(below) + LOG_TOP, 1.0, LOG_TOP)
    else:
        codes = tl.clamp(-tl.ceil(below) + LOG_TOP, 1.0, LOG_TOP)
        upper_code = tl.minimum(codes + 1.0, LOG_TOP)
        lower = _log_values(codes, high, exponent)
        upper = _log_values(upper_code, high, exponent)
        codes = tl.where(drawn * (upper - lower) < saturated(values, high) - lower, upper_code, codes)
    codes = tl.where(positive, codes, 0.0)
    return tl.where(values != values, LOG_NOT_A_NUMBER, codes), high, exponent


@triton.jit
def _write(
    values,
    drawn,
    moment,
    where,
    FORM: tl.constexpr,
    MAX: tl.constexpr,
    BOUND_LOG2: tl.constexpr,
    STEP: tl.constexpr,
    EXPONENT_MAX: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Inverse of `_read`; rounds to nearest or, with draws and values of 0 or more, stochastically."""
    codes_ptr, numbers_ptr, stride = moment
    places, inside, rows, in_rows = where
    rows, in_rows = rows[:, None], in_rows[:, None]
    if FORM == RATIO:
        high = _largest(values)
        scale = scale_from_amax(high, RATIO_TOP)
        codes = nearest(tl.div_rn(saturated(values, tl.where(high > 0, high, 1.0)), scale))
        values = tl.where(values != values, RATIO_NOT_A_NUMBER, codes)
        tl.store(numbers_ptr + rows, scale, mask=in_rows)
    elif FORM == LOG:
        values, scale, exponent = _log_codes(values, drawn)
        tl.store(numbers_ptr + rows, scale, mask=in_rows)
        tl.store(numbers_ptr + stride + rows, exponent, mask=in_rows)
    elif FORM != FP32:
        limit = _largest(values)
        values = saturated(values, tl.where(limit > 0, limit, MAX))
        exact, magnitude = values, finite_abs(values)
        high = tl.max(magnitude, axis=1)[:, None]
        if FORM == EXPANDED:
            center, exponent = _expansion_parameters(magnitude, high, BOUND_LOG2, STEP, EXPONENT_MAX)
            values = _expand(values, center, exponent, ON_GPU)
            high = _expand(high, center, exponent, ON_GPU)  # f is monotone: the amax of the expanded row
            tl.store(numbers_ptr + stride + rows, exponent, mask=in_rows)
            tl.store(numbers_ptr + 2 * stride + rows, center, mask=in_rows)
        scale = scale_from_amax(high, MAX)
        tl.store(numbers_ptr + rows, scale, mask=in_rows)
        values = saturated(values * tl.div_rn(1.0, scale) if FORM == EXPANDED else tl.div_rn(values, scale), MAX)
        if drawn is not None:
            values, upper_code = _neighbours(values, MAX)
            lower, upper = values * scale, upper_code * scale
            if FORM == EXPANDED:
                lower = _contract(lower, center, exponent, ON_GPU)
                upper = _contract(upper, center, exponent, ON_GPU)
            values = tl.where(drawn * (upper - lower) < exact - lower, upper_code, values)
    if FORM == LOG:
        codes = values.to(tl.uint8)
    else:
        codes = as_codes(values, codes_ptr)
    tl.store(codes_ptr + places, codes, mask=inside)


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
    tensor = tl.load(programs_ptr + 4 * program)
    first = tl.load(programs_ptr + 4 * program + 1)
    size = tl.load(programs_ptr + 4 * program + 2)
    first_row = tl.load(programs_ptr + 4 * program + 3)
    param_ptr = tl.load(addresses_ptr + 2 * tensor).to(tl.pointer_type(PARAM_TYPE))
    grad_ptr = tl.load(addresses_ptr + 2 * tensor + 1).to(tl.pointer_type(GRAD_TYPE))
    if table_ptr is not None:
        decay = tl.load(table_ptr + 3 * tensor)
        step_size = tl.load(table_ptr + 3 * tensor + 1)
        root = tl.load(table_ptr + 3 * tensor + 2)
        size = tl.where(root == root, size, 0)  # a row of NaN: this tensor is skipped
    if ALIGNED:
        size = tl.multiple_of(size, 16)
        param_ptr = tl.multiple_of(param_ptr, 16)
        grad_ptr = tl.multiple_of(grad_ptr, 16)
    block, column = first + tl.arange(0, R), tl.arange(0, P)
    offsets = block[:, None] * B + column[None, :]
    inside = (column[None, :] < B) & (offsets < size)
    rows, in_rows = first_row + block, block * B < size
    places = rows[:, None] * B + column[None, :]
    grad = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if MAXIMIZE:
        grad = -grad
    where = places, inside, rows, in_rows
    exp_avg = (exp_avg_ptr, exp_avg_numbers_ptr, stride)
    exp_avg_sq = (exp_avg_sq_ptr, exp_avg_sq_numbers_ptr, stride)
    v = _read(exp_avg_sq, where, FORM2, ON_GPU)
    m = _read(exp_avg, where, FORM1, ON_GPU)
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
        param = _rounded_stochastically(param, _random_bits(param_draws_ptr, tensor, offsets), DROPPED)
    tl.store(param_ptr + offsets, param.to(PARAM_TYPE), mask=inside)
    if FORM1 == RATIO:
        usable = (v > 0) & (v < float("inf"))
        m = tl.where(usable, m / tl.where(usable, sqrt_v, 1.0), 0.0)  # `moments.update_ratio`
    _write(m, None, exp_avg, where, FORM1, MAX1, BOUND1_LOG2, STEP, EXPONENT_MAX, ON_GPU)
    if draws_ptr is None:
        drawn = None
    else:
        bits = _random_bits(draws_ptr, tensor, offsets)
        drawn = (bits >> 8).to(tl.int32).to(tl.float32) * 2.0**-24  # `rounding.uniform`
    _write(v, drawn, exp_avg_sq, where, FORM2, MAX2, BOUND2_LOG2, STEP, EXPONENT_MAX, ON_GPU)


@launcher(operators._fp8_adamw_step)
def fp8_adamw_step(a: Any) -> None:
    sizes = tuple(map(Tensor.numel, a.params))
    first_blocks = a.first_blocks
    if not any(sizes):
        return
    stride, block_size = a.exp_avg.shape
    device = a.exp_avg.device
    moments = [Moment(a.exp_avg, a.exp_avg_numbers), Moment(a.exp_avg_sq, a.exp_avg_sq_numbers)]
    if len(a.params) == 1:  # from its own blocks on, so that tensors of equal size share a table
        rows = slice(first_blocks[0], first_blocks[0] + n_blocks(sizes[0], block_size))
        first_blocks = [0]
        moments = [Moment(codes[rows], numbers[:, rows]) for codes, numbers in moments]
    written = [*a.params, *(moment.codes for moment in moments)]
    own = written
    if device.type == "cpu":  # the interpreter writes fp32
        own = [tensor.to(torch.float32) for tensor in written]
    own = list(map(Tensor.contiguous, own))
    *params, codes, sq_codes = own
    grads = list(map(Tensor.contiguous, a.grads))
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
        *(codes, moments[0].numbers, sq_codes, moments[1].numbers),
        *(a.table, a.draws, a.param_draws if dropped else None),
        stride,
        *a.hyper,
        PARAM_TYPE=TL_DTYPES[params[0].dtype],
        GRAD_TYPE=TL_DTYPES[grads[0].dtype],
        **_moment_options(moments, a.expansion),
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


def _moment_options(moments: list[Moment], expansion: list[float]) -> dict[str, object]:
    fraction, step, exponent_max = expansion
    options: dict[str, object] = {"STEP": step, "EXPONENT_MAX": exponent_max}
    forms = []
    for i, (codes, numbers) in enumerate(moments, start=1):
        plain = {0: FP32, 1: PLAIN, 3: EXPANDED}
        form = INTEGER_FORMS[codes.dtype] if codes.dtype in INTEGER_FORMS else plain[len(numbers)]
        is_fp8 = form.value in (PLAIN.value, EXPANDED.value)
        largest = format_of(codes.dtype).max if is_fp8 else 0.0
        options[f"FORM{i}"] = form.value
        options[f"MAX{i}"] = largest
        options[f"BOUND{i}_LOG2"] = math.log2(largest) * 2 + math.log2(fraction) if is_fp8 else 0.0
        forms.append(form.value)
    options["EXACT"] = set(forms) <= {FP32.value, PLAIN.value}
    return options


def _programs(
    sizes: tuple[int, ...], first_blocks: tuple[int, ...], block_size: int, per_program: int
) -> array.array[int]:
    """Return tensor, first block, and size and first row of the tensor, for each program."""
    table = array.array("q")
    for tensor, (size, row) in enumerate(zip(sizes, first_blocks, strict=True)):
        firsts = array.array("q", range(0, n_blocks(size, block_size), per_program))
        part = array.array("q", bytes(4 * firsts.itemsize * len(firsts)))
        for column, value in ((0, tensor), (2, size), (3, row)):
            part[column::4] = array.array("q", [value]) * len(firsts)
        part[1::4] = firsts
        table += part
    return table
