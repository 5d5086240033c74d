"""Formats against torch's own, `coat_core.quantize` on cases worked out by hand, SQNR floors.

Properties are in tests/property.
"""

import math

import pytest
import torch

import coat_core
from coat_core.formats import FORMATS, format_of, get_format
from coat_core.granularity import PER_ROW, PER_TENSOR, Granularity, per_group
from coat_core.quantize import quantize, sqnr_db
from coat_flux.blocks.cast_loss import measure_cast
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.tolerances import GAUSSIAN_FLOOR_DB, GAUSSIAN_UNDERFLOW

GRANULARITIES = [PER_TENSOR, PER_ROW, per_group(16), per_group(128)]
granularities = pytest.mark.parametrize("granularity", GRANULARITIES, ids=lambda g: f"{g.name}{g.group_size}")
formats = pytest.mark.parametrize("fmt", list(FORMATS))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())
def test_limits_are_those_of_the_torch_dtype(fmt):
    info = torch.finfo(fmt.dtype)
    assert fmt.max == info.max == -info.min
    assert fmt.smallest_normal == info.smallest_normal
    assert fmt.mantissa_bits == -math.log2(info.eps)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fmt.dtype).to(torch.float32)
    assert codes[codes > 0].min().item() == fmt.smallest_normal * 2.0**-fmt.mantissa_bits
    assert codes[codes.isfinite()].max().item() == fmt.max


def test_formats_are_found_by_name_and_by_dtype():
    for name, fmt in FORMATS.items():
        assert get_format(name) is fmt
        assert format_of(fmt.dtype) is fmt
    with pytest.raises(ValueError, match="format='e3m4': must be one of e4m3, e5m2"):
        get_format("e3m4")
    with pytest.raises(ValueError, match=r"dtype=torch\.bfloat16: must be one of torch\.float8_e4m3fn"):
        format_of(torch.bfloat16)


def test_refuses_unknown_names_and_sizes():
    with pytest.raises(ValueError, match="granularity='per_channel': must be one of per_tensor, per_row, per_group"):
        Granularity("per_channel")
    for size in (0, -16, 24, 100, 512):
        with pytest.raises(ValueError, match=f"group_size={size}: must be one of 16, 32, 64, 128, 256"):
            per_group(size)


@formats
@granularities
def test_gaussian_floor(fmt, granularity, device):
    x = torch.randn(256, 384, device=device)
    quantized = quantize(x, fmt, granularity)
    assert_sqnr(x, quantized.dequantize(), GAUSSIAN_FLOOR_DB[fmt])
    assert measure_cast(x, *quantized)[1] < GAUSSIAN_UNDERFLOW


@granularities
@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nonfinite_elements_touch_nothing_else(granularity, fmt, dtype):
    clean = torch.randn(4, 256).to(dtype)
    clean[1, 5], clean[2, 6], clean[3, 7] = 0.0, 0.0, 0.0
    dirty = clean.clone()
    dirty[1, 5], dirty[2, 6], dirty[3, 7] = math.nan, math.inf, -math.inf
    expected, actual = quantize(clean, fmt, granularity), quantize(dirty, fmt, granularity)
    assert_bitwise(actual.scale, expected.scale)
    values = actual.codes.to(torch.float32)
    assert values[1, 5].isnan()
    assert (values[2, 6].item(), values[3, 7].item()) == (FORMATS[fmt].max, -FORMATS[fmt].max)
    same = dirty.isfinite()
    assert_bitwise(actual.codes.view(torch.uint8)[same], expected.codes.view(torch.uint8)[same])


def test_the_least_scale_is_fp32s_smallest_normal_number():
    """Codes are made by its reciprocal, which must be normal, too; zeros have scale 1."""
    scales = [quantize(torch.full((4,), x), "e4m3", Granularity("per_tensor")).scale for x in (1e-38, 1e-44, 0.0)]
    assert [scale.item() for scale in scales] == [2.0**-126, 2.0**-126, 1.0]


@pytest.mark.parametrize("x", [torch.tensor(1.0), torch.ones(0, 4), torch.ones(3, 0), torch.ones(4, dtype=torch.int64)])
def test_refuses_what_cannot_be_scaled(x):
    with pytest.raises(ValueError, match="must be floating, non-empty, with a last dimension"):
        coat_core.quantize(x)


def test_sqnr_by_hand():
    x = torch.tensor([3.0, 4.0])
    assert sqnr_db(x, x * 0.9) == pytest.approx(20.0, abs=1e-5)
    assert sqnr_db(x, torch.zeros(2)) == pytest.approx(0.0, abs=1e-12)
    assert sqnr_db(x.double(), x.double() * 1.001) == pytest.approx(60.0, abs=1e-9)
    assert sqnr_db(torch.ones(3), torch.ones(3)) == math.inf
    assert sqnr_db(torch.zeros(3), torch.zeros(3)) == math.inf
    assert math.isnan(sqnr_db(torch.zeros(3), torch.ones(3)))
    with pytest.raises(ValueError, match=r"x_hat of shape \(3,\): must have the shape of x, \(1, 3\)"):
        sqnr_db(torch.ones(1, 3), torch.ones(3))
