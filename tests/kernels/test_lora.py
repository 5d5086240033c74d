"""Gradients of LoRA's up-projections: the operator, and its Triton kernels."""

from contextlib import suppress

import pytest
import torch
from torch import Tensor

from coat_core.ops.lora import lora_up_gradients
from tests.helpers.asserts import assert_bitwise
from tests.helpers.operators import moved
from tests.helpers.rows import assert_rows_close, kernel_of, rows
from tests.tolerances import BF16_ULP_RTOL, KERNEL_ROW_RTOL

with suppress(ImportError):  # without triton
    from coat_core.ops import lora_kernel as kernels

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def tensors(shape: tuple[int, ...], widths: list[int], rank: int, dtype: torch.dtype = FP32) -> list[Tensor]:
    """dy [..., ΣN] in wider rows, h [..., n·r] likewise, up [ΣN, r]."""
    n, columns = sum(widths), len(widths) * rank
    dy, h = torch.randn(*shape, n + 8)[..., 8:], torch.randn(*shape, columns + 16)[..., :columns]
    return [x.to(dtype) for x in (dy, h, torch.randn(n, rank))]


@pytest.mark.parametrize("widths", [[48], [40, 7, 65]], ids=str)
def test_the_gradients_are_autograds(widths):
    dy, h, up = tensors((2, 7), widths, 4)
    leaves = [h.double().requires_grad_(), up.double().requires_grad_()]
    parts = zip(leaves[0].split(4, dim=-1), leaves[1].split(widths), strict=True)
    y = torch.cat([part @ matrix.t() for part, matrix in parts], dim=-1)
    found = lora_up_gradients(dy, h, up, widths, FP32)
    for gradient, expected in zip(found, torch.autograd.grad(y, leaves, dy.double()), strict=True):
        assert_rows_close(gradient.double(), expected, KERNEL_ROW_RTOL)


def test_products_are_torchs_in_the_dtype_of_h():
    dy, h, up = tensors((2, 7), [40, 8], 4, BF16)
    dh, dup = lora_up_gradients(dy.float() * 1.01, h, up, [40, 8], FP32)
    flat_dy, flat_h = (dy.float() * 1.01).bfloat16().flatten(0, 1), h.flatten(0, 1)
    assert_bitwise(dh.flatten(0, 1)[:, 4:], flat_dy[:, 40:] @ up[40:])
    assert_bitwise(dup[:40], (flat_dy[:, :40].t() @ flat_h[:, :4]).float())


@pytest.mark.triton
@pytest.mark.parametrize(
    "case",  # rank, widths, dtype of h, dtype of the gradient of up
    [
        (1, [40, 7, 130], FP32, FP32),
        (24, [130], FP32, FP32),
        (32, [40, 7], FP32, FP32),
        (16, [48, 8], FP16, BF16),
        (16, [600, 20], BF16, FP32),
    ],
    ids=str,
)
def test_the_kernel_multiplies(case, device, monkeypatch):
    """Near the gradients in fp64, relative to what their sums would be without cancellation."""
    rank, widths, dtype, dtype_up = case
    monkeypatch.setattr(kernels, "PROGRAMS", 8)  # each then takes several tiles of rows, as of large tensors
    shape = (2, 70)
    _, h, up = tensors(shape, widths, rank, dtype)
    dy = rows((*shape, sum(widths)))
    found = kernel_of(lora_up_gradients)(*moved((dy, h, up), device), widths, dtype_up)
    assert [x.dtype for x in found] == [dtype, dtype_up]
    exact = [x.double() for x in (dy.to(dtype), h, up)]
    expected = lora_up_gradients(*exact, widths, torch.float64)
    largest = lora_up_gradients(*(x.abs() for x in exact), widths, torch.float64)
    for gradient, wanted, sums in zip(found, expected, largest, strict=True):
        rtol = KERNEL_ROW_RTOL if gradient.dtype == FP32 else BF16_ULP_RTOL
        assert gradient.shape == wanted.shape
        assert bool(((gradient.cpu().double() - wanted).abs() <= rtol * sums).all())


@pytest.mark.triton
def test_ranks_without_a_kernel_are_torchs(device):
    arguments = (*moved(tensors((2, 7), [40, 8], 100), device), [40, 8], FP32)
    for found, expected in zip(kernel_of(lora_up_gradients)(*arguments), lora_up_gradients(*arguments), strict=True):
        assert_bitwise(found, expected)


@pytest.mark.triton
@pytest.mark.parametrize(("rows", "widths"), [(4608, [3072] * 3 + [12288]), (4096, [3072] * 3), (4096, [12288])])
def test_parts_are_few_and_programs_enough(rows, widths):
    block, stretches, shares, rounds = kernels._division(tuple(widths), rows, 16, kernels.STRETCHES, 132)
    assert stretches * block == sum(widths)
    assert shares * rounds * kernels.ROWS >= rows > (shares - 1) * rounds * kernels.ROWS
    assert 120 <= stretches * shares <= 132
    assert 4 * 16 * (stretches * rows + shares * sum(widths)) < 0.12 * 2 * rows * sum(widths)
