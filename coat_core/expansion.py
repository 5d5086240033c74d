"""Dynamic range expansion: make a group fill the format's range before the cast.

Optimizer moments use only a small part of e4m3's dynamic range (the paper measures 1e3 for exp_avg, 1e1 for
exp_avg_sq, of 2e5 available). For the nonzero magnitudes of one block, with lo = min and hi = max:

    center   = sqrt(hi · lo)
    exponent = k = log2(bound) / log2(hi / lo),   bound = format.max² · range_fraction
    f(x)     = sign(x) · abs(x / center)^k        expand
    x        = sign(y) · center · abs(y)^(1/k)    contract

after which hi/lo of f(x) is `bound`, and the usual scaling puts hi at format.max. Blocks wider than the bound are
*compressed* (k < 1), so the smallest nonzero value still gets a nonzero code.

A block without nonzero values, or with only one magnitude, gets k = 1 and stays finite.
NaN stays NaN and touches no other element of its block; ±inf becomes ± the largest finite magnitude of its block.

Shapes: blocks [n, B]; center, exponent [n, 1].
Source: arXiv 2410.19313, section 4; the constants of its CUDA kernel are `PAPER_EXPANSION`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coat_core.config import ExpansionConfig
from coat_core.formats import Format
from coat_core.quantize import finite_abs, neighbours, saturating_cast, scale_from_amax

# The smallest exponent. fp32 magnitudes span 2^-149 … 2^128; (2^277)^(1/16) = 2^17.3 is inside e4m3's 2^17.8.
EXPONENT_MIN = 1.0 / 16.0

FP32_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
FP32_MAX = torch.finfo(torch.float32).max


def expansion_parameters(blocks: Tensor, fmt: Format, config: ExpansionConfig) -> tuple[Tensor, Tensor]:
    """Return (center, exponent), fp32 [n, 1], of blocks fp32 [n, B]."""
    magnitude = finite_abs(blocks)
    nonzero = magnitude > 0
    high = magnitude.amax(dim=-1, keepdim=True)
    low = torch.where(nonzero, magnitude, torch.inf).amin(dim=-1, keepdim=True)
    spread_log2 = torch.log2(high) - torch.log2(low)
    bound_log2 = math.log2(fmt.max) * 2 + math.log2(config.range_fraction)
    exponent = bound_log2 / spread_log2
    if config.exponent_step:
        exponent = torch.floor(exponent / config.exponent_step) * config.exponent_step
    exponent = exponent.clamp(EXPONENT_MIN, config.exponent_max)
    center = torch.sqrt(high) * torch.sqrt(low)
    plain = ~(spread_log2 > 0) | ~spread_log2.isfinite()  # no nonzero value, or a single magnitude
    unit = torch.ones_like(center)
    return torch.where(plain & ~(center.isfinite() & (center > 0)), unit, center), torch.where(plain, unit, exponent)


def expand(blocks: Tensor, center: Tensor, exponent: Tensor) -> Tensor:
    """f(x) = sign(x)·abs(x/center)^exponent for fp32 [n, B]; zeros stay zero, abs(x/center) is kept inside fp32."""
    ratio = (blocks.abs() / center).clamp(FP32_SMALLEST_NORMAL, FP32_MAX)
    return torch.sign(blocks) * ratio.pow(exponent)


def clamp_infinities(blocks: Tensor, without_finite: float) -> Tensor:
    """Replace ±inf in [n, B] by ± the largest finite magnitude of its row (±without_finite in a row without one)."""
    limit = finite_abs(blocks).amax(dim=-1, keepdim=True)
    limit = torch.where(limit > 0, limit, torch.full_like(limit, without_finite))
    return blocks.clamp(-limit, limit)


def quantize_blocks(
    blocks: Tensor, fmt: Format, expansion: ExpansionConfig | None, uniform: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Quantize each row of fp32 [n, B] with one scale; with `expansion` no nonzero element gets a zero code.

    Returns codes FP8 [n, B], scale fp32 [n, 1] and, with `expansion`, exponent and center, fp32 [n, 1].
    """
    numbers: tuple[Tensor, ...] = ()
    blocks = expanded = clamp_infinities(blocks, fmt.max)
    if expansion is not None:
        center, exponent = expansion_parameters(blocks, fmt, expansion)
        numbers = (exponent, center)
        expanded = expand(blocks, center, exponent)
    scale = scale_from_amax(finite_abs(expanded).amax(dim=-1, keepdim=True), fmt.max)
    codes = expanded / scale
    if uniform is not None:
        below, above = neighbours(codes, fmt)
        lower = dequantize_blocks(below, scale, *numbers)
        upper = dequantize_blocks(above, scale, *numbers)
        codes = torch.where(uniform * (upper - lower) < blocks - lower, above, below)  # `rounding`
    return saturating_cast(codes, fmt), scale, *numbers


def dequantize_blocks(
    codes: Tensor, scale: Tensor, exponent: Tensor | None = None, center: Tensor | None = None
) -> Tensor:
    """Inverse of `quantize_blocks`, fp32 [n, B]."""
    values = codes.to(torch.float32) * scale
    if exponent is None or center is None:
        return values
    magnitude = values.abs().pow(1.0 / exponent) * center
    return torch.sign(values) * magnitude.clamp(FP32_SMALLEST_NORMAL, FP32_MAX)  # nonzero stays nonzero
