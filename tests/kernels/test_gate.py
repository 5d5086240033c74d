"""Gate and residual with the adapter's part and what is saved of it, also behind an RMSNorm: operators and kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from coat_core.granularity import per_group
from coat_core.ops.gate import gated_sum, gated_sum_backward
from coat_core.quantize import dequantize, quantize
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.helpers.operators import moved, reference
from tests.helpers.rows import (
    CASES,
    FLOOR,
    GRANULARITIES,
    SAVED,
    SPECS,
    assert_casts,
    assert_follows,
    assert_rows_close,
    diffusers_norm,
    kernel_of,
    rows,
    turned,
)
from tests.tolerances import BF16_ULP_RTOL, KERNEL_ROW_RTOL, NORM_BACKWARD_FP32_FLOOR_DB

EPS = 1e-5
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SHAPE = (2, 7, 48)
NORMS = [False, True]  # whether an RMSNorm stands before the gate


def tensors(shape: tuple[int, ...] = SHAPE, layout: str = "slice", dtype: torch.dtype = FP32) -> list[Tensor]:
    """Residual or grad, gate (one chunk of several), result: rows of every kind, or small whole numbers."""
    b, _, d = shape
    result = torch.randint(-4, 5, shape).float() if layout == "whole" else rows(shape, layout)
    return [x.to(dtype) for x in (torch.randn(shape), torch.randn(b, 3 * d)[:, d : 2 * d], result)]


def weight_of(result: Tensor) -> Tensor:
    """Of an RMSNorm of result."""
    return (1 + torch.randn(result.shape[-1]) / 4).to(result.device, result.dtype)


def adapter(shape: tuple[int, ...], rank: int, dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor]:
    """h [B, S, r], neighbour of another's, and up [D, r], in small whole numbers, whose sums are exact."""
    h, up = torch.randint(-2, 3, (*shape[:-1], 2 * rank)), torch.randint(-2, 3, (shape[-1], rank))
    return h.to(dtype)[..., rank:], up.to(dtype)


