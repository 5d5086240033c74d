"""`memory.transposed_weights`: all copies or none, only where they are of use and fit; the plan counts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from coat_core import FP8Linear
from coat_core.linear.module import load_transposed
from coat_flux.blocks.auto import AutoCheckpointing
from coat_flux.blocks.gemms import TransposedWeights
from coat_flux.plan.predict import predict
from tests.helpers.flux import coat_flux_model, flux_inputs
from tests.unit.test_plan import job_of

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def blocks_of(**activation: Any) -> list[nn.Module]:
    model, _, _ = coat_flux_model({"memory": {"checkpointing": "none"}, "activation": activation})
    return [*model.transformer_blocks, *model.single_transformer_blocks]


def copied(blocks: list[nn.Module]) -> int:
    linears = [m for block in blocks for m in block.modules() if isinstance(m, FP8Linear)]
    return sum(load_transposed(m, m.config) is not None for m in linears)


@pytest.mark.parametrize(
    ("mode", "device", "spare", "kept"),
    [
        ("auto", CUDA, 1e9, True),
        ("auto", CUDA, 1e3, False),
        ("auto", CUDA, -1.0, False),
        ("auto", CPU, 1e9, False),
        ("always", CUDA, -1.0, True),
        ("always", CPU, 1e9, False),
        ("never", CUDA, 1e9, False),
    ],
)
def test_when_copies_are_kept(mode: str, device: torch.device, spare: float, kept: bool) -> None:
    blocks = blocks_of()
    TransposedWeights(blocks, mode).fit(device, spare)
    assert copied(blocks) == (34 if kept else 0)  # all but the modulation's, which see one row per image


def test_copies_go_when_memory_is_needed_and_cost_what_is_said() -> None:
    blocks = blocks_of()
    weights = TransposedWeights(blocks, "auto")
    weights.fit(CUDA, weights.bytes)
    linears = [m for block in blocks for m in block.modules() if isinstance(m, FP8Linear)]
    assert weights.bytes == sum(m.weight_codes_transposed.numel() for m in linears if copied([m]))
    weights.fit(CUDA, weights.bytes - 1)
    assert copied(blocks) == 0


@pytest.mark.parametrize("activation", [{"grad_format": "bf16"}, {"use_fp8": False}])
def test_no_copies_where_dgrad_does_not_multiply_in_fp8(activation: dict[str, Any]) -> None:
    blocks = blocks_of(**activation)
    TransposedWeights(blocks, "always").fit(CUDA, 1e9)
    assert copied(blocks) == 0


def test_nothing_is_counted_in_a_step_that_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fit` runs in every step where checkpointing is not auto: a walk through all modules would cost milliseconds."""
    weights = TransposedWeights(blocks_of(), "auto")
    monkeypatch.setattr(weights, "_linears", lambda: pytest.fail("walked through all modules"))
    weights.fit(CUDA, -1.0)


def test_auto_knows_what_a_step_leaves_free() -> None:
    model, _, _ = coat_flux_model({"memory": {"checkpointing": "auto", "budget_gb": 1000.0}})
    policy = model._gradient_checkpointing_func
    model(**flux_inputs())
    assert isinstance(policy._auto, AutoCheckpointing)
    assert 990e9 < policy._auto.spare < 1000e9
    tight, _, _ = coat_flux_model({"memory": {"checkpointing": "auto", "budget_gb": 0.001}})
    tight(**flux_inputs())
    assert tight._gradient_checkpointing_func._auto.spare < 0


def test_the_plan_counts_copies_from_the_first_step_on() -> None:
    def totals(mode: str, gb: float = 80.0) -> dict[str, int]:
        memory = {"checkpointing": "auto", "transposed_weights": mode}
        job = job_of(coat={"memory": memory}, train={"gradient_checkpointing": True})
        return {phase.name: phase.total for phase in predict(job, device_bytes=gb * 1e9).phases}

    auto, never = totals("auto"), totals("never")
    extra = {name: auto[name] - never[name] for name in auto}
    copies = (19 * 24 + 38 * 12) * 3072**2
    assert extra == {"load": 0, "cache": 0, "sample": copies, "step": copies, "save": copies}
    assert totals("always") == auto
    exactly = (never["step"] + copies) / 0.92e9
    assert totals("auto", gb=exactly + 1e-3) == auto
    assert totals("auto", gb=exactly - 1e-3) == never
