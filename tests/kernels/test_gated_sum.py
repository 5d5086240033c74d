"""Gate and residual with the adapter's part and what is saved of it: operators, and their Triton kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coat_core.casts import declarations
from coat_core.granularity import PER_ROW, PER_TENSOR, per_group
from coat_core.kernels.gate import gate_residual, gated_sum, gated_sum_backward
from coat_core.quantize import quantize
from tests.helpers.asserts import assert_bitwise
from tests.helpers.operators import check_operator
from tests.helpers.rows import SPECS, assert_codes_of, assert_rows_close, assert_saved, rows_of_kind
from tests.tolerances import KERNEL_ROW_RTOL

FP32, BF16 = torch.float32, torch.bfloat16
CPU = torch.device("cpu")
SAVED = [("none", 128), ("e4m3", 128), ("e5m2", 16)]
GRANULARITIES = [PER_TENSOR, PER_ROW, per_group(16), per_group(128)]


def tensors(kind: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = FP32) -> list[Tensor]:
    """Residual or grad, gate (one chunk of several), result."""
    b, _, d = shape
    gate = torch.randn(b, 3 * d)[:, d : 2 * d]
    return [x.to(device, dtype) for x in (torch.randn(shape), gate, rows_of_kind(kind, shape))]


def adapter(
    shape: tuple[int, ...], rank: int, device: torch.device, dtype: torch.dtype = FP32
) -> tuple[Tensor, Tensor]:
    """h [B, S, r], neighbour of another's, and up [D, r]."""
    h = torch.randn(*shape[:-1], 2 * rank)[..., rank:]
    return h.to(device, dtype), torch.randn(shape[-1], rank).to(device, dtype)


@pytest.mark.parametrize("saved", SAVED, ids=str)
def test_the_sum_is_eager_pytorchs(saved: tuple[str, int]) -> None:
    residual, gate, result = tensors("outlier", (2, 7, 48), CPU, BF16)
    h, up = adapter((2, 7, 48), 4, CPU, BF16)
    y, *codes = gated_sum(residual, gate, result, None, None, *saved)
    assert_bitwise(y, residual + gate[:, None] * result)
    assert_saved(result, *codes, *saved)
    complete = result.clone()
    complete.view(-1, 48).addmm_(h.reshape(-1, 4), up.t())
    y, *codes = gated_sum(residual, gate, result, h, up, *saved)
    assert_bitwise(y, gate_residual(residual, gate, complete))
    assert_saved(complete, *codes, *saved)
    declared = declarations["coat::gated_sum"]((y, *codes), residual, gate, result, h, up, *saved)
    assert len(declared) == (saved[0] != "none")
    for cast in declared:
        assert_bitwise(cast.values, complete)


def test_the_gradients_are_autograds() -> None:
    grad, gate, result = tensors("plain", (2, 7, 48), CPU)
    leaves = [gate.double().requires_grad_(), result.double().requires_grad_()]
    expected_dgate, expected_dy = torch.autograd.grad(leaves[0][:, None] * leaves[1], leaves, grad.double())
    for spec in SPECS:
        dy, codes, scale, dgate = gated_sum_backward(grad, gate, result, None, 128, FP32, *spec)
        assert_rows_close(dy.double(), expected_dy, KERNEL_ROW_RTOL)
        assert_rows_close(dgate.double(), expected_dgate, KERNEL_ROW_RTOL)
        assert_codes_of(dy, codes, scale, *spec)


def test_the_gates_gradient_is_complete_in_fp32() -> None:
    grad, gate, result = tensors("plain", (2, 7, 48), CPU, BF16)
    for granularity in GRANULARITIES:
        codes, scale, _ = quantize(result, "e4m3", granularity)
        found = gated_sum_backward(grad, gate, codes, scale, granularity.group_size, BF16, "e5m2", "none")
        values = quantize(result, "e4m3", granularity).dequantize(BF16)
        assert_bitwise(found[-1], (grad.float() * values.float()).sum(1))


def test_operators_keep_torch_library_rules() -> None:
    grad, gate, result = tensors("strided", (2, 3, 48), CPU, BF16)
    for saved in SAVED:
        for given in ((None, None), adapter((2, 3, 48), 4, CPU, BF16)):
            check_operator(gated_sum, (grad, gate, result, *given, *saved))
    codes, scale, _ = quantize(result, "e4m3", per_group(16))
    for given in ((None, None), (result, None), (codes, scale)):
        check_operator(gated_sum_backward, (grad, gate, *given, 16, BF16, "e5m2", "per_row"))
