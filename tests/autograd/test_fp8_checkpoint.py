"""fp8_checkpoint: exact forward, recomputation from FP8 inputs that are really all that is kept."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from coat_core.activation import fp8_checkpoint
from coat_core.activation.packing import _Keeper
from coat_core.granularity import PER_TENSOR, Storage, per_group
from coat_core.quantize import quantize
from tests.autograd.test_packing import Block, D, T, gradients
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.tolerances import CHECKPOINT_GRADIENT_FLOOR_DB

SMALL = {"min_elements": 64, "storage": Storage(granularity=per_group(32))}


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("granularity", [per_group(32), PER_TENSOR], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_forward_is_exact_and_gradients_are_near(device, fmt, granularity, autocast) -> None:
    block, x = Block().to(device), torch.randn(2, T, D, device=device, requires_grad=True)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        exact = block(x)
        y = fp8_checkpoint(block, x, storage=Storage(fmt, granularity), min_elements=64)
    assert_bitwise(y, exact)
    expected = gradients(block, x, exact)
    for name, gradient in gradients(block, x, y).items():
        assert_sqnr(expected[name], gradient, CHECKPOINT_GRADIENT_FLOOR_DB[fmt])


def test_recomputes_from_the_fp8_values_of_its_input() -> None:
    seen, x = [], torch.randn(8, D, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        seen.append(x.detach().clone())
        return x.square()

    fp8_checkpoint(block, x, **SMALL).sum().backward()
    x_hat = quantize(x, "e4m3", per_group(32)).dequantize()
    assert_bitwise(seen[0], x.detach())
    assert_bitwise(seen[1], x_hat)
    assert_bitwise(x.grad, 2 * x_hat)


def test_small_inputs_are_exact_and_dropout_is_repeated() -> None:
    """With inputs kept exactly it is torch's checkpoint, to the last bit, dropout masks and generator included."""
    block, x = Block(dropout=0.5), torch.randn(2, T, D, requires_grad=True)
    results = []
    for run in (
        lambda: checkpoint(block, x, use_reentrant=False),
        lambda: fp8_checkpoint(block, x, min_elements=10**9),
    ):
        torch.manual_seed(7)
        y = run()
        state = torch.get_rng_state()
        results.append((y.detach(), state, gradients(block, x, y)))
    (y, state, expected), (ours, our_state, gradient) = results
    assert_bitwise(ours, y)
    assert_bitwise(our_state, state)
    for name, value in expected.items():
        assert_bitwise(gradient[name], value)


def test_dropout_is_repeated_with_fp8_inputs() -> None:
    x = torch.ones(64, D, requires_grad=True)  # exact in FP8
    y = fp8_checkpoint(lambda t: nn.functional.dropout(t, 0.5), x, **SMALL)
    torch.rand(5)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert 0.3 < (y == 0).float().mean() < 0.7
    assert_bitwise(dx, y.detach())


def test_the_input_is_really_freed() -> None:
    block = Block()
    x = torch.randn(2, T, D).bfloat16().requires_grad_()
    block.bfloat16()
    hidden = x * 1
    alive = weakref.ref(hidden.untyped_storage())
    y = fp8_checkpoint(block, hidden, **SMALL)
    del hidden
    gc.collect()
    assert alive() is None
    keepers = [k for k in gc.get_objects() if type(k) is _Keeper and k._quantized.codes.shape == x.shape]
    assert len(keepers) == 1
    assert keepers[0]._exact is None
    assert keepers[0]._quantized.codes.dtype == torch.float8_e4m3fn
    kept = weakref.ref(keepers.pop())
    y.sum().backward()
    assert x.grad.isfinite().all()
    del y
    gc.collect()
    assert kept() is None


def test_constants_stay_as_they_are() -> None:
    """What requires no gradient is shared by all blocks: an FP8 copy per block would cost, not save."""
    x, mask, seen = torch.randn(8, D, requires_grad=True), torch.randn(8, D), []

    def block(x: Tensor, mask: Tensor, scale: float, flags: dict[str, bool], none: None) -> Tensor:
        seen.append((mask, scale, flags, none))
        return x.sigmoid() * mask * scale

    y = fp8_checkpoint(block, x, mask, 2.5, {"flag": True}, None, **SMALL)
    y.sum().backward()
    for arguments in seen:
        assert arguments[0] is mask or arguments[0].data_ptr() == mask.data_ptr()
        assert arguments[1:] == (2.5, {"flag": True}, None)
    x_hat = quantize(x, "e4m3", per_group(32)).dequantize().sigmoid()
    torch.testing.assert_close(x.grad, x_hat * (1 - x_hat) * mask * 2.5)


def test_tuples_in_and_out() -> None:
    """As FLUX's double block: two streams in, two out."""
    first, second = Block(), Block()

    def block(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return first(a), second(b + a.mean(1, keepdim=True))

    a, b = (torch.randn(2, T, D, requires_grad=True) for _ in range(2))
    exact, ours = block(a, b), fp8_checkpoint(block, a, b, **SMALL)
    da, db = torch.randn_like(a), torch.randn_like(b)
    for expected, y in zip(exact, ours, strict=True):
        assert_bitwise(y, expected)
    for expected, gradient in zip(
        torch.autograd.grad(exact, (a, b), (da, db)), torch.autograd.grad(ours, (a, b), (da, db)), strict=True
    ):
        assert_sqnr(expected, gradient, CHECKPOINT_GRADIENT_FLOOR_DB["e4m3"])


def test_two_backward_passes_over_one_graph() -> None:
    block, x = Block(), torch.randn(2, T, D, requires_grad=True)
    y = fp8_checkpoint(block, x, **SMALL).sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    assert_bitwise(torch.autograd.grad(y, x)[0], first)


def test_without_grad_it_is_the_block() -> None:
    block, x = Block(), torch.randn(2, T, D)
    with torch.no_grad():
        assert_bitwise(fp8_checkpoint(block, x, **SMALL), block(x))
