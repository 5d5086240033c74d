"""Kernel building blocks: scaling to FP8 as `coat_core.quantize` defines it, reading it back, and adapters."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finite_abs(x):
    """abs(x), with 0 in place of NaN and inf."""
    magnitude = tl.abs(x)
    return tl.where(magnitude < float("inf"), magnitude, 0.0)


@triton.jit
def scale_from_amax(amax, FORMAT_MAX: tl.constexpr):
    """The dequantization multiplier amax / max; 1 where that is 0."""
    scale = tl.div_rn(amax, FORMAT_MAX)
    return tl.where(scale > 0, scale, 1.0)


@triton.jit
def saturated(x, FORMAT_MAX: tl.constexpr):
    """X clamped to ±max before the cast to FP8. NaN stays NaN."""
    return tl.clamp(x, -FORMAT_MAX, FORMAT_MAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def as_codes(x, codes_ptr):
    """X, fp32 within ±max, rounded to the pointer's code type; bytes are e4m3 on a GPU without an instruction for it.

    Normal values round in their own bits. Of the rest 2^-9 is the unit, and 2^14 is where fp32 has no finer one.
    """
    if codes_ptr.dtype.element_ty == tl.uint8:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 120 * 8
        small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        codes = tl.where(magnitude < 0x3C800000, small, tl.where(magnitude > 0x7F800000, 0x7F, normal))
        codes = (codes | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        codes = x.to(codes_ptr.dtype.element_ty)
    return codes


@triton.jit
def as_values(codes):
    """Return codes or saved values in fp32; bytes are e4m3, as in `as_codes`."""
    if codes.dtype == tl.uint8:
        bits = codes.to(tl.int32)
        magnitude = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 2.0**120  # exponents of bias 7 and 127
        magnitude = tl.where((bits & 0x7F) == 0x7F, float("nan"), magnitude)
        values = tl.where(bits >= 0x80, -magnitude, magnitude)
    else:
        values = codes.to(tl.float32)
    return values


@triton.jit
def rounded(x, like_ptr):
    """X rounded to the dtype that a pointer points to, in fp32."""
    return x.to(like_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def store_row_codes(values, codes_ptr, scale_ptr, rows, are_rows, offsets, inside, FORMAT_MAX: tl.constexpr):
    """Quantize whole rows that a program holds; without codes leave each row's amax, without scales do nothing."""
    if scale_ptr is not None:
        amax = tl.max(finite_abs(values), axis=1)
        if codes_ptr is None:
            tl.store(scale_ptr + rows, amax, mask=are_rows)
        else:
            scale = scale_from_amax(amax, FORMAT_MAX)
            tl.store(scale_ptr + rows, scale, mask=are_rows)
            codes = saturated(tl.div_rn(values, scale[:, None]), FORMAT_MAX)
            tl.store(codes_ptr + offsets, as_codes(codes, codes_ptr), mask=inside)


@triton.jit
def store_group_codes(
    values,
    codes_ptr,
    scale_ptr,
    rows,
    are_rows,
    first,
    end,
    width,
    FORMAT_MAX: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantize a tile, columns first to end of rows of `width`, in groups of G, a power of two up to BLOCK."""
    groups = tl.reshape(values, (R, BLOCK // G, G))
    scale = scale_from_amax(tl.max(finite_abs(groups), axis=2), FORMAT_MAX)
    places = first // G + tl.arange(0, BLOCK // G)[None, :]
    tl.store(scale_ptr + rows[:, None] * tl.cdiv(width, G) + places, scale, mask=are_rows[:, None] & (places * G < end))
    codes = tl.reshape(saturated(tl.div_rn(groups, scale[:, :, None]), FORMAT_MAX), (R, BLOCK))
    columns = first + tl.arange(0, BLOCK)[None, :]
    inside = are_rows[:, None] & (columns < end)
    tl.store(codes_ptr + rows[:, None] * width + columns, as_codes(codes, codes_ptr), mask=inside)


@triton.jit
def load_saved(x_ptr, scale_ptr, offsets, groups, inside, DTYPE: tl.constexpr):
    """Read values, or codes and their scales, in fp32, 0 outside; code · scale is rounded to DTYPE."""
    x = as_values(tl.load(x_ptr + offsets, mask=inside, other=0.0))
    if scale_ptr is not None:
        x = (x * tl.load(scale_ptr + groups, mask=inside, other=0.0)).to(DTYPE).to(tl.float32)
    return x


@triton.jit
def add_low_rank(
    y,
    h_ptr,
    up_ptr,
    h_rows,
    up_columns,
    up_stride,
    are_rows,
    are_columns,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
):
    """Return y + h·upᵀ in fp32 from these offsets, up's numbers up_stride apart; R and RANK_BLOCK are at least 16."""
    for start in tl.range(0, RANK, RANK_BLOCK, num_stages=1):
        rank = start + tl.arange(0, RANK_BLOCK)
        h = tl.load(h_ptr + h_rows[:, None] + rank, mask=are_rows[:, None] & (rank < RANK), other=0.0)
        up = tl.load(
            up_ptr + up_columns[None, :] + rank[:, None] * up_stride,
            mask=are_columns[None, :] & (rank < RANK)[:, None],
            other=0.0,
        )
        y = tl.dot(h, up, acc=y, input_precision="ieee")
    return y
