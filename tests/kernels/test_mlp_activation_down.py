"""What the linear after an MLP's activation reads, codes and down-projection: the operator, and its kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from coat_core.casts import declarations
from coat_core.ops.gelu import mlp_activation
from coat_core.ops.mlp_down import mlp_activation_down
from coat_core.quantize import quantize
from tests.helpers.asserts import assert_bitwise
from tests.helpers.operators import bits, check_operator, moved
from tests.helpers.rows import KINDS, SPECS, rows_of_kind
from tests.tolerances import BF16_ULP_RTOL, KERNEL_ROW_RTOL

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
# a huge negative x: exp overflows to inf, and sigmoid is 0 as it should be
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
WITH_CODES = [spec for spec in SPECS if spec[1] != "none"]


def whole(*shape: int) -> Tensor:
    """Small whole numbers, of which products and sums are exact in any order."""
    return torch.randint(-4, 5, shape).float()


def arguments(
    s: int, d: int, f: int, rank: int, next_rank: int, dtype: torch.dtype = FP32
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor]:
    """Attention [2, S, D], none where D is 0, mlp [2, S, F], its adapter and the next down-projection: all slices."""
    attention, mlp = torch.randn(2, s, d + 16)[..., 16:].to(dtype), whole(2, s, f + 50)[..., 50:].to(dtype)
    h, up = whole(2, s, 3 * rank)[..., rank : 2 * rank].to(dtype), whole(f, rank).to(dtype)
    down = (torch.randn(next_rank, d + f + 8) / 16).to(dtype)[:, 8:]
    return attention if d else None, mlp, h if rank else None, up if rank else None, down


def activation(given: tuple[Any, ...], *how: Any, by: Any = mlp_activation) -> tuple[Tensor, ...]:
    """What `mlp_activation` makes of the same arguments."""
    attention, mlp, h, up, _ = given
    return by(attention, None, mlp, None, h, up, *how)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("width", [0, 48])
@pytest.mark.parametrize("dtype", [BF16, FP32, FP16])
def test_the_operator_is_the_activation_and_torchs_linear(dtype: torch.dtype, width: int, rank: int) -> None:
    given, how = arguments(7, width, 130, rank, 24, dtype), ("e4m3", "per_row", "e5m2", 32, dtype)
    h_next, *found = mlp_activation_down(*given, *how)
    values, *expected = activation(given, *how)
    assert_bitwise(h_next, torch.nn.functional.linear(values, given[-1]))
    for a, b in zip(found, expected, strict=True):
        assert_bitwise(bits(a), bits(b))


def test_what_is_cast_is_declared() -> None:
    given, how = arguments(7, 48, 130, 4, 8), ("e4m3", "per_row", "e4m3", 16, FP32)
    casts = declarations["coat::mlp_activation_down"](mlp_activation_down(*given, *how), *given, *how)
    complete = torch.addmm(given[1].flatten(0, 1), given[2].flatten(0, 1), given[3].t()).view(2, 7, 130)
    assert [cast.kind for cast in casts] == ["input", None, None]
    for cast, wanted in zip(casts, (activation(given, *how)[0], given[0], complete), strict=True):
        assert_bitwise(cast.values, wanted)
        assert_bitwise(quantize(wanted, "e4m3", cast.granularity).scale, cast.scale)


def test_operators_keep_torch_library_rules() -> None:
    for spec in WITH_CODES:
        check_operator(mlp_activation_down, (*arguments(3, 16, 40, 4, 8), *spec, "e4m3", 16, FP32))
    check_operator(mlp_activation_down, (*arguments(3, 0, 40, 0, 1), "e4m3", "per_row", "none", 16, FP32))


def test_what_it_cannot_make_is_an_error() -> None:
    given = arguments(3, 16, 40, 4, 8)
    with pytest.raises(ValueError, match=r"granularity='none': must be per_row or per_tensor"):
        mlp_activation_down(*given, "e4m3", "none", "none", 16, FP32)
    with pytest.raises(ValueError, match=r"down of shape \(8, 40\): must have a column for each of 56 values"):
        mlp_activation_down(*given[:-1], given[-1][:, 16:], "e4m3", "per_row", "none", 16, FP32)


# -- kernels: interpreted on a CPU ------------------------------------------------------------------------------------


def assert_product(h_next: Tensor, values: Tensor, down: Tensor) -> None:
    """Assert values downᵀ, summed in fp32 in any order and rounded once to the dtype of h_next."""
    exact, magnitudes = (f(values.double()) @ f(down.double()).t() for f in (lambda x: x, torch.abs))
    rounding = BF16_ULP_RTOL if h_next.dtype != FP32 else 0.0
    assert h_next.shape == exact.shape
    assert bool(((h_next.double() - exact).abs() <= KERNEL_ROW_RTOL * magnitudes + rounding * exact.abs()).all())


def assert_kernel(given: tuple[Any, ...], *how: Any, device: torch.device) -> None:
    """Assert the launcher's codes those that `mlp_activation`'s launcher makes, and its product that of the values."""
    from coat_core.ops.gelu_kernel import mlp_activation as values_kernel
    from coat_core.ops.mlp_down_kernel import mlp_activation_down as kernel

    given = moved(given, device)
    h_next, *found = kernel(*given, *how)
    values, *expected = activation(given, *how, by=values_kernel)
    for a, b in zip(found, expected, strict=True):
        assert_bitwise(bits(a), bits(b))
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert_product(h_next.cpu(), values.cpu(), given[-1].cpu())


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_without_an_adapter(kind: str, device: torch.device) -> None:
    shapes = ((7, 48, 200, 16), (1, 130, 1100, 256), (33, 0, 300, 32), (7, 48, 130, 64))
    for spec, (s, d, f, group) in zip(WITH_CODES, shapes, strict=True):
        down = arguments(s, d, f, 0, 8)[-1]
        attention = rows_of_kind(kind, (2, s, d)) if d else None
        given = (attention, 3 * rows_of_kind(kind, (2, s, f)), None, None, down)
        assert_kernel(given, *spec, "e5m2", group, FP32, device=device)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("rank", "next_rank"), [(1, 1), (4, 16), (16, 4), (24, 24), (64, 40), (128, 64), (72, 128), (4, 256)]
)
def test_kernel_with_adapters_of_every_rank(rank: int, next_rank: int, device: torch.device) -> None:
    granularity = "per_tensor" if rank == 4 else "per_row"
    given = arguments(19, 48, 300, rank, next_rank)
    assert_kernel(given, "e4m3", granularity, "e4m3", 32, FP32, device=device)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
def test_kernel_goes_over_several_stretches(device: torch.device) -> None:
    assert_kernel(arguments(3, 1100, 2200, 4, 4), "e5m2", "per_row", "e4m3", 128, FP32, device=device)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("next_rank", [16, 200])
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_kernel_in_half_precision(dtype: torch.dtype, rank: int, next_rank: int, device: torch.device) -> None:
    attention, mlp, h, up, down = arguments(7, 48, 130, rank, next_rank, dtype)
    given = (attention, mlp + 0.25, h, None if up is None else 50 * up, down)  # sums that have to be rounded
    assert_kernel(given, "e4m3", "per_row", "e4m3", 16, dtype, device=device)


@pytest.mark.triton
def test_two_launches_agree(device: torch.device) -> None:
    from coat_core.ops.mlp_down_kernel import mlp_activation_down as kernel

    given = moved(arguments(7, 48, 1100, 4, 16), device)
    first, second = (kernel(*given, "e4m3", "per_row", "e4m3", 16, FP32) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert_bitwise(bits(a), bits(b))
