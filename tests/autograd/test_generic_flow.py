"""PackedSavedTensors where training loops put it: accumulation, checkpointing, nesting, threads, errors, in-place."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.utils.checkpoint import checkpoint

from coat_core.activation import PackedSavedTensors, Saving, _thread
from coat_core.granularity import Storage, per_group
from coat_core.quantize import quantize
from tests.autograd.test_packing import SMALL, Block, D, T, draw, gradients, packed
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
    def test_the_inner_one_has_options_of_its_own_and_shares_storages_and_what_is_kept(self) -> None:
        x, kept = draw(8, 64, grad=False), draw(8, 64, grad=False)
        outer, inner, other, exact = (draw(8, 64) for _ in range(4))
        coarse = Saving(Storage("e5m2", per_group(32)), min_elements=64)
        with recording() as saved, PackedSavedTensors(SMALL, keep=(kept,)):
            y = x * outer + packed(lambda: x * inner + kept * exact) + x * outer
            y = y + packed(lambda: x * other, config=coarse)
        assert len(saved.packed) == 4
        assert len({id(s.packed) for s in saved.packed}) == 2
        y.sum().backward()
        x_hat = quantize(x, "e4m3", per_group(32)).dequantize()
        assert_bitwise(inner.grad, x_hat)
        assert_bitwise(outer.grad, 2 * x_hat)
        assert_bitwise(other.grad, quantize(x, "e5m2", per_group(32)).dequantize())
        assert_bitwise(exact.grad, kept)

    def test_the_outer_one_goes_on_after_the_inner_one(self) -> None:
        """Also after an exception, within the hooks of attention."""
        x, w = draw(8, 64, grad=False), draw(8, 64)
        for fails in (False, True):
            with recording() as saved, PackedSavedTensors(SMALL) as outer:
                if fails:
                    with pytest.raises(RuntimeError):
                        packed(lambda: attend(w, w, torch.zeros(3, 5)))
                else:
                    packed(lambda: x.exp() * w)
                before = len(saved.packed)
                y = x * w
            assert len(saved.packed) == before + 1
            assert outer._packed == {}
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            assert _thread.innermost is None
            y.sum().backward()


class TestInPlace:
    @pytest.mark.parametrize("changes", [lambda t: t.mul_(2), lambda t: t.view(-1)[0].zero_()], ids=["whole", "view"])
    def test_a_change_of_what_was_left_alone_is_an_error_as_without_hooks(self, changes) -> None:
        for run in (lambda f: f(), lambda f: packed(f)):
            x, w = draw(2, 3, grad=False), draw(2, 3)
            y = run(lambda x=x, w=w: x * w)
            changes(x)
            with pytest.raises(RuntimeError, match=r"(?s)in.?place.*version"):
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
