"""GELU-tanh beside attention's output and its gradient: operators, and their Triton kernels against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coat_core.kernels.gelu import gelu_backward, gelu_concat_quantize
from tests.helpers.asserts import assert_bitwise
from tests.helpers.operators import check_operator
from tests.helpers.rows import CASES, KINDS, SPECS, assert_codes_of, rows_of_kind
from tests.tolerances import BF16_ULP_RTOL, GELU_RELATIVE_RTOL, GELU_RTOL

SHAPES = [(2, 7, 48, 192), (1, 7, 40, 130), (1, 1, 130, 2100)]  # B, S, D, F
# a huge negative x: exp overflows to inf, and sigmoid is 0 as it should be
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


def gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def slope(x: Tensor) -> Tensor:
    """GELU' by autograd in float64."""
    leaf = x.detach().double().requires_grad_()
    return torch.autograd.grad(gelu(leaf).sum(), leaf)[0]


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_gelu_concat_kernel(case: tuple[str, str, str], device: torch.device) -> None:
    from coat_core.kernels.gpu.gelu_concat import gelu_concat_quantize as kernel

    kind, *spec = case
    for b, s, d, f in SHAPES:
        attention, mlp = rows_of_kind(kind, (b, s, d)).to(device), 3 * rows_of_kind(kind, (b, s, f)).to(device)
        for beside in (attention, None):
            values, codes, scale = kernel(beside, mlp, *spec)
            copied, activated = values.split([values.shape[-1] - f, f], dim=-1)
            if beside is not None:
                assert_bitwise(copied, beside)
            assert activated.shape == mlp.shape
            assert bool(((activated - gelu(mlp.double())).abs() <= GELU_RTOL * mlp.abs()).all())
            assert_codes_of(values, codes, scale, *spec)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", KINDS)
def test_gelu_backward_kernel(kind: str, device: torch.device) -> None:
    from coat_core.kernels.gpu.gelu_concat import gelu_backward as kernel

    for b, s, d, f in SHAPES:
        grad, mlp = torch.randn(b, s, d + f, device=device)[..., d:], 3 * rows_of_kind(kind, (b, s, f)).to(device)
        dmlp = kernel(grad, mlp)
        assert dmlp.dtype == mlp.dtype
        assert bool(((dmlp - grad * slope(mlp)).abs() <= GELU_RTOL * grad.abs() * (1 + mlp.abs())).all())


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
def test_gelu_kernel_keeps_its_relative_precision_at_negative_x(device: torch.device) -> None:
    from coat_core.kernels.gpu.gelu_concat import gelu_concat_quantize as kernel

    x = torch.linspace(-5.0, 5.0, 1000, device=device).view(1, 1, -1)
    cubic = (2 / torch.pi) ** 0.5 * (x.double() + 0.044715 * x.double() ** 3)
    found = kernel(None, x, "e4m3", "none")[0].double()
    torch.testing.assert_close(found, x * torch.sigmoid(2 * cubic), rtol=GELU_RELATIVE_RTOL, atol=0)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("granularity", ["per_row", "per_tensor"])
def test_gelu_kernels_quantize_half_precision_as_it_is_returned(granularity: str, device: torch.device) -> None:
    from coat_core.kernels.gpu import gelu_concat as kernels

    attention, mlp = torch.randn(1, 5, 48, device=device).bfloat16(), torch.randn(1, 5, 96, device=device).bfloat16()
    values, codes, scale = kernels.gelu_concat_quantize(attention, mlp, "e4m3", granularity)
    assert values.dtype == torch.bfloat16
    assert_codes_of(values, codes, scale, "e4m3", granularity)
    assert kernels.gelu_backward(torch.randn(1, 5, 96, device=device), mlp).dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.triton
def test_gelu_kernels_match_the_reference_in_bf16() -> None:
    from coat_core.kernels.gpu import gelu_concat as kernels

    mlp = 3 * torch.randn(2, 64, 12288, device="cuda").bfloat16()
    attention, grad = torch.randn(2, 64, 3072, device="cuda").bfloat16(), torch.randn(2, 64, 12288, device="cuda")
    values = kernels.gelu_concat_quantize(attention, mlp, "e4m3", "per_row")[0]
    expected = torch.cat([attention, gelu(mlp.double()).to(torch.bfloat16)], dim=-1)
    torch.testing.assert_close(values, expected, rtol=BF16_ULP_RTOL, atol=GELU_RTOL * 15)
    dmlp = kernels.gelu_backward(grad, mlp)
    expected = (grad * slope(mlp)).to(torch.bfloat16)
    torch.testing.assert_close(dmlp, expected, rtol=BF16_ULP_RTOL, atol=GELU_RTOL * 100)


@pytest.mark.triton
def test_two_launches_agree(device: torch.device) -> None:
    from coat_core.kernels.gpu import gelu_concat as kernels

    attention, mlp = torch.randn(2, 7, 48, device=device), torch.randn(2, 7, 192, device=device)
    first, second = (kernels.gelu_concat_quantize(attention, mlp, "e4m3", "per_tensor") for _ in range(2))
    assert_bitwise(first[0], second[0])
    assert_bitwise(first[2], second[2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operators_are_torchs_gelu(kind: str, dtype: torch.dtype) -> None:
    attention, mlp = rows_of_kind(kind, (2, 7, 48)).to(dtype), 3 * rows_of_kind(kind, (2, 7, 130)).to(dtype)
    values, codes, scale = gelu_concat_quantize(attention, mlp, "e4m3", "per_row")
    assert_bitwise(values, torch.cat([attention, gelu(mlp)], dim=-1))
    assert_codes_of(values, codes, scale, "e4m3", "per_row")
    assert_bitwise(gelu_concat_quantize(None, mlp, "e4m3", "none")[0], gelu(mlp).contiguous())
    grad = torch.randn(2, 7, 130)
    torch.testing.assert_close(gelu_backward(grad, mlp), (grad * slope(mlp)).to(dtype))


def test_operators_keep_torch_library_rules() -> None:
    attention, mlp = torch.randn(2, 3, 16), torch.randn(2, 3, 64)[..., 24:]
    for spec in SPECS:
        check_operator(gelu_concat_quantize, (attention, mlp, *spec))
    check_operator(gelu_concat_quantize, (None, mlp, "e4m3", "per_row"))
    check_operator(gelu_backward, (mlp.bfloat16(), mlp))


def test_another_granularity_is_refused() -> None:
    with pytest.raises(ValueError, match="granularity='per_group': must be one of none, per_row, per_tensor"):
        gelu_concat_quantize(None, torch.randn(1, 2, 16), "e4m3", "per_group")
