"""What must hold of quantize and dequantize for every tensor."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given

from coat_core.granularity import Granularity
from coat_core.quantize import dequantize, quantize
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


@given(cases())
def test_each_group_has_its_scale_and_each_element_is_within_half_a_step(case: Case) -> None:
    """Half an ulp, relative for normals and absolute for subnormals."""
    codes, scale, granularity = quantize(case.x, case.fmt.name, case.granularity)
    assert (codes.dtype, codes.shape, granularity) == (case.fmt.dtype, case.x.shape, case.granularity)
    assert (scale.dtype, tuple(scale.shape)) == (torch.float32, case.granularity.scale_shape(tuple(case.x.shape)))
    groups, decoded = (_groups(x, granularity) for x in (case.x, dequantize(codes, scale, granularity)))
    assert len(groups) == scale.numel()
    for (index, elements), (_, back) in zip(groups, decoded, strict=True):
        amax = np.abs(elements).max()
        assert scale[index].item() == float(amax / np.float32(case.fmt.max) if amax > 0 else np.float32(1.0))
        x, step = elements.astype(np.float64), float(scale[index])
        half_step = np.maximum(
            np.abs(x) * 2.0 ** -(case.fmt.mantissa_bits + 1),
            step * case.fmt.smallest_normal * 2.0 ** -(case.fmt.mantissa_bits + 1),
        )
        assert (np.abs(x - back) <= half_step + np.abs(x) * FP32_ROUNDING).all()
        assert (back[x == 0] == 0).all()
        assert (np.sign(back) * np.sign(x) >= 0).all()


@given(cases())
def test_neither_memory_layout_nor_another_round_trip_changes_codes(case: Case) -> None:
    first = quantize(case.x, case.fmt.name, case.granularity)
    dense = quantize(case.x.contiguous(), case.fmt.name, case.granularity)
    assert_bitwise(first.codes.view(torch.uint8).contiguous(), dense.codes.view(torch.uint8))
    assert_bitwise(first.scale, dense.scale)
    second = quantize(first.dequantize(), case.fmt.name, case.granularity)
    assert_bitwise(second.codes.view(torch.uint8), first.codes.view(torch.uint8))
    torch.testing.assert_close(second.scale, first.scale, rtol=FP32_ROUNDING, atol=0.0)


@given(cases())
def test_groups_are_independent(case: Case) -> None:
    """Each group quantized alone, as a tensor, gives the codes it got among the others."""
    codes, _, granularity = quantize(case.x, case.fmt.name, case.granularity)
    coded = _groups(codes.to(torch.float32), granularity)
    for (_, elements), (_, expected) in zip(_groups(case.x, granularity), coded, strict=True):
        alone = quantize(torch.from_numpy(elements.copy()), case.fmt.name)
        assert_bitwise(alone.codes.to(torch.float32), torch.from_numpy(expected.copy()))
