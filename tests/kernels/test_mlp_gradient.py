"""The gradient of a down-projection that reads GELU, computed again: the operator, and its kernel against torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from coat_core.granularity import PER_ROW, PER_TENSOR, per_group
from coat_core.ops.gelu import mlp_activation
from coat_core.ops.mlp_gradient import mlp_down_gradient
from coat_core.quantize import quantize
from tests.helpers.asserts import assert_bitwise
from tests.helpers.operators import check_operator, moved, reference
from tests.helpers.rows import assert_rows_close
from tests.tolerances import BF16_ULP_RTOL, KERNEL_ROW_RTOL

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
# a huge negative x: exp overflows to inf, and sigmoid is 0 as it should be
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


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


@pytest.mark.parametrize("group", [0, 16, 128])
@pytest.mark.parametrize("width", [0, 48])
@pytest.mark.parametrize("dtype_down", [FP32, BF16])
def test_the_operator_is_torchs_product(dtype_down: torch.dtype, width: int, group: int) -> None:
    dh, given = torch.randn(2, 7, 12).bfloat16()[..., 8:], mlp_arguments(7, width, 130, group, BF16)
    values = mlp_activation(*given, None, None, "none", "none", "none", group, BF16)[0]
    found = mlp_down_gradient(dh, *given, group, BF16, dtype_down)
    assert found.shape == (4, width + 130)
    assert_bitwise(found, (dh.flatten(0, 1).t() @ values.flatten(0, 1)).to(dtype_down))


def test_the_operator_keeps_torch_library_rules() -> None:
    dh = torch.randn(2, 3, 12)[..., 8:]
    for group in (0, 16):
        check_operator(mlp_down_gradient, (dh, *mlp_arguments(3, 16, 40, group), group, FP32, BF16))
    check_operator(mlp_down_gradient, (dh, *mlp_arguments(3, 0, 40, 0), 16, FP32, FP32))


# -- kernels: interpreted on a CPU ------------------------------------------------------------------------------------


def gradient_rows(s: int, rank: int, dtype: torch.dtype = FP32) -> Tensor:
    """dh [2, S, r], the end of wider rows."""
    return torch.randn(2, s, 2 * rank + 3).to(dtype)[..., -rank:]


@pytest.fixture(params=[1, 3], ids=["one share", "three shares"])
def shares(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Rows are shared among so many programs, whatever their number."""
    kernels = pytest.importorskip("coat_core.ops.mlp_gradient_kernel")
    monkeypatch.setattr(kernels, "_shared", lambda rows, *_: (request.param, -(-rows // (32 * request.param))))
    return request.param


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned", "shares")
@pytest.mark.parametrize(
    ("rank", "d", "f", "group"),
    [(1, 48, 200, 0), (4, 0, 70, 128), (16, 130, 65, 16), (24, 48, 200, 0), (64, 0, 70, 128), (200, 130, 65, 16)],
)
def test_kernel(rank: int, d: int, f: int, group: int, device: torch.device) -> None:
    from coat_core.ops.mlp_gradient_kernel import mlp_down_gradient as kernel

    arguments = moved((gradient_rows(49, rank), *mlp_arguments(49, d, f, group), group, FP32, FP32), device)
    found = kernel(*arguments)
    assert found.is_contiguous()
    assert_rows_close(found, reference(mlp_down_gradient, *arguments), KERNEL_ROW_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("fmt", "group"), [("e4m3", 16), ("e5m2", 32), ("e4m3", 64), ("e5m2", 128), ("e4m3", 128), ("e4m3", 256)]
)
def test_kernel_reads_codes_of_every_group(fmt: str, group: int, device: torch.device) -> None:
    from coat_core.ops.mlp_gradient_kernel import mlp_down_gradient as kernel

    x = torch.randn(2, 7, 300) * torch.logspace(-3, 3, 300)  # a scale of another group would show
    dh = gradient_rows(7, 4)
    arguments = moved((dh, *saved(x, group, fmt), *saved(x, group, fmt), group, FP32, FP32), device)
    found, expected = kernel(*arguments), reference(mlp_down_gradient, *arguments)
    for start in range(0, 600, 60):
        assert_rows_close(found[:, start : start + 60], expected[:, start : start + 60], KERNEL_ROW_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
def test_kernel_reads_scales_per_row_and_per_tensor(device: torch.device) -> None:
    from coat_core.ops.mlp_gradient_kernel import mlp_down_gradient as kernel

    x = torch.randn(2, 7, 150) * torch.logspace(-2, 2, 14).view(2, 7, 1)
    for granularity in (PER_ROW, PER_TENSOR):
        codes, scale, _ = quantize(x, "e5m2", granularity)
        arguments = moved((gradient_rows(7, 4), codes, scale, codes, scale, 16, FP32, FP32), device)
        assert_rows_close(kernel(*arguments), reference(mlp_down_gradient, *arguments), KERNEL_ROW_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned", "shares")
@pytest.mark.parametrize(("dtype", "dtype_down"), [(BF16, BF16), (BF16, FP32), (FP16, FP32)])
def test_kernel_in_half_precision(dtype: torch.dtype, dtype_down: torch.dtype, device: torch.device) -> None:
    from coat_core.ops.mlp_gradient_kernel import mlp_down_gradient as kernel

    for group in (0, 64):
        given = mlp_arguments(49, 48, 130, group, dtype)
        arguments = moved((gradient_rows(49, 16, dtype), *given, group, dtype, dtype_down), device)
        # on the CPU the reference multiplies in half precision, and the interpreter truncates the values
        expected = reference(mlp_down_gradient, arguments[0].float(), *arguments[1:])
        assert_rows_close(kernel(*arguments), expected, 2 * BF16_ULP_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
def test_kernel_rounds_values_before_it_multiplies(device: torch.device) -> None:
    from coat_core.ops.mlp_gradient_kernel import mlp_down_gradient as kernel

    dh, x = torch.ones(1, 1, 1, device=device), torch.full((1, 1, 1), 257.0, device=device)
    assert kernel(dh, x, None, x, None, 16, BF16, FP32).tolist() == [[256.0, 256.0]]  # 257 is between two of bf16


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
def test_kernel_shares_rows_and_adds_the_parts_up_in_one_order(device: torch.device) -> None:
    from coat_core.ops.mlp_gradient_kernel import _shared
    from coat_core.ops.mlp_gradient_kernel import mlp_down_gradient as kernel

    assert _shared(194, 1, 4) == (3, 3)
    arguments = moved((gradient_rows(97, 1), *mlp_arguments(97, 48, 130, 16), 16, FP32, FP32), device)
    assert_bitwise(kernel(*arguments), kernel(*arguments))
    assert_rows_close(kernel(*arguments), reference(mlp_down_gradient, *arguments), KERNEL_ROW_RTOL)


def test_shares_of_rows() -> None:
    shared = pytest.importorskip("coat_core.ops.mlp_gradient_kernel")._shared
    for rows, rank, programs in itertools.product((0, 1, 64, 512, 1536, 4608, 70000), (1, 16, 128), (1, 192, 240, 999)):
        shares, rounds = shared(rows, rank, programs)
        assert (shares - 1) * rounds * 32 < max(rows, 1) <= max(shares * rounds * 32, 1)
        assert shares == 1 or (shares * programs <= 512 and rows // shares >= 64 * rank - 32)
    assert shared(4608, 16, 240)[0] == 2
    assert shared(4096, 16, 192)[0] == 2
