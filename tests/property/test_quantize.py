"""What must hold of quantize and dequantize for every tensor that users (and hardware) come up with."""

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given

from coat_core.formats import FORMATS, Format
from coat_core.granularity import GROUP_SIZES, PER_ROW, PER_TENSOR, Granularity, per_group
from coat_core.quantize import SMALLEST_SCALE, dequantize, quantize
from tests.helpers.asserts import assert_bitwise
from tests.tolerances import FP32_ROUNDING

formats = st.sampled_from(list(FORMATS.values()))
granularities = st.one_of(st.just(PER_TENSOR), st.just(PER_ROW), st.sampled_from(GROUP_SIZES).map(per_group))


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, Format, Granularity]:
    """A tensor of 1 to 3 dimensions with tails shorter than a group, zeros, outliers, strides and heavy tails."""
    shape = (*draw(st.lists(st.integers(1, 5), max_size=2)), draw(st.integers(1, 300)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(shape, generator=generator)
    x = x * torch.exp(torch.randn(shape, generator=generator) * draw(st.sampled_from([0.0, 1.0, 4.0])))
    # fp16 holds 6e-5 to 6.5e4 at full precision; the other two get magnitudes far from fp32's own ends
    x = x * 10.0 ** draw(st.integers(-1, 1) if dtype == torch.float16 else st.integers(-22, 22))
    x = x.clamp(-3e4, 3e4) if dtype == torch.float16 else x
    x = x * (torch.rand(shape, generator=generator) >= draw(st.sampled_from([0.0, 0.5])))
    if draw(st.booleans()):
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = x.abs().max() * (2.0 if dtype == torch.float16 else 1e5)
    if draw(st.booleans()):
        x[..., : min(128, shape[-1])] = 0.0  # at least one whole group up to 1×128
    x = _with_strides(x.to(dtype), draw(st.sampled_from(["dense", "sliced", "transposed"])))
    return x, draw(formats), draw(granularities)


def _with_strides(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in memory that is dense, a slice of something wider, or transposed."""
    if layout == "sliced":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"), dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if layout == "transposed" and x.ndim > 1:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    return x


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
def test_each_group_has_its_scale_and_each_element_is_within_half_a_step(case):
    """Half an ulp, relative for normals and absolute for subnormals."""
    x, fmt, granularity = case
    codes, scale, of_codes = quantize(x, fmt.name, granularity)
    assert (codes.dtype, codes.shape, of_codes) == (fmt.dtype, x.shape, granularity)
    assert (scale.dtype, tuple(scale.shape)) == (torch.float32, granularity.scale_shape(tuple(x.shape)))
    groups, decoded = (_groups(values, granularity) for values in (x, dequantize(codes, scale, granularity)))
    assert len(groups) == scale.numel()
    for (index, elements), (_, back) in zip(groups, decoded, strict=True):
        amax = np.abs(elements).max()
        least = max(amax / np.float32(fmt.max), np.float32(SMALLEST_SCALE))
        assert scale[index].item() == float(least if amax > 0 else np.float32(1.0))
        assert amax < fmt.max * SMALLEST_SCALE or (np.abs(back).max() == np.float32(fmt.max) * least)
        exact, smallest = elements.astype(np.float64), float(scale[index]) * fmt.smallest_normal
        half_step = np.maximum(np.abs(exact), smallest) * 2.0 ** -(fmt.mantissa_bits + 1)
        assert (np.abs(exact - back) <= half_step + np.abs(exact) * FP32_ROUNDING).all()
        assert (back[exact == 0] == 0).all()
        assert (np.sign(back) * np.sign(exact) >= 0).all()


@given(cases())
def test_neither_memory_layout_nor_another_round_trip_changes_codes(case):
    x, fmt, granularity = case
    first = quantize(x, fmt.name, granularity)
    dense = quantize(x.contiguous(), fmt.name, granularity)
    assert_bitwise(first.codes.view(torch.uint8).contiguous(), dense.codes.view(torch.uint8))
    assert_bitwise(first.scale, dense.scale)
    second = quantize(first.dequantize(), fmt.name, granularity)
    assert_bitwise(second.codes.view(torch.uint8), first.codes.view(torch.uint8))
    torch.testing.assert_close(second.scale, first.scale, rtol=FP32_ROUNDING, atol=0.0)
    back = dequantize(first.codes, first.scale, granularity, torch.float16)
    assert_bitwise(first.dequantize(torch.float16).contiguous(), back.contiguous())
