"""`coat_core.metrics` on values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from coat_core.formats import E4M3, E5M2
from coat_core.metrics import cast_losses, sqnr_db


def test_sqnr_of_a_tenth_is_twenty_db() -> None:
    x = torch.tensor([3.0, 4.0])
    assert sqnr_db(x, x * 0.9) == pytest.approx(20.0, abs=1e-5)
    assert sqnr_db(x, torch.zeros(2)) == pytest.approx(0.0, abs=1e-12)
    assert sqnr_db(x.double(), x.double() * 1.001) == pytest.approx(60.0, abs=1e-9)


def test_sqnr_of_equal_and_of_zero_tensors() -> None:
    assert sqnr_db(torch.ones(3), torch.ones(3)) == math.inf
    assert sqnr_db(torch.zeros(3), torch.zeros(3)) == math.inf
    assert math.isnan(sqnr_db(torch.zeros(3), torch.ones(3)))


def test_sqnr_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"x_hat of shape \(3,\): must have the shape of x, \(1, 3\)"):
        sqnr_db(torch.ones(1, 3), torch.ones(3))


def test_lost_elements_are_counted_among_those_that_were_not_zero() -> None:
    x = torch.tensor([0.0, 0.0, 1.0, 1e-6, -1e-6])
    codes = x.to(E4M3.dtype)
    assert cast_losses(x, codes, codes.float()).tolist() == [0.0, pytest.approx(2 / 3)]
    assert cast_losses(torch.zeros(4), torch.zeros(4).to(E4M3.dtype), torch.zeros(4)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_saturated_elements_are_counted_at_both_ends(fmt) -> None:
    codes = torch.tensor([fmt.max, -fmt.max, 1.0, 0.0]).to(fmt.dtype)
    assert cast_losses(codes.float() * 2, codes, codes.float()).tolist() == [0.5, 0.0]
