"""LayerNorm or RMSNorm with modulation: against diffusers to the bit, against autograd in float64.

Their Triton kernels, in the interpreter, against the operators in fp32: the interpreter truncates to bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers.models.normalization import AdaLayerNormZero
from torch import Tensor

from coat_core.granularity import per_group
from coat_core.ops.norm import norm_modulate, norm_modulate_backward, norm_modulate_quantize
from coat_core.quantize import dequantize, quantize
from tests.helpers.asserts import assert_bitwise, assert_sqnr
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
    read_cases,
    rows,
    turned,
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


def calls(norm: str) -> Iterator[tuple[Any, tuple[Any, ...], float]]:
    """Of the three kernels, and how far of a row their results may be from the references'.

    The interpreter truncates to half precision where a GPU rounds: up to four times.
    """
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
def test_kernels_follow_the_references(norm: str, device: torch.device) -> None:
    n = None
    for op, args, rtol in calls(norm):
        result = assert_follows(op, args, device, rtol)
        if op is norm_modulate_quantize:
            n = result[0]
        elif op is norm_modulate and args[1] is None and rtol == KERNEL_ROW_RTOL:  # n has the same bits without codes
            assert_bitwise(result, n)
