"""`decide`: each thing a plan rests on, changed alone, changes the plan as it should; and what a run says of it."""

import logging
from dataclasses import replace
from typing import Any

import diffusers.models.transformers.transformer_flux as transformer_flux
import pytest
import torch
from torch import nn

from coat_core.linear.function import load_weight
from coat_core.linear.module import FP8Linear
from coat_flux.blocks import measure
from coat_flux.blocks import report as shared
from coat_flux.blocks.decide import BlockPlan, Given, decide, saving_of
from coat_flux.blocks.gemms import set_transposed, transposed_bytes
from coat_flux.blocks.measure import Picked
from coat_flux.blocks.report import OUTSIDE, CoatReport, TableRow, shared_rows
from coat_flux.blocks.runner import BlockRunner
from coat_flux.blocks.sizes import Block, Tokens
from coat_flux.config.coat import COATConfig
from coat_flux.plan import predict as prediction
from coat_flux.plan.job import JobFacts
from tests.helpers.flux import coat_flux_model, flux_inputs, predict
from tests.unit.test_plan import job_of

BLOCK = Block("single", 64, 2, 256, (("attn.to_q", 4), ("proj_out", 4)))
START = Given((BLOCK,) * 4, ("FluxSingleTransformerBlock",) * 4, device="cpu")
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
    assert plan_of(replace(STEP, free_bytes=float(peak), accumulates=True)).recomputed != []


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
        return {name: sum(parts.values()) for name, parts in prediction.predict(JobFacts(job), gb * 1e9).phases.items()}

    auto, never = totals("auto"), totals("never")
    extra = {name: auto[name] - never[name] for name in auto}
    copies = (19 * 24 + 38 * 12) * 3072**2
    assert extra == {"load": 0, "cache": 0, "sample": copies, "step": copies, "save": copies}
    assert totals("always") == auto
    exactly = (never["step"] + copies) / 0.92e9
    assert totals("auto", gb=exactly + 1e-3) == auto
    assert totals("auto", gb=exactly - 1e-3) == never


GEMM = "W e4m3/per_tensor, x e4m3/per_row, dy e5m2"
WEIGHT_ONLY = "W e4m3/per_tensor, high precision GEMM"


def test_rows_count_parts_with_the_same_treatment():
    report = CoatReport()
    with torch.device("meta"):
        for name in ("blocks.0.to_q", "blocks.1.to_q", "blocks.2.to_q", "blocks.0.norm"):
            report.converted[name] = FP8Linear.from_linear(nn.Linear(16, 16), COATConfig().linear_config())
    report.why["blocks.0.norm"] = "one row per image"
    report.skipped = {"proj_out": OUTSIDE, "blocks.0.odd": "fallback: multiples of 16"}
    assert [(row.part, row.count, row.got, row.why) for row in report.parts()] == [
        ("blocks.*", 3, GEMM, ""),
        ("blocks.*", 1, WEIGHT_ONLY, "one row per image"),
        ("blocks.*", 1, "high precision", "fallback: multiples of 16"),
        ("outside", 1, "high precision", f"{OUTSIDE} (proj_out)"),
    ]
    report.add_row("optimizer", "adamw8bit", "adamw8bit")
    report.add_row("optimizer", "coat_fp8_adamw", "FP8AdamW", "as configured")  # in its place
    assert report.parts()[4:] == [TableRow("optimizer", "coat_fp8_adamw", "FP8AdamW", "as configured")]


def rows_of(report: CoatReport) -> dict[str, TableRow]:
    return {row.part: row for row in report.parts() if not row.count}


def test_what_the_first_step_decides_is_known_after_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "timed", lambda once, device: 1.0)  # of equal ones the configured GEMM is taken
    model, report, _ = coat_flux_model({"speed": {"measure": "always"}})
    rows = rows_of(report)
    later = {part for part, row in rows.items() if "decided at the first step" in row.got}
    assert later == {"saved tensors", "attention", "checkpointing", "transposed weights", "execution"}
    assert rows["saved tensors"].got == "decided at the first step, expected: as asked"
    predict(model)
    assert "first step" not in report.table()
    assert {part: row.got for part, row in rows_of(report).items()} == {
        "GEMMs": "fp32 products of the FP8 codes",
        "kernels": "PyTorch reference",
        "saved tensors": "4 kept in FP8, fused flow, attention fp8",
        "attention": "as asked; kernel flash_cpu",
        "checkpointing": "0 of 4 blocks recompute from FP8 inputs",
        "transposed weights": "none",
        "execution": "per_row GEMM, eager",
    }
    found = report.metadata()  # flat text
    assert all(isinstance(text, str) and text and "\n" not in text for text in found.values())
    assert found["coat.asked.transformer_blocks"] == GEMM
    assert found["coat.got.transformer_blocks"] == f"4 x {WEIGHT_ONLY}; 24 x {GEMM}"
    assert found["coat.why.transformer_blocks"].startswith("one row per image")
    assert found["coat.why.execution"].startswith("the fastest of those that were measured")
    assert found["coat.got.outside"] == "10 x high precision"
    assert "coat.asked.outside" not in found


