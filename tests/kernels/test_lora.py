"""Gradients of LoRA's up-projections: the operator, and its Triton kernels."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import Tensor

from coat_core.ops.lora import lora_up_gradients
from tests.helpers.asserts import assert_bitwise
from tests.helpers.rows import KINDS, assert_rows_close, rows_of_kind
from tests.tolerances import BF16_ULP_RTOL, KERNEL_ROW_RTOL

with suppress(ImportError):  # without triton
    from coat_core.ops import lora_kernel as kernels

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CPU = torch.device("cpu")


def tensors(
    shape: tuple[int, ...], widths: list[int], rank: int, device: torch.device, dtype: torch.dtype = FP32
) -> list[Tensor]:
    """dy [..., ΣN] in wider rows, h [..., n·r] likewise, up [ΣN, r]."""
    n, columns = sum(widths), len(widths) * rank
    dy, h = torch.randn(*shape, n + 8)[..., 8:], torch.randn(*shape, columns + 16)[..., :columns]
    return [x.to(dtype).to(device) for x in (dy, h, torch.randn(n, rank))]


@pytest.mark.parametrize("widths", [[48], [40, 7, 65]], ids=str)
def test_the_gradients_are_autograds(widths: list[int]) -> None:
    dy, h, up = tensors((2, 7), widths, 4, CPU)
    leaves = [h.double().requires_grad_(), up.double().requires_grad_()]
    parts = zip(leaves[0].split(4, dim=-1), leaves[1].split(widths), strict=True)
    y = torch.cat([part @ matrix.t() for part, matrix in parts], dim=-1)
    for found, expected in zip(
        lora_up_gradients(dy, h, up, widths, FP32), torch.autograd.grad(y, leaves, dy.double()), strict=True
    ):
        assert_rows_close(found.double(), expected, KERNEL_ROW_RTOL)


def test_products_are_torchs_in_the_dtype_of_h() -> None:
    dy, h, up = tensors((2, 7), [40, 8], 4, CPU, BF16)
    dh, dup = lora_up_gradients(dy.float() * 1.01, h, up, [40, 8], FP32)
    rows, flat = (dy.float() * 1.01).bfloat16().flatten(0, 1), h.flatten(0, 1)
    assert_bitwise(dh.flatten(0, 1)[:, 4:], rows[:, 40:] @ up[40:])
    assert_bitwise(dup[:40], (rows[:, :40].t() @ flat[:, :4]).float())


def assert_gradients(
    found: tuple[Tensor, Tensor], dy: Tensor, h: Tensor, up: Tensor, widths: list[int], rtols: tuple[float, float]
) -> None:
    """Assert that dh and dup are near those in fp64, relative to what their sums would be without cancellation."""
    given = [x.to("cpu", torch.float64) for x in (dy.to(h.dtype), h, up)]
    expected = lora_up_gradients(*given, widths, torch.float64)
    largest = lora_up_gradients(*(x.abs() for x in given), widths, torch.float64)
    for result, right, sums, rtol in zip(found, expected, largest, rtols, strict=True):
        assert result.shape == right.shape
        assert bool(((result.cpu().double() - right).abs() <= rtol * sums).all())


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have programs take several tiles of rows each, as they do of large tensors."""
    pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "PROGRAMS", 8)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned", "few_programs")
@pytest.mark.parametrize("rank", [1, 4, 16, 24, 32])
def test_the_kernel_multiplies(rank: int, device: torch.device) -> None:
    for shape, widths in (((2, 7), [48]), ((1, 33), [40, 7, 130]), ((2, 133), [260, 20])):
        given = tensors(shape, widths, rank, device)
        found = kernels.lora_up_gradients(*given, widths, FP32)
        assert [x.dtype for x in found] == [FP32, FP32]
        assert_gradients(found, *given, widths, (KERNEL_ROW_RTOL,) * 2)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned", "few_programs")
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_takes_any_gradient(kind: str, device: torch.device) -> None:
    dy, (_, h, up) = rows_of_kind(kind, (3, 70, 150)).to(device), tensors((3, 70), [130, 20], 16, device)
    assert_gradients(
        kernels.lora_up_gradients(dy, h, up, [130, 20], FP32), dy, h, up, [130, 20], (KERNEL_ROW_RTOL,) * 2
    )


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned", "few_programs")
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("dtype_up", [FP32, BF16])
def test_the_kernel_in_half_precision(dtype: torch.dtype, dtype_up: torch.dtype, device: torch.device) -> None:
    for widths in ([48, 8], [600, 20]):
        dy, h, up = tensors((2, 70), widths, 16, device, dtype)
        dy = dy.float() * 1.001
        dh, dup = kernels.lora_up_gradients(dy, h, up, widths, dtype_up)
        assert (dh.dtype, dup.dtype) == (dtype, dtype_up)
        rtols = BF16_ULP_RTOL, KERNEL_ROW_RTOL if dtype_up == FP32 else BF16_ULP_RTOL
        assert_gradients((dh, dup), dy, h, up, widths, rtols)


@pytest.mark.triton
def test_ranks_without_a_kernel_are_torchs(device: torch.device) -> None:
    given = tensors((2, 7), [40, 8], 100, device)
    for found, expected in zip(
        kernels.lora_up_gradients(*given, [40, 8], FP32), lora_up_gradients(*given, [40, 8], FP32), strict=True
    ):
        assert_bitwise(found, expected)


@pytest.mark.triton
@pytest.mark.parametrize(("rows", "widths"), [(4608, [3072] * 3 + [12288]), (4096, [3072] * 3), (4096, [12288])])
def test_parts_are_few_and_programs_enough(rows: int, widths: list[int]) -> None:
    block, stretches, shares, rounds = kernels._division(tuple(widths), rows, 16, kernels.STRETCHES, 132)
    assert stretches * block == sum(widths)
    assert shares * rounds * kernels.ROWS >= rows > (shares - 1) * rounds * kernels.ROWS
    assert 120 <= stretches * shares <= 132
    assert 4 * 16 * (stretches * rows + shares * sum(widths)) < 0.12 * 2 * rows * sum(widths)
