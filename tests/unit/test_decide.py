"""`decide`: each thing a plan rests on, changed alone, changes the plan as it should; transposed weights, too."""

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from coat_core import FP8Linear
from coat_core.linear.function import load_weight
from coat_flux.blocks.decide import BlockPlan, Given, decide, saving_of
from coat_flux.blocks.gemms import set_transposed, transposed_bytes
from coat_flux.blocks.measure import Picked
from coat_flux.blocks.runner import BlockRunner
from coat_flux.blocks.sizes import Block, Tokens
from coat_flux.config.coat import COATConfig
from coat_flux.plan.job import JobFacts
from coat_flux.plan.predict import predict
from tests.helpers.flux import coat_flux_model, flux_inputs
from tests.unit.test_plan import job_of

BLOCK = Block("single", 64, 2, 256, (("attn.to_q", 4), ("proj_out", 4)))
START = Given((BLOCK,) * 4, device="cpu")
STEP = replace(START, tokens=Tokens(1, 64, 64))


def plan_of(given: Given = STEP, **coat: Any) -> BlockPlan:
    return decide(COATConfig.from_dict(coat), given)


def all_of(plan: BlockPlan, name: str) -> set[Any]:
    return {getattr(choice, name) for choice in plan.blocks}


def test_before_the_first_step_auto_has_not_chosen_and_fixed_modes_have():
    assert plan_of(START).recomputed is None
    assert plan_of(START).moment is None
    assert plan_of(START, memory={"checkpointing": "all"}).recomputed == [0, 1, 2, 3]


def test_auto_recomputes_more_the_less_is_free():
    peak = plan_of().peak_bytes
    free = [peak, peak - 1, peak // 2, 0]
    counts = [len(plan_of(replace(STEP, free_bytes=float(size))).recomputed or ()) for size in free]
    assert counts[0] == 0 < counts[1] <= counts[2] <= counts[3] == 4
    short = plan_of(replace(STEP, free_bytes=0.0))
    assert (short.free_bytes, short.peak_bytes > 0) == (0.0, True)
    accumulating = replace(STEP, free_bytes=float(peak), accumulates=True)
    assert plan_of(accumulating).recomputed != []


def test_what_is_kept_or_recomputed_has_its_format():
    saving = saving_of(COATConfig())
    kept, again = plan_of(), plan_of(memory={"checkpointing": "all"})
    assert (all_of(kept, "saved"), all_of(kept, "inputs"), all_of(kept, "flow")) == ({saving}, {None}, {"fused"})
    assert (all_of(again, "saved"), all_of(again, "inputs")) == ({None}, {saving.tensors})
    assert all_of(again, "flow") == {"diffusers"}
    exact = plan_of(memory={"checkpointing": "all", "enable_efficient_checkpoint": False})
    assert all_of(exact, "inputs") == {None}
    assert plan_of(activation={"use_fp8": False}).gemm == "bf16"


def test_a_block_that_cannot_be_fused_is_generic_and_keeps_more():
    plan = plan_of(replace(STEP, unfused={2: "hooks"}))
    assert [choice.flow for choice in plan.blocks] == ["fused", "fused", "generic", "fused"]
    assert [choice.obstacle for choice in plan.blocks] == ["", "", "hooks", ""]
    assert plan.moment.kept > plan_of().moment.kept


def test_steps_are_cuda_graphs_where_they_can_be_and_the_gemm_is_the_one_picked():
    for asked, obstacle, captured in (("auto", "", True), ("auto", "not here", False), ("never", "", False)):
        plan = plan_of(replace(STEP, graph_obstacle=obstacle), speed={"cuda_graphs": asked})
        assert plan.captured is captured
    assert plan_of(replace(STEP, picked=Picked("bf16", "fastest"))).gemm == "bf16"


def test_without_coat_diffusers_recomputes_everything_as_it_is():
    plan = plan_of(enabled=False)
    assert (plan.recomputed, plan.gemm) == ([0, 1, 2, 3], "bf16")
    for name, value in {"flow": "diffusers", "saved": None, "inputs": None}.items():
        assert all_of(plan, name) == {value}


# -- transposed weights ------------------------------------------------------------------------------------------------
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
def test_when_copies_are_kept(mode, device, checkpointing, room, kept):
    """`room`: bytes that a step leaves beyond the copies."""
    config = COATConfig.from_dict({"memory": {"checkpointing": checkpointing, "transposed_weights": mode}})
    given = replace(STEP, device=device, transposed_bytes=1000)
    peak = decide(config, given).peak_bytes
    plan = decide(config, replace(given, free_bytes=peak + 1000 + room))
    assert plan.recomputed == []
    assert plan.transposed_bytes == (1000 if kept else 0)
    assert not decide(config, replace(plan.given, without_copies=True)).transposed_bytes
    assert not decide(config, replace(plan.given, tokens=None)).transposed_bytes


def test_copies_come_and_go_and_cost_what_is_said():
    """And there are none where dgrad does not multiply in FP8."""
    for activation in ({"grad_format": "bf16"}, {"use_fp8": False}):
        blocks = blocks_of(**activation)
        set_transposed(blocks, True)
        assert copied(blocks) == 0
    blocks = blocks_of()
    set_transposed(blocks, True)
    linears = [m for block in blocks for m in block.modules() if isinstance(m, FP8Linear)]
    assert transposed_bytes(blocks) == sum(m.weight_codes_transposed.numel() for m in linears if copied([m]))
    assert copied(blocks) == 34  # all but the modulation's, which see one row per image
    set_transposed(blocks, False)
    assert copied(blocks) == 0


def test_auto_knows_what_a_step_leaves_free():
    for budget, low, high in ((1000.0, 990e9, 1000e9), (0.001, -1.0, 0.0)):
        model, _, _ = coat_flux_model({"memory": {"checkpointing": "auto", "budget_gb": budget}})
        model(**flux_inputs())
        assert low <= BlockRunner.of(model).plan.spare_bytes < high


def test_the_plan_counts_copies_from_the_first_step_on():
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
