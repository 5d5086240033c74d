"""[attention | GELU(mlp)] with mlp's adapter and its gradient: operators, and their Triton kernels against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from coat_core.casts import declarations
from coat_core.granularity import PER_TENSOR, per_group
from coat_core.ops.dispatch import launcher_of
from coat_core.ops.gelu import mlp_activation, mlp_activation_backward
from coat_core.quantize import dequantize, quantize
from tests.helpers.asserts import assert_bitwise
from tests.helpers.operators import check_operator, moved, reference
from tests.helpers.rows import CASES, KINDS, SPECS, assert_codes_of, assert_rows_close, assert_saved, rows_of_kind
from tests.tolerances import BF16_ULP_RTOL, GELU_RELATIVE_RTOL, GELU_RTOL, KERNEL_ROW_RTOL

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
# a huge negative x: exp overflows to inf, and sigmoid is 0 as it should be
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


def gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def low_rank(y: Tensor, h: Tensor | None, up: Tensor | None) -> Tensor:
    """y + h upᵀ as linears add their adapters, in place on contiguous rows."""
    y = y.contiguous().clone()
    if h is not None:
        y.view(-1, y.shape[-1]).addmm_(h.flatten(0, 1), up.t())
    return y


def adapter(s: int, f: int, rank: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """h [2, S, r], the end of wider rows, and up [F, r]."""
    if not rank:
        return None, None
    return torch.randn(2, s, rank + 8).to(dtype)[..., 8:], torch.randn(f, rank).to(dtype)


def whole(*shape: int) -> Tensor:
    """Small whole numbers, of which products and sums are exact in any order."""
    return torch.randint(-4, 5, shape).float()


def slope(x: Tensor) -> Tensor:
    """GELU' by autograd in float64."""
    leaf = x.detach().double().requires_grad_()
    return torch.autograd.grad(gelu(leaf).sum(), leaf)[0]


def assert_gelu(found: Tensor, x: Tensor) -> None:
    """Assert GELU of x within the kernel's tolerance."""
    assert bool(((found.cpu() - gelu(x.cpu().double())).abs() <= GELU_RTOL * x.cpu().abs()).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [0, 1, 24])
@pytest.mark.parametrize("dtype", [BF16, FP32, FP16])
def test_the_operator_is_torchs_linear_and_gelu(rank: int, dtype: torch.dtype, kind: str) -> None:
    attention, mlp = rows_of_kind(kind, (2, 7, 48)).to(dtype), 3 * rows_of_kind(kind, (2, 7, 200)).to(dtype)[..., 70:]
    pair = adapter(7, 130, rank, dtype)
    complete = low_rank(mlp, *pair)
    values, codes, scale, *saved = mlp_activation(
        attention, None, mlp, None, *pair, "e5m2", "per_row", "e4m3", 32, dtype
    )
    assert_bitwise(values, torch.cat([attention, gelu(complete)], dim=-1))
    assert_codes_of(values, codes, scale, "e5m2", "per_row")
    assert_saved(attention, *saved[:2], "e4m3", 32)
    assert_saved(complete, *saved[2:], "e4m3", 32)
    alone = mlp_activation(None, None, mlp, None, *pair, "none", "none", "none", 32, dtype)
    assert_bitwise(alone[0], gelu(complete).contiguous())
    assert all(x.shape == (0,) for x in alone[1:])


