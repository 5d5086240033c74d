"""Attention in two halves: torch's own bits when fed its own tensors, FP8 round trips at the stated floor."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import coat_core.ops.attention as attention
from coat_core.granularity import PER_GROUP
from coat_core.ops.attention import (
    GPU_KERNELS,
    TAKES_MASK,
    AttentionTrial,
    additive_mask,
    attention_backward,
    attention_forward,
    chosen_kernel,
    kernel_obstacles,
    use_kernel,
)
from coat_core.quantize import quantize
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.helpers.rows import assert_rows_close
from tests.tolerances import ATTENTION_FP8_FLOOR_DB, BF16_ULP_RTOL, KERNEL_ROW_RTOL


@pytest.fixture(autouse=True)
def _torch_chooses_again() -> Iterator[None]:
    yield
    attention.use_kernel(None)


class Registry:
    """torch's registry of FlashAttention libraries, with those that are installed."""

    def __init__(self, *installed: str) -> None:
        self.installed, self.active = installed, None

    def current_flash_attention_impl(self) -> str | None:
        return self.active

    def restore_flash_attention_impl(self) -> None:
        self.active = None

    def activate_flash_attention_impl(self, name: str) -> None:
        self.active = None
        if name not in self.installed:
            raise ModuleNotFoundError(f"No module named {name!r}")
        self.active = name


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


def torch_gradients(
    inputs: list[Tensor], grad: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, mask)
    return out.detach(), torch.autograd.grad(out, leaves, grad)


def masks(device: torch.device) -> dict[str, Tensor]:
    """Of 65 tokens, two images of which the second has padding."""
    seen = torch.ones(2, 65, dtype=torch.bool)
    seen[1, 20:40] = False
    both = seen[:, None, None] & seen[:, None, :, None]
    found = {"keys": seen[:, None, None], "pairs": both, "one for all": both[1:], "added": both * 0.5}
    return {name: mask.to(device) for name, mask in found.items()}


