"""LayerNorm or RMSNorm with modulation: against diffusers to the bit, against autograd in float64.

Their Triton kernels, in the interpreter, against the operators in fp32: the interpreter truncates to bf16.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.normalization import AdaLayerNormZero
from torch import Tensor

from coat_core.granularity import Granularity, per_group
from coat_core.ops.norm import norm_modulate, norm_modulate_backward, norm_modulate_quantize
from coat_core.quantize import dequantize, quantize
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.helpers.operators import moved
from tests.helpers.rows import (
    CASES,
    FLOOR,
    GRANULARITIES,
    LAYOUTS,
    SAVED,
    SPECS,
    assert_codes_of,
    assert_follows,
    assert_rows_close,
    assert_saved,
    diffusers_norm,
    kernel_of,
    rows,
)
from tests.tolerances import BF16_ULP_RTOL, KERNEL_ROW_RTOL, NORM_BACKWARD_FP32_FLOOR_DB

EPS = 1e-6
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NORMS = ["layer", "rms"]


def vectors(norm: str, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Of x [B, S, D]: scale and shift, chunks of the modulations of many blocks; or scale and RMSNorm's weight."""
    scale, shift = torch.randn(len(x), 6 * x.shape[-1]).to(x.dtype).chunk(6, dim=1)[1:3]
    return (scale, shift, None) if norm == "layer" else (scale, None, (1 + torch.randn(x.shape[-1]) / 4).to(x.dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, FP32, FP16])
