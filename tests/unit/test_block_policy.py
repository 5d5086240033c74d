"""BlockRunner: which blocks recompute, and what happens to each."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coat_core.optim.state import state_bytes
from coat_flux.blocks import runner as runner_module
from coat_flux.blocks.runner import BlockRunner
from coat_flux.blocks.sizes import FP8_INPUT, UNKNOWN
from coat_flux.config.coat import COATConfig
from tests.helpers.saved_tensors import recording

TOKENS, WIDTH, BLOCKS = 64, 64, 6
ELEMENTS = TOKENS * WIDTH


class Doubling(nn.Module):
    """Counts its calls: 2 where it is recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.calls = 0

    def forward(self, x: Tensor, constant: Tensor | None = None) -> Tensor:
        self.calls += 1
        return x * torch.tanh(x * self.gain)


class Model(nn.Module):
    """Calls its blocks one after the other."""

    def __init__(self, allow_recompute: bool, config: COATConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Doubling() for _ in range(BLOCKS))
        self.runner = BlockRunner.install(self, ("blocks",), config, allow_recompute)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def make(allow_recompute: bool = True, **memory: Any) -> Model:
    return Model(allow_recompute, COATConfig.from_dict({"memory": memory}))


def recomputed(model: Model, tokens: int = TOKENS) -> list[int]:
    """Indices of the blocks that ran twice."""
    for block in model.blocks:
        block.calls = 0
    model(torch.randn(1, tokens, WIDTH)).sum().backward()
    assert all(block.gain.grad.isfinite().all() for block in model.blocks)
    return [i for i, block in enumerate(model.blocks) if block.calls == 2]


@pytest.mark.parametrize("efficient", [True, False])
def test_fixed_modes(efficient: bool) -> None:
    assert recomputed(make(checkpointing="none", enable_efficient_checkpoint=efficient)) == []
    assert recomputed(make(checkpointing="all", enable_efficient_checkpoint=efficient)) == [0, 1, 2, 3, 4, 5]


def test_host_that_forbids_recomputation() -> None:
    with pytest.raises(ValueError, match=r"coat\.memory\.checkpointing='all': train.gradient_checkpointing is false"):
        make(False, checkpointing="all")
    assert recomputed(make(False, checkpointing="auto", budget_gb=1e-6)) == []
    assert recomputed(make(False, checkpointing="none")) == []


def budget_for(kept: int, elements: int = ELEMENTS) -> float:
    """GB that are just enough for `kept` of the six blocks, by the policy's own estimate of what a block saves."""
    blocks = kept * UNKNOWN.packed + (BLOCKS - kept) * FP8_INPUT
    return elements * (UNKNOWN.high_precision + blocks + 1) / 1e9  # 1: the optimizer's states, and rounding


@pytest.mark.parametrize("kept", [0, 1, 5, BLOCKS])
def test_auto_keeps_as_many_blocks_as_fit(monkeypatch, caplog, kept: int) -> None:
    monkeypatch.setattr(runner_module, "held_bytes", lambda device: 0.0)
    with caplog.at_level(logging.INFO):
        assert len(recomputed(make(budget_gb=budget_for(kept)))) == BLOCKS - kept
    assert f"checkpointing auto: {BLOCKS - kept} of 6 blocks recompute" in caplog.text
    assert "even recomputing every block" not in caplog.text


def test_auto_counts_what_is_held_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "held_bytes", lambda device: 1e9)
    assert len(recomputed(make(budget_gb=1.0 + budget_for(4)))) == 2


def test_auto_chooses_again_when_images_grow_and_not_when_they_shrink(monkeypatch, caplog) -> None:
    monkeypatch.setattr(runner_module, "held_bytes", lambda device: 0.0)
    model = make(budget_gb=budget_for(3))
    with caplog.at_level(logging.INFO):
        chosen = []
        for tokens in (TOKENS, 2 * TOKENS, 2 * TOKENS, TOKENS):
            chosen.append(len(recomputed(model, tokens)))
            model.zero_grad()
    assert chosen[0] == 3 < chosen[1] == chosen[2] == chosen[3]
    assert len([m for m in caplog.messages if m.startswith("checkpointing auto: ")]) == 2


def test_auto_chooses_again_when_gradients_are_accumulated(monkeypatch, caplog) -> None:
    """The gradients of the first micro-batch are there while the second one runs: 6 x 64 x 4 bytes."""
    monkeypatch.setattr(runner_module, "held_bytes", lambda device: 0.0)
    states = state_bytes(COATConfig().optimizer_config()[0], [WIDTH] * BLOCKS)
    exact = budget_for(3) - (ELEMENTS - states - 1000) / 1e9  # 1000 bytes to spare without them
    model = make(budget_gb=exact)
    with caplog.at_level(logging.INFO):
        chosen = [len(recomputed(model)) for _ in range(3)]
    assert chosen == [3, 4, 4]


def test_auto_says_when_nothing_fits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(runner_module, "held_bytes", lambda device: 1e9)
    model = make(budget_gb=0.5)
    assert model.runner.plan.recomputed is None
    assert len(recomputed(model)) == BLOCKS
    assert "memory.budget_gb: even recomputing every block may exceed the budget by 0.50 GB; lower" in caplog.text


def test_constants_given_to_blocks_are_not_packed() -> None:
    config = COATConfig.from_dict({"memory": {"checkpointing": "none"}})
    cos, sin, mask = (torch.randn(TOKENS, WIDTH) for _ in range(3))

    class Rotated(nn.Module):
        def forward(self, x: Tensor, rotary: Any, options: Any) -> Tensor:
            return x * rotary[0] + x * rotary[1][:, :] * options["mask"].view(TOKENS, WIDTH)

    block = Rotated()
    runner = BlockRunner({"0": block}, config, True)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True) * 1
    with recording() as saved:
        runner(block, x, (cos, sin), {"mask": mask})
    assert len(saved.tensors) >= 3
    assert saved.packed == []
