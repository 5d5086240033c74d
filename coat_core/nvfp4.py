"""NVFP4, the 4-bit format of frozen weights: E2M1 codes, an E4M3 scale for each 16 along K, one fp32 scale over all.

A code is a sign and one of eight magnitudes; with the scale s of its block, and the tensor's scale t,

    w ≈ e4m3(magnitude · s / 8) · scale          scale = 8 t,  t = amax / (6 · 256)

The cast to e4m3 makes the decoded weight an ordinary FP8 weight. A magnitude times s has up to six significant bits, of
which e4m3 keeps four: 0.1 dB, less than scales that need no rounding cost (0.8 dB). The 8 keeps the largest product,
6 · 448, below e4m3's 448, and is exact; 6 · 256 is a number of e4m3, so the largest weight is exact.

s is the E4M3 number near amax / (6 t) and amax / (4 t) whose decoded block is nearest to the original: the squared
error of 16 numbers on a coarse grid depends on where the grid falls. That is worth 1.5 dB; of twice as many, 1.53.

Shapes: W [N, K], K a multiple of 16; codes [N, K/2], the first of two in the low half of a byte; block scales
[N, K/16].
Source: OCP Microscaling formats 1.0 (E2M1); NVFP4 as cuDNN and cuBLAS describe it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coat_core.formats import E4M3
from coat_core.quantize import finite_abs, saturating_cast

BLOCK = 16
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the three low bits of a code
LARGEST_SCALE = 256.0  # of the largest weight's block
SHIFT = 8.0  # a decoded number is so much smaller than its magnitude times its scale
# candidates for a block's scale, in E4M3's steps, of which an octave has eight: its largest number becomes 6, or 4
STEPS = (-1, 0, 1, 4, 5, 6)
CHUNK = 1 << 22  # elements that are searched at a time


def quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a floating W [N, K], K a multiple of 16, to NVFP4, each block with the scale of least squared error.

    Returns codes uint8 [N, K/2], two a byte, block scales uint8 [N, K/16], the bits of E4M3 numbers, and the scale
    fp32 [] of the decoded e4m3 numbers.
    ±inf becomes the largest number of its block; a NaN makes the scale, and so all of the weight, NaN.
    Numerics: Gaussian weights come back at 21.5 dB or better; tests/tolerances.py.
    """
    if weight.is_meta:  # nothing to search, and plans make many
        sizes = (2, BLOCK)
        codes, scales = (weight.new_empty(len(weight), weight.shape[1] // n, dtype=torch.uint8) for n in sizes)
        return codes, scales, weight.new_empty((), dtype=torch.float32)
    blocks = weight.detach().unflatten(-1, (-1, BLOCK))
    block_amax = finite_abs(blocks).amax(-1).to(torch.float32)
    largest = block_amax.amax()
    unit = largest / torch.full_like(largest, MAGNITUDES[-1] * LARGEST_SCALE)
    unit = torch.where(unit > 0, unit, torch.ones_like(unit))
    rows = max(1, CHUNK // weight.shape[1])
    parts = zip(blocks.split(rows), block_amax.split(rows), strict=True)
    encoded = [_search(part, amax, unit) for part, amax in parts]
    codes, scales = (torch.cat(each) for each in zip(*encoded, strict=True))
    scale = torch.where(weight.isnan().any(), torch.nan, unit * SHIFT)
    return pack(codes.flatten(-2)), scales, scale


def _search(blocks: Tensor, block_amax: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    limit = MAGNITUDES[-1] * LARGEST_SCALE  # of finite values
    values = (blocks.to(torch.float32) / unit).nan_to_num(nan=0.0).clamp(-limit, limit)
    exact_fit = saturating_cast(block_amax / (MAGNITUDES[-1] * unit), E4M3).view(torch.uint8).to(torch.int16)
    best = torch.full_like(block_amax, torch.inf)
    scales = torch.ones_like(exact_fit, dtype=torch.uint8)
    for step in STEPS:
        bits = (exact_fit + step).clamp(1, 0x7E).to(torch.uint8)  # from the smallest number to the largest
        error = (values - as_e4m3(nearest(values, bits), bits).to(torch.float32) * SHIFT).square().sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        scales = torch.where(better, bits, scales)
    return encode(nearest(values, scales)), scales


def nearest(values: Tensor, scale_bits: Tensor) -> Tensor:
    """Round values [..., 16], in units of the tensor's scale, to ± `MAGNITUDES` of these block scales [...]."""
    scale = scale_bits.view(E4M3.dtype).to(torch.float32)
    scaled = values / scale.unsqueeze(-1)
    size = scaled.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (scaled / step).round().mul(step).clamp(-MAGNITUDES[-1], MAGNITUDES[-1])  # halfway: to the even code


def encode(rounded: Tensor) -> Tensor:
    """The codes of ± `MAGNITUDES`, uint8 of the same shape: 8 where negative, plus the magnitude's number."""
    size = rounded.abs()
    number = torch.where(size < 2, 2 * size, torch.where(size < 4, size + 2, size / 2 + 4))
    return number.to(torch.uint8) | (rounded.signbit().to(torch.uint8) << 3)


def as_e4m3(rounded: Tensor, scale_bits: Tensor) -> Tensor:
    """± `MAGNITUDES` [..., 16] of blocks with these scales [...], as e4m3 numbers of the same shape."""
    scale = scale_bits.view(E4M3.dtype).to(torch.float32)
    return saturating_cast(rounded * (scale / SHIFT).unsqueeze(-1), E4M3)


def decode(codes: Tensor, scale_bits: Tensor) -> Tensor:
    """Codes [..., 16] of blocks with these scales [...] as e4m3 numbers."""
    both_signs = (*MAGNITUDES, *(-size for size in MAGNITUDES))
    return as_e4m3(torch.tensor(both_signs, device=codes.device)[codes.to(torch.int32)], scale_bits)


def pack(codes: Tensor) -> Tensor:
    """Pack codes [N, K] two to a byte [N, K/2]."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Inverse of `pack`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
