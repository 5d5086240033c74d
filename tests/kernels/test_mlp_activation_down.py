"""What the linear after an MLP's activation reads, codes and down-projection: the operator, and its kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from coat_core.casts import declarations
from coat_core.kernels.gelu import mlp_activation, mlp_activation_down
from coat_core.quantize import quantize
from tests.helpers.asserts import assert_bitwise
from tests.helpers.operators import check_operator
from tests.helpers.rows import SPECS

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
        assert_bitwise(a.float(), b.float())


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
