"""LayerNorm or RMSNorm with modulation, and gate and residual: against diffusers to the bit, autograd in float64.

Their Triton kernels, in the interpreter, against the operators in fp32: the interpreter truncates to bf16.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers.models.normalization import AdaLayerNormZero
from torch import Tensor

from coat_core.granularity import per_group
from coat_core.ops.gate import gated_sum, gated_sum_backward
from coat_core.ops.norm import norm_modulate, norm_modulate_backward, norm_modulate_quantize
from coat_core.quantize import dequantize, quantize
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.helpers.operators import moved, reference
from tests.helpers.rows import (
    CASES,
    FLOOR,
    GRANULARITIES,
    LAYOUTS,
    SAVED,
    SPECS,
    assert_casts,
    assert_follows,
    assert_rows_close,
    diffusers_norm,
    kernel_of,
    read_cases,
    rows,
    turned,
)
from tests.tolerances import BF16_ULP_RTOL, KERNEL_ROW_RTOL, NORM_BACKWARD_FP32_FLOOR_DB

EPS = 1e-6
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NORMS = ["layer", "rms"]
SHAPE = (2, 7, 48)


def vectors(norm: str, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Of x [B, S, D]: scale and shift, chunks of the modulations of many blocks; or scale and RMSNorm's weight."""
    scale, shift = torch.randn(len(x), 6 * x.shape[-1]).to(x.dtype).chunk(6, dim=1)[1:3]
    return (scale, shift, None) if norm == "layer" else (scale, None, (1 + torch.randn(x.shape[-1]) / 4).to(x.dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, FP32, FP16])
def test_norm_modulate_has_diffusers_bits(layout, dtype):
    x = rows((2, 7, 48), layout).to(dtype)
    norm, emb = AdaLayerNormZero(48).to(dtype), torch.randn(2, 48).to(dtype)
    with torch.no_grad():
        expected = norm(x, emb=emb)[0]
        shift, scale, *_ = norm.linear(norm.silu(emb)).chunk(6, dim=1)
    assert_bitwise(norm_modulate(x, None, 0, scale, shift, EPS, dtype), expected)
    with torch.autocast("cpu", BF16):
        assert_bitwise(norm_modulate_quantize(x, scale, shift, EPS, "e4m3", "none", "none", 0)[0], expected)


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP32, FP32), (FP16, FP16), (BF16, FP32), (FP32, BF16)], ids=str)
def test_rms_norm_has_diffusers_bits(dtypes):
    x = rows((2, 7, 48)).to(dtypes[0])
    scale, _, weight = vectors("rms", x)
    weight = weight.to(dtypes[1])
    expected = diffusers_norm(x, weight, EPS) * (1 + scale[:, None])
    assert_bitwise(norm_modulate(x, None, 0, scale, None, EPS, dtypes[0], weight), expected)
    assert_bitwise(norm_modulate_quantize(x, scale, None, EPS, "e4m3", "none", "none", 0, weight)[0], expected)
    shift = torch.randn_like(scale)
    assert_bitwise(norm_modulate(x, None, 0, scale, shift, EPS, dtypes[0], weight), expected + shift[:, None])


