"""INT8 per row after a rotation: the rotation itself, and how near a linear's products come."""

from __future__ import annotations

import pytest
import torch

from coat_core.granularity import PER_ROW
from coat_core.int8 import quantize_int8, rotate, rotation_size
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.tolerances import FP32_ORDER_FLOOR_DB


@pytest.mark.parametrize("size", [1, 4, 16, 64, 256])
def test_the_rotation_is_orthonormal_and_its_own_inverse(size: int) -> None:
    matrix = rotate(torch.eye(size), size)
    assert_bitwise(matrix, matrix.t().contiguous())
    assert_bitwise(matrix @ matrix, torch.eye(size))
    assert set(matrix.abs().flatten().tolist()) == {size**-0.5}
    assert set(matrix.sum(0).tolist()) <= {1.0, -1.0}  # a constant stays one: it is not gathered in one number


def test_blocks_are_rotated_apart() -> None:
    x = torch.randn(3, 2, 128)
    expected = torch.cat([rotate(part, 64) for part in x.split(64, dim=-1)], dim=-1)
    assert_bitwise(rotate(x, 64), expected)
    assert_sqnr(x, rotate(expected, 64), FP32_ORDER_FLOOR_DB)


def test_the_size_follows_from_the_width() -> None:
    sizes = {width: rotation_size(width) for width in (3072, 12288, 15360, 768, 256, 64, 320, 48, 16, 2, 3)}
    assert sizes == {3072: 256, 12288: 256, 15360: 256, 768: 256, 256: 256, 64: 64, 320: 64, 48: 16, 16: 16, 2: 1, 3: 1}


@pytest.mark.parametrize("size", [0, 2, 8, 1024, 256])
def test_other_sizes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"size={size}: must be a power of 4 up to 256 that divides 64"):
        rotate(torch.ones(2, 64), size)


def test_rows_of_zeros_tiny_numbers_and_none() -> None:
    x = torch.zeros(5, 16)
    x[1], x[2, 3], x[3, 5], x[4, 0] = 1e-44, float("nan"), float("inf"), -7.0
    codes, scale, granularity = quantize_int8(x, 4)
    assert granularity == PER_ROW
    assert not codes[0].any()
    assert scale[0] == 1.0
    assert scale[1].isfinite()
    assert scale[2:4].isnan().all()  # no code says so: the whole row becomes NaN
    assert codes[4, :4].tolist() == [127, -127, -127, -127]
    assert not codes[4, 4:].any()
