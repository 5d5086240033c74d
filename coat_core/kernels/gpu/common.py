"""Pieces of kernels: scaling to FP8 as `coat_core.quantize` defines it."""

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
    """X within ±max: what the cast to FP8 rounds. NaN stays NaN."""
    return tl.clamp(x, -FORMAT_MAX, FORMAT_MAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rounded(x, like_ptr):
    """X rounded to the dtype that a pointer points to, in fp32."""
    return x.to(like_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def store_row_codes(values, codes_ptr, scale_ptr, rows, are_rows, offsets, inside, FORMAT_MAX: tl.constexpr):
    """Quantize whole rows that a program holds.

    Args:
        values: fp32 [R, BLOCK], 0 where nothing is inside.
        codes_ptr: of the codes; None leaves the amax of each row alone.
        scale_ptr: of a scale or amax for each row; None does nothing at all.
        rows: index of each row [R].
        are_rows: which of them exist [R].
        offsets: of the codes [R, BLOCK].
        inside: which of those exist [R, BLOCK].
        FORMAT_MAX: of the codes.
    """
    if scale_ptr is not None:
        amax = tl.max(finite_abs(values), axis=1)
        if codes_ptr is None:
            tl.store(scale_ptr + rows, amax, mask=are_rows)
        else:
            scale = scale_from_amax(amax, FORMAT_MAX)
            tl.store(scale_ptr + rows, scale, mask=are_rows)
            codes = saturated(tl.div_rn(values, scale[:, None]), FORMAT_MAX)
            tl.store(codes_ptr + offsets, codes.to(codes_ptr.dtype.element_ty), mask=inside)
