"""What must hold of quantize and dequantize for every tensor."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given

from coat_core.formats import Format
from coat_core.granularity import Granularity
from coat_core.quantize import dequantize, quantize, saturating_cast
from tests.helpers.asserts import assert_bitwise
from tests.property.strategies import Case, cases
from tests.tolerances import FP32_ROUNDING


def _groups(x: torch.Tensor, granularity: Granularity) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """(index of the scale, the fp32 elements that share it), by plain loops."""
    array = x.to(torch.float32).numpy()
    if granularity.name == "per_tensor":
        return [((), array.reshape(-1))]
    size = granularity.group_size if granularity.name == "per_group" else array.shape[-1]
    return [
        ((*row, start // size), array[row][start : start + size])
        for row in np.ndindex(array.shape[:-1])
        for start in range(0, array.shape[-1], size)
    ]


def _scale_of_every_element(scale: torch.Tensor, shape: torch.Size, granularity: Granularity) -> torch.Tensor:
    """The scale each element was divided by, as float64 of x's shape, by plain loops."""
    spread = np.empty(shape, dtype=np.float64)
    if granularity.name == "per_tensor":
        spread[...] = scale.item()
        return torch.from_numpy(spread)
    size = granularity.group_size if granularity.name == "per_group" else shape[-1]
    for row in np.ndindex(shape[:-1]):
        for start in range(0, shape[-1], size):
            spread[row][start : start + size] = scale[(*row, start // size)].item()
    return torch.from_numpy(spread)


def _half_step(y: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Largest rounding error at magnitude y: half an ulp, relative for normals and absolute for subnormals."""
    return torch.maximum(y.abs() * 2.0 ** -(fmt.mantissa_bits + 1), torch.tensor(fmt.smallest_subnormal / 2))


@given(cases())
def test_dtypes_and_shapes(case: Case) -> None:
    codes, scale, granularity = quantize(case.x, case.fmt, case.granularity)
    assert (codes.dtype, codes.shape) == (case.fmt.dtype, case.x.shape)
    assert (scale.dtype, tuple(scale.shape)) == (torch.float32, case.granularity.scale_shape(tuple(case.x.shape)))
    assert granularity == case.granularity


@given(cases())
def test_scale_is_exactly_amax_over_max(case: Case) -> None:
    scale = quantize(case.x, case.fmt, case.granularity).scale
    groups = _groups(case.x, case.granularity)
    assert len(groups) == scale.numel()
    for index, elements in groups:
        amax = np.abs(elements).max()
        expected = amax / np.float32(case.fmt.max) if amax > 0 else np.float32(1.0)
        assert scale[index].item() == float(expected)


@given(cases())
def test_every_element_is_within_half_a_step(case: Case) -> None:
    codes, scale, granularity = quantize(case.x, case.fmt, case.granularity)
    x, back = case.x.double(), dequantize(codes, scale, granularity).double()
    scales = _scale_of_every_element(scale, case.x.shape, granularity)
    bound = scales * _half_step(x / scales, case.fmt) + x.abs() * FP32_ROUNDING
    assert ((x - back).abs() <= bound).all()
    assert (back[x == 0] == 0).all()
    assert (torch.sign(back) * torch.sign(x) >= 0).all()


@given(cases())
def test_largest_element_of_each_group_gets_the_largest_code(case: Case) -> None:
    quantized = quantize(case.x, case.fmt, case.granularity)
    values = quantized.codes.to(torch.float32)
    assert (values.abs() <= case.fmt.max).all()
    for (_, elements), (_, coded) in zip(
        _groups(case.x, case.granularity), _groups(values, case.granularity), strict=True
    ):
        largest = np.abs(elements).argmax()
        assert abs(coded[largest]) == (case.fmt.max if elements[largest] != 0 else 0.0)


@given(cases())
def test_quantizing_what_came_back_gives_the_same_codes(case: Case) -> None:
    first = quantize(case.x, case.fmt, case.granularity)
    second = quantize(first.dequantize(), case.fmt, case.granularity)
    assert_bitwise(second.codes.view(torch.uint8), first.codes.view(torch.uint8))
    torch.testing.assert_close(second.scale, first.scale, rtol=FP32_ROUNDING, atol=0.0)


@given(cases())
def test_memory_layout_changes_nothing(case: Case) -> None:
    strided = quantize(case.x, case.fmt, case.granularity)
    dense = quantize(case.x.contiguous(), case.fmt, case.granularity)
    assert_bitwise(strided.codes.view(torch.uint8).contiguous(), dense.codes.view(torch.uint8))
    assert_bitwise(strided.scale, dense.scale)


@given(cases())
def test_groups_are_independent(case: Case) -> None:
    """Each group quantized alone, as a tensor, gives the codes it got among the others."""
    codes, _, granularity = quantize(case.x, case.fmt, case.granularity)
    coded = _groups(codes.to(torch.float32), granularity)
    for (_, elements), (_, expected) in zip(_groups(case.x, granularity), coded, strict=True):
        alone = quantize(torch.from_numpy(elements.copy()), case.fmt)
        assert_bitwise(alone.codes.to(torch.float32), torch.from_numpy(expected.copy()))


@given(cases())
def test_negation_negates_the_codes(case: Case) -> None:
    positive = quantize(case.x, case.fmt, case.granularity)
    negative = quantize(-case.x, case.fmt, case.granularity)
    assert torch.equal(negative.codes.to(torch.float32), -positive.codes.to(torch.float32))
    assert_bitwise(negative.scale, positive.scale)


@given(cases())
def test_cast_is_monotone(case: Case) -> None:
    ordered = case.x.to(torch.float32).flatten().sort().values
    values = saturating_cast(ordered, case.fmt).to(torch.float32)
    assert (values[1:] >= values[:-1]).all()
