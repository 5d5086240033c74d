"""`saturating_cast` against ml_dtypes on every 16-bit value, and against exact arithmetic at fp32 halfway points."""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
import torch

from coat_core.formats import FORMATS, Format
from coat_core.quantize import saturating_cast
from tests.helpers.asserts import assert_bitwise
from tests.oracle.scalar_rounding import positive_values, round_to_format

ML_DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
ALL_BITS = torch.arange(65536, dtype=torch.int32).to(torch.int16)

formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())


def _ml_dtypes_codes(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    clamped = np.clip(x.to(torch.float32).numpy(), -fmt.max, fmt.max)
    return torch.from_numpy(clamped.astype(ML_DTYPES[fmt.name]).view(np.uint8))


@formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_equals_ml_dtypes(dtype: torch.dtype, fmt: Format, device: torch.device) -> None:
    x = ALL_BITS.view(dtype)
    x = x[~x.isnan()]  # ±inf stay in: they clamp
    assert x.numel() == 65536 - {torch.bfloat16: 2 * 127, torch.float16: 2 * 1023}[dtype]
    codes = saturating_cast(x.to(device), fmt)
    assert codes.dtype == fmt.dtype
    assert_bitwise(codes.view(torch.uint8).cpu(), _ml_dtypes_codes(x, fmt))


@formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nan_stays_nan_and_infinities_clamp(dtype: torch.dtype, fmt: Format, device: torch.device) -> None:
    x = torch.tensor([math.nan, -math.nan, math.inf, -math.inf], dtype=dtype, device=device)
    back = saturating_cast(x, fmt).to(torch.float32).tolist()
    assert math.isnan(back[0])
    assert math.isnan(back[1])
    assert back[2:] == [fmt.max, -fmt.max]
    every_nan = ALL_BITS.view(torch.bfloat16)
    every_nan = every_nan[every_nan.isnan()].to(device)
    assert saturating_cast(every_nan, fmt).to(torch.float32).isnan().all()


def _fp32_specials(fmt: Format) -> list[float]:
    """Values of the format, the halfway points between them, one fp32 ulp either side, and the ends of fp32."""
    values = positive_values(fmt)
    halfway = [(low + high) / 2 for low, high in itertools.pairwise(values)]
    edges = [fmt.max * 1.0625, fmt.max * 1.25, 2 * fmt.max, 1e38, 2.0**-149, 2.0**-126, 3.4028234663852886e38]
    near = []
    for value in values + halfway + edges:
        exact = np.float32(value)
        with np.errstate(over="ignore"):
            neighbours = (np.nextafter(exact, np.float32(0)), exact, np.nextafter(exact, np.float32(np.inf)))
        near += [float(v) for v in neighbours if np.isfinite(v)]
    return [sign * value for value in near for sign in (1.0, -1.0)]


@formats
def test_fp32_ties_and_their_neighbours_equal_exact_arithmetic(fmt: Format, device: torch.device) -> None:
    specials = _fp32_specials(fmt)
    expected = torch.tensor([round_to_format(value, fmt) for value in specials], dtype=torch.float32)
    codes = saturating_cast(torch.tensor(specials, dtype=torch.float32, device=device), fmt)
    assert_bitwise(codes.to(torch.float32).cpu(), expected)
