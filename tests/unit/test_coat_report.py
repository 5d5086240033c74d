"""What a run says: the table of what was asked, what each part got and why, and the blocks that are not fused."""

import logging
from dataclasses import replace
from typing import Any

import diffusers.models.transformers.transformer_flux as transformer_flux
import pytest
import torch
from torch import nn

from coat_core.linear.module import FP8Linear
from coat_flux.blocks import measure as pick
from coat_flux.blocks import report as shared
from coat_flux.blocks.decide import Given, decide
from coat_flux.blocks.report import OUTSIDE, CoatReport, TableRow, shared_rows
from coat_flux.blocks.runner import BlockRunner
from coat_flux.blocks.sizes import Block, Tokens
from coat_flux.config.coat import COATConfig
from tests.helpers.flux import coat_flux_model, flux_inputs, predict

GEMM = "W e4m3/per_tensor, x e4m3/per_row, dy e5m2"
WEIGHT_ONLY = "W e4m3/per_tensor, high precision GEMM"
ONE_ROW = "one row per image: reading the weight is all the time there is"


# --- layers ---
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


# --- a model ---
def rows_of(report: CoatReport) -> dict[str, TableRow]:
    return {row.part: row for row in report.parts() if not row.count}


def test_what_the_first_step_decides_is_known_after_it():
    model, report, _ = coat_flux_model({})
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
    assert found["coat.why.transformer_blocks"] == ONE_ROW
    assert found["coat.got.outside"] == "10 x high precision"
    assert "coat.asked.outside" not in found


# --- of a plan alone ---
BLOCK = Block("single", 64, 2, 256, (("attn.to_q", 4),))
STEP = Given((BLOCK,) * 4, ("FluxSingleTransformerBlock",) * 4, Tokens(1, 64, 64), device="cpu")


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
    assert runner is not None
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


def test_the_path_that_was_picked_shows_in_the_layers(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    current: list[str] = []
    set_gemm = pick.GemmPick.set
    monkeypatch.setattr(pick.GemmPick, "set", lambda self, gemm: (current.append(gemm), set_gemm(self, gemm)))
    monkeypatch.setattr(pick, "timed", lambda once, device: 1.0 if current[-1] == "per_row" else 2.0)
    model, report, _ = coat_flux_model({"memory": {"checkpointing": "none"}, "speed": {"measure": "always"}})
    predict(model)
    found = report.metadata()
    assert found["coat.got.single_transformer_blocks"] == f"2 x {WEIGHT_ONLY}; 10 x {GEMM}"
    assert found["coat.asked.single_transformer_blocks"] == GEMM
    assert found["coat.got.execution"] == "per_row GEMM, eager"
    assert found["coat.why.execution"].startswith("the fastest of those that were measured")
