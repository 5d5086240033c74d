"""LayerNorm+modulate that saves x as codes and reads them again: against diffusers to the bit, against autograd in
float64.

Its Triton kernels, in the interpreter, against the operators in fp32: the interpreter truncates to bf16.
"""

from __future__ import annotations

import pytest
import torch
from diffusers.models.normalization import AdaLayerNormZero
from torch import Tensor

from coat_core.granularity import PER_ROW, PER_TENSOR, Granularity, per_group
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

EPS = 1e-6
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
FLOOR = {FP32: NORM_BACKWARD_FP32_FLOOR_DB, BF16: NORM_BACKWARD_BF16_FLOOR_DB}
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, FP32, FP16])
def test_norm_modulate_has_diffusers_bits(kind: str, dtype: torch.dtype) -> None:
    x = rows_of_kind(kind, (2, 7, 48)).to(dtype)
    norm, emb = AdaLayerNormZero(48).to(dtype), torch.randn(2, 48).to(dtype)
    with torch.no_grad():
        expected = norm(x, emb=emb)[0]
        shift, scale, *_ = norm.linear(norm.silu(emb)).chunk(6, dim=1)
    assert_bitwise(norm_modulate(x, None, 0, scale, shift, EPS, dtype), expected)
    assert_bitwise(norm_modulate_quantize(x, scale, shift, EPS, "e4m3", "none", "none", 0)[0], expected)


def test_n_comes_with_its_codes_and_those_of_x_give_it_again() -> None:
    x, scale, shift = rows("outlier", (2, 7, 48), CPU, BF16)
    for spec in SPECS:
        for saved in SAVED:
            n, codes, code_scale, *x_codes = norm_modulate_quantize(x, scale, shift, EPS, *spec, *saved)
            assert_bitwise(n, norm_modulate(x, None, 0, scale, shift, EPS, BF16))
            assert_codes_of(n, codes, code_scale, *spec)
            assert_saved(x, *x_codes, *saved)
    for granularity in GRANULARITIES[:3]:
        saved_codes, saved_scale, _ = quantize(x, "e4m3", granularity)
        again = norm_modulate(saved_codes, saved_scale, 16, scale, shift, EPS, BF16)
        values = dequantize(saved_codes, saved_scale, granularity, BF16)
        assert_bitwise(again, norm_modulate(values, None, 0, scale, shift, EPS, BF16))


def test_autocast_changes_nothing() -> None:
    x, scale, shift = rows("plain", (2, 7, 48), CPU)
    plain = norm_modulate(x, None, 0, scale, shift, EPS, FP32)
    with torch.autocast("cpu", BF16):
        cast = norm_modulate(x, None, 0, scale, shift, EPS, FP32)
    assert_bitwise(cast, plain)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "zero row"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("from_codes", [True, False])
def test_the_gradients_are_autograds(from_codes: bool, dtype: torch.dtype, kind: str) -> None:
    x, scale, shift = rows(kind, (2, 7, 48), CPU, dtype)
    grad, residual = torch.randn_like(x), torch.randn_like(x)
    codes, code_scale, groups = quantize(x, "e4m3", per_group(16))
    if from_codes:
        x = dequantize(codes, code_scale, groups, dtype)
    leaves = [leaf.double().requires_grad_() for leaf in (x, shift, scale)]
    n = torch.nn.functional.layer_norm(leaves[0], (48,), eps=EPS) * (1 + leaves[2][:, None]) + leaves[1][:, None]
    dx, dshift, dscale = torch.autograd.grad(n, leaves, grad.double())
    saved = (codes, code_scale) if from_codes else (x, None)
    for added in (None, residual):
        found, modulation = norm_modulate_backward(grad, *saved, 16, scale, EPS, added, dtype)
        assert found.dtype == dtype
        assert_sqnr(dx if added is None else dx + added, found, FLOOR[dtype])
        assert_sqnr(torch.stack([dshift, dscale], dim=1), modulation, NORM_BACKWARD_FP32_FLOOR_DB)


def test_a_row_of_zeros_gets_a_finite_gradient() -> None:
    x, scale, _ = rows("zero row", (2, 7, 48), CPU)
    grad = torch.randn_like(x)
    dx, modulation = norm_modulate_backward(grad, x, None, 0, scale, EPS, None, FP32)
    dz = grad[0, -1] * (1 + scale[0])
    assert_rows_close(dx[0, -1], EPS**-0.5 * (dz - dz.mean()), KERNEL_ROW_RTOL)
    assert modulation.isfinite().all()


def test_the_residuals_gradient_is_added_before_the_one_rounding() -> None:
    x, scale, _ = rows("plain", (2, 7, 48), CPU, BF16)
    grad, residual = torch.randn_like(x), torch.randn_like(x)
    dx, modulation = norm_modulate_backward(grad, x, None, 0, scale, EPS, residual, BF16)
    exact, _ = norm_modulate_backward(grad, x.float(), None, 0, scale, EPS, residual, FP32)
    assert_bitwise(dx, exact.bfloat16())
    assert modulation.dtype == FP32