@pytest.mark.parametrize("saved", SAVED, ids=str)
def test_the_sum_is_eager_pytorchs(saved: tuple[str, int]) -> None:
    residual, gate, result = tensors(dtype=BF16)
    h, up = adapter(SHAPE, 4, BF16)
    complete, weight = result.contiguous().clone(), weight_of(result)
    complete.view(-1, 48).addmm_(h.reshape(-1, 4), up.t())
    for args, whole, normed in (
        ((None, None, *saved), result, result),
        ((h, up, *saved, weight, EPS), complete, diffusers_norm(complete, weight, EPS)),
        ((h, up, *saved), complete, complete),
    ):
        results = gated_sum(residual, gate, result, *args)
        assert_bitwise(results[0], residual + gate[:, None] * normed)
        assert_casts(gated_sum, results, (residual, gate, result, *args), *[whole] * (saved[0] != "none"))


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP32, FP32), (FP16, FP16), (BF16, FP32), (FP32, BF16)], ids=str)
def test_the_norm_has_diffusers_bits(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    residual, gate, result = tensors(dtype=dtypes[0])
    weight = weight_of(result).to(dtypes[1])
    y = gated_sum(residual, gate, result, None, None, "none", 0, weight, EPS)[0]
    assert_bitwise(y, residual + gate[:, None] * diffusers_norm(result, weight, EPS))


def test_the_gradients_are_autograds() -> None:
    grad, gate, result = torch.randn(SHAPE), torch.randn(2, 48), torch.randn(SHAPE)
    leaves = [gate.double().requires_grad_(), result.double().requires_grad_()]
    expected_dgate, expected_dy = torch.autograd.grad(leaves[0][:, None] * leaves[1], leaves, grad.double())
    for spec in SPECS:
        args = (grad, gate, result, None, 128, FP32, *spec)
        dy, _, _, dgate = results = gated_sum_backward(*args)
        assert_rows_close(dy.double(), expected_dy, KERNEL_ROW_RTOL)
        assert_rows_close(dgate.double(), expected_dgate, KERNEL_ROW_RTOL)
        assert_casts(gated_sum_backward, results, args)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("from_codes", [True, False])
def test_the_norms_gradients_are_autograds(from_codes: bool, dtype: torch.dtype) -> None:
    grad, gate, result = (torch.randn(shape).to(dtype) for shape in (SHAPE, (2, 48), SHAPE))
    weight = weight_of(result)
    codes, code_scale, groups = quantize(result, "e4m3", per_group(16))
    result = dequantize(codes, code_scale, groups, dtype) if from_codes else result
    saved = (codes, code_scale, 16) if from_codes else (result, None, 16)
    leaves = [leaf.double().requires_grad_() for leaf in (result, gate)]
    normed = torch.nn.functional.rms_norm(leaves[0], (48,), weight.double(), EPS)
    dy, dgate = torch.autograd.grad(normed * leaves[1][:, None], leaves, grad.double())
    for spec in SPECS:
        args = (grad, gate, *saved, dtype, *spec, weight, EPS)
        found, _, _, of_gate = results = gated_sum_backward(*args)
        assert found.dtype == dtype
        assert_sqnr(dy, found, FLOOR[dtype])
        assert_sqnr(dgate, of_gate, NORM_BACKWARD_FP32_FLOOR_DB)
        assert_casts(gated_sum_backward, results, args)


def test_a_row_of_zeros_gets_a_finite_gradient() -> None:
    grad, gate, result = tensors()
    weight = weight_of(result)
    dy = gated_sum_backward(grad, gate, result, None, 0, FP32, "e5m2", "none", weight, EPS)[0]
    assert_rows_close(dy[0, 1], EPS**-0.5 * grad[0, 1] * gate[0] * weight, KERNEL_ROW_RTOL)


def test_the_gates_gradient_is_complete_in_fp32() -> None:
    grad, gate, result = tensors(dtype=BF16)
    for granularity in GRANULARITIES:
        codes, scale, _ = quantize(result, "e4m3", granularity)
        found = gated_sum_backward(grad, gate, codes, scale, granularity.group_size, BF16, "e5m2", "none")
        assert_bitwise(found[-1], (grad.float() * dequantize(codes, scale, granularity, BF16).float()).sum(1))


# -- kernels: interpreted on a CPU ------------------------------------------------------------------------------------


def calls(normed: bool) -> Iterator[tuple[Any, tuple[Any, ...], float]]:
    """Of both kernels, and how far of a row their results may be from the references'.

    The interpreter truncates to half precision where a GPU rounds: up to six times.
    """
    for shape, layout, spec, saved in CASES:
        grad, gate, result = tensors(shape, layout)
        norm = (weight_of(result), EPS) if normed else ()
        yield gated_sum, (grad, gate, result, None, None, *saved, *norm), KERNEL_ROW_RTOL
        yield gated_sum, (grad, gate.bfloat16(), result.bfloat16(), None, None, *saved, *norm), 4 * BF16_ULP_RTOL
        back = (grad, gate, result, None, 128, FP32, *spec)
        yield gated_sum_backward, (*back, *norm), KERNEL_ROW_RTOL
        yield gated_sum_backward, (*back, *(norm or (None, 0.0)), torch.rand(shape[-1]) + 0.5), KERNEL_ROW_RTOL
    for rank, shape in ((1, (2, 17, 48)), (24, (3, 5, 130)), (100, (1, 4, 300))):
        residual, gate, result = tensors(shape, "whole")
        norm = (weight_of(result), EPS) if normed else ()
        args = (residual, gate, result, *adapter(shape, rank), "e4m3", 16, *norm)
        yield gated_sum, args, (1 + normed) * KERNEL_ROW_RTOL
    for granularity in GRANULARITIES:
        for fmt, shape, dtype in (("e5m2", (1, 4, 300), FP32), ("e4m3", SHAPE, BF16)):
            grad, gate, result = tensors(shape, dtype=dtype)
            norm = (weight_of(result), EPS) if normed else ()
            codes = (*quantize(result, fmt, granularity)[:2], granularity.group_size)
            rtol = KERNEL_ROW_RTOL if dtype == FP32 else 4 * BF16_ULP_RTOL
            yield gated_sum_backward, (grad, gate, *codes, dtype, "e5m2", "per_row", *norm), rtol
    for dtype, of_weight in ((BF16, BF16), (BF16, FP32), (FP16, FP16)):
        residual, gate, result = tensors(layout="whole", dtype=dtype)
        norm = (weight_of(result).to(of_weight), EPS) if normed else ()
        yield gated_sum, (residual, gate, result, *adapter(SHAPE, 16, dtype), "e4m3", 16, *norm), 6 * BF16_ULP_RTOL
    large, half = torch.full(SHAPE, 256.0).bfloat16(), torch.full((48, 2), 0.5).bfloat16()
    norm = (weight_of(large), EPS) if normed else ()
    # 257 is rounded to 256, before it is saved
    args = (large, large[:, 0], large, torch.ones(2, 7, 2).bfloat16(), half, "e4m3", 16, *norm)
    yield gated_sum, args, 6 * BF16_ULP_RTOL
    for tokens, granularity in ((7, "per_tensor"), (1, "per_row"), (0, "none")):
        x, gate = turned(2, tokens, 48), torch.randn(2, 144)[:, 48:96]
        norm, saved = (torch.rand(48), EPS) if normed else (), ("e5m2", 16) if tokens else ("none", 0)
        yield gated_sum, (x.bfloat16(), gate, x, None, None, *saved, *norm), 4 * BF16_ULP_RTOL
        back = (x, gate, x.bfloat16(), None, 128, BF16, "e5m2", granularity, *norm)
        yield gated_sum_backward, back, 4 * BF16_ULP_RTOL


@pytest.mark.triton
@pytest.mark.parametrize("normed", NORMS)
def test_kernels_follow_the_references(normed: bool, device: torch.device) -> None:
    for op, args, rtol in calls(normed):
        result = assert_follows(op, args, device, rtol)[0]
        if not normed and rtol == KERNEL_ROW_RTOL and args[3] is None:  # to the bit
            assert_bitwise(result.cpu(), reference(op, *args)[0])


@pytest.mark.triton
@pytest.mark.parametrize("normed", NORMS)
def test_the_kernel_rounds_the_product_before_the_sum(normed: bool, device: torch.device) -> None:
    """256.5 is 256 in bf16, also where it is truncated, as by the interpreter."""
    residual, gate, result, one = (torch.full((1, 2, 16), x).bfloat16().to(device) for x in (-256.0, 13.5, 19.0, 1.0))
    norm = (result[0, 0], 0.0) if normed else ()
    for run in (kernel_of(gated_sum), gated_sum):
        assert not run(residual, gate[:, 0], one if normed else result, None, None, "none", 0, *norm)[0].any()


@pytest.mark.triton
def test_without_result_there_is_no_gradient_of_the_gate(device: torch.device) -> None:
    grad, gate, _ = moved(tensors(), device)
    for run in (kernel_of(gated_sum_backward), gated_sum_backward):
        dy, _, _, dgate = run(grad, gate, None, None, 128, FP32, "e5m2", "none")
        assert_bitwise(dy, grad * gate[:, None])
        assert dgate.shape == (0,)
    for granularity in ("per_row", "per_tensor"):  # codes are those of what is returned
        args = (grad, gate.bfloat16(), None, None, 128, BF16, "e5m2", granularity)
        results = kernel_of(gated_sum_backward)(*args)
        assert results[0].dtype == BF16
        assert_casts(gated_sum_backward, results, args)
