"""The run report of folders made by hand: both hosts' files, what is missing, what is damaged, and its size."""

import html
import json
import math
import os
import random
import re
import sqlite3
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from coat_flux.base.table import FIDELITY, FIDELITY_FILE, METRICS
from coat_flux.cli.entry import main
from coat_flux.pages.report import write_report
from coat_flux.pages.run import RunFolder, smoothed
from coat_flux.watch.casts import COLUMNS

CONFIG = """
job: extension
config:
  name: "shirt <b>"
  process:
  - type: coat_flux_trainer
    trigger_word: sks
    network: {type: lora, linear: 16}
    train: {steps: 1000}
    sample: {sample_every: 250, prompts: ["a [trigger] <i>shirt</i>", "another"]}
    model: {name_or_path: some/model}
    coat: {activation: {exclude: ["x_block.*"]}}
"""


@pytest.fixture
def no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts are tested in test_page.py, and are what costs time."""
    monkeypatch.setattr("coat_flux.pages.html.Page.curves", lambda *args, **kwargs: None)


def text_of(page: Path) -> str:
    """What a reader sees, a cell or line at a time."""
    raw = re.sub(r'src="data:[^"]*"|<style>.*?</style>', "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"\s*\n\s*", "\n", html.unescape(re.sub(r"<[^>]+>", "\n", raw)))


def make_run(folder: Path, losses: list[float] | None = None) -> Path:
    """Config, metrics and an empty coat folder; four steps unless there are other losses."""
    losses = [1 / step for step in range(1, 5)] if losses is None else losses
    (folder / "coat").mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    rows = [f"{step},0,{loss},0.0001,0.5,0.25,7.5,{step // 3}" for step, loss in enumerate(losses, 1)]
    (folder / "coat" / "metrics.csv").write_text("\n".join([",".join(METRICS), *rows]) + "\n")
    return folder


def test_summary_curves_and_what_is_missing(tmp_path):
    page = write_report(make_run(tmp_path / "run"))
    assert page == tmp_path / "run" / "coat" / "report.html"
    text = text_of(page)
    for shown in ("shirt <b>", "4 of 1000", "0.250 s", "7.50 GB", "rank 16", "some/model", "1.00000 → 0.25000"):
        assert f"\n{shown}\n" in text, shown
    for missing in ("validation loss", "samples", "coat/memory.json", "FP8 cast", "table", "coat/versions.json"):
        assert f"No {missing}" in text, missing
    raw = page.read_text()
    assert raw.count('<figure class="chart"') == 6  # loss, s/it, lr, norm, peak memory, skipped updates
    assert "<b>" not in raw
    assert not re.findall(r'(?:src|href)="(?!data:)', raw)


@pytest.mark.usefixtures("no_drawing")
@pytest.mark.parametrize(
    ("losses", "validation", "saved", "tone", "verdict"),
    [
        ([], [], "", "plain", "No step"),
        ([0.5, 0.4], [], "", "open", "step 2 of 1000; this run does not say whether"),
        ([0.5, 0.4], [], "shirt <b>", "good", "the loss fell: 0.5 → 0.4."),
        ([0.5, 0.4], [], "torn", "bad", "newest save, torn.safetensors, cannot be read"),
        ([0.5] * 1000, [(0, 0.5), (1000, 0.5)], "", "open", "the validation loss did not fall"),
        ([0.5] * 1000, [(0, 0.5), (400, 0.3), (1000, 0.35)], "", "open", "lowest after step 400"),
        ([0.5, 0.4, math.nan, math.nan], [], "", "bad", "since step 3"),
    ],
)
def test_the_run_in_one_sentence(tmp_path, losses, validation, saved, tone, verdict):
    run = make_run(tmp_path / "run", losses)
    if validation:
        (run / "coat" / "validation.csv").write_text("step,loss\n" + "".join(f"{s},{loss}\n" for s, loss in validation))
    if saved == "torn":
        (run / "torn.safetensors").write_bytes(b"\x10")
    elif saved:
        save_file({"a": torch.zeros(1)}, run / f"{saved}.safetensors")
    page = html.unescape(write_report(run).read_text())
    assert re.search(rf'<p class="verdict {tone}" role="status">[^<]*{re.escape(verdict)}', page)
    assert page.index('<p class="verdict') < page.index("<table") < page.index("<h2>Loss</h2>") < page.index("<details")


def test_what_the_files_of_a_run_hold_is_shown(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "config.yaml").write_text(CONFIG + "    validation: {hold_out: 4, fidelity: true}\n")
    (run / "coat" / "validation.csv").write_text("step,loss\n0,0.5\n100,0.4\n200,0.4\n")
    rows = ["0,9,20,0.2,2,5,0.1", "100,5.25,15,0.4,2,5,0.1", "200,6,12,0.3,2,5,0.1"]  # step 0 is without the LoRA
    (run / FIDELITY_FILE).write_text("\n".join([",".join(FIDELITY), *rows]) + "\n")
    (run / "samples").mkdir()
    for step in range(0, 1001, 50):
        picture = Image.frombytes("RGB", (32, 32), random.Random(step).randbytes(32 * 32 * 3))
        for number in range(2):
            picture.save(run / "samples" / f"1700000000000__{step:09d}_{number}.png")
    metadata = {"coat.asked.gemms": "FP8", "coat.got.gemms": "bf16", "coat.why.gemms": "this card"}
    metadata["training_info"] = json.dumps({"step": 500, "epoch": 1})
    save_file({"a": torch.zeros(250_000)}, run / "shirt.safetensors", metadata=metadata)
    state = run / "coat" / "state-000000004" / "aitk"
    state.mkdir(parents=True)
    precision = {"minimum": 20.0, "left_out": ["blocks.1.proj"]}
    (state / "state.json").write_text(json.dumps({"guard": {"updates": 3, "skipped": 1, "precision": precision}}))
    rows = [
        f"{step},blocks.{block}.proj,{kind},{31 if block != 1 else 4},0.25,0,100"
        for step in (2, 100)
        for block in range(4)
        for kind in ("input", "gradient")
    ]
    (run / "coat" / "precision.csv").write_text("\n".join([",".join(COLUMNS), *rows]) + "\n")
    text = text_of(write_report(run, tmp_path / "out" / "r.html"))
    for shown in (
        *("best: step 100, 5.25", "best: step 200, 0.30", "the VAE alone"),
        *("\na sks <i>shirt</i>\n", "26 more are in samples/."),
        f"\n{run.resolve() / 'shirt.safetensors'}\n",
        f"pipe.load_lora_weights('{run.resolve()}', weight_name='shirt.safetensors')",
        "trigger word in your prompts: sks.",
        "\ngemms\nFP8\nbf16\nthis card\n",
        "\nshirt.safetensors\n1.00 MB\n500\n",
        "min_sqnr_db: 20\nblocks.1.proj",
        "updates done at the newest save\n3\n",
        "exclude:\n- x_block.*\n- blocks.1.proj\n",
        "\nlayer\ninput\ngradient\nblocks.0.proj\n31.0\n31.0\nblocks.1.proj\n4.0\n4.0\n",
        "25.00%",
    ):
        assert shown in text, shown
    steps = [int(step) for step in re.findall(r"\nstep (\d+)(?=\n)", text)]
    assert steps == [0, 150, 300, 450, 550, 700, 850, 1000] * 2


@pytest.mark.usefixtures("no_drawing")
def test_a_whole_model_and_how_to_load_it(tmp_path):
    run = make_run(tmp_path / "run")
    for name, step in (("shirt <b>_000000500", 500), ("shirt <b>", 1000)):
        file = run / name / "transformer" / "model.safetensors"
        file.parent.mkdir(parents=True)
        save_file({"a": torch.zeros(500_000)}, file, metadata={"training_info": json.dumps({"step": step})})
        os.utime(file, (step, step))
    text = text_of(write_report(run))
    assert f"FluxTransformer2DModel.from_pretrained({str(run.resolve() / 'shirt <b>')!r}" in text
    assert "\nshirt <b>_000000500\n2.00 MB\n500\n" in text
    assert [(save.name, save.step) for save in RunFolder(run).saves][-1] == ("shirt <b>", 1000)


@pytest.mark.usefixtures("no_drawing")
@pytest.mark.parametrize(
    ("file", "content", "shown"),
    [
        ("coat/metrics.csv", "step,loss\n1,x\n", "Loss: cannot be shown"),
        ("coat/precision.csv", "step\n1\n", "Precision of FP8: cannot be shown"),
        ("coat/memory.json", "{}", "Memory: cannot be shown"),
        ("coat/state-000000001/state.json", "[1]", "Guard: cannot be shown"),
        ("config.yaml", ": - :", ": - :"),
        ("samples/1__000000001_0.jpg", "no picture", "cannot be read"),
    ],
)
def test_a_damaged_file_costs_no_more_than_its_section(tmp_path, file, content, shown):
    run = make_run(tmp_path / "run")
    path = run / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    text = text_of(write_report(run))
    assert shown in text
    assert text.index("\nSamples\n") < text.index("\nSpeed and learning rate\n") < text.index("\nConfig\n")


@pytest.mark.usefixtures("no_drawing")
def test_log_of_an_ai_toolkit_run_without_coat(tmp_path):
    run = tmp_path / "theirs"
    run.mkdir()
    (run / "config.yaml").write_text(CONFIG)
    with sqlite3.connect(run / "loss_log.db") as log:
        log.execute("CREATE TABLE steps (step INTEGER PRIMARY KEY, wall_time REAL NOT NULL)")
        log.execute("CREATE TABLE metrics (step INTEGER, key TEXT, value_real REAL, value_text TEXT)")
        log.executemany("INSERT INTO steps VALUES (?, ?)", [(0, 10.0), (1, 10.5), (3, 12.5)])
        rows = [(0, "loss/loss", 2.0), (1, "loss/loss", 1.0), (1, "learning_rate", 1e-4), (1, "other", 3.0)]
        log.executemany("INSERT INTO metrics VALUES (?, ?, ?, NULL)", rows)
    log.close()
    assert RunFolder(run).metrics == {
        "loss": [(0.0, 2.0), (1.0, 1.0)],
        "lr": [(1.0, 1e-4)],
        "s_per_it": [(1.0, 0.5), (3.0, 1.0)],
    }
    assert "1 of 1000" in text_of(write_report(run))
    (run / "loss_log.db").write_bytes(b"no database" * 100)
    assert "loss_log.db: file is not a database" in text_of(write_report(run))


def test_smoothing_keeps_a_constant_and_passes_over_gaps():
    curve = [(float(step), math.nan if step % 3 == 0 else 2.0) for step in range(1, 400)]
    assert all(value == pytest.approx(2.0) for _, value in smoothed(curve))
    assert smoothed([(1.0, 5.0), (2.0, 1.0)]) == [(1.0, 5.0), (2.0, 1.0)]  # a short run is shown as it is
    assert smoothed([(step, float(step)) for step in range(200)])[-1][1] == pytest.approx(195.9, abs=1)


@pytest.mark.usefixtures("no_drawing")
def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    run = make_run(tmp_path / "out" / "shirt")
    (tmp_path / "out" / "config.yaml").write_text(CONFIG)  # of no run: nothing of one is next to it
    (tmp_path / "file").write_text("")
    for arguments, words in (
        ([tmp_path / "out"], "the runs shirt"),
        ([tmp_path / "nowhere"], "is not a folder"),
        ([run, "--out", tmp_path / "file" / "page.html"], "--out"),
    ):
        assert main(["report", *map(str, arguments)]) == 2
        assert words in capsys.readouterr().err
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'page.html'}\n"
