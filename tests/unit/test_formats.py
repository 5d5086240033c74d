"""The facts in `coat_core.formats` against torch's own."""

from __future__ import annotations

import math

import pytest
import torch

from coat_core.formats import FORMATS, Format, format_of, get_format


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


def test_the_two_formats_are_the_documented_ones() -> None:
    assert [(fmt.name, fmt.dtype, fmt.max) for fmt in FORMATS.values()] == [
        ("e4m3", torch.float8_e4m3fn, 448.0),
        ("e5m2", torch.float8_e5m2, 57344.0),
    ]


def test_lookup_both_ways() -> None:
    for name, fmt in FORMATS.items():
        assert get_format(name) is fmt
        assert format_of(fmt.dtype) is fmt


def test_unknown_names_are_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="format='e3m4': must be one of e4m3, e5m2"):
        get_format("e3m4")
    with pytest.raises(ValueError, match=r"dtype=torch\.bfloat16: must be one of torch\.float8_e4m3fn"):
        format_of(torch.bfloat16)
