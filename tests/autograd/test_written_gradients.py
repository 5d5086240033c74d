"""With gradients that blocks write themselves, a step has the bits it has with every adapter a leaf of the graph."""

from __future__ import annotations

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
from tests.helpers.flux import coat_flux_model, loss_of, predict


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


def test_bits_are_those_of_leaves(model: Any) -> None:
    expected, found = gradients(model, False), gradients(model, True)
    assert all(torch.equal(expected[name], found[name]) for name in expected)  # type: ignore[arg-type]


def test_no_leaf_is_visited(model: Any) -> None:
    visited: list[Tensor] = []
    hooks = [p.register_post_accumulate_grad_hook(visited.append) for p in lora_parameters(model).values()]
    gradients(model, True)
    assert not visited
    gradients(model, False)
    assert len(visited) == 2 * len(hooks)
    for hook in hooks:
        hook.remove()


def test_a_frozen_matrix_gets_no_gradient(model: Any) -> None:
    name, frozen = next(item for item in lora_parameters(model).items() if "single" in item[0])
    frozen.requires_grad_(False)
    expected, found = gradients(model, False), gradients(model, True)
    frozen.requires_grad_()
    assert found[name] is None
    assert all(torch.equal(grad, found[other]) for other, grad in expected.items() if grad is not None)  # type: ignore[arg-type]


def test_an_adapter_that_changes_before_backward_is_refused(model: Any) -> None:
    with written_gradients():
        loss = loss_of(predict(model))
    with torch.no_grad():
        next(iter(lora_parameters(model).values())).mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.zero_grad(set_to_none=True)


def test_the_measurement_at_the_start_leaves_no_gradients(model: Any) -> None:
    runner, seen = BlockRunner.of(model), {}
    assert runner is not None
    run = BlockRunner.__call__
    with mock.patch.object(
        BlockRunner, "__call__", lambda self, block, *x: run(self, block, *seen.setdefault(block, x))
    ):
        predict(model)
    pick = GemmPick(runner.blocks, COATConfig(), runner._kept_form)
    with written_gradients():
        for block, args in seen.items():
            pick._block_ms(block, args, time.monotonic() - 100.0)
    assert all(parameter.grad is None for parameter in lora_parameters(model).values())
