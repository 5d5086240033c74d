"""Attention in two halves: torch's own bits when fed its own tensors, FP8 round trips at the stated floor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import coat_core.kernels.attention as attention
from coat_core.granularity import PER_GROUP
from coat_core.kernels.attention import attention_backward, attention_forward, chosen_kernel
from coat_core.quantize import quantize
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.helpers.rows import assert_rows_close
from tests.tolerances import ATTENTION_FP8_FLOOR_DB, BF16_ULP_RTOL, KERNEL_ROW_RTOL

GPU_KERNELS = ["flash", "efficient", "cudnn"]


def qkv(device: torch.device, dtype: torch.dtype = torch.bfloat16, head_dim: int = 32) -> list[Tensor]:
    """q, k, v [2, 3, 65, d] as the blocks have them: heads split from the last dimension."""
    return [torch.randn(2, 65, 3, head_dim).to(device, dtype).transpose(1, 2) for _ in range(3)]


def assert_torchs(found: Tensor, wanted: Tensor) -> None:
    """Equal bits; on a GPU, where torch's own backward adds dq up in any order, within one rounding."""
    if wanted.device.type == "cpu":
        assert_bitwise(found, wanted)
        return
    rtol = BF16_ULP_RTOL if wanted.dtype != torch.float32 else KERNEL_ROW_RTOL
    assert_rows_close(found, wanted, rtol)


def torch_gradients(inputs: list[Tensor], grad: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves)
    return out.detach(), torch.autograd.grad(out, leaves, grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [32, 20])
def test_fed_the_originals_it_is_torchs(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    inputs = qkv(device, dtype, head_dim)
    out, context = attention_forward(*inputs)
    grad = torch.randn_like(out)
    expected, expected_grads = torch_gradients(inputs, grad)
    assert_torchs(out, expected)
    for found, wanted in zip(attention_backward(grad, *inputs, out, context), expected_grads, strict=True):
        assert_torchs(found, wanted)


def test_the_cpu_kernel_keeps_the_log_sum_exp_alone() -> None:
    q, k, v = qkv(torch.device("cpu"))
    out, context = attention_forward(q, k, v)
    (lse,) = context.tensors
    scores = (q.double() @ k.double().transpose(-1, -2)) / q.shape[-1] ** 0.5
    assert context.kernel == "flash_cpu"
    assert (lse.dtype, lse.shape, out.shape) == (torch.float32, (2, 3, 65), q.shape)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-4, rtol=1e-4)


def test_fp8_round_trips_keep_the_gradients(device: torch.device) -> None:
    inputs = [torch.randn(1, 320, 4, 128).to(device, torch.bfloat16).transpose(1, 2) for _ in range(3)]
    out, context = attention_forward(*inputs)
    grad = torch.randn_like(out)
    rough = [quantize(x, "e4m3", PER_GROUP).dequantize(x.dtype) for x in (*inputs, out)]
    exact = attention_backward(grad, *inputs, out, context)
    for found, wanted, floor in zip(
        attention_backward(grad, *rough, context), exact, ATTENTION_FP8_FLOOR_DB, strict=True
    ):
        assert_sqnr(wanted, found, floor)


def test_a_kernel_without_its_own_backward_runs_forward_again(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = qkv(torch.device("cpu"))
    monkeypatch.setattr(attention, "chosen_kernel", lambda *_: "plain")
    out, context = attention_forward(*inputs)
    grad = torch.randn_like(out)
    assert context.tensors == ()
    for found, wanted in zip(
        attention_backward(grad, *inputs, out, context), torch_gradients(inputs, grad)[1], strict=True
    ):
        assert_bitwise(found, wanted)


@pytest.mark.parametrize("kernel", GPU_KERNELS)
def test_gpu_kernels_take_these_arguments(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device: names, number and kinds of arguments, without a GPU."""
    monkeypatch.setattr(attention, "chosen_kernel", lambda *_: kernel)
    inputs = [torch.empty(2, 3, 64, 128, dtype=torch.bfloat16, device="meta") for _ in range(3)]
    out, context = attention_forward(*inputs)
    gradients = attention_backward(out, *inputs, out, context)
    assert context.tensors[0].dtype == torch.float32
    assert [g.shape for g in gradients] == [x.shape for x in inputs]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [*GPU_KERNELS, "plain"])
def test_every_gpu_kernel_is_torchs(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backends = {
        "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION", "plain": "MATH",
    }  # fmt: skip
    inputs = [torch.randn(2, 256, 3, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
    with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backends[kernel])):
        assert chosen_kernel(*inputs) == kernel
        out, context = attention_forward(*inputs)
        grad = torch.randn_like(out)
        expected, expected_grads = torch_gradients(inputs, grad)
        found = attention_backward(grad, *inputs, out, context)
    for ours, wanted in zip((out, *found), (expected, *expected_grads), strict=True):
        assert_torchs(ours, wanted)
