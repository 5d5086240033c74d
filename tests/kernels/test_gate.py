"""Gate and residual with the adapter's part and what is saved of it, also behind an RMSNorm: operators and kernels."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import Tensor

from coat_core.casts import declarations
from coat_core.granularity import Granularity, per_group
from coat_core.ops.gate import gated_sum, gated_sum_backward
from coat_core.quantize import dequantize, quantize
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.helpers.operators import reference, tensors_in
from tests.helpers.rows import (
    CASES,
    CPU,
    FLOOR,
    GRANULARITIES,
    KINDS,
    SAVED,
    SHAPES,
    SPECS,
    assert_codes_of,
    assert_rows_close,
    assert_saved,
    diffusers_norm,
    rows_of_kind,
)
from tests.tolerances import (
    BF16_ULP_RTOL,
    KERNEL_ROW_RTOL,
    NORM_BACKWARD_FP32_FLOOR_DB,
)

with suppress(ImportError):  # without triton
    from coat_core.ops import gate_kernel as kernels

EPS = 1e-5
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NORMS = [False, True]  # whether an RMSNorm stands before the gate


def tensors(kind: str, shape: tuple[int, ...], device: torch.device = CPU, dtype: torch.dtype = FP32) -> list[Tensor]:
    """Residual or grad, gate (one chunk of several), result."""
    b, _, d = shape
    gate = torch.randn(b, 3 * d)[:, d : 2 * d]
    return [x.to(device, dtype) for x in (torch.randn(shape), gate, rows_of_kind(kind, shape))]


def weight_of(result: Tensor) -> Tensor:
    """Of an RMSNorm of result."""
    return (1 + torch.randn(result.shape[-1]) / 4).to(result.device, result.dtype)


def kernel_dtypes(device: torch.device) -> list[torch.dtype]:
    """The interpreter truncates to bf16 where a GPU rounds."""
    return [FP32] + [BF16] * (device.type == "cuda")


def adapter(
    shape: tuple[int, ...], rank: int, device: torch.device = CPU, dtype: torch.dtype = FP32
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
    complete, weight = result.clone(), weight_of(result)
    complete.view(-1, 48).addmm_(h.reshape(-1, 4), up.t())
    y, *codes = gated_sum(residual, gate, result, h, up, *saved, weight, EPS)
    assert_bitwise(y, residual + gate[:, None] * diffusers_norm(complete, weight, EPS))
    assert_saved(complete, *codes, *saved)
    y, *codes = gated_sum(residual, gate, result, h, up, *saved)
    assert_bitwise(y, residual + gate[:, None] * complete)
    assert_saved(complete, *codes, *saved)
    declared = declarations["coat::gated_sum"]((y, *codes), residual, gate, result, h, up, *saved)
    assert len(declared) == (saved[0] != "none")
    for cast in declared:
        assert_bitwise(cast.values, complete)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP32, FP32), (FP16, FP16), (BF16, FP32), (FP32, BF16)], ids=str)
def test_the_norm_has_diffusers_bits(kind: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    residual, gate, result = tensors(kind, (2, 7, 48), CPU, dtypes[0])
    weight = weight_of(result).to(dtypes[1])
    y = gated_sum(residual, gate, result, None, None, "none", 0, weight, EPS)[0]
    assert_bitwise(y, residual + gate[:, None] * diffusers_norm(result, weight, EPS))


def test_the_gradients_are_autograds() -> None:
    grad, gate, result = tensors("plain", (2, 7, 48))
    leaves = [gate.double().requires_grad_(), result.double().requires_grad_()]
    expected_dgate, expected_dy = torch.autograd.grad(leaves[0][:, None] * leaves[1], leaves, grad.double())
    for spec in SPECS:
        dy, codes, scale, dgate = gated_sum_backward(grad, gate, result, None, 128, FP32, *spec)
        assert_rows_close(dy.double(), expected_dy, KERNEL_ROW_RTOL)
        assert_rows_close(dgate.double(), expected_dgate, KERNEL_ROW_RTOL)
        assert_codes_of(dy, codes, scale, *spec)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "zero row"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("from_codes", [True, False])
def test_the_norms_gradients_are_autograds(from_codes: bool, dtype: torch.dtype, kind: str) -> None:
    grad, gate, result = tensors(kind, (2, 7, 48), CPU, dtype)
    weight = weight_of(result)
    codes, code_scale, groups = quantize(result, "e4m3", per_group(16))
    result = dequantize(codes, code_scale, groups, dtype) if from_codes else result
    saved = (codes, code_scale, 16) if from_codes else (result, None, 16)
    leaves = [leaf.double().requires_grad_() for leaf in (result, gate)]
    normed = torch.nn.functional.rms_norm(leaves[0], (48,), weight.double(), EPS)
    dy, dgate = torch.autograd.grad(normed * leaves[1][:, None], leaves, grad.double())
    for spec in SPECS:
        found, codes, scale, of_gate = gated_sum_backward(grad, gate, *saved, dtype, *spec, weight, EPS)
        assert found.dtype == dtype
        assert_sqnr(dy, found, FLOOR[dtype])
        assert_sqnr(dgate, of_gate, NORM_BACKWARD_FP32_FLOOR_DB)
        assert_codes_of(found, codes, scale, *spec)


def test_a_row_of_zeros_gets_a_finite_gradient() -> None:
    grad, gate, result = tensors("zero row", (2, 7, 48))
    weight = weight_of(result)
    dy = gated_sum_backward(grad, gate, result, None, 0, FP32, "e5m2", "none", weight, EPS)[0]
    assert_rows_close(dy[0, -1], EPS**-0.5 * grad[0, -1] * gate[0] * weight, KERNEL_ROW_RTOL)


def test_the_gates_gradient_is_complete_in_fp32() -> None:
    grad, gate, result = tensors("plain", (2, 7, 48), CPU, BF16)
    for granularity in GRANULARITIES:
        codes, scale, _ = quantize(result, "e4m3", granularity)
        found = gated_sum_backward(grad, gate, codes, scale, granularity.group_size, BF16, "e5m2", "none")
        values = quantize(result, "e4m3", granularity).dequantize(BF16)
        assert_bitwise(found[-1], (grad.float() * values.float()).sum(1))


# -- kernels: interpreted on a CPU ------------------------------------------------------------------------------------


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_has_the_references_bits(kind: str, device: torch.device) -> None:
    for shape, saved in [*zip(SHAPES, SAVED, strict=True), (SHAPES[0], SAVED[KINDS.index(kind) % 4])]:
        for dtype in kernel_dtypes(device):
            residual, gate, result = tensors(kind, shape, device, dtype)
            for other in (residual, residual.float()):
                y, *codes = kernels.gated_sum(other, gate, result, None, None, *saved)
                assert_bitwise(y, other + gate[:, None] * result)
                assert_saved(result, *codes, *saved)
    y, *codes = kernels.gated_sum(residual.float(), gate.bfloat16(), result.bfloat16(), None, None, *saved)
    assert y.dtype == FP32
    assert_saved(result.bfloat16(), *codes, *saved)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rank", [1, 4, 16, 24, 64, 100, 256])
@pytest.mark.parametrize("normed", NORMS)
def test_kernel_completes_the_result(normed: bool, rank: int, device: torch.device) -> None:
    shapes = (("plain", (2, 17, 48)), ("slice", (1, 7, 40)), ("outlier", (3, 5, 130)), ("strided", (1, 3, 600)))
    for kind, shape in shapes[rank % 2 :: 2] if rank > 1 else shapes:
        residual, gate, result = tensors(kind, shape, device)
        h, up = adapter(shape, rank, device)
        norm = (weight_of(result), EPS) if normed else ()
        args = (residual, gate, result, h, up, "e4m3", 16, *norm)
        y, codes, scale = kernels.gated_sum(*args)
        assert_rows_close(y, reference(gated_sum, *args)[0], (1 + normed) * KERNEL_ROW_RTOL)
        ones, zeros = torch.ones_like(gate), torch.zeros_like(residual)
        complete = kernels.gated_sum(zeros, ones, result, h, up, "none", 0)[0]
        assert_rows_close(complete, result + h @ up.t(), KERNEL_ROW_RTOL)
        assert_saved(complete, codes, scale, "e4m3", 16)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_kernel_in_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    residual, gate, result = tensors("plain", (2, 17, 48), device, dtype)
    h, up = adapter((2, 17, 48), 16, device, dtype)
    args = (residual, gate, result, h, up, "e4m3", 16)
    y, codes, scale = kernels.gated_sum(*args)
    # the result, the product and the sum are rounded: the interpreter truncates
    assert_rows_close(y, reference(gated_sum, *args)[0], 6 * BF16_ULP_RTOL)
    complete = kernels.gated_sum(torch.zeros_like(residual), torch.ones_like(gate), *args[2:])[0]
    assert_saved(complete, codes, scale, "e4m3", 16)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("of_weight", [BF16, FP32])
def test_norm_kernels_in_half_precision(of_weight: torch.dtype, device: torch.device) -> None:
    grad, gate, result = tensors("outlier", (2, 17, 48), device, BF16)
    codes, scale, _ = quantize(result, "e4m3", per_group(16))
    norm = (weight_of(result).to(of_weight), EPS)
    for run, op, args in (
        (kernels.gated_sum, gated_sum, (grad, gate, result, None, None, "none", 0)),
        (kernels.gated_sum_backward, gated_sum_backward, (grad, gate, codes, scale, 16, BF16, "e5m2", "none")),
    ):
        pairs = zip(tensors_in(run(*args, *norm)), tensors_in(reference(op, *args, *norm)), strict=True)
        for found, wanted in pairs:  # the interpreter truncates where a GPU rounds, up to four times
            if found.numel():
                assert_rows_close(found, wanted, 4 * BF16_ULP_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", CASES, ids="-".join)
@pytest.mark.parametrize("normed", NORMS)
def test_backward_kernel(normed: bool, case: tuple[str, str, str], device: torch.device) -> None:
    kind, *spec = case
    for shape, saved in zip(SHAPES, SAVED, strict=True):
        for dtype in [FP32] if normed else kernel_dtypes(device):
            grad, gate, result = tensors(kind, shape, device, dtype)
            norm = (weight_of(result), EPS) if normed else ()
            args = (grad, gate, result, None, 128, dtype, *spec, *norm)
            dy, codes, scale, dgate = kernels.gated_sum_backward(*args)
            expected = reference(gated_sum_backward, *args)
            assert_codes_of(dy, codes, scale, *spec)
            assert_rows_close(dgate, expected[-1], KERNEL_ROW_RTOL)
            if not normed:
                assert_bitwise(dy, grad * gate[:, None])
                continue
            assert_rows_close(dy, expected[0], KERNEL_ROW_RTOL)
            y, *kept = kernels.gated_sum(grad, gate, result, None, None, *saved, *norm)
            expected = reference(gated_sum, grad, gate, result, None, None, "none", 0, *norm)
            assert_rows_close(y, expected[0], KERNEL_ROW_RTOL)
            assert_saved(result, *kept, *saved)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("normed", NORMS)
def test_backward_kernel_reads_codes(normed: bool, granularity: Granularity, device: torch.device) -> None:
    for shape, fmt, dtype in zip(SHAPES, ("e4m3", "e5m2") * 2, (FP32, FP32, BF16, BF16), strict=True):
        dtype = FP32 if normed else dtype
        grad, gate, result = tensors("heavy tails", shape, device, dtype)
        norm = (weight_of(result), EPS) if normed else ()
        codes, scale, _ = quantize(result, fmt, granularity)
        args = (grad, gate, codes, scale, granularity.group_size, dtype, "e5m2", "per_row", *norm)
        found, expected = kernels.gated_sum_backward(*args), reference(gated_sum_backward, *args)
        assert found[-1].dtype == FP32
        # the interpreter truncates the values to bf16
        allowed = KERNEL_ROW_RTOL if dtype == FP32 else 2 * BF16_ULP_RTOL
        assert_rows_close(found[-1], expected[-1], allowed)
        assert_rows_close(found[0], expected[0], allowed)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("programs", [1, 2, 5])
@pytest.mark.parametrize("normed", NORMS)
def test_each_program_takes_its_share_of_the_rows(
    normed: bool, programs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coat_core.ops import device as launching

    monkeypatch.setattr(launching, "PROGRAMS", programs)
    monkeypatch.setattr(launching, "TILE_ELEMENTS", 128)  # two rows at once
    grad, gate, result = tensors("plain", (2, 13, 48), device)
    norm = (weight_of(result), EPS) if normed else ()
    args = (grad, gate, result, None, 128, FP32, "e5m2", "per_row", *norm)
    dy, dy_codes, scale, dgate = kernels.gated_sum_backward(*args)
    expected = reference(gated_sum_backward, *args)
    assert_rows_close(dy, expected[0], KERNEL_ROW_RTOL)
    assert_codes_of(dy, dy_codes, scale, "e5m2", "per_row")
    assert_rows_close(dgate, expected[-1], KERNEL_ROW_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
def test_without_result_there_is_no_gradient_of_gate_nor_of_a_norm(device: torch.device) -> None:
    grad, gate, result = tensors("plain", (2, 7, 48), device)
    for run in (kernels.gated_sum_backward, gated_sum_backward):
        dy, _, _, dgate = run(grad, gate, None, None, 128, FP32, "e5m2", "none")
        assert_bitwise(dy, grad * gate[:, None])
        assert dgate.shape == (0,)
        with pytest.raises(ValueError, match="result=None"):
            run(grad, gate, None, None, 128, FP32, "e5m2", "none", weight_of(result), EPS)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("granularity", ["per_row", "per_tensor"])
def test_dy_is_quantized_as_it_is_returned(granularity: str, device: torch.device) -> None:
    grad, gate, _ = tensors("plain", (2, 7, 48), device)
    dy, codes, scale, _ = kernels.gated_sum_backward(grad, gate.bfloat16(), None, None, 128, BF16, "e5m2", granularity)
    assert dy.dtype == BF16
    assert_codes_of(dy, codes, scale, "e5m2", granularity)
