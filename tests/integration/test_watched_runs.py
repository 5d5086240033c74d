"""Precision by layer and memory by phase in whole runs of both trainers; one layer has a planted outlier."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from coat_flux.blocks.held import PARTS
from coat_flux.cli.entry import main
from coat_flux.config.job import JobConfig
from coat_flux.pages.report import below_median, standing_out, summaries
from coat_flux.plan.job import JobFacts
from coat_flux.plan.predict import predict
from coat_flux.trainers.standalone import session
from coat_flux.trainers.standalone.trainer import COATTrainer
from coat_flux.watch.casts import CastPrecision, read_rows
from coat_flux.watch.oom import OutOfMemory
from coat_flux.watch.phases import PhaseTracker, finish
from tests.helpers.aitk_standin.host import COAT_ENTRY, Host, standin_host  # noqa: F401
from tests.helpers.asserts import assert_all_bitwise
from tests.helpers.engine_job import engine_job, write_images
from tests.helpers.step_watch import set_limits
from tests.helpers.tiny_flux import make_tiny_flux
from tests.tolerances import REPORT_SAVED_RTOL
from tests.unit.test_run_report import text_of

PLANTED = "transformer_blocks.1.ff.net.2"


@pytest.fixture(autouse=True, scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Model, images and output folder. One channel of the MLP of a block is huge, and the layer behind ignores it."""
    root = tmp_path_factory.mktemp("precision")
    load = session.load_transformer

    def planted(name: str, dtype: torch.dtype, *_: Any, **__: Any) -> nn.Module:
        model = load(name, dtype)  # not quantized yet
        with torch.no_grad():
            model.get_submodule(PLANTED.replace("net.2", "net.0.proj")).bias[0] = 1e6
            model.get_submodule(PLANTED).weight[:, 0] = 0
        return model

    with pytest.MonkeyPatch.context() as patch:
        set_limits(patch, max_underflow=1.0, health_every=3)  # what is planted would end the run
        patch.setattr("coat_flux.trainers.standalone.loading.MAX_TEXT_TOKENS", 48)
        patch.setattr("coat_flux.plan.job.TEXT_TOKENS", 48)
        patch.setattr(session, "load_transformer", planted)
        yield {"model": make_tiny_flux(root / "tiny"), "images": write_images(root / "images"), "out": root / "out"}


def train(name: str, place: dict[str, Path], steps: int) -> Path:
    coat = {"activation": {"min_sqnr_db": 20.0}}
    COATTrainer(engine_job(name, **place, coat=coat, train={"steps": steps}, save={"save_every": 1})).train()
    return place["out"] / name


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "memory.json").read_text(encoding="utf-8"))


# -- precision ---------------------------------------------------------------------------------------------------------
def rows_of(run: Path) -> list[CastPrecision]:
    return read_rows(run / "coat" / "precision.csv")


def inputs(run: Path, step: int) -> dict[str, CastPrecision]:
    return {row.layer: row for row in rows_of(run) if row.kind == "input" and row.step == step}


@pytest.fixture(scope="module")
def whole(place: dict[str, Path]) -> Path:
    return train("whole", place, 3)


def test_every_kind_is_measured_and_what_is_planted_is_the_worst(whole):
    rows = [row for row in rows_of(whole) if row.step < 3]
    counts = {kind: sum(row.kind == kind for row in rows) for kind in ("weight", "input", "gradient", "saved")}
    assert counts == {"weight": 40, "input": 34, "gradient": 34, "saved": 4}
    assert {row.step for row in rows} == {0, 2}
    healthy = {kind: [row.sqnr_db for row in rows if row.kind == kind and row.layer != PLANTED] for kind in counts}
    for kind in ("weight", "input"):
        assert 25 < min(healthy[kind]) <= max(healthy[kind]) < 40
    assert inputs(whole, 2)[PLANTED].sqnr_db < 10
    assert inputs(whole, 2)[PLANTED].underflow > 0.5
    layers = summaries(rows)
    _, first = below_median(layers)[0]
    assert (first.layer, first.kind) == (PLANTED, "input")
    assert standing_out(layers) == [PLANTED]


def test_layers_below_the_minimum_multiply_in_bf16_and_a_resume_keeps_them(place, whole, capsys):
    chosen = f"coat.activation.min_sqnr_db=20: 1 of 34 layers multiply in bf16 from here on: {PLANTED} ("
    assert chosen in (whole / "coat" / "log.txt").read_text(encoding="utf-8")
    assert inputs(whole, 2).keys() - inputs(whole, 3).keys() == {PLANTED}
    for steps in (1, 2, 3):  # cut before the choice, and after it
        run = train("cut", place, steps)
        assert ("layers multiply in bf16 as before" in capsys.readouterr().out) == (steps == 3)
    assert inputs(run, 2).keys() == inputs(whole, 2).keys()
    assert_all_bitwise(*(load_file(folder / f"{folder.name}.safetensors") for folder in (whole, run)))
    with safe_open(whole / "whole.safetensors", "pt") as file:
        assert "input below activation.min_sqnr_db: 20" in file.metadata()["coat.why.transformer_blocks"]
    log = (run / "coat" / "log.txt").read_text(encoding="utf-8")
    resumed = " ".join(log.rpartition("IMPORTANT RESUMING")[2].split())
    row = r"\btransformer_blocks\.\* \(1\) [^()]*high precision GEMM \([^()]*input below activation\.min_sqnr_db: 20\)"
    assert re.search(row, resumed)


