"""PackedSavedTensors where training loops put it: accumulation, checkpointing, nesting, threads, errors, in-place."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.utils.checkpoint import checkpoint

from coat_core.activation import PackedSavedTensors, Saving
from coat_core.activation.packing import _thread
from coat_core.granularity import Storage, per_group
from coat_core.quantize import quantize
from tests.autograd.test_packing import HEADS, SMALL, Block, D, T, draw, gradients, packed
from tests.helpers.asserts import assert_all_bitwise, assert_bitwise, assert_sqnr
from tests.helpers.saved_tensors import recording
from tests.tolerances import PACKED_GRADIENT_FLOOR_DB


class TestTrainingLoops:
    def test_a_block_run_twice_before_backward(self) -> None:
        block, batches = Block(), [draw(2, T, D) for _ in range(2)]
        single = [gradients(block, x, packed(block, x)) for x in batches]
        outputs = [packed(block, x) for x in batches]
        for expected, x, y in zip(single, batches, outputs, strict=True):
            assert_all_bitwise(gradients(block, x, y), expected)

    def test_backward_one_after_the_other_frees_as_it_goes(self) -> None:
        block, x = Block(), draw(2, T, D)
        with recording() as saved:
            first = packed(block, x * 1)
            count = len(saved.packed)
            second = packed(block, x * 1)
        codes = [weakref.ref(s.packed.codes) for s in saved.packed]
        saved.tensors.clear()
        saved.alive.clear()
        first.sum().backward()
        gc.collect()
        assert [ref() is None for ref in codes] == [True] * count + [False] * (len(codes) - count)
        second.sum().backward()
        del first, second
        assert all(ref() is None for ref in codes)

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_nothing_is_packed_without_grad(self, mode) -> None:
        block, x = Block(), draw(2, T, D)
        with recording() as saved, mode():
            y = packed(block.eval(), x)
        assert saved.tensors == []
        assert_bitwise(y.clone(), block(x).detach())

    def test_backward_inside_autocast(self) -> None:
        """Hosts that call backward where autocast is on: what comes back has the dtype that was saved."""
        block, x = Block(), draw(2, T, D)
        with torch.autocast("cpu", torch.bfloat16):
            exact, y = gradients(block, x, block(x)), packed(block, x)
            inside = gradients(block, x, y)
        for name, gradient in inside.items():
            assert gradient.dtype == torch.float32
            assert_sqnr(exact[name], gradient, PACKED_GRADIENT_FLOOR_DB["e4m3"])


class TestCheckpoint:
    def test_reentrant_around_a_packed_block(self) -> None:
        block, x = Block(dropout=0.3), draw(2, T, D)
        torch.manual_seed(7)
        expected = gradients(block, x, packed(block, x))
        torch.manual_seed(7)
        y = checkpoint(packed, block, x, use_reentrant=True)
        torch.manual_seed(3)
        y.backward(torch.randn_like(y))
        assert_all_bitwise({name: p.grad for name, p in block.named_parameters()} | {"x": x.grad}, expected)

    def test_inside_non_reentrant_checkpoint_it_leaves_all_to_checkpoint(self) -> None:
        """Its hooks would take the tensors away from checkpoint's, which would then keep all of them."""
        block, x = Block(dropout=0.3), draw(2, T, D)
        torch.manual_seed(7)
        expected = gradients(block, x, block(x))
        torch.manual_seed(7)
        hidden = []
        block.up.register_forward_hook(lambda module, args, out: hidden.append(weakref.ref(out.untyped_storage())))
        with recording() as saved:
            y = checkpoint(packed, block, x, use_reentrant=False)
        gc.collect()
        assert [ref() for ref in hidden] == [None]
        assert_all_bitwise(gradients(block, x, y), expected)
        assert saved.tensors == []

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpoint_inside_a_packed_block(self, reentrant: bool) -> None:
        """Attention's own hooks must not take its tensors away from a checkpoint that is open inside."""
        block, x = Block(dropout=0.3), draw(2, T, D)
        torch.manual_seed(7)
        expected = gradients(block, x, block(x.tanh()).exp())
        torch.manual_seed(7)
        with recording() as saved, PackedSavedTensors(SMALL):
            y = checkpoint(block, x.tanh(), use_reentrant=reentrant).exp()
        shapes = {s.shape for s in saved.tensors} - {(0,)}  # torch 2.9's checkpoint saves an empty tensor, too
        assert shapes == {(2, T, D)}  # of tanh, checkpoint's input, and of exp
        torch.manual_seed(3)
        y.backward(torch.randn_like(y))
        for name, value in expected.items():
            assert_sqnr(
                value,
                x.grad if name == "x" else dict(block.named_parameters())[name].grad,
                PACKED_GRADIENT_FLOOR_DB["e4m3"],
            )


