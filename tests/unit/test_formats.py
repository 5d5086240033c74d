"""The facts in `coat_core.formats` against torch's own; scale shapes of `coat_core.granularity`."""

from __future__ import annotations

import math

import pytest
import torch

from coat_core.formats import FORMATS, Format, format_of, get_format
from coat_core.granularity import PER_ROW, PER_TENSOR, Granularity, per_group


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())
def test_limits_are_those_of_the_torch_dtype(fmt: Format) -> None:
    info = torch.finfo(fmt.dtype)
    assert fmt.max == info.max == -info.min
    assert fmt.smallest_normal == info.smallest_normal
    assert fmt.mantissa_bits == -math.log2(info.eps)
    assert fmt.smallest_subnormal == fmt.smallest_normal * 2.0**-fmt.mantissa_bits
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fmt.dtype).to(torch.float32)
    assert codes[codes > 0].min().item() == fmt.smallest_subnormal
    assert codes[codes.isfinite()].max().item() == fmt.max


def test_lookup_both_ways() -> None:
    for name, fmt in FORMATS.items():
        assert get_format(name) is fmt
        assert format_of(fmt.dtype) is fmt


def test_unknown_names_are_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="format='e3m4': must be one of e4m3, e5m2"):
        get_format("e3m4")
    with pytest.raises(ValueError, match=r"dtype=torch\.bfloat16: must be one of torch\.float8_e4m3fn"):
        format_of(torch.bfloat16)


@pytest.mark.parametrize(
    ("granularity", "shape", "expected"),
    [
        (PER_TENSOR, (4, 5, 100), ()),
        (PER_TENSOR, (7,), ()),
        (PER_ROW, (4, 5, 100), (4, 5, 1)),
        (PER_ROW, (7,), (1,)),
        (per_group(32), (4, 5, 96), (4, 5, 3)),
        (per_group(32), (4, 5, 97), (4, 5, 4)),
        (per_group(128), (2, 1), (2, 1)),
    ],
)
def test_scale_shape(granularity: Granularity, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert granularity.scale_shape(shape) == expected


def test_refuses_unknown_names_and_sizes() -> None:
    with pytest.raises(ValueError, match="granularity='per_channel': must be one of per_tensor, per_row, per_group"):
        Granularity("per_channel")
    for size in (0, -16, 24, 100, 512):
        with pytest.raises(ValueError, match=f"group_size={size}: must be one of 16, 32, 64, 128, 256"):
            per_group(size)