@pytest.mark.parametrize("norm", NORMS)
def test_n_comes_with_its_codes_and_those_of_x_give_it_again(norm):
    x = rows((2, 7, 48)).bfloat16()
    *modulation, weight = vectors(norm, x)
    for spec, saved in zip(SPECS, [*SAVED, *SAVED[:2]], strict=True):
        args = (x, *modulation, EPS, *spec, *saved, weight)
        n, *_ = results = norm_modulate_quantize(*args)
        assert_bitwise(n, norm_modulate(x, None, 0, *modulation, EPS, BF16, weight))
        assert_casts(norm_modulate_quantize, results, args, *[n] * (spec[1] != "none"), *[x] * (saved[0] != "none"))
    for granularity in GRANULARITIES[:2]:
        saved_codes, saved_scale, _ = quantize(x, "e4m3", granularity)
        again = norm_modulate(saved_codes, saved_scale, 16, *modulation, EPS, BF16, weight)
        values = dequantize(saved_codes, saved_scale, granularity, BF16)
        assert_bitwise(again, norm_modulate(values, None, 0, *modulation, EPS, BF16, weight))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("from_codes", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_the_gradients_are_autograds(norm, from_codes, dtype):
    x = torch.randn(2, 7, 48).to(dtype)
    scale, _, weight = vectors(norm, x)
    grad, residual = torch.randn_like(x), torch.randn_like(x)
    codes, code_scale, groups = quantize(x, "e4m3", per_group(16))
    if from_codes:
        x = dequantize(codes, code_scale, groups, dtype)
    leaves = [leaf.double().requires_grad_() for leaf in (x, torch.zeros_like(scale), scale)]
    if weight is None:
        normed = torch.nn.functional.layer_norm(leaves[0], (48,), eps=EPS)
    else:
        normed = torch.nn.functional.rms_norm(leaves[0], (48,), weight.double(), EPS)
    n = normed * (1 + leaves[2][:, None]) + leaves[1][:, None]
    dx, dshift, dscale = torch.autograd.grad(n, leaves, grad.double())
    saved = (codes, code_scale) if from_codes else (x, None)
    for added in (None, residual):
        found, modulation = norm_modulate_backward(grad, *saved, 16, scale, EPS, added, dtype, weight)
        assert found.dtype == dtype
        assert_sqnr(dx if added is None else dx + added, found, FLOOR[dtype])
        assert_sqnr(torch.stack([dshift, dscale], dim=1), modulation, NORM_BACKWARD_FP32_FLOOR_DB)


@pytest.mark.parametrize("norm", NORMS)
def test_a_row_of_zeros_gets_a_finite_gradient(norm):
    x = rows((2, 7, 48))
    scale, _, weight = vectors(norm, x)
    grad = torch.randn_like(x)
    dx, modulation = norm_modulate_backward(grad, x, None, 0, scale, EPS, None, FP32, weight)
    dz = grad[0, 1] * (1 + scale[0])
    dz = dz - dz.mean() if weight is None else dz * weight
    assert_rows_close(dx[0, 1], EPS**-0.5 * dz, KERNEL_ROW_RTOL)
    assert modulation.isfinite().all()


def test_the_residuals_gradient_is_added_before_the_one_rounding():
    x = torch.randn(2, 7, 48).bfloat16()
    scale, *_ = vectors("layer", x)
    grad, residual = torch.randn_like(x), torch.randn_like(x)
    dx, modulation = norm_modulate_backward(grad, x, None, 0, scale, EPS, residual, BF16)
    exact, _ = norm_modulate_backward(grad, x.float(), None, 0, scale, EPS, residual, FP32)
    assert_bitwise(dx, exact.bfloat16())
    assert modulation.dtype == FP32


# -- kernels: interpreted on a CPU ------------------------------------------------------------------------------------
def norm_calls(norm: str) -> Iterator[tuple[Any, tuple[Any, ...], float]]:
    """Of the three kernels, and how far of a row they may be off: the interpreter truncates where a GPU rounds."""
    for shape, layout, spec, saved in CASES:
        x = rows(shape, layout)
        *modulation, weight = vectors(norm, x)
        grad, residual = torch.randn(*shape, 2)[..., 0], rows(shape) if shape[0] == 2 else None
        yield norm_modulate_quantize, (x, *modulation, EPS, *spec, *saved, weight), KERNEL_ROW_RTOL
        yield norm_modulate, (x, None, 0, *modulation, EPS, FP32, weight), KERNEL_ROW_RTOL
        back = (grad, x, None, 0, modulation[0], EPS, residual, FP32, weight)
        yield norm_modulate_backward, back, KERNEL_ROW_RTOL
    for granularity in GRANULARITIES:
        for fmt, shape in (("e4m3", (2, 7, 48)), ("e5m2", (1, 4, 300))):
            x = rows(shape)
            *modulation, weight = vectors(norm, x)
            codes = (*quantize(x, fmt, granularity)[:2], granularity.group_size)
            yield norm_modulate, (*codes, *modulation, EPS, FP32, weight), KERNEL_ROW_RTOL
            back = (torch.randn_like(x), *codes, modulation[0], EPS, None, FP32, weight)
            yield norm_modulate_backward, back, KERNEL_ROW_RTOL
    for x, dtype, other, granularity in (  # `other`: of the modulation or of the weight
        (rows((2, 7, 48)), BF16, BF16, "per_row"),
        (turned(2, 7, 48), BF16, FP32, "per_tensor"),
        (turned(2, 1, 48), FP16, FP16, "per_row"),
        (turned(2, 0, 48), BF16, FP32, "none"),
    ):
        x = x.to(dtype)
        *modulation, weight = (v if v is None else v.to(other) for v in vectors(norm, x))
        saved = ("e4m3", 16) if x.numel() else ("none", 0)
        yield norm_modulate_quantize, (x, *modulation, EPS, "e4m3", granularity, *saved, weight), 4 * BF16_ULP_RTOL
        grad, residual = torch.randn(2, *x.shape).to(other)
        for given in read_cases(x):
            yield norm_modulate, (*given, *modulation, EPS, dtype, weight), 4 * BF16_ULP_RTOL
            back = (grad, *given, modulation[0], EPS, residual, dtype, weight)
            yield norm_modulate_backward, back, 3 * BF16_ULP_RTOL


@pytest.mark.triton
@pytest.mark.parametrize("norm", NORMS)
def test_kernels_follow_the_references(norm, device):
    n = None
    for op, args, rtol in norm_calls(norm):
        result = assert_follows(op, args, device, rtol)
        if op is norm_modulate_quantize:
            n = result[0]
        elif op is norm_modulate and args[1] is None and rtol == KERNEL_ROW_RTOL:  # n has the same bits without codes
            assert_bitwise(result, n)


# -- gate and residual -------------------------------------------------------------------------------------------------
def gate_tensors(shape: tuple[int, ...] = SHAPE, layout: str = "slice", dtype: torch.dtype = FP32) -> list[Tensor]:
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
def test_the_sum_is_eager_pytorchs(saved):
    residual, gate, result = gate_tensors(dtype=BF16)
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
def test_a_norm_behind_the_gate_has_diffusers_bits(dtypes):
    residual, gate, result = gate_tensors(dtype=dtypes[0])
    weight = weight_of(result).to(dtypes[1])
    y = gated_sum(residual, gate, result, None, None, "none", 0, weight, EPS)[0]
    assert_bitwise(y, residual + gate[:, None] * diffusers_norm(result, weight, EPS))


def test_the_gates_gradients_are_autograds():
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
def test_gradients_of_a_norm_behind_the_gate_are_autograds(from_codes, dtype):
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


def test_a_row_of_zeros_behind_the_gate_gets_a_finite_gradient():
    grad, gate, result = gate_tensors()
    weight = weight_of(result)
    dy = gated_sum_backward(grad, gate, result, None, 0, FP32, "e5m2", "none", weight, EPS)[0]
    assert_rows_close(dy[0, 1], EPS**-0.5 * grad[0, 1] * gate[0] * weight, KERNEL_ROW_RTOL)


def test_the_gates_gradient_is_complete_in_fp32():
    grad, gate, result = gate_tensors(dtype=BF16)
    for granularity in GRANULARITIES:
        codes, scale, _ = quantize(result, "e4m3", granularity)
        found = gated_sum_backward(grad, gate, codes, scale, granularity.group_size, BF16, "e5m2", "none")
        assert_bitwise(found[-1], (grad.float() * dequantize(codes, scale, granularity, BF16).float()).sum(1))


def gate_calls(normed: bool) -> Iterator[tuple[Any, tuple[Any, ...], float]]:
    """Of both kernels, and how far of a row they may be off: the interpreter truncates where a GPU rounds."""
    for shape, layout, spec, saved in CASES:
        grad, gate, result = gate_tensors(shape, layout)
        norm = (weight_of(result), EPS) if normed else ()
        yield gated_sum, (grad, gate, result, None, None, *saved, *norm), KERNEL_ROW_RTOL
        yield gated_sum, (grad, gate.bfloat16(), result.bfloat16(), None, None, *saved, *norm), 4 * BF16_ULP_RTOL
        back = (grad, gate, result, None, 128, FP32, *spec)
        yield gated_sum_backward, (*back, *norm), KERNEL_ROW_RTOL
        yield gated_sum_backward, (*back, *(norm or (None, 0.0)), torch.rand(shape[-1]) + 0.5), KERNEL_ROW_RTOL
    for rank, shape in ((1, (2, 17, 48)), (24, (3, 5, 130)), (100, (1, 4, 300))):
        residual, gate, result = gate_tensors(shape, "whole")
        norm = (weight_of(result), EPS) if normed else ()
        args = (residual, gate, result, *adapter(shape, rank), "e4m3", 16, *norm)
        yield gated_sum, args, (1 + normed) * KERNEL_ROW_RTOL
    for granularity in GRANULARITIES:
        for fmt, shape, dtype in (("e5m2", (1, 4, 300), FP32), ("e4m3", SHAPE, BF16)):
            grad, gate, result = gate_tensors(shape, dtype=dtype)
            norm = (weight_of(result), EPS) if normed else ()
            codes = (*quantize(result, fmt, granularity)[:2], granularity.group_size)
            rtol = KERNEL_ROW_RTOL if dtype == FP32 else 4 * BF16_ULP_RTOL
            yield gated_sum_backward, (grad, gate, *codes, dtype, "e5m2", "per_row", *norm), rtol
    for dtype, of_weight in ((BF16, BF16), (BF16, FP32), (FP16, FP16)):
        residual, gate, result = gate_tensors(layout="whole", dtype=dtype)
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
@pytest.mark.parametrize("normed", [False, True])
def test_gate_kernels_follow_the_references(normed, device):
    for op, args, rtol in gate_calls(normed):
        result = assert_follows(op, args, device, rtol)[0]
        if not normed and rtol == KERNEL_ROW_RTOL and args[3] is None:  # to the bit
            assert_bitwise(result.cpu(), reference(op, *args)[0])


@pytest.mark.triton
@pytest.mark.parametrize("normed", [False, True])
def test_the_kernel_rounds_the_product_before_the_sum(normed, device):
    """256.5 is 256 in bf16, also where it is truncated, as by the interpreter."""
    residual, gate, result, one = (torch.full((1, 2, 16), x).bfloat16().to(device) for x in (-256.0, 13.5, 19.0, 1.0))
    norm = (result[0, 0], 0.0) if normed else ()
    for run in (kernel_of(gated_sum), gated_sum):
        assert not run(residual, gate[:, 0], one if normed else result, None, None, "none", 0, *norm)[0].any()


@pytest.mark.triton
def test_without_result_there_is_no_gradient_of_the_gate(device):
    grad, gate, _ = moved(gate_tensors(), device)
    for run in (kernel_of(gated_sum_backward), gated_sum_backward):
        dy, _, _, dgate = run(grad, gate, None, None, 128, FP32, "e5m2", "none")
        assert_bitwise(dy, grad * gate[:, None])
        assert dgate.shape == (0,)
    for granularity in ("per_row", "per_tensor"):  # codes are those of what is returned
        args = (grad, gate.bfloat16(), None, None, 128, BF16, "e5m2", granularity)
        results = kernel_of(gated_sum_backward)(*args)
        assert results[0].dtype == BF16
        assert_casts(gated_sum_backward, results, args)