def kept(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale, and what they stand for in bf16."""
    codes, scale, granularity = quantize(x, "e5m2", per_group(group))
    return codes, scale, dequantize(codes, scale, granularity, BF16)


@pytest.mark.parametrize("group", [16, 256])
def test_from_codes_it_is_that_of_the_values_they_stand_for(group: int) -> None:
    *attention, attention_values = kept(torch.randn(2, 7, 48), group)
    *mlp, mlp_values = kept(torch.randn(2, 7, 130), group)
    rest = (None, None, "none", "none", "none", group, BF16)
    values = mlp_activation(*attention, *mlp, *rest)[0]
    assert_bitwise(values, mlp_activation(attention_values, None, mlp_values, None, *rest)[0])
    grad = (torch.randn(2, 7, 130), None, None)
    found = mlp_activation_backward(*grad, *mlp, group, BF16)
    assert_bitwise(found, mlp_activation_backward(*grad, mlp_values, None, group, BF16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_backward_is_the_gradient(dtype: torch.dtype, rank: int, kind: str) -> None:
    mlp, grad = 3 * rows_of_kind(kind, (2, 7, 130)).to(dtype), torch.randn(2, 7, 200)[..., 70:]
    dh, down = (torch.randn(2, 7, 4), torch.randn(4, 200)[:, 70:]) if rank else (None, None)
    complete = low_rank(grad, dh, None if down is None else down.t())
    found = mlp_activation_backward(grad, dh, down, mlp, None, 128, dtype)
    torch.testing.assert_close(found, (complete * slope(mlp)).to(dtype))


def test_another_granularity_is_refused() -> None:
    given = (None, None, torch.randn(1, 2, 16), None, None, None)
    with pytest.raises(ValueError, match="granularity='per_group': must be one of none, per_row, per_tensor"):
        mlp_activation(*given, "e4m3", "per_group", "none", 16, FP32)


def kernel_of(op: Any) -> Any:
    """The launcher, which is interpreted on a CPU."""
    return launcher_of(op._qualname)


@pytest.mark.parametrize(
    "by", [pytest.param(lambda op: op, id="operator"), pytest.param(kernel_of, marks=pytest.mark.triton, id="kernel")]
)
def test_half_precision_is_rounded_after_the_adapter(by: Any, device: torch.device) -> None:
    """257 is between two numbers of bf16, and becomes 256 before all else."""
    y, h = torch.full((1, 1, 16), 256.0, dtype=BF16, device=device), torch.ones(1, 1, 2, dtype=BF16, device=device)
    matrix = torch.full((16, 2), 0.5, dtype=BF16, device=device)
    saved_scale = by(mlp_activation)(None, None, y, None, h, matrix, "none", "none", "e4m3", 16, BF16)[-1]
    assert saved_scale.item() * 448 == pytest.approx(256)
    flat = torch.full((1, 1, 16), 50.0, device=device)  # GELU' is 1
    found = by(mlp_activation_backward)(y, h, matrix.t().contiguous(), flat, None, 128, FP32)
    assert found.unique().tolist() == [256.0]


def test_what_is_cast_is_declared() -> None:
    attention, mlp, pair = torch.randn(2, 7, 48), torch.randn(2, 7, 130), adapter(7, 130, 4, FP32)
    arguments: tuple[Any, ...] = (attention, None, mlp, None, *pair, "e4m3", "per_row", "e4m3", 16, FP32)
    out = mlp_activation(*arguments)
    casts = declarations["coat::mlp_activation"](out, *arguments)
    assert [cast.kind for cast in casts] == ["input", None, None]
    for cast, wanted in zip(casts, (out[0], attention, low_rank(mlp, *pair)), strict=True):
        assert_bitwise(cast.values, wanted)
        assert_bitwise(quantize(wanted, "e4m3", cast.granularity).scale, cast.scale)
    nothing = (attention, None, mlp, None, *pair, "none", "none", "none", 16, FP32)
    assert declarations["coat::mlp_activation"](mlp_activation(*nothing), *nothing) == ()


def test_operators_keep_torch_library_rules() -> None:
    attention, mlp, pair = torch.randn(2, 3, 16), torch.randn(2, 3, 64)[..., 24:], adapter(3, 40, 4, FP32)
    for spec in SPECS:
        check_operator(mlp_activation, (attention, None, mlp, None, *pair, *spec, "e4m3", 16, FP32))
    check_operator(mlp_activation, (None, None, mlp, None, None, None, "e4m3", "per_row", "none", 16, FP32))
    check_operator(mlp_activation_backward, (mlp, pair[0], pair[1].t(), mlp.contiguous(), None, 16, BF16))


# -- kernels: interpreted on a CPU ------------------------------------------------------------------------------------


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_kernel_without_an_adapter(case: tuple[str, str, str], device: torch.device) -> None:
    kernel = kernel_of(mlp_activation)
    kind, *spec = case
    for b, s, d, f, group in ((2, 7, 48, 200, 16), (1, 1, 130, 1100, 256)):
        attention, mlp = rows_of_kind(kind, (b, s, d)).to(device), 3 * rows_of_kind(kind, (b, s, f)).to(device)
        for out in (attention, None):
            values, codes, scale, *saved = kernel(out, None, mlp, None, None, None, *spec, "e5m2", group, FP32)
            if out is not None:
                assert_bitwise(values[..., :d], attention)
                assert_saved(attention, *saved[:2], "e5m2", group)
            assert_gelu(values[..., -f:], mlp)
            assert_codes_of(values, codes, scale, *spec)
            assert_saved(mlp, *saved[2:], "e5m2", group)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rank", [1, 4, 16, 24, 64, 72, 128])
def test_kernel_adds_the_adapter(rank: int, device: torch.device) -> None:
    kernel = kernel_of(mlp_activation)
    wide, attention = whole(2, 19, 350).to(device), torch.randn(2, 19, 48, device=device)
    mlp, h, up = wide[..., 50:], whole(2, 19, 4 * rank)[..., rank : 2 * rank].to(device), whole(300, rank).to(device)
    spec = ("e4m3", "per_tensor" if rank == 4 else "per_row")
    values, codes, scale, *saved = kernel(attention, None, mlp, None, h, up, *spec, "e4m3", 32, FP32)
    complete = low_rank(mlp, h, up)
    assert_bitwise(values[..., :48], attention)
    assert_gelu(values[..., 48:], complete)
    assert_codes_of(values, codes, scale, *spec)
    assert_saved(attention, *saved[:2], "e4m3", 32)
    assert_saved(complete, *saved[2:], "e4m3", 32)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("granularity", ["per_row", "per_tensor"])
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_kernels_in_half_precision(dtype: torch.dtype, rank: int, granularity: str, device: torch.device) -> None:
    forward, backward = map(kernel_of, (mlp_activation, mlp_activation_backward))
    attention, mlp = torch.randn(2, 7, 48).to(dtype), torch.randn(2, 7, 130).to(dtype)
    arguments = moved((attention, None, mlp, None, *adapter(7, 130, rank, dtype)), device)
    values, codes, scale, *_ = forward(*arguments, "e4m3", granularity, "none", 16, dtype)
    expected = reference(mlp_activation, *arguments, "e4m3", granularity, "none", 16, dtype)
    # two roundings, each to a neighbour that the interpreter's truncation may choose otherwise
    assert_rows_close(values, expected[0], 2 * BF16_ULP_RTOL)
    assert_codes_of(values, codes, scale, "e4m3", granularity)
    dh, down = adapter(7, 4, rank, dtype)[0], torch.randn(rank, 200).to(dtype)[:, 70:] if rank else None
    gradient = moved((torch.randn(2, 7, 130).to(dtype), dh, down, mlp, None), device)
    expected = reference(mlp_activation_backward, *gradient, 16, dtype)
    assert_rows_close(backward(*gradient, 16, dtype), expected, 2 * BF16_ULP_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
def test_kernel_keeps_its_relative_precision_at_negative_x(device: torch.device) -> None:
    kernel = kernel_of(mlp_activation)
    x = torch.linspace(-5.0, 5.0, 1000, device=device).view(1, 1, -1)
    cubic = (2 / torch.pi) ** 0.5 * (x.double() + 0.044715 * x.double() ** 3)
    found = kernel(None, None, x, None, None, None, "none", "none", "none", 16, FP32)[0].double()
    torch.testing.assert_close(found, x * torch.sigmoid(2 * cubic), rtol=GELU_RELATIVE_RTOL, atol=0)


@pytest.mark.gpu
@pytest.mark.triton
def test_kernels_match_the_reference_in_bf16() -> None:
    forward, backward = map(kernel_of, (mlp_activation, mlp_activation_backward))
    mlp, grad = 3 * torch.randn(2, 64, 12288, device="cuda").bfloat16(), torch.randn(2, 64, 12288, device="cuda")
    attention = torch.randn(2, 64, 3072, device="cuda").bfloat16()
    values = forward(attention, None, mlp, None, None, None, "e4m3", "per_row", "none", 128, BF16)[0]
    expected = torch.cat([attention, gelu(mlp.double()).to(BF16)], dim=-1)
    torch.testing.assert_close(values, expected, rtol=BF16_ULP_RTOL, atol=GELU_RTOL * 15)
    dmlp = backward(grad, None, None, mlp, None, 128, BF16)
    torch.testing.assert_close(dmlp, (grad * slope(mlp)).to(BF16), rtol=BF16_ULP_RTOL, atol=GELU_RTOL * 100)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("group", [16, 256, 0], ids=["1x16", "wider than a row", "per tensor"])
def test_kernels_read_codes(group: int, device: torch.device) -> None:
    forward, backward = map(kernel_of, (mlp_activation, mlp_activation_backward))
    granularity = per_group(group) if group else PER_TENSOR
    (attention, mlp), found = (torch.randn(2, 7, 48), 3 * torch.randn(2, 7, 130)), []
    for x in (attention, mlp):
        codes, scale, _ = quantize(x, "e4m3", granularity)
        found.append((codes.to(device), scale.to(device), dequantize(codes, scale, granularity, FP32)))
    how = (None, None, "none", "none", "none", group, FP32)
    values, *rest = forward(*found[0][:2], *found[1][:2], *how)
    assert_bitwise(values[..., :48].cpu(), found[0][2])
    assert_gelu(values[..., 48:], found[1][2])
    assert all(x.shape == (0,) for x in rest)
    grad = torch.randn(2, 7, 130, device=device)
    dmlp = backward(grad, None, None, *found[1][:2], group, FP32)
    expected = reference(mlp_activation_backward, grad, None, None, found[1][2], None, group, FP32)
    assert_rows_close(dmlp, expected, KERNEL_ROW_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", KINDS)
def test_backward_kernel(kind: str, device: torch.device) -> None:
    kernel = kernel_of(mlp_activation_backward)
    for s, f, rank in ((7, 200, 0), (19, 300, 24), (1, 1100, 128)):
        mlp, grad = 3 * rows_of_kind(kind, (2, s, f)), whole(2, s, f + 40)[..., 40:]
        dh, down = (whole(2, s, 3 * rank)[..., rank : 2 * rank], whole(rank, f + 40)[:, 40:]) if rank else (None, None)
        g = low_rank(grad, dh, None if down is None else down.t())
        dmlp = kernel(*moved((grad, dh, down, mlp), device), None, 128, FP32).cpu()
        assert dmlp.is_contiguous()
        assert bool(((dmlp - g * slope(mlp)).abs() <= GELU_RTOL * g.abs() * (1 + mlp.abs())).all())


@pytest.mark.triton
def test_two_launches_agree(device: torch.device) -> None:
    kernel = kernel_of(mlp_activation)
    arguments = moved((torch.randn(2, 7, 48), None, torch.randn(2, 7, 130), None, *adapter(7, 130, 4, FP32)), device)
    first, second = (kernel(*arguments, "e4m3", "per_row", "e4m3", 16, FP32) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert_bitwise(a, b)
