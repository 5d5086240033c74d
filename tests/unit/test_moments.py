"""`coat_core.moments`: exp_avg as a ratio in int8, exp_avg_sq on a logarithmic grid in uint8."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from coat_core import moments
from tests.tolerances import LOG_GRID_REL, REPEATED_ROUND_TRIP_REL, SINGLE_MAGNITUDE_REL

TINY = torch.finfo(torch.float32).tiny
LARGEST = torch.finfo(torch.float32).max
magnitudes = st.floats(min_value=0.0, max_value=LARGEST, width=32, allow_subnormal=True)
signed = st.floats(min_value=-(2.0**126), max_value=2.0**126, width=32, allow_subnormal=True)
rows = {"min_size": 16, "max_size": 16}


def through_log(v: Tensor) -> Tensor:
    return moments.dequantize_log(*moments.quantize_log(v))


def through_ratio(r: Tensor) -> Tensor:
    return moments.dequantize_ratio(*moments.quantize_ratio(r))


@given(values=st.lists(magnitudes, **rows))
def test_log_keeps_what_is_zero_and_what_is_not(values):
    v = torch.tensor([values])
    back = through_log(v)
    assert torch.equal(back != 0, v != 0)
    assert (back >= 0).all()
    assert back.isfinite().all()


@given(values=st.lists(st.floats(min_value=TINY, max_value=LARGEST, width=32), **rows))
def test_log_comes_back_within_half_a_code(values):
    v = torch.tensor([values]).double()
    log_ratio = (through_log(v.float()).double() / v).log()
    half_code = (v.max() / v.min()).log() / (2 * (moments.LOG_MAX - 1))
    assert (log_ratio.abs() <= half_code + LOG_GRID_REL).all()


@given(values=st.lists(signed, **rows))
def test_ratio_comes_back_within_half_a_code(values):
    r = torch.tensor([values])
    error = (through_ratio(r).double() - r.double()).abs().max()
    assert error <= r.abs().max().double() / 254 * (1 + SINGLE_MAGNITUDE_REL) + TINY
    assert (through_ratio(r)[r == 0] == 0).all()


def test_ends_of_a_block_are_codes_and_repeated_round_trips_change_nothing():
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(200, 128, generator=generator).square() * torch.exp(2 * torch.randn(200, 128, generator=generator))
    codes, *_ = moments.quantize_log(v)
    assert (codes.amax(-1) == moments.LOG_MAX).all()
    assert (codes.amin(-1) == 1).all()
    once = values = through_log(v)
    for _ in range(100):
        values = through_log(values)
    assert (values / once - 1).abs().max() < REPEATED_ROUND_TRIP_REL
    ratio = through_ratio(v)
    torch.testing.assert_close(through_ratio(ratio), ratio, rtol=SINGLE_MAGNITUDE_REL, atol=0.0)


@pytest.mark.parametrize("value", [1e-45, 1e-38, 1.0, 3e38])
def test_a_block_of_one_magnitude_is_exact(value):
    v = torch.full((1, 16), value)
    v[0, 3:5] = 0.0
    assert torch.equal(through_log(v), v.clamp(min=TINY) * (v > 0))  # a denormal comes back as the smallest normal
    r = v.clamp(min=TINY) * (v > 0) * torch.tensor([1.0, -1.0]).repeat(8)
    torch.testing.assert_close(through_ratio(r), r, rtol=SINGLE_MAGNITUDE_REL, atol=0.0)


def test_after_a_first_gradient_the_update_is_exact_however_far_the_gradients_lie_apart():
    """Each is stored in 8 bits; the two together are the sign of the gradient, times one number."""
    grad = torch.logspace(-15, 10, 128)[None] * (1 - 2 * (torch.arange(128) % 2))
    m, v = 0.1 * grad, 0.001 * grad.square()
    v_back = through_log(v)
    m_back = through_ratio(moments.update_ratio(m, v)) * v_back.sqrt()
    torch.testing.assert_close(m_back / v_back.sqrt(), m / v.sqrt(), rtol=SINGLE_MAGNITUDE_REL, atol=0.0)
    assert ((v_back / v).log().abs().max() > 0.05).item()  # v alone is 8 bits coarse


def test_zero_blocks_nan_and_infinities():
    inf, nan = float("inf"), float("nan")
    v = torch.zeros(4, 16)
    v[1, :4] = torch.tensor([1.0, nan, inf, 4.0])
    v[2, 0] = inf
    v[3] = nan
    codes, scale, exponent = moments.quantize_log(v)
    assert codes[1, :4].tolist() == [1, moments.LOG_NAN, moments.LOG_MAX, moments.LOG_MAX]
    back = moments.dequantize_log(codes, scale, exponent)
    assert torch.equal(back.nan_to_num(-1.0)[1, :5], torch.tensor([1.0, -1.0, 4.0, 4.0, 0.0]))
    assert torch.equal(back[0], v[0])
    assert back[2].tolist() == [1.0] + [0.0] * 15
    assert back[3].isnan().all()
    assert (scale.isfinite() & exponent.isfinite()).all()

    r = torch.zeros(3, 16)
    r[1, :4] = torch.tensor([1.0, nan, -inf, -2.0])
    r[2] = nan
    codes, scale = moments.quantize_ratio(r)
    assert codes[1, :5].tolist() == [64, moments.RATIO_NAN, -127, -127, 0]
    assert not codes[0].any()
    assert moments.dequantize_ratio(codes, scale)[2].isnan().all()
    assert scale.isfinite().all()