def rows_of_plan(coat: dict[str, Any], device: str = "cpu", **changed: Any) -> dict[str, TableRow]:
    config = COATConfig.from_dict(coat)
    return {row.part: row for row in shared_rows(decide(config, replace(STEP, **changed)), torch.device(device), {})}


@pytest.mark.parametrize(
    ("memory", "changed", "asked", "got", "why"),
    [
        ({"checkpointing": "all"}, {}, "all", "4 of 4 blocks recompute from FP8 inputs", ""),
        ({"budget_gb": 1e-3}, {"free_bytes": 1.0}, "auto within 0.001 GB", "4 of 4 blocks recompute", "fewest"),
        ({}, {"allow_recompute": False}, "auto", "0 of 4 blocks recompute from FP8", "train.gradient_checkpointing"),
        ({}, {"recomputed": range(4), "ran_out_with": 2}, "auto", "4 of 4 blocks recompute from FP8", "ran out with 2"),
        (
            {"checkpointing": "all", "enable_efficient_checkpoint": False}, {}, "all",
            "4 of 4 blocks recompute from high precision inputs", "",
        ),
    ],
)  # fmt: skip
def test_checkpointing(memory, changed, asked, got, why):
    row = rows_of_plan({"memory": memory}, **changed)["checkpointing"]
    assert row.asked == asked
    assert row.got.startswith(got)
    assert why in row.why
    assert bool(row.why) == bool(why)


def test_without_fp8_activations_nothing_is_claimed():
    rows = rows_of_plan({"activation": {"use_fp8": False}})
    assert (rows["GEMMs"].got, rows["GEMMs"].why) == ("products of dequantized weights", "activation.use_fp8: false")
    assert rows["saved tensors"].got == "high precision"
    assert "transposed weights" not in rows


@pytest.mark.parametrize(
    ("no_triton", "no_fp8", "gemms", "why", "kernels"),
    [
        (None, None, "torch._scaled_mm", "a trial on cuda:0 ran", "Triton"),
        ("not installed", "capability 8.0", "products of dequantized weights", "fallback: capability 8.0", "PyTorch"),
    ],
)
def test_on_a_gpu_kernels_are_named_and_each_fall_back_has_its_reason(
    monkeypatch, no_triton, no_fp8, gemms, why, kernels
):
    monkeypatch.setattr(shared, "triton_obstacle", lambda device: no_triton)
    monkeypatch.setattr(shared, "fp8_gemm_obstacle", lambda device, linear: no_fp8)
    rows = rows_of_plan({"activation": {"grad_format": "bf16"}}, "cuda:0")
    assert rows["GEMMs"] == TableRow("GEMMs", "FP8, forward e4m3, backward dequantized weights", gemms, why)
    assert (rows["kernels"].got.split()[0], rows["kernels"].why) == (kernels, no_triton or "")


# --- blocks that are not fused ---
class FluxSingleTransformerBlock(transformer_flux.FluxSingleTransformerBlock):
    """A later diffusers whose block computes something else under the same names."""

    def forward(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb=None, joint_attention_kwargs=None):
        text, image = super().forward(hidden_states, encoder_hidden_states, temb, image_rotary_emb)
        return text + 0.1 * (text - encoder_hidden_states), image + 0.1 * (image - hidden_states)


def test_another_formula_is_warned_of_once_and_trained_through_diffusers_code(caplog):
    model, _, _ = coat_flux_model()
    model.single_transformer_blocks[0].__class__ = FluxSingleTransformerBlock
    caplog.clear()  # diffusers' own
    with caplog.at_level(logging.WARNING, logger="coat_flux"):
        predict(model)
        predict(model)
    (warning,) = caplog.messages
    assert warning.startswith("FluxSingleTransformerBlock: generic flow in place of the fused one")
    assert "its output differs from its own code's by " in warning
    flows = [choice.flow for choice in BlockRunner.of(model).plan.blocks]
    assert flows == ["fused", "fused", "generic", "fused"]


def test_arguments_that_a_reader_does_not_know_run_the_blocks_own_code_in_that_pass(caplog):
    model: Any = coat_flux_model()[0]
    runner = BlockRunner.of(model)
    for keywords, flow in (({}, "fused"), ({"joint_attention_kwargs": {"unknown": 1}}, "generic"), ({}, "fused")):
        with caplog.at_level(logging.WARNING, logger="coat_flux"):
            model(**flux_inputs(), **keywords, return_dict=False)
        assert {choice.flow for choice in runner.plan.blocks} == {flow}
    assert sum("joint_attention_kwargs unknown" in line for line in caplog.messages) == 2  # once for each kind


def test_a_run_says_what_its_blocks_got(caplog):
    model, _, _ = coat_flux_model()
    with caplog.at_level(logging.INFO, logger="coat_flux"):
        predict(model)
        predict(model)
        model.transformer_blocks[1].register_forward_hook(lambda *_: None)
        predict(model)
    lines = [r.getMessage() for r in caplog.records if "blocks:" in r.getMessage() or "in place of" in r.getMessage()]
    assert lines == [
        "blocks: 4 kept in FP8, fused flow, attention fp8",
        "FluxTransformerBlock: generic flow in place of the fused one, which saves less: hooks on the block",
        "blocks: 3 kept in FP8, fused flow, attention fp8; 1 kept in FP8, generic flow, attention fp8",
    ]
