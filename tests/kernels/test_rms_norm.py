"""RMSNorm with a weight, before linears (norm_modulate) and after them (gated_sum): against diffusers to the bit and
autograd in float64; their Triton kernels, in the interpreter, against the operators.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.normalization import RMSNorm
from torch import Tensor

from coat_core.granularity import PER_ROW, PER_TENSOR, Granularity, per_group
from coat_core.ops.gate import gated_sum, gated_sum_backward
from coat_core.ops.norm import norm_modulate, norm_modulate_backward, norm_modulate_quantize
from coat_core.quantize import dequantize, quantize
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.helpers.operators import check_operator, reference
from tests.helpers.rows import CASES, KINDS, SPECS, assert_codes_of, assert_rows_close, assert_saved, rows_of_kind
from tests.tolerances import (
    BF16_ULP_RTOL,
    KERNEL_ROW_RTOL,
    NORM_BACKWARD_BF16_FLOOR_DB,
    NORM_BACKWARD_FP32_FLOOR_DB,
)

EPS = 1e-5
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
FLOOR = {FP32: NORM_BACKWARD_FP32_FLOOR_DB, BF16: NORM_BACKWARD_BF16_FLOOR_DB}
CPU = torch.device("cpu")
SAVED = [("none", 128), ("e4m3", 128), ("e5m2", 16)]
SHAPES = [(2, 7, 48), (1, 19, 40), (3, 5, 130), (1, 3, 2100)]
GRANULARITIES = [PER_TENSOR, PER_ROW, per_group(16), per_group(128)]


def rows(kind: str, shape: tuple[int, ...], device: torch.device = CPU, dtype: torch.dtype = FP32) -> list[Tensor]:
    """x [B, S, D]; scale or gate, a chunk of several; weight."""
    b, _, d = shape
    vectors = torch.randn(b, 4 * d)[:, d : 2 * d]
    return [x.to(device, dtype) for x in (rows_of_kind(kind, shape), vectors, 1 + torch.randn(d) / 4)]


def diffusers_norm(x: Tensor, weight: Tensor) -> Tensor:
    norm = RMSNorm(len(weight), EPS)
    norm.weight.data = weight
    return norm(x).detach()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP32, FP32), (FP16, FP16), (BF16, FP32), (FP32, BF16)], ids=str)
def test_both_have_diffusers_bits(kind: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    dtype, of_weight = dtypes
    x, vectors, weight = rows(kind, (2, 7, 48), dtype=dtype)
    weight, shift = weight.to(of_weight), torch.randn_like(vectors)
    normed, residual = diffusers_norm(x, weight), torch.randn(x.shape).to(dtype)
    n = norm_modulate(x, None, 0, vectors, None, EPS, dtype, weight)
    assert_bitwise(n, normed * (1.0 + vectors[:, None]))
    assert_bitwise(norm_modulate(x, None, 0, vectors, shift, EPS, dtype, weight), n + shift[:, None])
    assert_bitwise(norm_modulate_quantize(x, vectors, None, EPS, "e4m3", "none", "none", 0, weight)[0], n)
    gate = vectors.tanh()
    y = gated_sum(residual, gate, x, None, None, "none", 0, weight, EPS)[0]
    assert_bitwise(y, residual + gate[:, None] * normed)


def test_zeros_and_ones_stand_for_no_modulation() -> None:
    x, vectors, weight = rows("outlier", (2, 7, 48), dtype=BF16)
    zeros, ones = torch.zeros_like(vectors), torch.ones_like(vectors)
    assert_bitwise(norm_modulate(x, None, 0, zeros, None, EPS, BF16, weight), diffusers_norm(x, weight))
    y = gated_sum(x, ones, x, None, None, "none", 0, weight, EPS)[0]
    assert_bitwise(y, x + diffusers_norm(x, weight))


def test_codes_are_those_of_what_is_returned_and_kept() -> None:
    x, vectors, weight = rows("outlier", (2, 7, 48), dtype=BF16)
    h, up = torch.randn(2, 7, 4).bfloat16(), torch.randn(48, 4).bfloat16()
    complete = torch.addmm(x.view(-1, 48), h.view(-1, 4), up.t()).view(x.shape)
    for saved in SAVED:
        for spec in SPECS:
            n, codes, scale, *of_x = norm_modulate_quantize(x, vectors, None, EPS, *spec, *saved, weight)
            assert_codes_of(n, codes, scale, *spec)
            assert_saved(x, *of_x, *saved)
        y, *of_result = gated_sum(x, vectors, x, h, up, *saved, weight, EPS)
        assert_bitwise(y, x + vectors[:, None] * diffusers_norm(complete, weight))
        assert_saved(complete, *of_result, *saved)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "zero row"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("from_codes", [True, False])
def test_the_gradients_are_autograds(from_codes: bool, dtype: torch.dtype, kind: str) -> None:
    x, vectors, weight = rows(kind, (2, 7, 48), dtype=dtype)
    grad, residual = torch.randn_like(x), torch.randn_like(x)
    codes, code_scale, groups = quantize(x, "e4m3", per_group(16))
    x = dequantize(codes, code_scale, groups, dtype) if from_codes else x
    saved = (codes, code_scale, 16) if from_codes else (x, None, 16)
    leaves = [leaf.double().requires_grad_() for leaf in (x, vectors)]
    normed = torch.nn.functional.rms_norm(leaves[0], (48,), weight.double(), EPS)

    dx, dscale = torch.autograd.grad(normed * (1 + leaves[1][:, None]), leaves, grad.double(), retain_graph=True)
    for added in (None, residual):
        found, modulation = norm_modulate_backward(grad, *saved, vectors, EPS, added, dtype, weight)
        assert found.dtype == dtype
        assert_sqnr(dx if added is None else dx + added, found, FLOOR[dtype])
        expected = torch.stack([grad.double().sum(1), dscale], dim=1)
        assert_sqnr(expected, modulation, NORM_BACKWARD_FP32_FLOOR_DB)

    dy, dgate = torch.autograd.grad(normed * leaves[1][:, None], leaves, grad.double())
    for spec in SPECS:
        found, codes, scale, of_gate = gated_sum_backward(grad, vectors, *saved, dtype, *spec, weight, EPS)
        assert found.dtype == dtype
        assert_sqnr(dy, found, FLOOR[dtype])
        assert_sqnr(dgate, of_gate, NORM_BACKWARD_FP32_FLOOR_DB)
        assert_codes_of(found, codes, scale, *spec)


def test_a_row_of_zeros_gets_a_finite_gradient() -> None:
    x, vectors, weight = rows("zero row", (2, 7, 48))
    grad = torch.randn_like(x)
    dx, _ = norm_modulate_backward(grad, x, None, 0, vectors, EPS, None, FP32, weight)
    assert_rows_close(dx[0, -1], EPS**-0.5 * grad[0, -1] * (1 + vectors[0]) * weight, KERNEL_ROW_RTOL)
    dy = gated_sum_backward(grad, vectors, x, None, 0, FP32, "e5m2", "none", weight, EPS)[0]
    assert_rows_close(dy[0, -1], EPS**-0.5 * grad[0, -1] * vectors[0] * weight, KERNEL_ROW_RTOL)


def test_operators_keep_torch_library_rules() -> None:
    x, vectors, weight = rows("strided", (2, 3, 48), dtype=BF16)
    codes, scale, _ = quantize(x, "e4m3", per_group(16))
    for of_weight in (weight, weight.float()):
        how = ("e4m3", "per_row", "e4m3", 16, of_weight)
        check_operator(norm_modulate_quantize, (x, vectors, None, EPS, *how))
        check_operator(norm_modulate, (codes, scale, 16, vectors, None, EPS, BF16, of_weight))
        check_operator(norm_modulate_backward, (x, codes, scale, 16, vectors, EPS, x, BF16, of_weight))
        check_operator(gated_sum, (x, vectors, x, None, None, "e4m3", 16, of_weight, EPS))
        how = (BF16, "e5m2", "per_row", of_weight, EPS)
        check_operator(gated_sum_backward, (x, vectors, codes, scale, 16, *how))


def test_the_gradient_of_a_norm_needs_what_it_normed() -> None:
    x, vectors, weight = rows("plain", (2, 3, 48))
    for run in (gated_sum_backward, kernels().gate.gated_sum_backward):
        with pytest.raises(ValueError, match="result=None: the gradient of a norm needs what it normed"):
            run(x, vectors, None, None, 128, FP32, "e5m2", "none", weight, EPS)


# -- kernels ----------------------------------------------------------------------------------------------------------


def kernels() -> Any:
    pytest.importorskip("triton")
    from coat_core.ops import gate_kernel as gate
    from coat_core.ops import norm_kernel as norm

    return type("kernels", (), {"gate": gate, "norm": norm})


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_norm_kernels(case: tuple[str, str, str], device: torch.device) -> None:
    kind, *spec = case
    norm = kernels().norm
    for shape, saved in zip(SHAPES, [*SAVED, ("e4m3", 256)], strict=True):
        x, scale, weight = rows(kind, shape, device)
        n, codes, code_scale, *of_x = norm.norm_modulate_quantize(x, scale, None, EPS, *spec, *saved, weight)
        args = (x, None, 0, scale, None, EPS, FP32, weight)
        assert_rows_close(n, reference(norm_modulate, *args), KERNEL_ROW_RTOL)
        assert_codes_of(n, codes, code_scale, *spec)
        assert_saved(x, *of_x, *saved)
        assert_bitwise(norm.norm_modulate(*args), n)
        for residual in (None, rows_of_kind("slice", shape).to(device)):
            args = (rows_of_kind("strided", shape).to(device), x, None, 0, scale, EPS, residual, FP32, weight)
            expected = reference(norm_modulate_backward, *args)
            for found, wanted in zip(norm.norm_modulate_backward(*args), expected, strict=True):
                assert_rows_close(found, wanted, KERNEL_ROW_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_gate_kernels(case: tuple[str, str, str], device: torch.device) -> None:
    kind, *spec = case
    gate = kernels().gate
    for shape, saved in zip(SHAPES, [*SAVED, ("e4m3", 256)], strict=True):
        result, vectors, weight = rows(kind, shape, device)
        residual = torch.randn(shape, device=device)
        y, *kept = gate.gated_sum(residual, vectors, result, None, None, *saved, weight, EPS)
        expected = reference(gated_sum, residual, vectors, result, None, None, "none", 0, weight, EPS)
        assert_rows_close(y, expected[0], KERNEL_ROW_RTOL)
        assert_saved(result, *kept, *saved)
        args = (residual, vectors, result, None, 128, FP32, *spec, weight, EPS)
        dy, codes, scale, dgate = gate.gated_sum_backward(*args)
        expected = reference(gated_sum_backward, *args)
        assert_rows_close(dy, expected[0], KERNEL_ROW_RTOL)
        assert_codes_of(dy, codes, scale, *spec)
        assert_rows_close(dgate, expected[-1], KERNEL_ROW_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rank", [1, 16, 100])
def test_gate_kernel_completes_what_it_norms(rank: int, device: torch.device) -> None:
    for kind, shape in (("plain", (2, 17, 48)), ("outlier", (1, 5, 130)), ("strided", (1, 3, 600))):
        result, vectors, weight = rows(kind, shape, device)
        residual, up = torch.randn(shape, device=device), torch.randn(shape[-1], rank, device=device)
        h = torch.randn(*shape[:-1], 2 * rank, device=device)[..., rank:]
        args = (residual, vectors, result, h, up, "e4m3", 16, weight, EPS)
        found = kernels().gate.gated_sum(*args)
        assert_rows_close(found[0], reference(gated_sum, *args)[0], 2 * KERNEL_ROW_RTOL)
        complete = kernels().gate.gated_sum(torch.zeros_like(result), torch.ones_like(vectors), *args[2:5], "none", 0)
        assert_saved(complete[0], *found[1:], "e4m3", 16)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_kernels_read_codes(granularity: Granularity, device: torch.device) -> None:
    for shape in SHAPES:
        x, vectors, weight = rows("heavy tails", shape, device)
        grad, saved = torch.randn_like(x), (*quantize(x, "e4m3", granularity)[:2], granularity.group_size)
        of_norm = (grad, *saved, vectors, EPS, None, FP32, weight)
        of_gate = (grad, vectors, *saved, FP32, "e5m2", "none", weight, EPS)
        for run, op, args in (
            (kernels().norm.norm_modulate_backward, norm_modulate_backward, of_norm),
            (kernels().gate.gated_sum_backward, gated_sum_backward, of_gate),
        ):
            for found, wanted in zip(run(*args), reference(op, *args), strict=True):
                if found.numel():
                    assert_rows_close(found, wanted, KERNEL_ROW_RTOL)
        again = (*saved, vectors, None, EPS, FP32, weight)
        assert_rows_close(kernels().norm.norm_modulate(*again), reference(norm_modulate, *again), KERNEL_ROW_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("of_weight", [BF16, FP32])
def test_kernels_in_half_precision(of_weight: torch.dtype, device: torch.device) -> None:
    x, vectors, weight = rows("outlier", (2, 17, 48), device, BF16)
    weight, grad = weight.to(of_weight), torch.randn(x.shape, device=device).bfloat16()
    codes, scale, _ = quantize(x, "e4m3", per_group(16))
    for run, op, args in (
        (kernels().norm.norm_modulate, norm_modulate, (x, None, 0, vectors, None, EPS, BF16, weight)),
        (kernels().gate.gated_sum, gated_sum, (grad, vectors, x, None, None, "none", 0, weight, EPS)),
        (
            kernels().norm.norm_modulate_backward,
            norm_modulate_backward,
            (grad, codes, scale, 16, vectors, EPS, x, BF16, weight),
        ),
        (
            kernels().gate.gated_sum_backward,
            gated_sum_backward,
            (grad, vectors, codes, scale, 16, BF16, "e5m2", "none", weight, EPS),
        ),
    ):
        for found, wanted in zip(tensors(run(*args)), tensors(reference(op, *args)), strict=True):
            # the interpreter truncates where a GPU rounds, up to four times
            assert_rows_close(found, wanted, 4 * BF16_ULP_RTOL)


def tensors(found: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [x for x in ([found] if isinstance(found, Tensor) else found) if x.numel()]


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("programs", [1, 5])
def test_each_program_takes_its_share_of_the_rows(
    programs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coat_core.ops import rows as codes

    monkeypatch.setattr(codes, "PROGRAMS", programs)
    monkeypatch.setattr(codes, "TILE_ELEMENTS", 128)  # two rows at once
    x, vectors, weight = rows("plain", (2, 13, 48), device)
    grad = torch.randn_like(x)
    args = (grad, vectors, x, None, 128, FP32, "e5m2", "none", weight, EPS)
    found, wanted = kernels().gate.gated_sum_backward(*args), reference(gated_sum_backward, *args)
    assert_rows_close(found[0], wanted[0], KERNEL_ROW_RTOL)
    assert_rows_close(found[-1], wanted[-1], KERNEL_ROW_RTOL)
