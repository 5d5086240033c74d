"""Scaling to FP8 and back: the specification of the codes of a high precision tensor.

    scale = max(amax / format.max, 2^-126)      (fp32; the dequantization multiplier)
    codes = saturating_cast(x · (1 / scale))
    x     ≈ codes · scale

One division a scale, a multiplication an element: a code next to a tie may differ from that of x / scale, and the
largest element still gets ±format.max. Below 2^-126 the reciprocal would be infinite.

A group of zeros gets scale 1 and zero codes. ±inf clamps to ±format.max (its group's amax is that of the finite
values), NaN stays NaN. `ops.quantize` has the same functions by the device's kernel.

Shapes: x [..., K]; codes like x; scale as `Granularity.scale_shape` says.
Source: arXiv 2410.19313, sections 3 and 5.2 (group scaling).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from coat_core.formats import Format, get_format
from coat_core.granularity import PER_TENSOR, Granularity

SMALLEST_SCALE = 2.0**-126  # fp32's smallest normal number, the reciprocal of another


class Quantized(NamedTuple):
    """FP8 codes with their scales: x ≈ codes · scale."""

    codes: Tensor  # FP8 dtype, the shape of x
    scale: Tensor  # fp32, `granularity.scale_shape(x.shape)`
    granularity: Granularity  # which elements share a scale

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Codes · scale in `dtype`."""
        return dequantize(self.codes, self.scale, self.granularity, dtype)


def saturating_cast(x: Tensor, fmt: Format) -> Tensor:
    """Round to nearest even into `fmt`, clamping to ±fmt.max: `ml_dtypes` after clamping, for every bf16 value."""
    return x.clamp(-fmt.max, fmt.max).to(fmt.dtype)


def neighbours(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """The largest code not above x and the one after it, as fp32; fmt.max has no next."""
    exponent = x.clamp(min=fmt.smallest_normal).view(torch.int32) & 0x7F800000
    spacing = (exponent - (fmt.mantissa_bits << 23)).view(torch.float32)
    lower = torch.floor(x / spacing) * spacing
    return lower.clamp(max=fmt.max), (lower + spacing).clamp(max=fmt.max)


def stochastic_cast(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Round fp32 up or down to bf16 or fp16 by uniform random `bits`, int32 like x, so that the mean is x.

    Adds the lowest bits below the target's last mantissa bit and truncates the fp32 bit pattern; fp16 values below its
    normal range (abs(x) < 2^-14) are rounded on their grid of 2^-24 instead. Exactly representable values, ±inf and NaN
    come back unchanged; other fp16 values are clamped to ±65504.
    """
    dropped_bits = 16 if dtype == torch.bfloat16 else 13
    noise = bits & ((1 << dropped_bits) - 1)
    mask = -1 << dropped_bits
    rounded = ((x.view(torch.int32) + noise) & mask).view(torch.float32)
    if dtype == torch.float16:
        grid = 2.0**-24
        uniform = noise.to(torch.float32) / (1 << dropped_bits)
        rounded = torch.where(x.abs() < 2.0**-14, torch.floor(x / grid + uniform) * grid, rounded)
        rounded = rounded.clamp(-65504.0, 65504.0)
    return torch.where(x.isfinite(), rounded, x).to(dtype)


def split_groups(x: Tensor, group_size: int) -> Tensor:
    """View x [..., K] as [..., ceil(K / G), G], zero-padding the last group."""
    tail = -x.shape[-1] % group_size
    if tail:
        x = torch.nn.functional.pad(x, (0, tail))
    groups: Tensor = x.unflatten(-1, (-1, group_size))
    return groups


def finite_abs(x: Tensor) -> Tensor:
    """Return abs(x) with 0 in place of NaN and inf, for scales."""
    magnitude = x.detach().abs()
    return torch.where(magnitude.isfinite(), magnitude, torch.zeros((), dtype=x.dtype, device=x.device))


def amax(x: Tensor, granularity: Granularity) -> Tensor:
    """The largest finite magnitude per group, fp32 in `granularity.scale_shape(x.shape)`; 0 without one.

    In two stages, of which the first is by groups for every granularity.
    """
    group_amax = split_groups(finite_abs(x), granularity.group_size).amax(dim=-1).to(torch.float32)
    if granularity.name == "per_group":
        return group_amax
    return group_amax.amax() if granularity.name == "per_tensor" else group_amax.amax(dim=-1, keepdim=True)


def scale_from_amax(group_amax: Tensor, largest: float) -> Tensor:
    """Dequantization multiplier amax / largest code, at least SMALLEST_SCALE (fp32, same shape); 1 where amax is 0."""
    scale = group_amax / torch.full_like(group_amax, largest)  # by a number, CUDA multiplies by its reciprocal
    return torch.where(group_amax > 0, scale.clamp(min=SMALLEST_SCALE), torch.ones_like(scale))


def _spread(scale: Tensor, granularity: Granularity, size: int) -> Tensor:
    if granularity.name != "per_group":
        return scale
    return scale.repeat_interleave(granularity.group_size, dim=-1)[..., :size]


def quantize(x: Tensor, fmt: str = "e4m3", granularity: Granularity = PER_TENSOR) -> Quantized:
    """Quantize floating x [..., K] to FP8 with just-in-time scales: codes like x, scale fp32, x ≈ codes · scale.

    Numerics: Gaussian data comes back at 31.5 dB (e4m3) and 25.5 dB (e5m2) or better; tests/tolerances.py.
    """
    form = get_format(fmt)
    scale = scale_from_amax(amax(x, granularity), form.max)
    factor = _spread(torch.ones_like(scale) / scale, granularity, x.shape[-1])
    codes = saturating_cast(x.detach().to(torch.float32) * factor, form)
    return Quantized(codes, scale, granularity)


def dequantize(
    codes: Tensor, scale: Tensor, granularity: Granularity = PER_TENSOR, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Codes · scale [..., K], computed in fp32 and rounded once to `dtype`; shapes as of the module."""
    return (codes.to(torch.float32) * _spread(scale, granularity, codes.shape[-1])).to(dtype)


def sqnr_db(x: Tensor, x_hat: Tensor) -> float:
    """Return 20·log10(‖x‖ / ‖x − x̂‖) in dB, inf if equal, nan if only x is zero; ValueError if the shapes differ."""
    if x.shape != x_hat.shape:
        raise ValueError(f"x_hat of shape {tuple(x_hat.shape)}: must have the shape of x, {tuple(x.shape)}")
    signal = x.detach().double()
    noise_norm = (signal - x_hat.detach().double()).norm().item()
    signal_norm = signal.norm().item()
    if noise_norm == 0.0:
        return math.inf
    return 20.0 * math.log10(signal_norm / noise_norm) if signal_norm else math.nan
