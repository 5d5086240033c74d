"""Gradients of down-projections, of activations that are computed again: operators, and their kernels against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from coat_core.granularity import per_group
from coat_core.kernels.gelu import mlp_activation
from coat_core.kernels.mlp_gradient import mlp_down_gradient, norm_down_gradient
from coat_core.kernels.norm import norm_modulate
from coat_core.quantize import quantize
from tests.helpers.asserts import assert_bitwise
from tests.helpers.operators import check_operator

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16


def saved(x: Tensor, group: int, fmt: str = "e4m3") -> tuple[Tensor, Tensor]:
    """Codes and scale of 1×G groups."""
    codes, scale, _ = quantize(x, fmt, per_group(group))
    return codes, scale


def mlp_arguments(
    s: int, d: int, f: int, group: int, dtype: torch.dtype = FP32
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """Attention [2, S, D], none where D is 0, and mlp [2, S, F], with their scales: values where the group is 0."""
    attention, mlp = torch.randn(2, s, d).to(dtype) if d else None, (3 * torch.randn(2, s, f)).to(dtype)
    if not group:
        return attention, None, mlp, None
    return *((None, None) if attention is None else saved(attention, group)), *saved(mlp, group)


def norm_arguments(s: int, d: int, group: int, dtype: torch.dtype = FP32) -> tuple[Any, ...]:
    """x [2, S, D], values where the group is 0, and scale and shift [2, D], slices of wider rows; eps."""
    x, modulation = (0.5 + 2 * torch.randn(2, s, d)).to(dtype), torch.randn(2, 6 * d).to(dtype)
    given = saved(x, group) if group else (x, None)
    return *given, group, modulation[:, d : 2 * d], modulation[:, :d], 1e-6


@pytest.mark.parametrize("group", [0, 16, 128])
@pytest.mark.parametrize("width", [0, 48])
@pytest.mark.parametrize("dtype_down", [FP32, BF16])
def test_the_mlps_operator_is_torchs_product(dtype_down: torch.dtype, width: int, group: int) -> None:
    dh, given = torch.randn(2, 7, 12).bfloat16()[..., 8:], mlp_arguments(7, width, 130, group, BF16)
    values = mlp_activation(*given, None, None, "none", "none", "none", group, BF16)[0]
    found = mlp_down_gradient(dh, *given, group, BF16, dtype_down)
    assert found.shape == (4, width + 130)
    assert_bitwise(found, (dh.flatten(0, 1).t() @ values.flatten(0, 1)).to(dtype_down))


@pytest.mark.parametrize("group", [0, 16, 128])
@pytest.mark.parametrize("dtype_down", [FP32, BF16])
def test_the_norms_operator_is_torchs_product(dtype_down: torch.dtype, group: int) -> None:
    dh, given = torch.randn(2, 7, 12).bfloat16()[..., 8:], norm_arguments(7, 130, group, BF16)
    n = norm_modulate(*given, BF16)
    found = norm_down_gradient(dh, *given, BF16, dtype_down)
    assert_bitwise(found, (dh.flatten(0, 1).t() @ n.flatten(0, 1)).to(dtype_down))


def test_operators_keep_torch_library_rules() -> None:
    dh = torch.randn(2, 3, 12)[..., 8:]
    for group in (0, 16):
        check_operator(mlp_down_gradient, (dh, *mlp_arguments(3, 16, 40, group), group, FP32, BF16))
        check_operator(norm_down_gradient, (dh, *norm_arguments(3, 40, group), FP32, FP32))
    check_operator(mlp_down_gradient, (dh, *mlp_arguments(3, 0, 40, 0), 16, FP32, FP32))