def test_operators_keep_torch_library_rules() -> None:
    x, scale, shift = rows("strided", (2, 3, 48), CPU, BF16)
    for spec, saved in zip(SPECS, [*SAVED, *SAVED], strict=False):
        check_operator(norm_modulate_quantize, (x, scale, shift, EPS, *spec, *saved))
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
    from coat_core.ops.norm_kernel import norm_modulate as norm_modulate_kernel
    from coat_core.ops.norm_kernel import norm_modulate_quantize as kernel

    kind, *spec = case
    for shape in SHAPES:
        x, scale, shift = rows(kind, shape, device)
        n, codes, code_scale, *x_codes = kernel(x, scale, shift, EPS, *spec, *saved)
        plain = (x, None, 0, scale, shift, EPS, FP32)
        assert_rows_close(n, reference(norm_modulate, *plain), KERNEL_ROW_RTOL)
        assert_codes_of(n, codes, code_scale, *spec)
        assert_saved(x, *x_codes, *saved)
        assert_bitwise(norm_modulate_kernel(*plain), n)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("granularity", ["per_row", "per_tensor"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_norm_modulate_kernels_in_half_precision(dtype: torch.dtype, granularity: str, device: torch.device) -> None:
    from coat_core.ops import norm_kernel as kernels

    x, scale, shift = rows("outlier", (2, 7, 48), device, dtype)
    for modulation in ((scale, shift), (scale.float(), shift.float())):
        n, codes, code_scale, *x_codes = kernels.norm_modulate_quantize(
            x, *modulation, EPS, "e4m3", granularity, "e4m3", 16
        )
        assert_codes_of(n, codes, code_scale, "e4m3", granularity)
        assert_saved(x, *x_codes, "e4m3", 16)
        # the interpreter truncates where a GPU rounds, three times
        plain = (x, None, 0, *modulation, EPS, dtype)
        assert_rows_close(n, reference(norm_modulate, *plain), 3 * BF16_ULP_RTOL)
        assert_rows_close(kernels.norm_modulate(*plain), n, 3 * BF16_ULP_RTOL)
        args = (*x_codes, 16, *modulation, EPS, dtype)
        assert_rows_close(kernels.norm_modulate(*args), reference(norm_modulate, *args), 4 * BF16_ULP_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_norm_modulate_kernels_read_codes(fmt: str, granularity: Granularity, device: torch.device) -> None:
    from coat_core.ops import norm_kernel as kernels

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
    from coat_core.ops.norm_kernel import norm_modulate_backward as kernel

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
    from coat_core.ops.norm_kernel import norm_modulate_backward as kernel

    x, scale, _ = rows("plain", (2, 7, 48), device, BF16)
    saved, groups, _ = quantize(x, "e4m3", per_group(16))
    for grad_dtype in (BF16, FP32):
        grad, residual = torch.randn(x.shape).to(device, grad_dtype), torch.randn(x.shape).to(device, grad_dtype)
        for given in ((x, None), (saved, groups)):
            args = (grad, *given, 16, scale, EPS, residual, BF16)
            dx, modulation = kernel(*args)
            expected_dx, expected_modulation = reference(norm_modulate_backward, *args)
            # codes are rounded to bf16 once more: the interpreter truncates
            assert_rows_close(dx, expected_dx, (1 if given[1] is None else 3) * BF16_ULP_RTOL)
            assert_rows_close(modulation, expected_modulation, BF16_ULP_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("programs", [1, 2, 5])
def test_norm_modulates_backward_shares_rows_among_programs(
    programs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coat_core.ops import rows as codes
    from coat_core.ops.norm_kernel import norm_modulate_backward as kernel

    monkeypatch.setattr(codes, "PROGRAMS", programs)
    monkeypatch.setattr(codes, "TILE_ELEMENTS", 128)  # two rows at once
    x, scale, _ = rows("plain", (2, 13, 48), device)
    grad = torch.randn_like(x)
    args = (grad, *quantize(x, "e4m3", per_group(16))[:2], 16, scale, EPS, x, FP32)
    for found, expected in zip(kernel(*args), reference(norm_modulate_backward, *args), strict=True):
        assert_rows_close(found, expected, KERNEL_ROW_RTOL)


@pytest.mark.triton
def test_two_launches_agree(device: torch.device) -> None:
    from coat_core.ops import norm_kernel as kernels

    x, scale, shift = rows("heavy tails", (2, 40, 48), device)
    first, second = (
        (
            *kernels.norm_modulate_backward(x, x, None, 0, scale, EPS, x, FP32),
            kernels.norm_modulate_quantize(x, scale, shift, EPS, "e4m3", "per_tensor", "none", 0)[2],
        )
        for _ in range(2)
    )
    for a, b in zip(first, second, strict=True):
        assert_bitwise(a, b)


@pytest.mark.triton
def test_a_row_too_wide_for_a_program_is_refused(device: torch.device) -> None:
    from coat_core.ops import norm_kernel as kernels

    wide = torch.zeros(1, 1, 16385, device=device)
    with pytest.raises(ValueError, match="rows of 16385: the Triton kernel holds at most 16384"):
        kernels.norm_modulate(wide, None, 0, wide[0], wide[0], EPS, FP32)
    with pytest.raises(ValueError, match="rows of 16385: the Triton kernel holds at most 16384"):
        kernels.norm_modulate_backward(wide, wide, None, 0, wide[0], EPS, None, FP32)
