"""Our pages in a real browser, at the width of a phone and of a desk, light and dark: nothing clipped, all readable."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from coat_flux.pages.compare import show_comparison
from coat_flux.pages.html import Page
from coat_flux.pages.live import live_page
from coat_flux.pages.report import write_report
from coat_flux.study.compare import Verdict, judge, write_page
from coat_flux.study.study import ArmResult, Study
from coat_flux.study.sweep import FAILED, FINISHED, OPEN, Run, Sweep, Trial, write_sweep_page
from coat_flux.watch.casts import COLUMNS
from coat_flux.watch.live import LiveRun
from tests.helpers.browser import WIDTHS, inspect_pages
from tests.unit.test_live import make_watched_run
from tests.unit.test_page import full_page
from tests.unit.test_run_report import add_samples, make_run
from tests.unit.test_verify_parts import job_of

LOSSLESS_PAGE = Path(__file__).parents[2] / "docs" / "lossless.html"
LAYERS = [f"single_transformer_blocks.{block}.attn.to_added_output_projection" for block in range(40)]


def parts(picture: Path) -> str:
    """Every part that a page may have, with long words."""
    long = "transformer_blocks.11." + "attn.to_added_projection." * 4
    page = full_page("a text " + long, picture)
    for tone in ("good", "bad", "open", "plain"):
        page.verdict(f"What came out: {tone}.", tone)  # type: ignore[arg-type]  # every tone in turn
    with page.details("folded"):
        page.table([f"column {i}" for i in range(9)], [[long, *map(str, range(8))]] * 2)
        shades = [[i + 5.5 * j for i in range(6)] for j in range(5)]
        page.table(["layer", *(f"exp_avg{i}" for i in range(6))], [[long, *row] for row in shades], (0.0, 27.0))
        page.code(f"key: {long}")
    page.curves("c", {f"s{i}": [(step, step * i) for step in range(0, 90_000, 100)] for i in range(8)}, y="y")
    marks = {0: "first mark", 1e6: "last mark"}
    page.curves("m", {"a": [(0, 1e-7), (1e6, 1e7)]}, y="y", log_y=True, marks=marks)
    page.images("many", [(f"step {i}", picture) for i in range(8)], columns=8)
    page.images("pairs", [("seed 1", picture), ("", picture)], columns=2, header=["bf16", "COAT"])
    return page.html()


def report(folder: Path) -> str:
    """The page of a run that has everything a run may have."""
    run = make_run(folder, [1 / step for step in range(1, 3001)])
    add_samples(run, range(0, 3001, 250), prompts=4)
    rows = [
        f"{step},{layer},{kind},{31.5 if block else 4},0.0001,0,100"
        for step in (2, 100, 200)
        for block, layer in enumerate(LAYERS)
        for kind in ("weight", "input", "gradient", "saved", "exp_avg", "exp_avg_sq")
    ]
    (run / "coat" / "precision.csv").write_text("\n".join([",".join(COLUMNS), *rows]) + "\n")
    (run / "coat" / "validation.csv").write_text("step,loss\n0,0.5\n1000,0.3\n2000,0.4\n")
    (run / "coat" / "versions.json").write_text(json.dumps({"torch": "2.13.0", "python": "3.11"}))
    parts = {"transformer": 12e9, "lora": 1e9, "saved activations": 4e9, "rest": 2e9}
    phase = {"entered": 1, "exact": False, "parts": parts}
    phase |= {side: {"allocated": 19e9, "reserved": 21e9} for side in ("start", "end", "peak")}
    record = {"device": "cuda", "method": {"memory": "torch's CUDA allocator", "saved activations": ""}, "baseline": 0}
    record |= {"peak": 19e9, "phases": {"load": phase, "step": phase}, "moments": {}, "transformer": {}}
    record["prediction"] = {"peak": 18e9, "phases": {"step": {"transformer": 18e9}}}
    (run / "coat" / "memory.json").write_text(json.dumps(record))
    metadata = {"coat.asked.gemms": "FP8, forward e4m3, backward e5m2", "coat.got.gemms": "bf16", "coat.why.gemms": "x"}
    save_file({"a": torch.zeros(9)}, run / "shirt.safetensors", metadata=metadata)
    return write_report(run).read_text(encoding="utf-8")


def comparison(folder: Path) -> str:
    """The page of a comparison with samples and scores."""
    folder.mkdir()
    job = job_of(folder, {}, sample={"prompts": ["a [trigger] on a very long prompt " * 5, "another"]})
    Image.new("RGB", (64, 64), "teal").save(folder / "a.png")
    study = Study(job, folder, 4, 1, [f"{i}.jpg" for i in range(20)], torch.device("cpu"))
    curve = tuple((step, 1 / (step + 1)) for step in range(0, 1001, 50))
    samples = (folder / "a.png",) * 2
    runs = [
        ArmResult(f"{arm}{seed}", arm, seed, folder / arm / "x.safetensors", curve, 0.5, 2.0, 2.0, 10**9, samples)
        for seed in (7, 8)
        for arm in ("bf16", "coat")
    ]
    losses = {run.name: 0.5 for run in runs}
    judgement = judge([0.5, 0.51], [0.501, 0.512], 0.9, where=" in the bf16 model")
    verdict = Verdict(judgement, study, tuple(runs), 0.9, losses, ("A note.",), judgement, judgement)
    return write_page(verdict).read_text(encoding="utf-8")


def saves_compared(folder: Path) -> str:
    """The page of seven columns, with long prompts and a picture that is still to be drawn."""
    Image.new("RGB", (64, 96), "teal").save(folder / "cell.png")
    labels = ["without LoRA", *(f"step {step}, loss 0.1234, best" for step in range(1000, 7000, 1000))]
    columns = [{"label": label, "best": number == 3, "file": None} for number, label in enumerate(labels)]
    cells = ["cell.png"] * 6 + ["missing.png"]
    rows = [{"title": "a_very_long_prompt " * 12, "strength": 1.0, "number": i, "cells": cells} for i in range(3)]
    page = Page("shirt: saves compared", str(folder))
    show_comparison(page, {"lines": ["a line"], "columns": columns, "rows": rows}, folder)
    return page.html()


def ranking(folder: Path) -> str:
    """The page of a sweep with finished, failed and open trials, samples of one."""
    sweep = Sweep.__new__(Sweep)
    sweep.job = job_of(folder, {}, sample={"prompts": ["a [trigger] on a very long prompt " * 5]})
    sweep.folder, sweep.trials, sweep.total, sweep.held_out = folder, [], 12, ["a_photo.jpg"] * 3
    for number in range(12):
        settings = {"train.lr": 10 ** -(number % 4 + 1), "coat.optimizer.m1_format": "e4m3", "network.linear": number}
        curve = [(step, 1 / (step + 1 + number)) for step in range(0, 1001, 50)]
        process = {"train": {"lr": 0.1}, "coat": {"optimizer": {"m1_format": "e4m3"}}, "network": {"linear": number}}
        job = {"config": {"process": [process]}}
        run = Run(f"lr{number}_linear{number}_seed42", 1000, job, FINISHED, curve, 1.25)
        sweep.trials.append(Trial(settings, [run], []))
    sweep.runs[10].state, sweep.runs[10].message = FAILED, "LoRA pinned: " + "the loss was exactly the same " * 5
    sweep.runs[11].state = OPEN
    for run in sweep.runs[:10]:
        samples = folder / run.name / "samples"
        samples.mkdir(parents=True)
        (samples.parent / "config.yaml").write_text("job: extension")
        Image.new("RGB", (64, 64), "teal").save(samples / "1700000000__000001000_0.png")
    return write_sweep_page(sweep).read_text(encoding="utf-8")


def watched(folder: Path) -> str:
    """The live page of a run that goes on."""
    run = make_watched_run(folder / "a_rather_long_name_that_has_to_break_somewhere" / "shirt")
    with LiveRun(run, 0, 100, samples=True):
        return live_page(run, "nonce")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    Image.new("RGB", (8, 8), "red").save(folder / "a.png")
    return {
        "parts": parts(folder / "a.png"),
        "watch": watched(folder / "watch"),
        "report": report(folder / "run"),
        "verify": comparison(folder / "verify"),
        "compare": saves_compared(folder),
        "sweep": ranking(folder / "sweep"),
        "lossless": LOSSLESS_PAGE.read_text(encoding="utf-8"),
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_their_window_and_can_be_read(scheme, pages, tmp_path):
    layouts = inspect_pages(pages, scheme, tmp_path / "browser")
    assert set(layouts) == {f"{name} {width}" for name in pages for width in WIDTHS}
    for name, layout in layouts.items():
        assert layout["dark"] == (scheme == "dark"), name
        assert layout["texts"] > 20, name
        assert layout["wrong"] == [], name
