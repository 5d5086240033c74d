"""How precise one cast to 8 bits was, in four numbers computed on the device without a synchronization.

SQNR of a whole tensor says little about FP8: a just-in-time scale stores the largest element exactly, so one
outlier that drives all others to zero improves the ratio. Here it is *local*, averaged over segments of 128
neighbours along the last dimension:

    sqnr_db = −10·log10( mean over segments of ‖x − x̂‖² / ‖x‖² )

A lost segment counts as 1, a zero segment not at all. For a Gaussian: e4m3 31.5 dB, e5m2 25.5 dB.

`range_used` is the share of the format's octaves that a scaling group needs, from its largest value down to the 1
% quantile of the nonzero ones. Above 1 values underflow. (e4m3 has 17.8 octaves, e5m2 31.8; a Gaussian needs 8 to
9.)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from coat_core.config import FP8LinearConfig
from coat_core.formats import Format, format_of
from coat_core.granularity import PER_ROW, PER_TENSOR, Granularity
from coat_core.int8 import rotate
from coat_core.linear.weight import load_weight
from coat_core.metrics import cast_losses
from coat_core.quantize import dequantize, split_groups

__all__ = ["SAMPLE", "WEIGHT_PRECISION", "Measures", "evenly", "measure_cast", "note_weight", "octaves", "sampled"]

SAMPLE = 1 << 20  # elements measured per cast
SEGMENT = 128
# attribute of a layer: the four numbers of its weight as one string, which ai-toolkit stores with the codes when it
# keeps a quantized model, so that they come back with it
WEIGHT_PRECISION = "coat_weight_precision"
QUANTILE_SAMPLE = 4096
SHORTEST_SHARE = 0.01  # of the nonzero elements may be below the range


class Measures(NamedTuple):
    """The losses of a cast."""

    saturation: float  # share of elements beyond the largest code, 0 to 1
    underflow: float  # share of nonzero elements cast to zero, 0 to 1
    noise: float  # mean relative noise power of the segments, 0 to 1; nan where all are zero
    range_used: float  # share of the format's octaves that the values ask for; nan where that says nothing

    @property
    def sqnr_db(self) -> float:
        """Local SQNR; inf for an exact cast, nan for no elements."""
        if self.noise == 0:
            return math.inf
        return -10 * math.log10(self.noise) if self.noise > 0 else math.nan


def measure_cast(x: Tensor, codes: Tensor, scale: Tensor, granularity: Granularity) -> Tensor:
    """Measure the cast of x [..., K] to codes; returns `Measures` as fp32 [4] on the device of x."""
    losses = cast_losses(x, codes, dequantize(codes, scale, granularity))
    # in units of the codes: squares of small gradients would be zero in fp32
    unit = dequantize(torch.ones((), dtype=torch.float32, device=x.device).expand(codes.shape), scale, granularity)
    values = x.detach().to(torch.float32) / unit
    finite = values.isfinite()
    values = torch.where(finite, values, 0.0)
    errors = values - torch.where(finite, codes.to(torch.float32), 0.0)
    segment = min(SEGMENT, granularity.group_size) if granularity.name == "per_group" else SEGMENT
    rows, row_errors = split_groups(values, segment), split_groups(errors, segment)
    nonzero = (rows != 0).any(dim=-1)
    noise = (row_errors.square().sum(-1) / rows.square().sum(-1)).nan_to_num(nan=1.0).clamp(max=1.0)
    mean_noise = torch.where(nonzero, noise, 0.0).sum() / nonzero.sum()
    fmt = format_of(codes.dtype)
    magnitudes = evenly(values.reshape(-1), QUANTILE_SAMPLE).abs()
    range_used = (torch.log2(fmt.max / low_end(magnitudes)) / octaves(fmt)).clamp(min=0.0)
    return torch.stack([*losses, mean_noise, range_used])


def octaves(fmt: Format) -> float:
    """From a format's largest number to its smallest."""
    return math.log2(fmt.max / fmt.smallest_subnormal)


def low_end(magnitudes: Tensor) -> Tensor:
    """The magnitude that all but 1 % of the nonzero elements of each row of [..., n] reach; nan where all are zero."""
    nonzero = magnitudes > 0
    ordered = torch.where(nonzero, magnitudes, math.inf).sort(dim=-1).values
    place = (nonzero.sum(-1, keepdim=True) * SHORTEST_SHARE).to(torch.int64)
    low = ordered.gather(-1, place).squeeze(-1)
    return torch.where(low.isfinite(), low, math.nan)


def evenly(flat: Tensor, most: int) -> Tensor:
    """At most `most` evenly spaced elements [n]; an odd step meets all columns of a matrix with an even width."""
    step = -(-flat.numel() // most)
    return flat if step == 1 else flat[:: step | 1]


def sampled(x: Tensor, codes: Tensor, scale: Tensor, granularity: Granularity) -> tuple[Tensor, Tensor, Tensor]:
    """Evenly spaced rows of about `SAMPLE` elements, as views; the beginning of a tensor without rows."""
    step = -(-x.numel() // SAMPLE)
    if step == 1:
        return x, codes, scale
    if x.ndim == 1:
        groups = SAMPLE // granularity.group_size if granularity.name == "per_group" else None
        return x[:SAMPLE], codes[:SAMPLE], scale[:groups] if scale.ndim else scale
    return x[..., ::step, :], codes[..., ::step, :], scale[..., ::step, :] if scale.ndim else scale


@torch.no_grad()
def note_weight(module: nn.Module, weight: Tensor, config: FP8LinearConfig) -> None:
    """Measure a frozen weight [N, K] while the original still exists; weights on the meta device are skipped."""
    if weight.is_meta:
        return
    stored = load_weight(module, config)
    values = weight.detach().to(stored.scale.device)
    if stored.block_scales is not None:
        step = max(1, -(-values.numel() // SAMPLE))
        taken = stored._replace(codes=stored.codes[::step], block_scales=stored.block_scales[::step])
        # products read e4m3, of which the codes use a part that depends on the block
        measured = [*measure_cast(values[::step], taken.for_fprop(), stored.scale, PER_TENSOR)[:3].tolist(), math.nan]
    else:
        granularity = PER_ROW if config.weight_has_row_scales else PER_TENSOR
        values, codes, scale = sampled(values, stored.codes, stored.scale, granularity)
        measured = measure_cast(rotate(values, stored.rotation), codes, scale, granularity).tolist()
    setattr(module, WEIGHT_PRECISION, " ".join(map(repr, measured)))
