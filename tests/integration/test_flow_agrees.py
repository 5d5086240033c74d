"""What the start table and `plan` say of a config's flow is what its blocks do, at the config's own batch size.

Each shipped config's `coat:` block and batch on a FLUX of 1 + 2 narrow blocks, with ai-toolkit's kind of adapter.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from coat_flux.blocks.apply import apply_coat
from coat_flux.blocks.decide import Given, flow_settings
from coat_flux.blocks.lora import attach_lora
from coat_flux.blocks.report import CoatReport, treatments
from coat_flux.blocks.runner import BlockRunner
from coat_flux.blocks.sizes import Tokens
from coat_flux.config.coat import COATConfig
from coat_flux.config.job import JobConfig
from coat_flux.config.job_sections import NetworkSection
from coat_flux.plan.job import JobFacts
from coat_flux.trainers.standalone.network import add_lora, lora_targets
from scripts.bench_memory import kept_bytes as measured_kept_bytes
from tests.architecture.sources import ROOT
from tests.helpers.toolkit_lora import Network
from tests.integration.test_plan_measured import flux_inputs, flux_model, predicted
from tests.tolerances import PLAN_KEPT_RTOL

# of the shipped configs those whose blocks differ on a CPU: 12gb is 8gb, 16gb the first in nvfp4, 80gb the first
NAMES = ("coat", "coat_8gb", "coat_3090", "tiny")
CONFIGS = [ROOT / "configs" / f"flux_clothing_{name}.yaml" for name in NAMES]
OFF = COATConfig.from_dict({"enabled": False})


def _model(coat: COATConfig, batch: int, dropout: float = 0.0) -> tuple[Any, CoatReport]:
    """A narrow FLUX under COAT with a LoRA of rank 16, at the strengths ai-toolkit sets for a batch.

    With dropout the stand-alone trainer's adapters.
    """
    model = flux_model(OFF, heads=2, head_dim=64, blocks=(1, 2), rank=16, words=["transformer_blocks.0.norm1.linear"])
    model.unload_lora()
    targets = lora_targets(model, NetworkSection())
    report = apply_coat(model, coat)
    root: Any = model
    if dropout:
        add_lora(model, NetworkSection(linear=16, dropout=dropout), 0)
    else:
        root = Network([model.get_submodule(name) for name in targets], 16).train()
        root.multiplier = [1.0] * batch
        vars(model)["network"] = root
    attach_lora(root, coat)
    return model.train(), report


def _saved(report: CoatReport) -> str:
    return next(row.got for row in report.parts() if row.part == "saved tensors")


def _flows(model: nn.Module) -> set[str]:
    """Of the blocks that keep what they save, after a forward pass."""
    policy = BlockRunner.of(model)
    assert policy is not None
    kept = [what for what in treatments(policy.plan, policy.ran) if not what.startswith("recomputed")]
    return {"fused" if "fused flow" in what else "generic" if "generic flow" in what else "eager" for what in kept}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_shipped_config_does_what_is_said_of_it(config: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = JobConfig.load(config)
    facts = JobFacts(job)
    tokens = Tokens(facts.tokens.batch, 32, 64)
    assert tokens.batch == job.train.batch_size
    model, report = _model(job.coat, tokens.batch)
    with caplog.at_level(logging.WARNING, logger="coat_flux"):
        before = _saved(report)
        inputs = flux_inputs(tokens)
        for _ in range(2):  # weights are joined and adapters copied, in memory of their own
            model(**inputs)
        measured = measured_kept_bytes(lambda: model(**inputs))
    kept, _ = predicted(model, tokens, flow_settings(job.coat, Given((), device="cpu")))
    assert kept == pytest.approx(measured, rel=PLAN_KEPT_RTOL)
    assert "flow in place of" not in caplog.text
    assert facts.settings[-1].flow == "fused"
    assert _flows(model) == (set() if job.coat.memory.checkpointing == "all" else {"fused"})
    assert before == "decided at the first step, expected: as asked"
    assert "generic" not in _saved(report)


def test_what_cannot_be_fused_is_in_the_table_and_in_the_plan(caplog: pytest.LogCaptureFixture) -> None:
    """Dropout in the LoRA: in the table, and logged at the first step."""
    job = JobConfig.load(ROOT / "configs" / "flux_clothing_tiny.yaml")
    dropped = replace(job, network=replace(job.network, dropout=0.1))
    kept = COATConfig.from_dict({"memory": {"checkpointing": "none"}})
    model, report = _model(kept, 4, dropout=0.1)
    assert _saved(report) == "decided at the first step, expected: FP8 e4m3 per_group, generic flow"
    assert "LoRA dropout" in report.table(1000)
    inputs = flux_inputs(Tokens(4, 32, 64))
    with caplog.at_level(logging.WARNING, logger="coat_flux"):
        for _ in range(2):
            model(**inputs)[0].sum().backward()
    warnings = [record.getMessage() for record in caplog.records if "in place of" in record.getMessage()]
    assert len(warnings) == 2  # once for each kind of block
    assert all(warning.endswith("LoRA dropout") for warning in warnings)
    assert _flows(model) == {JobFacts(dropped).settings[-1].flow} == {"generic"}


def test_auto_chooses_again_when_a_block_is_not_fused_any_more(caplog: pytest.LogCaptureFixture) -> None:
    """And counts on the largest micro-batch seen, not on the one at hand."""
    model, _ = _model(COATConfig.from_dict({"memory": {"budget_gb": 1e3}}), 4)
    with caplog.at_level(logging.INFO, logger="coat_flux"):
        model(**flux_inputs(Tokens(4, 32, 64)))
        model.network.multiplier = [1.0]
        model.single_transformer_blocks[1].register_forward_hook(lambda *_: None)
        for _ in range(2):
            model(**flux_inputs(Tokens(1, 32, 64)))
    choices = [record.getMessage() for record in caplog.records if "checkpointing auto: " in record.getMessage()]
    assert len(choices) == 2
    needs = [float(line.split("(")[1].split(" GB")[0]) for line in choices]
    assert needs[1] >= needs[0]
