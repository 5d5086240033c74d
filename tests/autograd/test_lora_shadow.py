"""With copies of the adapters' matrices made once a pass, a step has the bits it has with casts at each use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from coat_flux.blocks.runner import BlockRunner
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


def test_gradients_have_the_bits_of_casts_at_each_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with_copies = gradients_of_two_passes(lora_model())
    monkeypatch.setattr(BlockRunner, "share", lambda *_: None)
    expected = gradients_of_two_passes(lora_model())
    for pass_expected, found in zip(expected, with_copies, strict=True):
        assert all(torch.equal(pass_expected[name], gradient) for name, gradient in found.items())


def test_copies_are_one_buffer_that_follows_the_adapters() -> None:
    model = lora_model()
    predict(model)
    (*_, form) = BlockRunner.of(model).forms.values()  # type: ignore[union-attr]
    group = form.inputs.linears
    adapters, copies = group.all_adapters, group.copies
    with torch.no_grad():
        adapters[0].down.fill_(3.0)
    predict(model)
    assert group.copies is copies
    assert torch.equal(copies.down[: len(adapters[0].down)], torch.full_like(adapters[0].down, 6.0).bfloat16())
    buffers = {x.untyped_storage().data_ptr() for x in copies}
    assert len(buffers) == 1


def test_without_room_nothing_is_copied_and_what_was_is_dropped() -> None:
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


def test_the_first_block_may_have_no_adapters() -> None:
    model = lora_model()
    for module in model.transformer_blocks[0].modules():
        if hasattr(module, "lora_A"):
            module.enable_adapters(False)
    loss_of(predict(model)).backward()
    forms = BlockRunner.of(model).forms  # type: ignore[union-attr]
    assert len(forms) == 4
    assert forms[3].inputs.linears.copies is not None
