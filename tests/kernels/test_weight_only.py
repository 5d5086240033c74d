"""A few rows times an FP8 weight: the kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coat_core.granularity import PER_ROW, PER_TENSOR
from coat_core.ops.weight_only import weight_only_linear as operator
from coat_core.quantize import quantize
from tests.helpers.asserts import assert_sqnr
from tests.helpers.operators import check_operator, reference
from tests.tolerances import FP32_ORDER_FLOOR_DB


def case(rows: tuple[int, ...], n: int, k: int, granularity: object, kind: str = "plain") -> tuple[Tensor, ...]:
    x, weight = torch.randn(*rows, k), torch.randn(n, k)
    if kind == "outlier":
        x[..., 3], weight[1] = 1e4, weight[1] * 1e4
    elif kind == "zero row":
        weight[0] = 0
    elif kind == "strided":
        x = torch.randn(*rows, 2 * k)[..., ::2]
    codes, scale, _ = quantize(weight, "e4m3", granularity)
    return x, codes, scale, torch.randn(n)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", ["plain", "outlier", "zero row", "strided"])
@pytest.mark.parametrize("granularity", [PER_TENSOR, PER_ROW], ids=str)
def test_kernel_is_the_reference_in_another_order(kind: str, granularity: object, device: torch.device) -> None:
    from coat_core.ops.weight_only_kernel import weight_only_linear

    for rows, n, k in [((1,), 48, 80), ((4,), 33, 16), ((2, 3), 64, 300), ((16,), 16, 128), ((17,), 48, 32)]:
        x, codes, scale, bias = (t.to(device) for t in case(rows, n, k, granularity, kind))
        for given in (bias, None):
            found = weight_only_linear(x, codes, scale, given, torch.float32)
            expected = reference(operator, x, codes, scale, given, torch.float32)
            assert found.shape == expected.shape
            assert_sqnr(expected, found.cpu(), FP32_ORDER_FLOOR_DB)


def test_operator_passes_opcheck() -> None:
    x, codes, scale, bias = case((2,), 32, 16, PER_ROW)
    check_operator(operator, (x, codes, scale, bias, torch.bfloat16))
