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
