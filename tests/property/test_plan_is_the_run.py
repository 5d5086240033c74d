"""`coat-flux plan` and the run take one decision: for any config and sizes both have the same `BlockPlan`."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from coat_flux.blocks import runner as runner_module
from coat_flux.blocks.apply import apply_coat
from coat_flux.blocks.decide import BlockPlan
from coat_flux.blocks.lora import attach_lora
from coat_flux.blocks.runner import BlockRunner
from coat_flux.config.job import JobConfig
from coat_flux.plan.job import JobFacts, job_facts
from coat_flux.plan.predict import block_plan, optimizer_bytes, outside_bytes
from coat_flux.trainers.standalone.network import add_lora, lora_targets
from tests.helpers.engine_job import engine_job
from tests.helpers.tiny_flux import build_transformer, make_tiny_flux

TARGETS: tuple[dict[str, Any], ...] = (
    {},
    {"only_if_contains": ["attn"]},
    {"only_if_contains": ["single_transformer_blocks"]},
    {"ignore_if_contains": ["norm", "transformer_blocks.0."]},
)
HELD = 1_000_000_000  # bytes of the models and adapters: a measured number, here the one that plan foresees


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_flux(tmp_path_factory.mktemp("model") / "tiny")


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """The parts of a job that the decision rests on."""

    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    mode = one("auto", "auto", "none", "all")
    flow = one("fused", "fused", "generic")
    stored, transposed = one(True, True, False), one("auto", "always", "never")
    coat = {
        "memory": {
            "checkpointing": mode,
            "enable_efficient_checkpoint": one(True, False),
            "transposed_weights": transposed,
        },
        "activation": {
            "use_fp8": one(True, True, False),
            "flow": flow,
            "attention": one("fp8", "bf16"),
            "format": one("e4m3", "e5m2"),
            "grad_format": one("e5m2", "bf16"),
            "linear_granularity": one("per_tensor", "per_row"),
            "nonlinear_granularity": one("per_group", "per_tensor"),
            "group_size": one(128, 32),
            "exclude": one([], ["*.to_k"]),
        },
        "weight": {
            "use_fp8": stored,
            "format": one("e4m3", "e4m3", "nvfp4") if stored and transposed != "always" else "e4m3",
        },
        "speed": {"cuda_graphs": one("auto", "never")},
    }
    network = {"linear": one(2, 16), "dropout": one(0, 0, 0.1), "transformer_only": one(True, False)}
    train = {
        "batch_size": one(1, 2),
        "gradient_accumulation": one(1, 2),
        "gradient_checkpointing": mode == "all" or one(True, True, False),
    }
    if coat["weight"]["use_fp8"] and coat["memory"]["transposed_weights"] != "always":
        coat["memory"]["stream_blocks"] = one(0, 0, "auto", "all", 2)
    return {
        "coat": coat,
        "network": {**network, "network_kwargs": one(*TARGETS)},
        "train": train,
        "dataset": {"resolution": one(64, 128)},
    }


@functools.cache
def frozen_model() -> Any:
    return build_transformer(seed=0).to(torch.bfloat16).requires_grad_(False).train()


def planned(job: JobConfig, room: float) -> tuple[JobFacts, BlockPlan]:
    """The job within a budget that has this share of what a step without recomputation needs, and its plan."""
    facts = job_facts(job)
    needs = block_plan(facts, recomputed=()).peak_bytes + facts.given.transposed_bytes // 2
    budget = HELD + optimizer_bytes(facts) + needs * room + 0.5  # no whole byte: floats round
    memory = replace(job.coat.memory, budget_gb=budget / 1e9)
    facts = job_facts(replace(job, coat=replace(job.coat, memory=memory)), facts)
    return facts, block_plan(facts)


def run(facts: JobFacts, patch: pytest.MonkeyPatch) -> BlockPlan:
    """The plan of a real model after as many micro-batches as the job accumulates."""
    job, tokens = facts.job, facts.tokens
    model = copy.deepcopy(frozen_model())
    kwargs = job.network.network_kwargs
    targets = lora_targets(
        model,
        only_if_contains=kwargs.only_if_contains,
        ignore_if_contains=kwargs.ignore_if_contains,
        transformer_only=job.network.transformer_only,
    )
    apply_coat(model, job.coat, allow_recompute=job.train.gradient_checkpointing)
    runner = BlockRunner.of(model)
    assert runner is not None
    if job.coat.memory.stream_blocks == "auto":
        runner.expect(reserve_bytes=outside_bytes(facts))
    patch.setattr(runner_module, "held_bytes", lambda _: float(HELD - runner.plan.freed_bytes))
    add_lora(model, targets, job.network.linear, seed=0, dropout=job.network.dropout)
    attach_lora(model, job.coat)
    inputs = {
        "hidden_states": torch.zeros(tokens.batch, tokens.image, 64, dtype=model.dtype),
        "encoder_hidden_states": torch.zeros(tokens.batch, tokens.text, facts.model.text_width, dtype=model.dtype),
        "pooled_projections": torch.zeros(tokens.batch, facts.model.pooled_width, dtype=model.dtype),
        "timestep": torch.full((tokens.batch,), 0.5, dtype=model.dtype),
        "guidance": torch.ones(tokens.batch),
        "img_ids": torch.zeros(tokens.image, 3),
        "txt_ids": torch.zeros(tokens.text, 3),
    }
    for _ in range(job.train.gradient_accumulation):
        model(**inputs)[0].float().square().mean().backward()
    return runner.plan


def job(memory: dict[str, Any], activation: dict[str, Any] | None = None, dropout: float = 0) -> dict[str, Any]:
    """A job that reaches a branch of the decision that few draws reach."""
    coat, network = {"memory": memory, "activation": activation or {}}, {"linear": 16, "dropout": dropout}
    train, dataset = {"gradient_checkpointing": True}, {"resolution": 64}
    return {"coat": coat, "network": network, "train": train, "dataset": dataset}


@settings(max_examples=3, phases=[Phase.explicit, Phase.generate])
@example(drawn=job({"checkpointing": "none"}, dropout=0.1), room=1.6, device="cpu")  # blocks with LoRA are not fused
@example(drawn=job({"checkpointing": "auto"}), room=0.6, device="cuda")  # some recompute
@example(drawn=job({"checkpointing": "auto", "transposed_weights": "auto"}), room=1.6, device="cuda")  # copies are kept
@example(drawn=job({"checkpointing": "all"}, {"flow": "generic"}), room=1.6, device="cpu")
@example(drawn=job({"stream_blocks": "auto", "checkpointing": "auto"}), room=-0.2, device="cuda")  # some are streamed
@given(drawn=jobs(), room=st.floats(0.05, 1.6), device=st.sampled_from(["cpu", "cuda"]))
def test_the_plan_is_the_run(folder: Path, drawn: dict[str, Any], room: float, device: str) -> None:
    """On a GPU too, as far as the decision goes: the blocks run on the CPU and are told of a GPU."""
    raw = engine_job("run", model=folder, images="not here", out="output", **drawn)
    raw["config"]["process"][0]["device"] = device
    facts_of = runner_module.shown_by
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coat_flux.plan.predict._held", lambda facts: {"all": HELD, "optimizer": optimizer_bytes(facts)})
        patch.setattr("coat_flux.plan.predict.LIBRARY_WORKSPACE", {True: 0, False: 0})
        patch.setattr(runner_module, "shown_by", lambda args: {**facts_of(args), "device": device})
        facts, expected = planned(JobConfig.from_dict(raw), room)
        found = run(facts, patch)
    assert found == expected
