"""Gradients of LoRA's up-projections: the operator, and its Triton kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coat_core.kernels.lora import lora_up_gradients
from tests.helpers.asserts import assert_bitwise
from tests.helpers.operators import check_operator
from tests.helpers.rows import assert_rows_close
from tests.tolerances import KERNEL_ROW_RTOL

FP32, BF16 = torch.float32, torch.bfloat16
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


def test_shapes_that_do_not_go_together_are_refused() -> None:
    dy, h, up = tensors((2, 7), [40, 8], 4, CPU)
    with pytest.raises(ValueError, match=r"widths=\[40, 9\]: must add up to the columns of dy \(48\)"):
        lora_up_gradients(dy, h, up, [40, 9], FP32)
    with pytest.raises(ValueError, match=r"h of shape \(2, 7, 4\): .* 4 columns for each of 2 linears"):
        lora_up_gradients(dy, h[..., :4], up, [40, 8], FP32)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_operator_keeps_torch_library_rules(dtype: torch.dtype) -> None:
    check_operator(lora_up_gradients, (*tensors((2, 7), [40, 8], 4, CPU, dtype), [40, 8], FP32))
