"""`decide`: each thing a plan rests on, changed alone, changes the plan as it should. Nothing here runs a block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coat_flux.blocks.decide import BlockPlan, Given, decide, saving_of
from coat_flux.blocks.measure import Picked
from coat_flux.blocks.sizes import UNKNOWN, Block, Tokens, UnknownBlock
from coat_flux.config.coat import COATConfig

BLOCK = Block("single", 64, 2, 256, (("attn.to_q", 4), ("proj_out", 4)))
START = Given((BLOCK,) * 4, device="cpu")
STEP = replace(START, tokens=Tokens(1, 64, 64))


def plan_of(given: Given = STEP, **coat: Any) -> BlockPlan:
    return decide(COATConfig.from_dict(coat), given)


def all_of(plan: BlockPlan, name: str) -> set[Any]:
    return {getattr(choice, name) for choice in plan.blocks}


def test_before_the_first_step_auto_has_not_chosen_and_fixed_modes_have() -> None:
    assert plan_of(START).recomputed is None
    assert plan_of(START).moment is None
    assert plan_of(START, memory={"checkpointing": "all"}).recomputed == [0, 1, 2, 3]


def test_auto_recomputes_more_the_less_is_free() -> None:
    peak = plan_of().peak_bytes
    free = [peak, peak - 1, peak // 2, 0]
    counts = [len(plan_of(replace(STEP, free_bytes=float(size))).recomputed or ()) for size in free]
    assert counts[0] == 0 < counts[1] <= counts[2] <= counts[3] == 4
    short = plan_of(replace(STEP, free_bytes=0.0))
    assert (short.free_bytes, short.peak_bytes > 0) == (0.0, True)
    accumulating = replace(STEP, free_bytes=float(peak), accumulates=True)
    assert plan_of(accumulating).recomputed != []


def test_recomputation_that_is_forbidden_or_forced() -> None:
    forbidden = replace(STEP, free_bytes=0.0, allow_recompute=False)
    assert (plan_of(forbidden).checkpointing, plan_of(forbidden).recomputed) == ("none", [])
    assert plan_of(replace(STEP, recomputed=(1,))).recomputed == [1]


def test_what_is_kept_or_recomputed_has_its_format() -> None:
    saving = saving_of(COATConfig())
    kept, again = plan_of(), plan_of(memory={"checkpointing": "all"})
    assert (all_of(kept, "saved"), all_of(kept, "inputs"), all_of(kept, "flow")) == ({saving}, {None}, {"fused"})
    assert (all_of(again, "saved"), all_of(again, "inputs")) == ({None}, {saving.tensors})
    assert all_of(again, "flow") == {"diffusers"}
    exact = plan_of(memory={"checkpointing": "all", "enable_efficient_checkpoint": False})
    assert all_of(exact, "inputs") == {None}
    assert plan_of(activation={"use_fp8": False}).gemm == "bf16"


def test_a_block_that_cannot_be_fused_is_generic_and_keeps_more() -> None:
    plan = plan_of(replace(STEP, unfused={2: "hooks"}))
    assert [choice.flow for choice in plan.blocks] == ["fused", "fused", "generic", "fused"]
    assert [choice.obstacle for choice in plan.blocks] == ["", "", "hooks", ""]
    assert plan.moment.kept > plan_of().moment.kept


@pytest.mark.parametrize(
    ("asked", "obstacle", "expected"), [("auto", "", True), ("auto", "not here", False), ("never", "", False)]
)
def test_steps_are_cuda_graphs_where_they_can_be(asked: str, obstacle: str, expected: bool) -> None:
    plan = plan_of(replace(STEP, graph_obstacle=obstacle), speed={"cuda_graphs": asked})
    assert plan.captured is expected


def test_what_the_first_step_picked_is_taken() -> None:
    plan = plan_of(replace(STEP, picked=Picked("bf16", "fastest")))
    assert plan.gemm == "bf16"


def test_without_coat_diffusers_recomputes_everything_as_it_is() -> None:
    plan = plan_of(enabled=False)
    assert (plan.recomputed, plan.gemm) == ([0, 1, 2, 3], "bf16")
    for name, value in {"flow": "diffusers", "saved": None, "inputs": None}.items():
        assert all_of(plan, name) == {value}


def test_blocks_nobody_listed_have_measured_rates() -> None:
    given = Given((UnknownBlock("Odd", 1000, 64),) * 2, tokens=Tokens(0, 0, 0), unfused={0: "odd", 1: "odd"})
    plan = plan_of(given)
    assert all_of(plan, "flow") == {"generic"}
    assert plan.moment.kept == 2 * int(UNKNOWN.packed * 1000)
    assert plan.around_bytes == 0