def test_ai_toolkit_writes_the_same_files_and_keeps_layers_below_the_minimum_out(host, capsys):
    train = {**COAT_ENTRY["train"], "timestep_type": "next_sample"}  # ai-toolkit's own: the plan does not know it
    for steps, words in ((2, "=100: 4 of 4 layers multiply in bf16 from here on"), (3, ": 4 layers multiply in bf16")):
        coat = {"activation": {"min_sqnr_db": 100.0}}
        host.run(model=COAT_ENTRY["model"], train={**train, "steps": steps}, coat=coat)
        out = capsys.readouterr().out
        assert f"[coat] coat.activation.min_sqnr_db{words}" in out
    assert "input below activation.min_sqnr_db: 100" in out  # the start table
    assert "Traceback" not in out
    run = host.save_folder

    record = read(run / "coat")
    entered = {"load": 1, "cache": 1, "sample": 2, "step": 1, "save": 1}
    assert {name: phase["entered"] for name, phase in record["phases"].items()} == entered
    state = torch.load(run / "optimizer.pt", weights_only=True)["state"]
    lora = 4 * sum(value["exp_avg_codes"].numel() for value in state.values())
    most = record["phases"]["step"]["most"]
    assert most["lora"] == most["gradients"] == lora
    assert set(most) == set(PARTS)
    assert most["transformer"] < 3 * 4 * 32 * 32  # four linears in codes, the rest in fp32
    assert record["prediction"]["missing"].startswith("ConfigError: ")

    rows = rows_of(run)
    blocks, leaves = ("transformer_blocks", "single_transformer_blocks"), ("to_q", "to_k")
    layers = {f"{block}.0.attn.{leaf}" for block in blocks for leaf in leaves}
    for kind, steps in {"weight": {0}, "input": {2}, "exp_avg": {2}, "exp_avg_sq": {2}}.items():
        assert {row.layer for row in rows if row.kind == kind} == layers
        assert {row.step for row in rows if row.kind == kind} == steps
    assert all(25 < row.sqnr_db < 40 for row in rows if row.kind in ("weight", "input"))
    steps = [row.split(",")[0] for row in (run / "coat" / "metrics.csv").read_text().splitlines()]
    assert steps == ["step", "1", "2", "3"]
    assert main(["report", str(run)]) == 0
    text = text_of(run / "coat" / "report.html")
    assert "3 of 3" in text
    assert "ai-toolkit 0.12.26" in text
    assert "cannot be shown" not in text


# -- memory ------------------------------------------------------------------------------------------------------------
def test_engine_run(place, capsys):
    train = {"disable_sampling": False, "ema_config": {"use_ema": True}, "batch_size": 4}
    job = engine_job("sized", **place, coat={}, train=train, save={"save_every": 2}, sample={"sample_every": 2})
    final = COATTrainer(job).train()
    out = capsys.readouterr().out
    record = read(final.parent / "coat")
    phases = record["phases"]
    entered = {"load": 1, "cache": 1, "validate": 2, "sample": 3, "step": 1, "save": 2}
    assert {name: phase["entered"] for name, phase in phases.items()} == entered
    assert not any(phase["open"] for phase in phases.values())
    assert record["peak"] == max(phase["peak"]["allocated"] for phase in phases.values()) > record["baseline"] > 0
    assert set(record["moments"]) == {"before_training", "before_sampling", "after_sampling"}

    saved = torch.load(final.parent / "optimizer.pt", weights_only=True)["state"]
    lora = 4 * sum(state["exp_avg_codes"].numel() for state in saved.values())
    most = phases["step"]["most"]
    assert most["lora"] == most["gradients"] == most["ema"] == lora
    assert 0.5 * lora < most["optimizer"] < 0.75 * lora  # two FP8 moments and their scales, of fp32
    assert phases["cache"]["most"]["text encoders"] > 0
    assert phases["step"]["most"]["text encoders"] == 0  # gone before the transformer came
    assert phases["sample"]["most"]["vae"] > 0

    predicted = record["prediction"]["phases"]["step"]
    assert (predicted["lora"], predicted["ema"]) == (lora, lora)
    assert predicted["transformer"] == most["transformer"]
    assert most["saved activations"] == pytest.approx(predicted["saved activations"], rel=REPORT_SAVED_RTOL)
    assert "Memory by phase" not in out
    assert "Memory by phase, MB" in (final.parent / "coat" / "log.txt").read_text()


def test_run_that_fails_leaves_its_phases(place, monkeypatch):
    def fail(*_: Any) -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr("coat_flux.trainers.standalone.trainer.whole_norms", fail)
    with pytest.raises(OutOfMemory):
        COATTrainer(engine_job("broken", **place)).train()
    record = read(place["out"] / "broken" / "coat")
    assert {"load", "cache", "step"} <= set(record["phases"])
    assert record["phases"]["step"]["most"]["gradients"] > 0
    assert record["prediction"] is None


def test_prediction_is_for_the_device_that_trained(place, tmp_path):
    raw = engine_job("anywhere", **place, coat={})
    raw["config"]["process"][0]["device"] = None
    job = JobConfig.from_dict(raw)
    finish(PhaseTracker(torch.device("cpu"), tmp_path / "memory.json"), lambda: job, None)
    found = read(tmp_path)["prediction"]["peak"]
    assert found == predict(JobFacts(replace(job, device="cpu"))).peak
    assert found != predict(JobFacts(replace(job, device="cuda"))).peak
