"""Precision by layer and its report in whole runs of both hosts, with one layer whose input has a planted outlier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from coat_flux.cli.entry import main
from coat_flux.pages.report import standing_out, summaries, worst
from coat_flux.trainers.standalone import session
from coat_flux.trainers.standalone.trainer import COATTrainer
from coat_flux.watch.casts import CastPrecision
from coat_flux.watch.precision import read_rows
from tests.helpers.aitk_standin.host import COAT_ENTRY, Host, standin_host  # noqa: F401
from tests.helpers.asserts import assert_bitwise
from tests.helpers.engine_job import engine_job, write_images
from tests.helpers.guard_limits import set_limits
from tests.helpers.tiny_flux import make_tiny_flux
from tests.unit.test_run_report import text_of

PLANTED = "transformer_blocks.1.ff.net.2"


@pytest.fixture(autouse=True, scope="module")
def _limits() -> Iterator[None]:
    """Casts are observed every three steps; what is planted would end the run."""
    with pytest.MonkeyPatch.context() as patch:
        set_limits(patch, max_underflow=1.0, health_every=3)
        yield


@pytest.fixture(scope="module")
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
        patch.setattr("coat_flux.trainers.standalone.loading.MAX_TEXT_TOKENS", 48)
        patch.setattr(session, "load_transformer", planted)
        yield {"model": make_tiny_flux(root / "tiny"), "images": write_images(root / "images"), "out": root / "out"}


def train(name: str, place: dict[str, Path], steps: int, activation: dict[str, Any], **blocks: Any) -> Path:
    coat = {"activation": activation}
    COATTrainer(engine_job(name, **place, coat=coat, train={"steps": steps}, **blocks)).train()
    return place["out"] / name


def rows_of(run: Path) -> list[CastPrecision]:
    return read_rows(run / "coat" / "precision.csv")


def inputs(run: Path, step: int) -> dict[str, CastPrecision]:
    return {row.layer: row for row in rows_of(run) if row.kind == "input" and row.step == step}


@pytest.fixture(scope="module")
def default_run(place: dict[str, Path]) -> Path:
    return train("default", place, 2, {}, save={"save_every": 1})


def test_every_kind_is_measured_and_what_is_planted_is_the_worst(default_run: Path) -> None:
    rows = rows_of(default_run)
    counts = {kind: sum(row.kind == kind for row in rows) for kind in ("weight", "input", "gradient", "saved")}
    assert counts == {"weight": 40, "input": 34, "gradient": 34, "saved": 4}
    assert {row.step for row in rows} == {0, 2}
    healthy = {kind: [row.sqnr_db for row in rows if row.kind == kind and row.layer != PLANTED] for kind in counts}
    for kind in ("weight", "input"):
        assert 25 < min(healthy[kind]) <= max(healthy[kind]) < 40
    assert inputs(default_run, 2)[PLANTED].sqnr_db < 10
    assert inputs(default_run, 2)[PLANTED].underflow > 0.5
    found = summaries(rows)
    _, first = worst(found)[0]
    assert (first.layer, first.kind) == (PLANTED, "input")
    assert standing_out(found) == [PLANTED]


def test_the_report_of_a_run_has_all_of_it(default_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(default_run)]) == 0
    page = default_run / "coat" / "report.html"
    assert capsys.readouterr().out == f"wrote {page}\n"
    text = text_of(page)
    for shown in (
        "2 of 2",
        f"exclude:\n- {PLANTED}\n",
        "Memory by phase, MB",
        "predicted by coat-flux plan",
        "FP8 e4m3 per_group, fused flow",  # asked, got, why
        "No samples",
        "\ndefault_000000001.safetensors\n",
    ):
        assert shown in text, shown
    assert "cannot be shown" not in text


def test_layers_below_the_minimum_multiply_in_bf16_and_a_resume_keeps_them(
    place: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    option = {"min_sqnr_db": 20.0}
    whole = train("whole", place, 3, option)
    said = capsys.readouterr().out
    assert f"coat.activation.min_sqnr_db=20: 1 of 34 layers multiply in bf16 from here on: {PLANTED} (" in said
    assert PLANTED in inputs(whole, 2)
    assert inputs(whole, 2).keys() - inputs(whole, 3).keys() == {PLANTED}
    for steps in (1, 2, 3):  # cut before the choice, and after it
        run = train("cut", place, steps, option)
        said = capsys.readouterr().out
        assert ("layers multiply in bf16 as before" in said) == (steps == 3)
    assert inputs(run, 2).keys() == inputs(whole, 2).keys()
    left, right = (load_file(folder / f"{folder.name}.safetensors") for folder in (whole, run))
    for tensor in left:
        assert_bitwise(right[tensor], left[tensor])
    with safe_open(whole / "whole.safetensors", "pt") as file:
        assert "input below activation.min_sqnr_db: 20" in file.metadata()["coat.why.transformer_blocks"]
    log = (run / "coat" / "log.txt").read_text(encoding="utf-8").splitlines()
    rows = [line for line in log if "min_sqnr_db: 20" in line and "transformer_blocks" in line]
    assert "high precision GEMM" in rows[-1]  # in the table of the resumed run


# -- ai-toolkit ------------------------------------------------------------------------------------------------------


def aitk_entry(host: Host, steps: int, minimum: float | None) -> dict[str, Any]:
    coat = {"activation": {"min_sqnr_db": minimum}}
    train = {**COAT_ENTRY["train"], "steps": steps}
    return {"model": COAT_ENTRY["model"], "train": train, "coat": coat}


def test_ai_toolkit_writes_the_same_files_and_its_report(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.run(**aitk_entry(host, 3, None))
    run = host.save_folder
    rows = rows_of(run)
    layers = {
        f"{block}.0.attn.{leaf}"
        for block in ("transformer_blocks", "single_transformer_blocks")
        for leaf in ("to_q", "to_k")
    }
    for kind, steps in {"weight": {0}, "input": {2, 3}, "exp_avg": {2, 3}, "exp_avg_sq": {2, 3}}.items():
        assert {row.layer for row in rows if row.kind == kind} == layers
        assert {row.step for row in rows if row.kind == kind} == steps
    assert all(25 < row.sqnr_db < 40 for row in rows if row.kind in ("weight", "input"))
    assert main(["report", str(run)]) == 0
    text = text_of(run / "coat" / "report.html")
    assert "3 of 3" in text
    assert "ai-toolkit 0.12.26" in text
    assert "cannot be shown" not in text


def test_ai_toolkit_leaves_layers_below_the_minimum_out_and_keeps_them(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    host.run(**aitk_entry(host, 2, 100.0))
    said = capsys.readouterr().out
    assert "[coat] coat.activation.min_sqnr_db=100: 4 of 4 layers multiply in bf16 from here on" in said
    host.run(**aitk_entry(host, 3, 100.0))
    said = capsys.readouterr().out
    assert "[coat] coat.activation.min_sqnr_db: 4 layers multiply in bf16 as before" in said
    assert "input below activation.min_sqnr_db: 100" in said  # the start table
    assert inputs(host.save_folder, 2).keys() != set()
    assert inputs(host.save_folder, 3) == {}
    steps = [row.split(",")[0] for row in (host.save_folder / "coat" / "metrics.csv").read_text().splitlines()]
    assert steps == ["step", "1", "2", "3"]