@pytest.mark.parametrize(
    ("mask", "head_dim", "dtype"),
    [
        *((None, 32, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
        (None, 20, torch.bfloat16),
        *((name, 32, torch.bfloat16) for name in masks(torch.device("cpu"))),
    ],
)
def test_fed_the_originals_it_is_torchs(mask, head_dim, dtype, device):
    inputs = qkv(device, dtype, head_dim)
    given = None if mask is None else masks(device)[mask]
    added = None if given is None else additive_mask(given, dtype)
    out, context = attention_forward(*inputs, added)
    grad = torch.randn_like(out)
    theirs = given if given is None or given.dtype == torch.bool else given.to(dtype)
    expected, expected_grads = torch_gradients(inputs, grad, theirs)
    assert_torchs(out, expected)
    for found, wanted in zip(attention_backward(grad, *inputs, out, context, added), expected_grads, strict=True):
        assert_torchs(found, wanted)
    assert mask is None or not torch.equal(out, attention_forward(*inputs)[0])


def test_a_kernel_that_takes_no_mask_is_left(monkeypatch):
    q, k, v = qkv(torch.device("cpu"))
    mask = additive_mask(masks(q.device)["keys"], q.dtype)
    monkeypatch.setattr(attention, "_in_use", ("flash", "cpu", q.dtype, q.shape[-1]))
    assert [chosen_kernel(q, k, v), chosen_kernel(q, k, v, mask)] == ["flash", "flash_cpu"]
    monkeypatch.setattr(attention, "_in_use", ("efficient", "cpu", q.dtype, q.shape[-1]))
    assert chosen_kernel(q, k, v, mask) == "efficient"


def test_fp8_round_trips_keep_the_gradients(device):
    inputs = [torch.randn(1, 320, 4, 128).to(device, torch.bfloat16).transpose(1, 2) for _ in range(3)]
    out, context = attention_forward(*inputs)
    grad = torch.randn_like(out)
    rough = [quantize(x, "e4m3", PER_GROUP).dequantize(x.dtype) for x in (*inputs, out)]
    exact = attention_backward(grad, *inputs, out, context)
    for found, wanted, floor in zip(
        attention_backward(grad, *rough, context), exact, ATTENTION_FP8_FLOOR_DB, strict=True
    ):
        assert_sqnr(wanted, found, floor)


@pytest.mark.parametrize("kernel", GPU_KERNELS)
def test_gpu_kernels_take_these_arguments(kernel, monkeypatch):
    """On the meta device: names, number and kinds of arguments, without a GPU."""
    monkeypatch.setattr(attention, "chosen_kernel", lambda *_: kernel)
    inputs = [torch.empty(2, 3, 64, 128, dtype=torch.bfloat16, device="meta") for _ in range(3)]
    mask = torch.empty(2, 1, 1, 64, dtype=torch.bfloat16, device="meta") if kernel in TAKES_MASK else None
    for given in {None, mask}:
        out, context = attention_forward(*inputs, given)
        gradients = attention_backward(out, *inputs, out, context, given)
        assert context.tensors[0].dtype == torch.float32
        assert [g.shape for g in gradients] == [x.shape for x in inputs]


# -- by name ----------------------------------------------------------------------------------------------------------
def test_a_kernel_in_use_is_taken_for_tensors_like_those_it_was_named_for():
    q, k, v = qkv(torch.device("cpu"))
    assert chosen_kernel(q, k, v) == "flash_cpu"
    use_kernel("plain", q)
    assert chosen_kernel(q, k, v) == "plain" == attention_forward(q, k, v)[1].kernel
    assert chosen_kernel(*qkv(torch.device("cpu"), torch.float32)) == "flash_cpu"
    assert chosen_kernel(*qkv(torch.device("cpu"), head_dim=64)) == "flash_cpu"
    use_kernel(None)
    assert chosen_kernel(q, k, v) == "flash_cpu"


def test_libraries_are_exchanged_in_torchs_registry(monkeypatch):
    registry, (q, _, _) = Registry("FA3", "FA4"), qkv(torch.device("cpu"))
    monkeypatch.setattr(attention, "registry", registry)
    seen = []
    for kernel in ("fa3", "fa4", "flash", "fa3", None):
        use_kernel(kernel, q)
        seen.append(registry.active)
    assert seen == ["FA3", "FA4", None, "FA3", None]
    monkeypatch.setattr(attention, "registry", object())  # of an older torch
    use_kernel("cudnn", q)
    with pytest.raises(RuntimeError, match="cannot exchange its FlashAttention 2"):
        use_kernel("fa3", q)


@pytest.mark.parametrize(("shape", "dtype"), [((1, 2, 300, 32), torch.bfloat16), ((2, 3, 65, 64), torch.float16)])
def test_right_kernels_pass_the_trial_and_are_in_use(shape, dtype, monkeypatch):
    monkeypatch.setattr(attention, "LARGEST_ERROR", attention.LARGEST_ERROR / 5)  # rounding alone is far from it
    batch, heads, tokens, head_dim = shape
    like = torch.empty(batch, tokens, heads, head_dim, dtype=dtype).transpose(1, 2)
    state, trial = torch.get_rng_state(), AttentionTrial(like)
    assert torch.equal(torch.get_rng_state(), state)
    assert (trial.qkv[0].shape, trial.qkv[0].stride()) == (like.shape, like.stride())
    for kernel in ("flash_cpu", "plain"):
        assert trial.obstacle(kernel) is None
        assert chosen_kernel(like, like, like) == kernel


def wrong(part: int, change: Any) -> Any:
    """An attention that gets one of its results wrong: out, dq, dk or dv."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, context = attention_forward(q, k, v)
        return change(out) if part == 0 else out, context

    def backward(*args: Any) -> tuple[Tensor, ...]:
        found = attention_backward(*args)
        return tuple(change(x) if i + 1 == part else x for i, x in enumerate(found))

    return forward, backward


CHANGES = {
    "another scale": lambda x: x * 1.05,
    "not finite in one place": lambda x: x.index_put((torch.tensor(0),) * 4, torch.tensor(torch.nan, dtype=x.dtype)),
    "heads mixed up": lambda x: x.roll(1, 1),
}


@pytest.mark.parametrize(
    ("part", "change"),
    [*((part, "another scale") for part in range(4)), (0, "not finite in one place"), (3, "heads mixed up")],
)
def test_a_wrong_kernel_is_refused(part, change, monkeypatch):
    forward, backward = wrong(part, CHANGES[change])
    monkeypatch.setattr(attention, "attention_forward", forward)
    monkeypatch.setattr(attention, "attention_backward", backward)
    q, k, v = qkv(torch.device("cpu"))
    reason = AttentionTrial(q).obstacle("plain")
    assert str(reason).startswith("differs from plain matrix products by")
    assert chosen_kernel(q, k, v) == "flash_cpu"


def test_what_cannot_run_here_says_why(monkeypatch):
    monkeypatch.setattr(attention, "registry", Registry("FA3"))
    q, k, v = qkv(torch.device("cpu"))
    found = kernel_obstacles(q)
    assert list(found) == list(GPU_KERNELS)
    assert found.pop("fa4") == "not installed (No module named 'FA4')"
    assert all(str(reason).startswith("NotImplementedError: Could") for reason in found.values())
    assert chosen_kernel(q, k, v) == "flash_cpu"


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn", "plain"])
def test_every_gpu_kernel_is_torchs(kernel, monkeypatch):
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
