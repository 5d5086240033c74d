"""INT8 per row after a rotation: x, dy and W where INT8 is multiplied faster than FP8, or alone.

    x̂ = x H          H orthonormal and symmetric, so x Wᵀ = (x H)(W H)ᵀ and H H = 1
    scale = amax(x̂ row) / 127
    codes = round(x̂ · (1 / scale))
    x ≈ (codes · scale) H

127 even steps are finer than e4m3's for a row's largest numbers and coarser for its small ones, so an outlier costs the
rest of its row precision. H mixes each 256 neighbours evenly. W is rotated once, along both axes, as x meets it along K
and dy along N; x and dy where they are quantized, y and dx back where their products are rounded:

    Ŵ = H W H,   y = ((x H) Ŵᵀ) H,   dx = ((dy H) Ŵ) H

H is the Kronecker power of the 4-point reflection y = sum(x) / 2 - x. All rows of its matrix have the same sum: unlike
Sylvester's matrices it does not gather a block's mean, which GELU leaves, in one number.

A row with inf or NaN has scale NaN: INT8 has no code for either, and a rotation spreads them anyway.

Shapes: x [..., K], codes like x, scale [..., 1].
Source: ConvRot, arXiv 2512.03673, section 3 (regular Hadamard matrices, blocks of 256); QuaRot, arXiv 2404.00456.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coat_core.granularity import PER_ROW
from coat_core.quantize import Quantized, scale_from_amax

INT8_MAX = 127
LARGEST_ROTATION = 256


def rotation_size(width: int) -> int:
    """How many neighbours a rotation mixes: the largest power of 4 up to 256 that divides `width`.

    256 divides the widths of every quantized linear of FLUX.1, FLUX.2 and Qwen-Image. 64 costs up to 4 dB where a row
    has outliers, 1024 gains up to 2: RESULTS.md.
    """
    size = 1
    while size < LARGEST_ROTATION and width % (4 * size) == 0:
        size *= 4
    return size


def rotate(x: Tensor, size: int) -> Tensor:
    """Return x H in fp32, H of `size` neighbours, with the kernel's bits; ValueError where `size` does not fit."""
    is_power = size > 0 and size & (size - 1) == 0 and size.bit_length() % 2 == 1
    if not is_power or size > LARGEST_ROTATION or x.shape[-1] % size:
        raise ValueError(f"size={size}: must be a power of 4 up to {LARGEST_ROTATION} that divides {x.shape[-1]}")
    values, stride = x.to(torch.float32), 1
    while stride < size:
        pairs = values.reshape(-1, 2, 2, stride)
        sums = pairs[:, :, 0] + pairs[:, :, 1]
        total = (sums[:, 0] + sums[:, 1])[:, None, None]
        values, stride = total * 0.5 - pairs, 4 * stride
    return values.reshape(x.shape)


def quantize_int8(x: Tensor, size: int, factors: Tensor | None = None) -> Quantized:
    """Rotate x and round each row: codes INT8 like x, scale fp32 [..., 1], of x H, or of x H times `factors` [K].

    Raises ValueError for a `size` that does not fit.
    Numerics: the product of a linear comes at 35.5 dB or better, with outlier channels too; tests/tolerances.py.
    """
    x = x.detach()
    values = rotate(x, size)
    values = values if factors is None else values * factors
    magnitude = values.abs()
    amax = torch.where(magnitude.isfinite(), magnitude, torch.inf).amax(dim=-1, keepdim=True)
    scale = scale_from_amax(amax, INT8_MAX)
    codes = (values * (torch.ones_like(scale) / scale)).round().nan_to_num(nan=0.0).to(torch.int8)
    return Quantized(codes, torch.where(amax.isfinite(), scale, torch.nan), PER_ROW)
