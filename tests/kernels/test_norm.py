"""LayerNorm or RMSNorm with modulation: against diffusers to the bit, against autograd in float64.

Their Triton kernels, in the interpreter, against the operators in fp32: the interpreter truncates to bf16.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from diffusers.models.normalization import AdaLayerNormZero
from torch import Tensor

from coat_core.granularity import Granularity, per_group
from coat_core.ops.norm import norm_modulate, norm_modulate_backward, norm_modulate_quantize
from coat_core.quantize import dequantize, quantize
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.helpers.operators import reference
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
    from coat_core.ops import norm_kernel as kernels

EPS = 1e-6
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NORMS = ["layer", "rms"]


def rows(
    norm: str, kind: str, shape: tuple[int, ...], device: torch.device = CPU, dtype: torch.dtype = FP32
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """x [B, S, D]; scale and shift, chunks of the modulations of many blocks; or scale and RMSNorm's weight."""
    b, _, d = shape
    scale, shift = torch.randn(b, 6 * d).chunk(6, dim=1)[1:3]
    weight = 1 + torch.randn(d) / 4
    x, scale, shift, weight = (x.to(device, dtype) for x in (rows_of_kind(kind, shape), scale, shift, weight))
    return (x, scale, shift, None) if norm == "layer" else (x, scale, None, weight)


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP32, FP32), (FP16, FP16), (BF16, FP32), (FP32, BF16)], ids=str)
def test_rms_norm_has_diffusers_bits(kind: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    x, scale, _, weight = rows("rms", kind, (2, 7, 48), CPU, dtypes[0])
    weight = weight.to(dtypes[1])
    expected = diffusers_norm(x, weight, EPS) * (1 + scale[:, None])
    assert_bitwise(norm_modulate(x, None, 0, scale, None, EPS, dtypes[0], weight), expected)
    assert_bitwise(norm_modulate_quantize(x, scale, None, EPS, "e4m3", "none", "none", 0, weight)[0], expected)
    shift = torch.randn_like(scale)
    assert_bitwise(norm_modulate(x, None, 0, scale, shift, EPS, dtypes[0], weight), expected + shift[:, None])


@pytest.mark.parametrize("norm", NORMS)
def test_n_comes_with_its_codes_and_those_of_x_give_it_again(norm: str) -> None:
    x, *modulation, weight = rows(norm, "outlier", (2, 7, 48), CPU, BF16)
    for spec in SPECS:
        for saved in SAVED:
            n, codes, code_scale, *x_codes = norm_modulate_quantize(x, *modulation, EPS, *spec, *saved, weight)
            assert_bitwise(n, norm_modulate(x, None, 0, *modulation, EPS, BF16, weight))
            assert_codes_of(n, codes, code_scale, *spec)
            assert_saved(x, *x_codes, *saved)
    for granularity in GRANULARITIES[:3]:
        saved_codes, saved_scale, _ = quantize(x, "e4m3", granularity)
        again = norm_modulate(saved_codes, saved_scale, 16, *modulation, EPS, BF16, weight)
        values = dequantize(saved_codes, saved_scale, granularity, BF16)
        assert_bitwise(again, norm_modulate(values, None, 0, *modulation, EPS, BF16, weight))


def test_autocast_changes_nothing() -> None:
    x, *modulation, _ = rows("layer", "plain", (2, 7, 48))
    plain = norm_modulate(x, None, 0, *modulation, EPS, FP32)
    with torch.autocast("cpu", BF16):
        cast = norm_modulate(x, None, 0, *modulation, EPS, FP32)
    assert_bitwise(cast, plain)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "zero row"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("from_codes", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_the_gradients_are_autograds(norm: str, from_codes: bool, dtype: torch.dtype, kind: str) -> None:
    x, scale, _, weight = rows(norm, kind, (2, 7, 48), CPU, dtype)
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
def test_a_row_of_zeros_gets_a_finite_gradient(norm: str) -> None:
    x, scale, _, weight = rows(norm, "zero row", (2, 7, 48))
    grad = torch.randn_like(x)
    dx, modulation = norm_modulate_backward(grad, x, None, 0, scale, EPS, None, FP32, weight)
    dz = grad[0, -1] * (1 + scale[0])
    dz = dz - dz.mean() if weight is None else dz * weight
    assert_rows_close(dx[0, -1], EPS**-0.5 * dz, KERNEL_ROW_RTOL)
    assert modulation.isfinite().all()


def test_the_residuals_gradient_is_added_before_the_one_rounding() -> None:
    x, scale, *_ = rows("layer", "plain", (2, 7, 48), CPU, BF16)
    grad, residual = torch.randn_like(x), torch.randn_like(x)
    dx, modulation = norm_modulate_backward(grad, x, None, 0, scale, EPS, residual, BF16)
    exact, _ = norm_modulate_backward(grad, x.float(), None, 0, scale, EPS, residual, FP32)
    assert_bitwise(dx, exact.bfloat16())
    assert modulation.dtype == FP32


# -- kernels: interpreted on a CPU ------------------------------------------------------------------------------------


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", CASES, ids="-".join)
@pytest.mark.parametrize("norm", NORMS)
def test_kernels(norm: str, case: tuple[str, str, str], device: torch.device) -> None:
    """Each shape with another way to save x; the first kind with every one."""
    kind, *spec = case
    ways = list(zip(SHAPES, SAVED, strict=True)) + [(SHAPES[0], saved) for saved in SAVED[1:] if case == CASES[0]]
    for number, (shape, saved) in enumerate(ways):
        x, scale, shift, weight = rows(norm, kind, shape, device)
        n, codes, code_scale, *x_codes = kernels.norm_modulate_quantize(x, scale, shift, EPS, *spec, *saved, weight)
        args: tuple[Any, ...] = (x, None, 0, scale, shift, EPS, FP32, weight)
        assert_rows_close(n, reference(norm_modulate, *args), KERNEL_ROW_RTOL)
        assert_codes_of(n, codes, code_scale, *spec)
        assert_saved(x, *x_codes, *saved)
        assert_bitwise(kernels.norm_modulate(*args), n)
        grad = rows_of_kind("strided", shape).to(device)
        residual = rows_of_kind("slice", shape).to(device) if number % 2 else None
        args = (grad, x, None, 0, scale, EPS, residual, FP32, weight)
        expected = reference(norm_modulate_backward, *args)
        for found, wanted in zip(kernels.norm_modulate_backward(*args), expected, strict=True):
            assert_rows_close(found, wanted, KERNEL_ROW_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("granularity", ["per_row", "per_tensor"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("norm", NORMS)
def test_kernels_in_half_precision(norm: str, dtype: torch.dtype, granularity: str, device: torch.device) -> None:
    x, scale, shift, weight = rows(norm, "outlier", (2, 7, 48), device, dtype)
    for other in (dtype, FP32):  # of the modulation, or of the weight
        vectors = [v if v is None else v.to(other) for v in ((scale, shift) if weight is None else (scale, None))]
        weight = weight if weight is None else weight.to(other)
        n, codes, code_scale, *x_codes = kernels.norm_modulate_quantize(
            x, *vectors, EPS, "e4m3", granularity, "e4m3", 16, weight
        )
        assert_codes_of(n, codes, code_scale, "e4m3", granularity)
        assert_saved(x, *x_codes, "e4m3", 16)
        # the interpreter truncates where a GPU rounds, three times or four
        plain = (x, None, 0, *vectors, EPS, dtype, weight)
        assert_rows_close(n, reference(norm_modulate, *plain), 4 * BF16_ULP_RTOL)
        assert_rows_close(kernels.norm_modulate(*plain), n, 3 * BF16_ULP_RTOL)
        args = (*x_codes, 16, *vectors, EPS, dtype, weight)
        assert_rows_close(kernels.norm_modulate(*args), reference(norm_modulate, *args), 4 * BF16_ULP_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_kernels_read_codes(norm: str, granularity: Granularity, device: torch.device) -> None:
    for shape, fmt in zip(SHAPES, ("e4m3", "e5m2", "e4m3", "e5m2"), strict=True):
        x, scale, shift, weight = rows(norm, "heavy tails", shape, device)
        saved = (*quantize(x, fmt, granularity)[:2], granularity.group_size)
        args: tuple[Any, ...] = (*saved, scale, shift, EPS, FP32, weight)
        assert_rows_close(kernels.norm_modulate(*args), reference(norm_modulate, *args), KERNEL_ROW_RTOL)
        args = (torch.randn_like(x), *saved, scale, EPS, None, FP32, weight)
        expected = reference(norm_modulate_backward, *args)
        for found, wanted in zip(kernels.norm_modulate_backward(*args), expected, strict=True):
            assert_rows_close(found, wanted, KERNEL_ROW_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("norm", NORMS)
def test_backward_kernel_in_half_precision(norm: str, device: torch.device) -> None:
    x, scale, _, weight = rows(norm, "plain", (2, 7, 48), device, BF16)
    saved, groups, _ = quantize(x, "e4m3", per_group(16))
    for grad_dtype in (BF16, FP32):
        grad, residual = torch.randn(x.shape).to(device, grad_dtype), torch.randn(x.shape).to(device, grad_dtype)
        for given in ((x, None), (saved, groups)):
            args = (grad, *given, 16, scale, EPS, residual, BF16, weight)
            dx, modulation = kernels.norm_modulate_backward(*args)
            expected_dx, expected_modulation = reference(norm_modulate_backward, *args)
            # codes are rounded to bf16 once more: the interpreter truncates
            assert_rows_close(dx, expected_dx, (1 if given[1] is None else 3) * BF16_ULP_RTOL)
            assert_rows_close(modulation, expected_modulation, BF16_ULP_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("programs", [1, 2, 5])
def test_backward_shares_rows_among_programs(
    programs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coat_core.ops import device as launching

    monkeypatch.setattr(launching, "PROGRAMS", programs)
    monkeypatch.setattr(launching, "TILE_ELEMENTS", 128)  # two rows at once
    x, scale, *_ = rows("layer", "plain", (2, 13, 48), device)
    args = (torch.randn_like(x), *quantize(x, "e4m3", per_group(16))[:2], 16, scale, EPS, x, FP32)
    expected = reference(norm_modulate_backward, *args)
    for found, wanted in zip(kernels.norm_modulate_backward(*args), expected, strict=True):
        assert_rows_close(found, wanted, KERNEL_ROW_RTOL)
