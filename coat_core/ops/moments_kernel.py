"""Reading and writing blocks of 8-bit moments inside a kernel: `expansion`, `moments` and `rounding` of coat_core.

Powers are exp2(k·log2(x)) by the GPU's own two instructions, where powf takes a hundred. abs(k·log2(x)) < 18; log2 errs
by 2^-22, absolute near 1 and relative elsewhere, so x^k errs by 2^-18 for k about 2 and 2^-14 for the largest k, 256;
neighbouring codes are 2^-4 apart. Division by a number of the block is multiplication by its reciprocal, for the same
reason. Without expansion all is rounded as in the reference. Draws have the reference's bits.

Shapes: tiles [R, P], P the power of two from the block size on; numbers of a block [R].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from coat_core.expansion import EXPONENT_MIN
from coat_core.formats import E4M3, E5M2, INT8_RATIO, UINT8_LOG
from coat_core.moments import LOG_MAX, LOG_NAN, RATIO_MAX, RATIO_NAN
from coat_core.ops.device import as_codes, as_values, finite_abs, nearest, saturated, scale_from_amax
from coat_core.rounding import MULTIPLIER_1, MULTIPLIER_2

# how a moment is stored
FP32, PLAIN, EXPANDED, RATIO, LOG = (tl.constexpr(form) for form in range(5))
INTEGER_FORMS = {INT8_RATIO.dtype: RATIO, UINT8_LOG.dtype: LOG}

TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
HUGE = tl.constexpr(torch.finfo(torch.float32).max)
SMALLEST_EXPONENT = tl.constexpr(EXPONENT_MIN)
RATIO_TOP = tl.constexpr(RATIO_MAX)
RATIO_NOT_A_NUMBER = tl.constexpr(RATIO_NAN)
LOG_TOP = tl.constexpr(LOG_MAX)
LOG_NOT_A_NUMBER = tl.constexpr(LOG_NAN)
E4M3_MAX, E4M3_SMALLEST, E4M3_BITS = map(tl.constexpr, (E4M3.max, E4M3.smallest_normal, E4M3.mantissa_bits))
E5M2_SMALLEST = tl.constexpr(E5M2.smallest_normal)
E5M2_BITS = tl.constexpr(E5M2.mantissa_bits)
FIRST_FACTOR = tl.constexpr(MULTIPLIER_1)
SECOND_FACTOR = tl.constexpr(MULTIPLIER_2)


def form_of(dtype: torch.dtype, numbers: int) -> int:
    form = INTEGER_FORMS[dtype] if dtype in INTEGER_FORMS else {0: FP32, 1: PLAIN, 3: EXPANDED}[numbers]
    return int(form.value)


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
def random_bits(stream, step, elements):
    stream, step = stream.to(tl.uint32, bitcast=True), step.to(tl.uint32, bitcast=True)
    return _mix(_mix(elements.to(tl.uint32) ^ stream) + _mix(step ^ _mix(stream)))


@triton.jit
def uniform(stream, step, elements):
    return (random_bits(stream, step, elements) >> 8).to(tl.int32).to(tl.float32) * 2.0**-24


@triton.jit
def _neighbours(x, MAX: tl.constexpr):
    SMALLEST: tl.constexpr = E4M3_SMALLEST if MAX == E4M3_MAX else E5M2_SMALLEST
    BITS: tl.constexpr = E4M3_BITS if MAX == E4M3_MAX else E5M2_BITS
    exponent = (tl.maximum(x, SMALLEST).to(tl.int32, bitcast=True) & 0x7F800000) - (BITS << 23)
    spacing, per_spacing = exponent.to(tl.float32, bitcast=True), (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    lower = tl.floor(x * per_spacing) * spacing
    return lower, tl.minimum(lower + spacing, MAX)


@triton.jit
def _log_values(codes, scale, exponent):
    root = tl.exp2(exponent * -0.5 * (LOG_TOP - codes))
    return _held(root * scale * root)


@triton.jit
def read(moment, where, FORM: tl.constexpr, ON_GPU: tl.constexpr):
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
        codes = tl.clamp(LOG_TOP - nearest(below), 1.0, LOG_TOP)
    else:
        codes = tl.clamp(LOG_TOP - tl.ceil(below), 1.0, LOG_TOP)
        upper_code = tl.minimum(codes + 1.0, LOG_TOP)
        lower, upper = _log_values(codes, high, exponent), _log_values(upper_code, high, exponent)
        codes = tl.where(drawn * (upper - lower) < saturated(values, high) - lower, upper_code, codes)
    codes = tl.where(positive, codes, 0.0)
    return tl.where(values != values, LOG_NOT_A_NUMBER, codes), high, exponent


@triton.jit
def write(
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
    """Inverse of `read`; rounds to nearest or, with draws and values of 0 or more, stochastically."""
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
                lower, upper = _contract(lower, center, exponent, ON_GPU), _contract(upper, center, exponent, ON_GPU)
            values = tl.where(drawn * (upper - lower) < exact - lower, upper_code, values)
    if FORM == LOG:
        codes = values.to(tl.uint8)
    else:
        codes = as_codes(values, codes_ptr)
    tl.store(codes_ptr + places, codes, mask=inside)
