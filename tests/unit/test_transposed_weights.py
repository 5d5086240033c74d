"""`memory.transposed_weights`: all copies or none, only where they are of use and fit; the plan counts them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from coat_core import FP8Linear
from coat_core.linear.function import load_weight
from coat_flux.blocks.decide import Given, decide
from coat_flux.blocks.gemms import set_transposed, transposed_bytes
from coat_flux.blocks.runner import BlockRunner
from coat_flux.blocks.sizes import Block, Tokens
from coat_flux.config.coat import COATConfig
from coat_flux.plan.job import JobFacts
from coat_flux.plan.predict import predict
from tests.helpers.flux import coat_flux_model, flux_inputs
from tests.unit.test_plan import job_of


def blocks_of(**activation: Any) -> list[nn.Module]:
    model, _, _ = coat_flux_model({"memory": {"checkpointing": "none"}, "activation": activation})
    return [*model.transformer_blocks, *model.single_transformer_blocks]


def copied(blocks: list[nn.Module]) -> int:
    linears = [m for block in blocks for m in block.modules() if isinstance(m, FP8Linear)]
    return sum(load_weight(m, m.config).transposed is not None for m in linears)


@pytest.mark.parametrize(
    ("mode", "device", "checkpointing", "room", "kept"),
    [
        ("auto", "cuda", "auto", 1, True),
        ("auto", "cuda", "auto", -1, False),
        ("auto", "cuda", "none", 1, False),
        ("auto", "cpu", "auto", 1, False),
        ("always", "cuda", "none", -1, True),
        ("always", "cpu", "auto", 1, False),
        ("never", "cuda", "auto", 1, False),
    ],
)
def test_when_copies_are_kept(mode: str, device: str, checkpointing: str, room: int, kept: bool) -> None:
    """`room`: bytes that a step leaves beyond the copies."""
    config = COATConfig.from_dict({"memory": {"checkpointing": checkpointing, "transposed_weights": mode}})
    block = Block("single", 64, 2, 256, (("attn.to_q", 4),))
    given = Given((block, block), tokens=Tokens(1, 64, 64), device=device, transposed_bytes=1000)
    peak = decide(config, given).peak_bytes
    plan = decide(config, replace(given, free_bytes=peak + 1000 + room))
    assert plan.recomputed == []
    assert (plan.copies, plan.transposed_bytes) == (kept, 1000 if kept else 0)
    assert not decide(config, replace(plan.given, without_copies=True)).copies
    assert not decide(config, replace(plan.given, tokens=None)).copies


def test_copies_come_and_go_and_cost_what_is_said() -> None:
    blocks = blocks_of()
    set_transposed(blocks, True)
    linears = [m for block in blocks for m in block.modules() if isinstance(m, FP8Linear)]
    assert transposed_bytes(blocks) == sum(m.weight_codes_transposed.numel() for m in linears if copied([m]))
    assert copied(blocks) == 34  # all but the modulation's, which see one row per image
    set_transposed(blocks, False)
    assert copied(blocks) == 0


@pytest.mark.parametrize("activation", [{"grad_format": "bf16"}, {"use_fp8": False}])
def test_no_copies_where_dgrad_does_not_multiply_in_fp8(activation: dict[str, Any]) -> None:
    blocks = blocks_of(**activation)
    set_transposed(blocks, True)
    assert copied(blocks) == 0


def test_auto_knows_what_a_step_leaves_free() -> None:
    for budget, low, high in ((1000.0, 990e9, 1000e9), (0.001, -1.0, 0.0)):
        model, _, _ = coat_flux_model({"memory": {"checkpointing": "auto", "budget_gb": budget}})
        model(**flux_inputs())
        assert low <= BlockRunner.of(model).plan.spare_bytes < high


def test_the_plan_counts_copies_from_the_first_step_on() -> None:
    def totals(mode: str, gb: float = 80.0) -> dict[str, int]:
        memory = {"checkpointing": "auto", "transposed_weights": mode}
        job = job_of(coat={"memory": memory}, train={"gradient_checkpointing": True})
        return {name: sum(parts.values()) for name, parts in predict(JobFacts(job), gb * 1e9).phases.items()}

    auto, never = totals("auto"), totals("never")
    extra = {name: auto[name] - never[name] for name in auto}
    copies = (19 * 24 + 38 * 12) * 3072**2
    assert extra == {"load": 0, "cache": 0, "sample": copies, "step": copies, "save": copies}
    assert totals("always") == auto
    exactly = (never["step"] + copies) / 0.92e9
    assert totals("auto", gb=exactly + 1e-3) == auto
    assert totals("auto", gb=exactly - 1e-3) == never
