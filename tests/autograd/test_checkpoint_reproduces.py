"""What fp8_checkpoint recomputes is what ran: random numbers, autocast, arguments; alone and inside other contexts."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import coat_core.activation.packing as checkpoint_module
from coat_core.activation import PackedSavedTensors, fp8_checkpoint
from coat_core.granularity import Storage, per_group
from coat_core.quantize import quantize
from tests.autograd.test_packing import SMALL as PACKS
from tests.autograd.test_packing import Block, D, T, gradients
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.tolerances import CHECKPOINT_GRADIENT_FLOOR_DB

SMALL = {"min_elements": 64, "storage": Storage(granularity=per_group(32))}
EXACT = {"min_elements": 10**9}


def lora_block(dropout: float) -> nn.Module:
    """A frozen block with PEFT adapters, B nonzero so that every gradient is."""
    config = LoraConfig(r=4, lora_dropout=dropout, target_modules=["qkv", "out", "up", "down"], init_lora_weights=False)
    block: nn.Module = inject_adapter_in_model(config, Block().requires_grad_(False))
    return block


class TestRandomNumbers:
    @pytest.mark.parametrize("options", [SMALL, EXACT], ids=["fp8 input", "exact input"])
    @pytest.mark.parametrize("autocast", [False, True])
    def test_lora_dropout_draws_the_same_mask(self, options: dict, autocast: bool) -> None:
        block, x = lora_block(0.3), torch.randn(2, T, D, requires_grad=True)
        masks: list[Tensor] = []
        block.up.lora_dropout["default"].register_forward_hook(lambda module, args, out: masks.append(out == 0))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            torch.manual_seed(7)
            y = block(x)
            torch.manual_seed(7)
            ours = fp8_checkpoint(block, x, **options)
        assert_bitwise(ours, y)
        expected, found = gradients(block, x, y), gradients(block, x, ours)
        assert len(masks) == 3
        assert 0.2 < masks[0].float().mean() < 0.4
        for mask in masks[1:]:
            assert_bitwise(mask, masks[0])
        for name, value in expected.items():
            if options is EXACT:
                assert_bitwise(found[name], value)
            else:
                assert_sqnr(value, found[name], CHECKPOINT_GRADIENT_FLOOR_DB["e4m3"])

    def test_each_call_draws_its_own_mask_and_the_generator_is_left_where_it_was(self) -> None:
        x, outputs = torch.ones(64, D, requires_grad=True), []  # ones are exact in FP8
        for _ in range(2):
            outputs.append(fp8_checkpoint(lambda t: nn.functional.dropout(t, 0.5), x, **SMALL))
        assert not torch.equal(outputs[0], outputs[1])
        torch.manual_seed(11)
        state = torch.get_rng_state()
        for y in reversed(outputs):
            assert_bitwise(torch.autograd.grad(y, x, torch.ones_like(y))[0], y.detach())
        assert_bitwise(torch.get_rng_state(), state)


class TestAutocast:
    @pytest.mark.parametrize("forward", [True, False])
    def test_is_that_of_the_forward_pass(self, forward: bool) -> None:
        block, x, seen = Block(), torch.randn(2, T, D, requires_grad=True), []
        block.up.register_forward_hook(lambda module, args, out: seen.append((out.dtype, out.requires_grad)))
        with torch.autocast("cpu", torch.bfloat16, enabled=forward):
            y = fp8_checkpoint(block, x, **SMALL)
        with torch.autocast("cpu", torch.bfloat16, enabled=not forward):
            y.sum().backward()
        assert seen == [(torch.bfloat16 if forward else torch.float32, True)] * 2
        assert x.grad.dtype == torch.float32


class TestArguments:
    def test_keywords_are_kept_as_positions_are(self) -> None:
        calls = []

        def block(x: Tensor, *, other: Tensor, scale: float) -> tuple[Tensor, float]:
            calls.append(other.detach().clone())
            return x.sigmoid() * other * scale, scale

        x, other = torch.randn(8, D, requires_grad=True), torch.randn(8, D, requires_grad=True)
        hidden = other * 1
        alive = weakref.ref(hidden.untyped_storage())
        y, scale = fp8_checkpoint(block, x, other=hidden, scale=2.0, **SMALL)
        del hidden
        gc.collect()
        assert alive() is None
        assert scale == 2.0
        y.sum().backward()
        x_hat, other_hat = (quantize(t, "e4m3", per_group(32)).dequantize() for t in (x, other))
        assert_bitwise(calls[0], other.detach())
        assert_bitwise(calls[1], other_hat)
        torch.testing.assert_close(other.grad, x_hat.sigmoid() * 2)

    @pytest.mark.parametrize(
        "x",
        [torch.randn(8, D, dtype=torch.float64), torch.randn(()), torch.randn(0, D)],
        ids=["fp64", "scalar", "empty"],
    )
    def test_what_fp8_has_no_place_for_is_kept_exactly(self, x: Tensor) -> None:
        x = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(fp8_checkpoint(torch.sigmoid, x, min_elements=0).sum(), x)
        assert_bitwise(dx, torch.autograd.grad(x.sigmoid().sum(), x)[0])

    def test_a_change_of_the_input_in_place_after_the_block_is_not_seen(self) -> None:
        x = torch.randn(8, D, requires_grad=True)
        hidden = x * 1
        y = fp8_checkpoint(torch.sigmoid, hidden, **SMALL)
        hidden.detach().zero_()
        y.sum().backward()
        x_hat = quantize(x, "e4m3", per_group(32)).dequantize().sigmoid()
        torch.testing.assert_close(x.grad, x_hat * (1 - x_hat))


class TestInsideOthers:
    def test_inside_packed_saved_tensors(self) -> None:
        """A recomputed part of a packed block: its constants are not packed, so that it recomputes from what ran."""
        mask, x = torch.randn(8, D), torch.randn(8, D, requires_grad=True)

        def run(packs: bool) -> Tensor:
            def inner() -> Tensor:
                return fp8_checkpoint(lambda a, b: a.sigmoid() * b, x, mask, **SMALL)

            if not packs:
                return inner()
            with PackedSavedTensors(PACKS):
                return inner()

        dy = torch.randn(8, D)
        expected = torch.autograd.grad(run(False), x, dy)[0]
        assert_bitwise(torch.autograd.grad(run(True), x, dy)[0], expected)

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_inside_torch_checkpoint(self, reentrant: bool) -> None:
        block, x = lora_block(0.3), torch.randn(2, T, D, requires_grad=True)
        torch.manual_seed(7)
        exact = gradients(block, x, block(x.tanh()))
        torch.manual_seed(7)
        y = checkpoint(lambda t: fp8_checkpoint(block, t.tanh(), **SMALL), x, use_reentrant=reentrant)
        torch.manual_seed(3)
        y.backward(torch.randn_like(y))
        found = {name: p.grad for name, p in block.named_parameters() if p.requires_grad} | {"x": x.grad}
        for name, value in exact.items():
            assert_sqnr(value, found[name], CHECKPOINT_GRADIENT_FLOOR_DB["e4m3"])

    def test_around_a_packed_block(self) -> None:
        """What is recomputed is used at once: packing it would only add an error."""
        block, x = Block(), torch.randn(2, T, D, requires_grad=True)

        def packed(x: Tensor) -> Tensor:
            with PackedSavedTensors(PACKS):
                return block(x)

        expected = gradients(block, x, fp8_checkpoint(block, x, **SMALL))
        for name, gradient in gradients(block, x, fp8_checkpoint(packed, x, **SMALL)).items():
            assert_bitwise(gradient, expected[name])


def test_an_exception_in_the_block_keeps_nothing() -> None:
    refs = []

    def fails(x: Tensor) -> None:
        refs.append(weakref.ref(x.untyped_storage()))
        raise ZeroDivisionError

    x = torch.randn(8, D, requires_grad=True)
    with pytest.raises(ZeroDivisionError):
        fp8_checkpoint(fails, x * 1, **SMALL)
    gc.collect()
    assert [ref() for ref in refs] == [None]
    (dx,) = torch.autograd.grad((x * x).sum(), x)  # no hooks are left
    assert_bitwise(dx, 2 * x.detach())


def test_a_graph_dropped_without_backward_is_freed() -> None:
    block, x = Block(), torch.randn(2, T, D, requires_grad=True)
    y = fp8_checkpoint(block, x * 1, **SMALL)
    codes = [
        weakref.ref(keeper._quantized.codes)
        for keeper in gc.get_objects()
        if type(keeper) is checkpoint_module._Keeper and keeper._quantized.codes.shape == x.shape
    ]
    assert [ref() is None for ref in codes] == [False]
    del y
    gc.collect()
    assert [ref() for ref in codes] == [None]
