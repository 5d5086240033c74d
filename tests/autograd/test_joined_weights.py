"""Linears that read the same tensor multiply by one matrix, and each keeps its own as a view of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from coat_core.linear.function import keep_transposed
from coat_core.linear.module import FP8Linear
from coat_core.ops.quantize import quantize
from coat_flux.blocks.fused.linears import join_buffers, read_group
from tests.helpers.asserts import assert_bitwise

CODES, TRANSPOSED = "weight_codes", "weight_codes_transposed"


def linears(*widths: int) -> list[Any]:
    found = [FP8Linear.from_linear(nn.Linear(32, width)) for width in widths]
    for linear in found:
        keep_transposed(linear, linear.config)
    return found


def test_each_keeps_its_values_and_the_memory_is_one() -> None:
    group = linears(16, 48, 32)
    before = [(linear.weight.clone(), linear.weight_codes_transposed.clone()) for linear in group]
    addresses = {linear.weight_codes.untyped_storage().data_ptr() for linear in group}
    for name, dim, shape in ((CODES, 0, (96, 32)), (TRANSPOSED, 1, (32, 96))):
        whole = join_buffers(group, name, dim)
        assert whole is not None
        assert whole.shape == shape
        assert whole.is_contiguous()
        again = join_buffers(group, name, dim)
        assert again is not None
        assert again.data_ptr() == whole.data_ptr()
        parts = whole.split([16, 48, 32], dim=dim)
        assert all(torch.equal(part, linear._buffers[name]) for part, linear in zip(parts, group, strict=True))
    for linear, (weight, transposed) in zip(group, before, strict=True):
        assert_bitwise(linear.weight.data, weight)
        assert torch.equal(linear.weight_codes_transposed, transposed)
        assert linear.weight_codes.untyped_storage().data_ptr() not in addresses


def test_views_that_are_not_side_by_side_are_joined_again() -> None:
    group = linears(16, 32)
    first = join_buffers(group, CODES, 0)
    assert first is not None
    swapped = join_buffers(group[::-1], CODES, 0)
    assert swapped is not None
    assert torch.equal(swapped, torch.cat([first[16:], first[:16]]))
    moved = [linear._apply(lambda x: x.clone()) for linear in group]
    assert join_buffers(moved, CODES, 0) is not None


def test_a_missing_copy_joins_nothing() -> None:
    group = linears(16, 32)
    group[1]._buffers.pop(TRANSPOSED)
    own = group[0].weight_codes_transposed
    assert join_buffers(group, TRANSPOSED, 1) is None
    assert group[0].weight_codes_transposed is own


@pytest.mark.parametrize("bias", [True, False])
def test_one_product_gives_what_each_gives(bias: bool) -> None:
    group = [FP8Linear.from_linear(nn.Linear(32, width, bias)) for width in (16, 48)]
    x, grad = torch.randn(2, 5, 32), torch.randn(2, 5, 64)
    expected = torch.cat([linear(x) for linear in group], dim=-1)
    apart, joined = read_group(group, join=False), read_group(group, join=True)
    assert (len(apart.bases), len(joined.bases)) == (2, 1)
    for one in (apart, joined):
        assert one.input_storage is not None
        y, h = one.forward(x, quantize(x, one.input_storage.format, one.input_storage.granularity))
        assert h is None
        torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    wanted = apart.dgrad(grad)
    assert float((joined.dgrad(grad) - wanted).norm() / wanted.norm()) < 0.1  # e5m2, scaled apart and together


def test_linears_of_other_settings_stay_apart() -> None:
    group = linears(16, 32)
    group[1].config = type(group[1].config)(use_fp8_gemm=False)
    assert len(read_group(group, join=True).bases) == 2
    plain = [nn.Linear(32, 16).requires_grad_(False) for _ in range(2)]
    assert len(read_group(plain, join=True).bases) == 2
