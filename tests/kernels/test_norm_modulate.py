"""LayerNorm+modulate that saves x as codes and reads them again: operators, and their Triton kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coat_core.granularity import PER_ROW, PER_TENSOR, Granularity, per_group
from coat_core.kernels.norm import layer_norm_modulate, norm_modulate, norm_modulate_backward, norm_modulate_quantize
from coat_core.quantize import dequantize, quantize
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.helpers.operators import check_operator, reference
from tests.helpers.rows import CASES, KINDS, SPECS, assert_codes_of, assert_rows_close, assert_saved, rows_of_kind
from tests.tolerances import BF16_ULP_RTOL, KERNEL_ROW_RTOL, NORM_BACKWARD_FP32_FLOOR_DB

EPS = 1e-6
FP32, BF16 = torch.float32, torch.bfloat16
CPU = torch.device("cpu")
SAVED = [("none", 128), ("e4m3", 128), ("e5m2", 16)]
SHAPES = [(2, 7, 48), (1, 7, 40), (3, 5, 130), (1, 3, 2100)]
GRANULARITIES = [PER_TENSOR, PER_ROW, per_group(16), per_group(128)]


def rows(
    kind: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = FP32
) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, S, D]; scale and shift, chunks of the modulations of many blocks."""
    b, _, d = shape
    scale, shift = torch.randn(b, 6 * d).chunk(6, dim=1)[1:3]
    x, scale, shift = (x.to(device, dtype) for x in (rows_of_kind(kind, shape), scale, shift))
    return x, scale, shift


def test_the_operators_are_those_they_consist_of() -> None:
    x, scale, shift = rows("outlier", (2, 7, 48), CPU, BF16)
    for spec in SPECS:
        for saved in SAVED:
            n, codes, code_scale, *x_codes = norm_modulate_quantize(x, scale, shift, EPS, *spec, *saved)
            assert_bitwise(n, layer_norm_modulate(x, scale, shift, EPS))
            assert_codes_of(n, codes, code_scale, *spec)
            assert_saved(x, *x_codes, *saved)
    for granularity in GRANULARITIES[:3]:
        saved_codes, saved_scale, _ = quantize(x, "e4m3", granularity)
        again = norm_modulate(saved_codes, saved_scale, 16, scale, shift, EPS, BF16)
        assert_bitwise(
            again, layer_norm_modulate(dequantize(saved_codes, saved_scale, granularity, BF16), scale, shift, EPS)
        )
    assert_bitwise(norm_modulate(x, None, 0, scale, shift, EPS, BF16), layer_norm_modulate(x, scale, shift, EPS))


@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("from_codes", [True, False])
def test_the_gradients_are_autograds(with_residual: bool, from_codes: bool) -> None:
    x, scale, shift = rows("heavy tails", (2, 7, 48), CPU)
    grad, residual = torch.randn_like(x), torch.randn_like(x) if with_residual else None
    codes, code_scale, groups = quantize(x, "e4m3", per_group(16))
    if from_codes:
        x = dequantize(codes, code_scale, groups)
    leaves = [leaf.double().requires_grad_() for leaf in (x, shift, scale)]
    n = torch.nn.functional.layer_norm(leaves[0], (48,), eps=EPS) * (1 + leaves[2][:, None]) + leaves[1][:, None]
    dx, dshift, dscale = torch.autograd.grad(n, leaves, grad.double())
    saved = (codes, code_scale) if from_codes else (x, None)
    found, modulation = norm_modulate_backward(grad, *saved, 16, scale, EPS, residual, FP32)
    assert_sqnr(dx if residual is None else dx + residual, found, NORM_BACKWARD_FP32_FLOOR_DB)
    assert_sqnr(torch.stack([dshift, dscale], dim=1), modulation, NORM_BACKWARD_FP32_FLOOR_DB)


def test_the_residuals_gradient_is_added_before_the_one_rounding() -> None:
    x, scale, _ = rows("plain", (2, 7, 48), CPU, BF16)
    grad, residual = torch.randn_like(x), torch.randn_like(x)
    dx, modulation = norm_modulate_backward(grad, x, None, 0, scale, EPS, residual, BF16)
    exact, _ = norm_modulate_backward(grad, x.float(), None, 0, scale, EPS, residual, FP32)
    assert_bitwise(dx, exact.bfloat16())
    assert modulation.dtype == FP32


