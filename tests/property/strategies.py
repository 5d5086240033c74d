"""Hypothesis strategies that make the tensors users (and hardware) come up with."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import torch

from coat_core.formats import FORMATS, Format
from coat_core.granularity import GROUP_SIZES, PER_ROW, PER_TENSOR, Granularity, per_group

formats = st.sampled_from(list(FORMATS.values()))
granularities = st.one_of(st.just(PER_TENSOR), st.just(PER_ROW), st.sampled_from(GROUP_SIZES).map(per_group))


@dataclass(frozen=True)
class Case:
    """One tensor to quantize, and how."""

    x: torch.Tensor
    fmt: Format
    granularity: Granularity


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A tensor of 1 to 3 dimensions with tails shorter than a group, zeros, outliers, strides and heavy tails."""
    shape = (*draw(st.lists(st.integers(1, 5), max_size=2)), draw(st.integers(1, 300)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(shape, generator=generator)
    x = x * torch.exp(torch.randn(shape, generator=generator) * draw(st.sampled_from([0.0, 1.0, 4.0])))
    # fp16 holds 6e-5 to 6.5e4 at full precision; the other two get magnitudes far from fp32's own ends
    x = x * 10.0 ** draw(st.integers(-1, 1) if dtype == torch.float16 else st.integers(-22, 22))
    x = x.clamp(-3e4, 3e4) if dtype == torch.float16 else x
    x = x * (torch.rand(shape, generator=generator) >= draw(st.sampled_from([0.0, 0.5])))
    if draw(st.booleans()):
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = x.abs().max() * (2.0 if dtype == torch.float16 else 1e5)
    if draw(st.booleans()):
        x[..., : min(128, shape[-1])] = 0.0  # at least one whole group up to 1×128
    x = _with_strides(x.to(dtype), draw(st.sampled_from(["dense", "sliced", "transposed"])))
    return Case(x, draw(formats), draw(granularities))


def _with_strides(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in memory that is dense, a slice of something wider, or transposed."""
    if layout == "sliced":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"), dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if layout == "transposed" and x.ndim > 1:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    return x