class TestNesting:
    def test_a_storage_of_both_is_packed_once(self) -> None:
        x, outer, inner = draw(8, 64, grad=False), draw(8, 64), draw(8, 64)
        with recording() as saved, PackedSavedTensors(SMALL):
            y = x * outer + packed(lambda: x * inner) + x * outer
        assert len(saved.packed) == 3
        assert len({id(s.packed) for s in saved.packed}) == 1
        y.sum().backward()
        assert_bitwise(inner.grad, quantize(x, "e4m3", per_group(32)).dequantize())
        assert_bitwise(outer.grad, 2 * inner.grad)

    def test_other_formats_are_not_mixed_up(self) -> None:
        x, outer, inner = draw(8, 64, grad=False), draw(8, 64), draw(8, 64)
        coarse = Saving(Storage("e5m2", per_group(32)), min_elements=64)
        with PackedSavedTensors(SMALL):
            y = x * outer + packed(lambda: x * inner, config=coarse)
        y.sum().backward()
        assert_bitwise(outer.grad, quantize(x, "e4m3", per_group(32)).dequantize())
        assert_bitwise(inner.grad, quantize(x, "e5m2", per_group(32)).dequantize())

    def test_the_inner_options_hold_inside_for_attention_too(self) -> None:
        q, k, v = (draw(1, HEADS, T, 32) for _ in range(3))
        exact = torch.autograd.grad(attend(q, k, v).sum(), (q, k, v))
        with PackedSavedTensors(SMALL):
            y = packed(
                lambda: attend(q * 1, k * 1, v * 1),
                config=Saving(Storage(granularity=per_group(32)), attention="bf16", min_elements=64),
            )
        for expected, gradient in zip(exact, torch.autograd.grad(y.sum(), (q, k, v)), strict=True):
            assert_bitwise(gradient, expected)

    def test_what_the_outer_one_keeps_the_inner_one_keeps(self) -> None:
        x, w = draw(8, 64, grad=False), draw(8, 64)
        with PackedSavedTensors(SMALL, keep=(x,)):
            packed(lambda: x * w).sum().backward()
        assert_bitwise(w.grad, x)

    def test_the_outer_one_goes_on_after_the_inner_one(self) -> None:
        x, w = draw(8, 64, grad=False), draw(8, 64)
        for fails in (False, True):
            with recording() as saved, PackedSavedTensors(SMALL) as outer:
                if fails:
                    with pytest.raises(ZeroDivisionError):
                        packed(lambda: 1 / 0)
                else:
                    packed(lambda: x.exp() * w)
                before = len(saved.packed)
                y = x * w
            assert len(saved.packed) == before + 1
            assert outer._packed == {}
            y.sum().backward()


class TestErrors:
    def test_an_exception_leaves_no_hooks(self) -> None:
        def fails(x: Tensor) -> Tensor:
            packed(lambda: x.exp() * x)
            attend(x, x, torch.zeros(3, 5))
            return x

        with pytest.raises(RuntimeError):
            packed(fails, draw(1, 2, T, D))
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert _thread.innermost is None


class TestInPlace:
    @pytest.mark.parametrize("changes", [lambda t: t.mul_(2), lambda t: t.view(-1)[0].zero_()], ids=["whole", "view"])
    def test_a_change_of_what_was_left_alone_is_an_error_as_without_hooks(self, changes) -> None:
        for run in (lambda f: f(), lambda f: packed(f)):
            x, w = draw(2, 3, grad=False), draw(2, 3)
            y = run(lambda x=x, w=w: x * w)
            changes(x)
            with pytest.raises(RuntimeError, match=r"(?s)in.?place.*version"):
                y.sum().backward()

    def test_the_optimizer_may_not_step_between_forward_and_backward(self) -> None:
        layer, x = nn.Linear(64, 64), draw(8, 64)
        y = packed(layer, x * 1)
        with torch.no_grad():
            layer.weight.add_(1)
        with pytest.raises(RuntimeError, match=r"\(64, 64\) and torch.float32 saved for backward was changed in place"):
            y.sum().backward()


class TestThreads:
    def test_another_thread_packs_nothing_and_may_pack_its_own(self) -> None:
        x, w = draw(8, 64, grad=False), draw(8, 64)
        results: dict[str, Tensor] = {}
        counts: list[int] = []

        def elsewhere() -> None:
            results["plain"] = torch.autograd.grad((x * w).sum(), w)[0]
            with PackedSavedTensors(SMALL):
                z = x.exp() * w
                counts.append(len(packing._packed))
            results["packed"] = torch.autograd.grad(z.sum(), w)[0]
            results["of the other thread"] = torch.autograd.grad(y.sum(), w)[0]

        with PackedSavedTensors(SMALL) as packing:
            y = x * w
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            assert counts == [1]
        x_hat = quantize(x, "e4m3", per_group(32)).dequantize()
        assert_bitwise(results["plain"], x)
        assert_bitwise(results["packed"], quantize(x.exp(), "e4m3", per_group(32)).dequantize())
        assert_bitwise(results["of the other thread"], x_hat)
