"""How much one cast to 8 bits loses, in three numbers computed on the device without a synchronization.

    saturation   share of elements beyond the largest code
    underflow    share of nonzero elements cast to zero
    noise        power of the errors over that of the values, the mean over segments of 128 neighbours

SQNR of a whole tensor says little about FP8: a just-in-time scale stores the largest element exactly, so one
outlier that drives all others to zero improves the ratio. Here it is *local*, −10·log10(noise): a lost segment counts
as 1, a zero segment not at all. For a Gaussian: e4m3 31.5 dB, e5m2 25.5 dB.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from coat_core.config import FP8LinearConfig
from coat_core.formats import format_of
from coat_core.granularity import PER_ROW, PER_TENSOR, Granularity
from coat_core.int8 import rotate
from coat_core.linear.function import load_weight
from coat_core.quantize import dequantize, split_groups

SAMPLE = 1 << 20  # elements measured per cast
SEGMENT = 128
ROUNDED_SCALE = 2.0**-20  # a scale is rounded to fp32: its format.max falls short of amax by up to 2^-23 (relative)
# attribute of a layer: the three numbers of its weight as one string, which ai-toolkit stores with the codes when it
# keeps a quantized model, so that they come back with it
WEIGHT_PRECISION = "coat_weight_precision"


def decibels(noise: float) -> float:
    """Local SQNR; inf for an exact cast, nan for no elements."""
    if noise == 0:
        return math.inf
    return -10 * math.log10(noise) if noise > 0 else math.nan


def measure_cast(x: Tensor, codes: Tensor, scale: Tensor, granularity: Granularity) -> Tensor:
    """Saturation, underflow and noise of the cast of x [..., K] to codes: fp32 [3] on the device of x.

    Saturated are those at ±format.max with x beyond x̂, ±inf among them: not what defines a just-in-time scale.
    """
    values = x.detach().to(torch.float32)
    x_hat = dequantize(codes, scale, granularity)
    code, nonzero = codes.to(torch.float32).abs(), values != 0
    saturated = (code >= format_of(codes.dtype).max) & (values.abs() > x_hat.abs() * (1 + ROUNDED_SCALE))
    lost = nonzero & (code == 0)
    finite = values.isfinite()
    errors = torch.where(finite, values - x_hat, 0.0)
    segment = min(SEGMENT, granularity.group_size) if granularity.name == "per_group" else SEGMENT
    noise = noise_share(split_groups(torch.where(finite, values, 0.0), segment), split_groups(errors, segment))
    shares = saturated.sum() / max(x.numel(), 1), lost.sum() / nonzero.sum().clamp(min=1)
    return torch.stack([*shares, noise.nanmean()])


def noise_share(values: Tensor, errors: Tensor) -> Tensor:
    """Power of the errors over that of the values, for each row of [..., n], at most 1; nan for a row of zeros."""
    largest = values.abs().amax(-1, keepdim=True)  # squares of small gradients would be zero in fp32
    return ((errors / largest).square().sum(-1) / (values / largest).square().sum(-1)).clamp(max=1.0)


def sampled(x: Tensor, codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Evenly spaced rows of about `SAMPLE` elements, as views; a tensor without rows is measured whole."""
    step = -(-x.numel() // SAMPLE)
    if step <= 1 or x.ndim == 1:
        return x, codes, scale
    return x[..., ::step, :], codes[..., ::step, :], scale[..., ::step, :] if scale.ndim else scale


@torch.no_grad()
def note_weight(module: nn.Module, weight: Tensor, config: FP8LinearConfig) -> None:
    """Measure a frozen weight [N, K] while the original still exists; weights on the meta device are skipped."""
    if weight.is_meta:
        return
    stored = load_weight(module, config)
    rows, columns = stored.rotations  # of INT8 whole blocks of rows, which were rotated together
    blocks = (
        x.reshape(len(x) // rows, -1) if x.ndim else x for x in (weight.detach(), stored.for_fprop(), stored.scale)
    )
    values, codes, scale = (x.reshape(-1, x.shape[-1] // rows) if x.ndim else x for x in sampled(*blocks))
    values = rotate(rotate(values.to(scale.device), columns).t(), rows).t()
    measured = measure_cast(values, codes, scale, PER_ROW if scale.ndim else PER_TENSOR)
    setattr(module, WEIGHT_PRECISION, " ".join(map(repr, measured.tolist())))
