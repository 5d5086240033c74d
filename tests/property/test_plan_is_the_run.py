"""`coat-flux plan` and the run take one decision: for a config and sizes both have the same `BlockPlan`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coat_flux.blocks import runner as runner_module
from coat_flux.blocks.apply import apply_coat
from coat_flux.blocks.decide import BlockPlan
from coat_flux.blocks.lora import attach_lora
from coat_flux.blocks.runner import BlockRunner
from coat_flux.config.job import JobConfig
from coat_flux.plan.job import JobFacts
from coat_flux.plan.predict import block_plan, optimizer_bytes, outside_bytes
from coat_flux.trainers.standalone.network import add_lora
from tests.helpers.engine_job import engine_job
from tests.helpers.flux import tiny_flux
from tests.helpers.tiny_flux import make_tiny_flux
from tests.integration.test_plan_measured import flux_inputs

HELD = 1_000_000_000  # bytes of the models and adapters: a measured number, here the one that plan foresees


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_flux(tmp_path_factory.mktemp("model") / "tiny")


def planned(job: JobConfig, room: float) -> tuple[JobFacts, BlockPlan]:
    """The job within a budget that has this share of what a step without recomputation needs, and its plan."""
    facts = JobFacts(job)
    needs = block_plan(facts, recomputed=()).peak_bytes + facts.given.transposed_bytes // 2
    budget = HELD + optimizer_bytes(facts) + needs * room + 0.5  # no whole byte: floats round
    memory = replace(job.coat.memory, budget_gb=budget / 1e9)
    facts = JobFacts(replace(job, coat=replace(job.coat, memory=memory)), facts)
    return facts, block_plan(facts)


def run(facts: JobFacts, patch: pytest.MonkeyPatch) -> BlockPlan:
    """The plan of a real model after as many micro-batches as the job accumulates."""
    job, tokens = facts.job, facts.tokens
    model = tiny_flux()
    apply_coat(model, job.coat, allow_recompute=job.train.gradient_checkpointing)
    runner = BlockRunner.of(model)
    if job.coat.memory.stream_blocks == "auto":
        runner.expect(reserve_bytes=outside_bytes(facts))
    patch.setattr(runner_module, "used_bytes", lambda _: (float(HELD - runner.plan.freed_bytes), 0))
    add_lora(model, job.network, 0)
    attach_lora(model, job.coat)
    for _ in range(job.train.gradient_accumulation):
        model(**flux_inputs(tokens))[0].float().square().mean().backward()
    return runner.plan


def job(
    memory: dict[str, Any], activation: Any = None, weight: Any = None, network: Any = None, **train: Any
) -> dict[str, Any]:
    """The parts of a job that the decision rests on."""
    return {
        "coat": {"memory": memory, "activation": activation or {}, "weight": weight or {}},
        "network": {"linear": 16, "dropout": 0, **(network or {})},
        "train": {"gradient_checkpointing": True, **train},
        "dataset": {"resolution": 64},
    }


NONE, AUTO, ALL = ({"checkpointing": mode} for mode in ("none", "auto", "all"))
NVFP4, NO_FP8 = {"format": "nvfp4"}, {"use_fp8": False}
LATER_BLOCKS = {"network_kwargs": {"only_if_contains": ["single_transformer_blocks"]}}
SOME = {"network_kwargs": {"ignore_if_contains": ["norm", "transformer_blocks.0."]}, "transformer_only": False}
# the job, its budget as a share of what a step needs that recomputes nothing, and the device
JOBS = {
    "blocks with dropout are not fused": (job(NONE, network={"dropout": 0.1}), 1.6, "cuda"),
    "some recompute from bf16 inputs": (job({**AUTO, "enable_efficient_checkpoint": False}, batch_size=2), 0.5, "cuda"),
    "copies are kept": (job({**AUTO, "transposed_weights": "auto"}), 1.6, "cuda"),
    "all recompute in the generic flow": (job(ALL, {"flow": "generic"}), 1.6, "cpu"),
    "some are streamed": (job({**AUTO, "stream_blocks": "auto"}), -0.2, "cuda"),
    "two are streamed": (job({**AUTO, "stream_blocks": 2}, weight=NVFP4, network=LATER_BLOCKS), 0.4, "cuda"),
    "accumulated gradients": (job(AUTO, {"attention": "bf16", "group_size": 32}, gradient_accumulation=2), 0.7, "cuda"),
    "weights in bf16, few adapters": (job(AUTO, {"exclude": ["*.to_k"]}, NO_FP8, network=SOME), 0.5, "cuda"),
    "no recomputation": (job(AUTO, NO_FP8, gradient_checkpointing=False), 0.3, "cuda"),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_plan_is_the_run(folder, name):
    """On a GPU too, as far as the decision goes: the blocks run on the CPU and are told of a GPU."""
    blocks, room, device = JOBS[name]
    raw = engine_job("run", model=folder, images="not here", out="output", **blocks)
    raw["config"]["process"][0]["device"] = device
    facts_of = runner_module.shown_by
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coat_flux.plan.job.TEXT_TOKENS", 112)
        patch.setattr("coat_flux.plan.predict._held", lambda facts: {"all": HELD, "optimizer": optimizer_bytes(facts)})
        patch.setattr("coat_flux.plan.predict.LIBRARY_WORKSPACE", {True: 0, False: 0})
        patch.setattr(runner_module, "shown_by", lambda args: {**facts_of(args), "device": device})
        facts, expected = planned(JobConfig.from_dict(raw), room)
        actual = run(facts, patch)
    assert actual == expected
    for counted in ("moment", "shadow_bytes", "spare_bytes", "transposed_bytes"):
        assert getattr(actual, counted) == getattr(expected, counted), counted
