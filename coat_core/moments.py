"""Two integer formats for AdamW's moments: exp_avg as a ratio to sqrt(exp_avg_sq), exp_avg_sq on a logarithmic grid.

AdamW uses its moments as the update m/sqrt(v). Stored apart, each moment adds its own rounding error. So int8_ratio
stores the update itself, evenly spaced, and recovers m from it and the stored v:

    code  = round(r / scale),   r = m/sqrt(v),   scale = largest abs(r) of the block / 127
    m     ≈ code · scale · sqrt(v as stored)

Then the stored m/sqrt(v) is code · scale, without v's rounding. Where both come from the same gradients, Cauchy-Schwarz
bounds the ratio by (1−β1) / sqrt((1−β2)·(1−β1²/β2)), 7.3 with usual betas; after a first gradient m/sqrt(v) is exact.

uint8_log spaces the codes 1 … 254 evenly in log(v) from the smallest nonzero value of the block to its largest:

    code  = 254 − round(log2(scale / v) / exponent),   scale = largest v,   exponent = log2(largest / smallest) / 253
    v     ≈ scale · 2^(−exponent · (254 − code))

Both ends of the block are on codes, so storing again changes nothing, and no nonzero v comes back 0.
Zeros are exact in both. NaN has a code of its own and touches no other element; ±inf becomes ± the largest finite
magnitude of its block. Where v is 0 or inf the ratio is 0.

Shapes: blocks [n, B]; scale, exponent [n, 1].
Source: own; measured against the paper's formats on captured moments, RESULTS.md.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from coat_core.expansion import FP32_MAX, FP32_SMALLEST_NORMAL, clamp_infinities
from coat_core.formats import INT8_RATIO, UINT8_LOG
from coat_core.quantize import finite_abs, scale_from_amax

RATIO_MAX, RATIO_NAN = 127, -128
LOG_MAX, LOG_NAN = 254, 255


def update_ratio(exp_avg: Tensor, exp_avg_sq: Tensor) -> Tensor:
    """Return m/sqrt(v), fp32 of one shape; 0 where v is 0, inf or NaN (the NaN of v comes back with v)."""
    usable = (exp_avg_sq > 0) & exp_avg_sq.isfinite()
    return torch.where(usable, exp_avg / exp_avg_sq.sqrt(), 0.0)


def quantize_ratio(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row of fp32 [n, B] to int8 with one scale, largest magnitude / 127; 1 in a row of zeros."""
    blocks = clamp_infinities(blocks, 1.0)
    scale = scale_from_amax(finite_abs(blocks).amax(dim=-1, keepdim=True), RATIO_MAX)
    codes = torch.round(blocks / scale).clamp(-RATIO_MAX, RATIO_MAX)
    return torch.where(blocks.isnan(), RATIO_NAN, codes).to(torch.int8), scale


def dequantize_ratio(codes: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `quantize_ratio`, fp32 [n, B]."""
    return torch.where(codes == RATIO_NAN, torch.nan, codes.to(torch.float32) * scale)


def quantize_log(blocks: Tensor, uniform: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize each row of fp32 [n, B], values of 0 or more, to uint8 with codes evenly spaced in the logarithm.

    Returns codes, scale and exponent.
    Numerics: a value comes back within a factor of (largest / smallest nonzero)^(±1/506).
    """
    blocks = clamp_infinities(blocks, 1.0)
    magnitude = finite_abs(blocks)
    positive = blocks > 0
    high = magnitude.amax(dim=-1, keepdim=True)
    high = torch.where(high > 0, high, torch.ones_like(high))
    low = torch.where(positive, magnitude, high).amin(dim=-1, keepdim=True)
    high_log2 = torch.log2(high)
    exponent = (high_log2 - torch.log2(low)) / (LOG_MAX - 1)
    below = (high_log2 - torch.log2(torch.where(positive, blocks, high))) / torch.where(exponent > 0, exponent, 1.0)
    if uniform is None:
        codes = (LOG_MAX - torch.round(below)).clamp(1, LOG_MAX)
    else:
        lower_code = (LOG_MAX - torch.ceil(below)).clamp(1, LOG_MAX)
        upper_code = (LOG_MAX - torch.ceil(below) + 1).clamp(1, LOG_MAX)
        lower = dequantize_log(lower_code, high, exponent)
        upper = dequantize_log(upper_code, high, exponent)
        codes = torch.where(uniform * (upper - lower) < blocks - lower, upper_code, lower_code)
    codes = torch.where(blocks.isnan(), LOG_NAN, torch.where(positive, codes, 0))
    return codes.to(torch.uint8), high, exponent


def dequantize_log(codes: Tensor, scale: Tensor, exponent: Tensor) -> Tensor:
    """Inverse of `quantize_log`, fp32 [n, B]; in two factors, so that no power underflows."""
    root = torch.exp2(exponent * -0.5 * (LOG_MAX - codes.to(torch.float32)))
    values = (root * scale * root).clamp(FP32_SMALLEST_NORMAL, FP32_MAX)
    values = torch.where(codes == 0, 0.0, values)
    return torch.where(codes == LOG_NAN, torch.nan, values)


# By the dtype of the codes. Encode: fp32 [n, B], and for exp_avg_sq `rounding.uniform`, → codes [n, B] and
# the format's numbers, fp32 [n, 1].
ENCODERS: dict[torch.dtype, Callable[..., tuple[Tensor, ...]]] = {
    INT8_RATIO.dtype: quantize_ratio,
    UINT8_LOG.dtype: quantize_log,
}
# Decode: codes [n, B] and the format's numbers [n, 1], in their order → fp32 [n, B]. A new state has zero codes and
# numbers of 1, which must give 0.
DECODERS: dict[torch.dtype, Callable[..., Tensor]] = {
    INT8_RATIO.dtype: dequantize_ratio,
    UINT8_LOG.dtype: dequantize_log,
}