def test_norm_modulate_has_diffusers_bits(layout: str, dtype: torch.dtype) -> None:
    x = rows((2, 7, 48), layout).to(dtype)
    norm, emb = AdaLayerNormZero(48).to(dtype), torch.randn(2, 48).to(dtype)
    with torch.no_grad():
        expected = norm(x, emb=emb)[0]
        shift, scale, *_ = norm.linear(norm.silu(emb)).chunk(6, dim=1)
    assert_bitwise(norm_modulate(x, None, 0, scale, shift, EPS, dtype), expected)
    with torch.autocast("cpu", BF16):
        assert_bitwise(norm_modulate_quantize(x, scale, shift, EPS, "e4m3", "none", "none", 0)[0], expected)


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP32, FP32), (FP16, FP16), (BF16, FP32), (FP32, BF16)], ids=str)
def test_rms_norm_has_diffusers_bits(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    x = rows((2, 7, 48)).to(dtypes[0])
    scale, _, weight = vectors("rms", x)
    weight = weight.to(dtypes[1])
    expected = diffusers_norm(x, weight, EPS) * (1 + scale[:, None])
    assert_bitwise(norm_modulate(x, None, 0, scale, None, EPS, dtypes[0], weight), expected)
    assert_bitwise(norm_modulate_quantize(x, scale, None, EPS, "e4m3", "none", "none", 0, weight)[0], expected)
    shift = torch.randn_like(scale)
    assert_bitwise(norm_modulate(x, None, 0, scale, shift, EPS, dtypes[0], weight), expected + shift[:, None])


@pytest.mark.parametrize("norm", NORMS)
def test_n_comes_with_its_codes_and_those_of_x_give_it_again(norm: str) -> None:
    x = rows((2, 7, 48)).bfloat16()
    *modulation, weight = vectors(norm, x)
    for spec, saved in zip(SPECS, [*SAVED, SAVED[0]], strict=True):
        n, codes, code_scale, *x_codes = norm_modulate_quantize(x, *modulation, EPS, *spec, *saved, weight)
        assert_bitwise(n, norm_modulate(x, None, 0, *modulation, EPS, BF16, weight))
        assert_codes_of(n, codes, code_scale, *spec)
        assert_saved(x, *x_codes, *saved)
    for granularity in GRANULARITIES[:2]:
        saved_codes, saved_scale, _ = quantize(x, "e4m3", granularity)
        again = norm_modulate(saved_codes, saved_scale, 16, *modulation, EPS, BF16, weight)
        values = dequantize(saved_codes, saved_scale, granularity, BF16)
        assert_bitwise(again, norm_modulate(values, None, 0, *modulation, EPS, BF16, weight))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("from_codes", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_the_gradients_are_autograds(norm: str, from_codes: bool, dtype: torch.dtype) -> None:
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
def test_a_row_of_zeros_gets_a_finite_gradient(norm: str) -> None:
    x = rows((2, 7, 48))
    scale, _, weight = vectors(norm, x)
    grad = torch.randn_like(x)
    dx, modulation = norm_modulate_backward(grad, x, None, 0, scale, EPS, None, FP32, weight)
    dz = grad[0, 1] * (1 + scale[0])
    dz = dz - dz.mean() if weight is None else dz * weight
    assert_rows_close(dx[0, 1], EPS**-0.5 * dz, KERNEL_ROW_RTOL)
    assert modulation.isfinite().all()


def test_the_residuals_gradient_is_added_before_the_one_rounding() -> None:
    x = torch.randn(2, 7, 48).bfloat16()
    scale, *_ = vectors("layer", x)
    grad, residual = torch.randn_like(x), torch.randn_like(x)
    dx, modulation = norm_modulate_backward(grad, x, None, 0, scale, EPS, residual, BF16)
    exact, _ = norm_modulate_backward(grad, x.float(), None, 0, scale, EPS, residual, FP32)
    assert_bitwise(dx, exact.bfloat16())
    assert modulation.dtype == FP32


# -- kernels: interpreted on a CPU ------------------------------------------------------------------------------------


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_kernels(norm: str, case: Any, device: torch.device) -> None:
    shape, layout, spec, saved = case
    x = rows(shape, layout)
    scale, shift, weight = vectors(norm, x)
    args = moved((x, scale, shift, EPS, *spec, *saved, weight), device)
    n, codes, code_scale, *x_codes = kernel_of(norm_modulate_quantize)(*args)
    assert_codes_of(n, codes, code_scale, *spec)
    assert_saved(x, *x_codes, *saved)
    assert_bitwise(assert_follows(norm_modulate, (x, None, 0, scale, shift, EPS, FP32, weight), device), n)
    grad, residual = torch.randn(*shape, 2)[..., 0], rows(shape) if shape[0] == 2 else None
    assert_follows(norm_modulate_backward, (grad, x, None, 0, scale, EPS, residual, FP32, weight), device)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("dtype", "other"), [(BF16, BF16), (BF16, FP32), (FP16, FP16)])
@pytest.mark.parametrize("norm", NORMS)
def test_kernels_in_half_precision(norm: str, dtype: torch.dtype, other: torch.dtype, device: torch.device) -> None:
    """`other` is the dtype of the modulation, or of the weight."""
    x = rows((2, 7, 48)).to(dtype)
    *modulation, weight = (v if v is None else v.to(other) for v in vectors(norm, x))
    granularity = "per_row" if other == dtype else "per_tensor"
    args = moved((x, *modulation, EPS, "e4m3", granularity, "e4m3", 16, weight), device)
    n, codes, code_scale, *x_codes = kernel_of(norm_modulate_quantize)(*args)
    assert_codes_of(n, codes, code_scale, "e4m3", granularity)
    assert_saved(x, *x_codes, "e4m3", 16)
    # the interpreter truncates where a GPU rounds, three times or four
    rest = (*modulation, EPS, dtype, weight)
    assert_rows_close(
        assert_follows(norm_modulate, (x, None, 0, *rest), device, 4 * BF16_ULP_RTOL), n, 3 * BF16_ULP_RTOL
    )
    assert_follows(norm_modulate, (*x_codes, 16, *rest), device, 4 * BF16_ULP_RTOL)
    grad, residual = torch.randn(2, *x.shape).to(other)
    for given in ((x, None), x_codes):  # codes are rounded once more
        args = (grad, *given, 16, modulation[0], EPS, residual, dtype, weight)
        assert_follows(norm_modulate_backward, args, device, 3 * BF16_ULP_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_kernels_read_codes(norm: str, granularity: Granularity, device: torch.device) -> None:
    shape, fmt = ((2, 7, 48), "e4m3") if norm == "layer" else ((1, 4, 300), "e5m2")
    x = rows(shape)
    scale, shift, weight = vectors(norm, x)
    saved = (*quantize(x, fmt, granularity)[:2], granularity.group_size)
    assert_follows(norm_modulate, (*saved, scale, shift, EPS, FP32, weight), device)
    assert_follows(norm_modulate_backward, (torch.randn_like(x), *saved, scale, EPS, None, FP32, weight), device)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("programs", [2, 5])
def test_backward_shares_rows_among_programs(
    programs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coat_core.ops import device as launching

    monkeypatch.setattr(launching, "PROGRAMS", programs)
    monkeypatch.setattr(launching, "TILE_ELEMENTS", 128)  # two rows at once
    x = torch.randn(2, 13, 48)
    scale, *_ = vectors("layer", x)
    args = (torch.randn_like(x), *quantize(x, "e4m3", per_group(16))[:2], 16, scale, EPS, x, FP32)
    assert_follows(norm_modulate_backward, args, device)
