"""Copies of the adapters' matrices and gradients that blocks write themselves leave a step its bits."""

import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from coat_flux.blocks.fused.parts import written_gradients
from coat_flux.blocks.measure import GemmPick
from coat_flux.blocks.runner import BlockRunner
from coat_flux.config.coat import COATConfig
from coat_flux.trainers.standalone.network import lora_parameters
from tests.helpers.flux import coat_flux_model, lora_gradients, loss_of, predict


def lora_model() -> Any:
    """FLUX whose adapters multiply by 2, those of one linear by 1."""
    model: Any = coat_flux_model()[0]
    for name, module in model.named_modules():
        if hasattr(module, "scaling"):
            module.scaling["default"] = 1.0 if name.endswith("to_k") else 2.0
    return model


def gradients_of_two_passes(model: Any) -> list[dict[str, Tensor]]:
    """Parameters change between passes, in a way that their version counters do not show; adapters come and go."""
    found = []
    for _ in range(2):
        found.append(lora_gradients(model))
        for parameter in lora_parameters(model).values():
            parameter.data.mul_(1.25)
        model.disable_adapters()
        with torch.no_grad():
            predict(model)
        model.enable_adapters()
    return found


def test_gradients_have_the_bits_of_casts_at_each_use(monkeypatch):
    with_copies = gradients_of_two_passes(lora_model())
    monkeypatch.setattr(BlockRunner, "share", lambda *_: None)
    expected = gradients_of_two_passes(lora_model())
    for pass_expected, found in zip(expected, with_copies, strict=True):
        assert all(torch.equal(pass_expected[name], gradient) for name, gradient in found.items())


def test_copies_are_one_buffer_that_follows_the_adapters():
    model = lora_model()
    predict(model)
    (*_, form) = BlockRunner.of(model).forms.values()
    group = form.inputs.linears
    adapters, copies = group.all_adapters, group.copies
    with torch.no_grad():
        adapters[0].down.fill_(3.0)
    predict(model)
    assert group.copies is copies
    assert torch.equal(copies.down[: len(adapters[0].down)], torch.full_like(adapters[0].down, 6.0).bfloat16())
    assert len({x.untyped_storage().data_ptr() for x in copies}) == 1


def test_without_room_nothing_is_copied_and_what_was_is_dropped():
    model = lora_model()
    runner: Any = BlockRunner.of(model)
    predict(model)
    assert runner.forms[0].image.inputs.linears.copies is not None
    forms = runner.forms
    runner.expect(recomputed=(3,), adapter_elements=0)  # other blocks are fused now: stale copies would be used
    predict(model)
    assert runner.forms.keys() == {0, 1, 2}
    assert runner.forms[0] is forms[0]
    assert forms[0].image.inputs.linears.copies is None


def test_the_first_block_may_have_no_adapters():
    model = lora_model()
    for module in model.transformer_blocks[0].modules():
        if hasattr(module, "lora_A"):
            module.enable_adapters(False)
    loss_of(predict(model)).backward()
    forms = BlockRunner.of(model).forms
    assert len(forms) == 4
    assert forms[3].inputs.linears.copies is not None


# -- gradients that blocks write themselves ----------------------------------------------------------------------------
def gradients(model: Any, written: bool) -> dict[str, Tensor | None]:
    """Of two micro-batches, added up."""
    model.zero_grad(set_to_none=True)
    for batch in (1, 2):
        with written_gradients(written):
            loss = loss_of(predict(model, batch=batch))
        loss.backward()
    found = {name: each.grad for name, each in lora_parameters(model).items()}
    return {name: None if grad is None else grad.clone() for name, grad in found.items()}


@pytest.fixture(scope="module")
def model() -> Any:
    model: Any = coat_flux_model()[0]
    predict(model).sum().backward()  # blocks are read, and compared with diffusers' own
    return model


def test_bits_are_those_of_leaves(model):
    expected, found = gradients(model, False), gradients(model, True)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_no_leaf_is_visited(model):
    visited: list[Tensor] = []
    hooks = [p.register_post_accumulate_grad_hook(visited.append) for p in lora_parameters(model).values()]
    gradients(model, True)
    assert not visited
    gradients(model, False)
    assert len(visited) == 2 * len(hooks)
    for hook in hooks:
        hook.remove()


def test_a_frozen_matrix_gets_no_gradient(model):
    name, frozen = next(item for item in lora_parameters(model).items() if "single" in item[0])
    frozen.requires_grad_(False)
    expected, found = gradients(model, False), gradients(model, True)
    frozen.requires_grad_()
    assert found[name] is None
    assert all(torch.equal(grad, found[other]) for other, grad in expected.items() if grad is not None)


def test_an_adapter_that_changes_before_backward_is_refused(model):
    with written_gradients():
        loss = loss_of(predict(model))
    with torch.no_grad():
        next(iter(lora_parameters(model).values())).mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.zero_grad(set_to_none=True)


def test_the_measurement_at_the_start_leaves_no_gradients(model):
    runner, seen = BlockRunner.of(model), {}
    run = BlockRunner.__call__
    with mock.patch.object(
        BlockRunner, "__call__", lambda self, block, *x: run(self, block, *seen.setdefault(block, x))
    ):
        predict(model)
    pick = GemmPick(runner.blocks, COATConfig(), runner._timed_form)
    with written_gradients():
        for block, args in seen.items():
            pick._block_ms(block, args, time.monotonic() - 100.0)
    assert all(parameter.grad is None for parameter in lora_parameters(model).values())