def test_operators_keep_torch_library_rules() -> None:
    x, scale, shift = rows("strided", (2, 3, 48), CPU, BF16)
    for saved in SAVED:
        check_operator(norm_modulate_quantize, (x, scale, shift, EPS, "e4m3", "per_row", *saved))
    codes, code_scale, _ = quantize(x, "e4m3", per_group(16))
    for given in ((x, None), (codes, code_scale)):
        check_operator(norm_modulate, (*given, 16, scale, shift, EPS, BF16))
        for residual in (None, x):
            check_operator(norm_modulate_backward, (x, *given, 16, scale, EPS, residual, BF16))


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("saved", [("e4m3", 128), ("e5m2", 16), ("e4m3", 256), ("none", 0)], ids=str)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_norm_modulate_quantize_kernel(
    case: tuple[str, str, str], saved: tuple[str, int], device: torch.device
) -> None:
    from coat_core.kernels.gpu.norm import norm_modulate_quantize as kernel

    kind, *spec = case
    for shape in SHAPES:
        x, scale, shift = rows(kind, shape, device)
        n, codes, code_scale, *x_codes = kernel(x, scale, shift, EPS, *spec, *saved)
        assert_rows_close(n, reference(layer_norm_modulate, x, scale, shift, EPS), KERNEL_ROW_RTOL)
        assert_codes_of(n, codes, code_scale, *spec)
        assert_saved(x, *x_codes, *saved)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_modulate_kernels_in_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    from coat_core.kernels.gpu import norm as kernels

    x, scale, shift = rows("outlier", (2, 7, 48), device, dtype)
    for modulation in ((scale, shift), (scale.float(), shift.float())):
        n, codes, code_scale, *x_codes = kernels.norm_modulate_quantize(
            x, *modulation, EPS, "e4m3", "per_row", "e4m3", 16
        )
        assert_codes_of(n, codes, code_scale, "e4m3", "per_row")
        assert_saved(x, *x_codes, "e4m3", 16)
        # the interpreter truncates where a GPU rounds, three times
        assert_rows_close(n, reference(layer_norm_modulate, x, *modulation, EPS), 3 * BF16_ULP_RTOL)
        assert_rows_close(kernels.norm_modulate(x, None, 0, *modulation, EPS, dtype), n, 3 * BF16_ULP_RTOL)
        args = (*x_codes, 16, *modulation, EPS, dtype)
        assert_rows_close(kernels.norm_modulate(*args), reference(norm_modulate, *args), 4 * BF16_ULP_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_norm_modulate_kernels_read_codes(fmt: str, granularity: Granularity, device: torch.device) -> None:
    from coat_core.kernels.gpu import norm as kernels

    for shape in SHAPES:
        x, scale, shift = rows("heavy tails", shape, device)
        saved = (*quantize(x, fmt, granularity)[:2], granularity.group_size)
        args = (*saved, scale, shift, EPS, FP32)
        assert_rows_close(kernels.norm_modulate(*args), reference(norm_modulate, *args), KERNEL_ROW_RTOL)
        args = (torch.randn_like(x), *saved, scale, EPS, None, FP32)
        for found, expected in zip(
            kernels.norm_modulate_backward(*args), reference(norm_modulate_backward, *args), strict=True
        ):
            assert_rows_close(found, expected, KERNEL_ROW_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", KINDS)
def test_norm_modulate_backward_kernel(kind: str, device: torch.device) -> None:
    from coat_core.kernels.gpu.norm import norm_modulate_backward as kernel

    for shape in SHAPES:
        x, scale, _ = rows(kind, shape, device)
        grad = rows_of_kind("strided", shape).to(device)
        for residual in (None, rows_of_kind("slice", shape).to(device)):
            args = (grad, x, None, 0, scale, EPS, residual, FP32)
            for found, expected in zip(kernel(*args), reference(norm_modulate_backward, *args), strict=True):
                assert_rows_close(found, expected, KERNEL_ROW_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
def test_norm_modulate_backward_kernel_in_half_precision(device: torch.device) -> None:
    from coat_core.kernels.gpu.norm import norm_modulate_backward as kernel

    x, scale, _ = rows("plain", (2, 7, 48), device, BF16)
    saved, groups, _ = quantize(x, "e4m3", per_group(16))
    for grad_dtype in (BF16, FP32):
        grad, residual = torch.randn(x.shape).to(device, grad_dtype), torch.randn(x.shape).to(device, grad_dtype)
        for given in ((x, None), (saved, groups)):
            args = (grad, *given, 16, scale, EPS, residual, BF16)
            dx, modulation = kernel(*args)
            expected_dx, expected_modulation = reference(norm_modulate_backward, *args)
            # codes are rounded to bf16 once more: the interpreter truncates
            assert_rows_close(dx, expected_dx, 3 * BF16_ULP_RTOL)
            assert_rows_close(modulation, expected_modulation, BF16_ULP_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("programs", [1, 2, 5])
def test_norm_modulates_backward_shares_rows_among_programs(
    programs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coat_core.kernels.gpu import codes
    from coat_core.kernels.gpu.norm import norm_modulate_backward as kernel

    monkeypatch.setattr(codes, "PROGRAMS", programs)
    monkeypatch.setattr(codes, "TILE_ELEMENTS", 128)  # two rows at once
    x, scale, _ = rows("plain", (2, 13, 48), device)
    grad = torch.randn_like(x)
    args = (grad, *quantize(x, "e4m3", per_group(16))[:2], 16, scale, EPS, x, FP32)
    for found, expected in zip(kernel(*args), reference(norm_modulate_backward, *args), strict=True):
        assert_rows_close(found, expected, KERNEL_ROW_RTOL)
