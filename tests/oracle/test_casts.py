"""The casts against other arithmetic: ml_dtypes, exact rational numbers, and counts of how often they round up."""

import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from coat_core.formats import FORMATS, Format
from coat_core.quantize import saturating_cast, stochastic_cast
from tests.helpers.asserts import assert_bitwise
from tests.tolerances import STOCHASTIC_DRAWS, STOCHASTIC_SIGMAS

ML_DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
ALL_BITS = torch.arange(65536, dtype=torch.int32).to(torch.int16)

formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())


def round_to_format(value: float, fmt: Format) -> float:
    """Round to nearest, ties to the even mantissa, clamping to ±fmt.max; NaN stays NaN, the sign of zero is kept."""
    if math.isnan(value):
        return value
    magnitude = min(abs(value), fmt.max)
    _, exponent = math.frexp(magnitude)  # magnitude = f · 2^exponent with f in [0.5, 1)
    lowest = int(math.log2(fmt.smallest_normal))
    quantum = Fraction(2) ** (max(exponent - 1, lowest) - fmt.mantissa_bits)
    steps = round(Fraction(magnitude) / quantum)  # Python rounds Fractions half to even
    return math.copysign(float(steps * quantum), value)


def positive_values(fmt: Format) -> list[float]:
    """Every nonnegative finite value of the format, ascending: zero, subnormals, normals."""
    values = [step * fmt.smallest_normal * 2.0**-fmt.mantissa_bits for step in range(2**fmt.mantissa_bits)]
    base = fmt.smallest_normal
    while base <= fmt.max:
        values += [base * (1 + step / 2**fmt.mantissa_bits) for step in range(2**fmt.mantissa_bits)]
        base *= 2
    return [value for value in values if value <= fmt.max]


@formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_equals_ml_dtypes(dtype, fmt, device):
    x = ALL_BITS.view(dtype)
    x = x[~x.isnan()]  # ±inf stay in: they clamp
    assert x.numel() == 65536 - {torch.bfloat16: 2 * 127, torch.float16: 2 * 1023}[dtype]
    codes = saturating_cast(x.to(device), fmt)
    clamped = np.clip(x.to(torch.float32).numpy(), -fmt.max, fmt.max)
    expected = torch.from_numpy(clamped.astype(ML_DTYPES[fmt.name]).view(np.uint8))
    assert codes.dtype == fmt.dtype
    assert_bitwise(codes.view(torch.uint8).cpu(), expected)


@formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nan_stays_nan_and_infinities_clamp(dtype, fmt, device):
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
def test_fp32_ties_and_their_neighbours_equal_exact_arithmetic(fmt, device):
    specials = _fp32_specials(fmt)
    expected = torch.tensor([round_to_format(value, fmt) for value in specials], dtype=torch.float32)
    codes = saturating_cast(torch.tensor(specials, dtype=torch.float32, device=device), fmt)
    assert_bitwise(codes.to(torch.float32).cpu(), expected)


# -- stochastic ----------------------------------------------------------------------------------------------------
DTYPES = [torch.bfloat16, torch.float16]

# (dtype, lower neighbour, upper neighbour): ordinary values, both sides of a power of two, fp16's subnormals and the
# step from them to the normals, bf16's subnormals.
INTERVALS = [
    (torch.bfloat16, 1.0, 1.0 + 2.0**-7),
    (torch.bfloat16, 2.0 - 2.0**-7, 2.0),
    (torch.bfloat16, 3.0e38, 3.0e38 + 2.0**120),
    (torch.bfloat16, 0.0, 2.0**-133),
    (torch.float16, 1.0, 1.0 + 2.0**-10),
    (torch.float16, 65472.0, 65504.0),
    (torch.float16, 0.0, 2.0**-24),
    (torch.float16, 5 * 2.0**-24, 6 * 2.0**-24),
    (torch.float16, 1023 * 2.0**-24, 2.0**-14),
]


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return stochastic_cast(x, dtype, torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device))


def _grid(value: float, dtype: torch.dtype) -> float:
    return torch.tensor(value, dtype=torch.float64).to(dtype).to(torch.float64).item()


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["positive", "negative"])
@pytest.mark.parametrize("fraction", [0.5, 1.0 / 64.0])
@pytest.mark.parametrize(("dtype", "low", "high"), INTERVALS)
def test_rounds_up_as_often_as_it_should(dtype, low, high, fraction, sign):
    low, high = _grid(low, dtype), _grid(high, dtype)
    x = torch.tensor(sign * (low + fraction * (high - low)), dtype=torch.float32)
    exact_fraction = (abs(x.double().item()) - low) / (high - low)  # after x itself was rounded to fp32
    drawn = rounded(x.expand(STOCHASTIC_DRAWS).contiguous(), dtype).double() * sign
    assert set(drawn.unique().tolist()) == {low, high}
    up = int((drawn == high).sum())
    sigma = math.sqrt(STOCHASTIC_DRAWS * exact_fraction * (1 - exact_fraction))
    assert abs(up - STOCHASTIC_DRAWS * exact_fraction) <= STOCHASTIC_SIGMAS * sigma


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_representable_value_is_unchanged(dtype, device):
    exact = ALL_BITS.view(dtype).to(device)
    exact = exact[~exact.isnan()]  # ±inf included
    for _ in range(3):
        assert torch.equal(rounded(exact.to(torch.float32), dtype), exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinities_pass_through(dtype, device):
    back = rounded(torch.tensor([math.nan, math.inf, -math.inf, -math.nan], device=device), dtype)
    assert back.isnan().tolist() == [True, False, False, True]
    assert back[1:3].tolist() == [math.inf, -math.inf]


@pytest.mark.parametrize("dtype", DTYPES)
def test_never_beyond_the_two_neighbours(dtype):
    limit = torch.finfo(dtype).max
    exponents = torch.linspace(-45, math.log10(limit), 200_000, dtype=torch.float64)
    x = (10.0**exponents * (torch.rand(200_000, dtype=torch.float64) + 0.5)).clamp(max=limit).to(torch.float32)
    x = torch.cat([x, -x])
    back = rounded(x, dtype).double()
    nearest = x.to(dtype)
    towards_zero = torch.where(nearest.double().abs() > x.double().abs(), _step(nearest, -1), nearest).double()
    away = torch.where(towards_zero == x, towards_zero, _step(towards_zero.to(dtype), 1).double())
    assert ((back == towards_zero) | (back == away)).all()


def _step(x: torch.Tensor, steps: int) -> torch.Tensor:
    """The value whose magnitude is `steps` bit patterns away (16-bit floats are ordered like their bits)."""
    return (x.view(torch.int16) + steps).view(x.dtype)


def test_fp16_clamps_finite_values_above_its_range():
    x = torch.tensor([65504.0, 65519.0, 1e6, -3e38])
    assert rounded(x, torch.float16).tolist() == [65504.0, 65504.0, 65504.0, -65504.0]
