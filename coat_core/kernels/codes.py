"""Codes along with values: what operators return that quantize what they make.

Such an operator takes `fmt` and `granularity` and returns (values, codes, code_scale) with

    codes, code_scale = quantize(values, fmt, granularity)

to the bit: the values that are quantized are those that are returned. With granularity "none" both have shape [0].
"""

from __future__ import annotations

import torch
from torch import Tensor

from coat_core.casts import Cast
from coat_core.formats import get_format
from coat_core.granularity import Granularity
from coat_core.quantize import quantize

GRANULARITIES = ("none", "per_row", "per_tensor")


def check_granularity(granularity: str) -> None:
    """Raise ValueError unless the granularity is one that goes with values."""
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity={granularity!r}: must be one of {', '.join(GRANULARITIES)}")


def codes_of(values: Tensor, fmt: str, granularity: str) -> tuple[Tensor, Tensor]:
    """Return the codes and scale of values [..., K], both of shape [0] where the granularity is "none"."""
    check_granularity(granularity)
    if granularity == "none":
        return no_codes(values, fmt)
    codes, scale, _ = quantize(values, fmt, Granularity(granularity))
    return codes, scale


def no_codes(values: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """Return the placeholders for codes and scale where none were asked for."""
    return values.new_empty(0, dtype=get_format(fmt).dtype), values.new_empty(0, dtype=torch.float32)


def fake_codes_of(values: Tensor, fmt: str, granularity: str) -> tuple[Tensor, Tensor]:
    """Return tensors with the shapes and dtypes of `codes_of`."""
    check_granularity(granularity)
    if granularity == "none":
        return no_codes(values, fmt)
    scale_shape = Granularity(granularity).scale_shape(tuple(values.shape))
    codes = values.new_empty(values.shape, dtype=get_format(fmt).dtype)
    return codes, values.new_empty(scale_shape, dtype=torch.float32)


def cast_of(kind: str, out: tuple[Tensor, ...], granularity: str) -> Cast | None:
    """What such an operator declares to have cast; None where no codes were asked for."""
    values, codes, scale = out[:3]
    return None if granularity == "none" else Cast(kind, values, codes, scale, Granularity(granularity))
