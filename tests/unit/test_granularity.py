"""Scale shapes and refusals of `coat_core.granularity`."""

from __future__ import annotations

import pytest

from coat_core.granularity import GROUP_SIZES, PER_ROW, PER_TENSOR, Granularity, per_group


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


def test_every_documented_group_size_is_accepted() -> None:
    assert [per_group(size).group_size for size in GROUP_SIZES] == [16, 32, 64, 128, 256]


def test_is_a_value() -> None:
    assert per_group(64) == Granularity("per_group", 64)
    assert hash(per_group(64)) == hash(Granularity("per_group", 64))
    assert per_group(64) != per_group(32)
