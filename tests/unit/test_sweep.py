"""`coat-flux sweep` without training: what trials are made, what is refused, the ranking, its page, the processes."""

from __future__ import annotations

import json
import math
import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from coat_flux.config.findings import ConfigError
from coat_flux.config.job import JobConfig
from coat_flux.mini_flux.folder import make_tiny_flux
from coat_flux.study import sweep
from coat_flux.study.grid import Axis, SweepError, Trial, find_axis, make_trials
from coat_flux.study.ranking import FAILED, FINISHED, OPEN, Result, rank, spread_of
from coat_flux.study.runs import VerifyError
from coat_flux.study.sweep import read_trial, run_trials
from coat_flux.study.sweep_page import ranking_rows, sentence_of, write_sweep_page
from tests.helpers.engine_job import engine_job, write_images
from tests.helpers.locks import held_by_another_process

COAT = {"memory": {"log_memory_stats": False}}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that can be checked: model and photos are there."""
    root = tmp_path_factory.mktemp("sweep")
    images, model = write_images(root / "images", 12), make_tiny_flux(root / "tiny")
    job = engine_job("mine", model=model, images=images, out=root / "out", coat=COAT)
    job["config"]["process"][0]["network"]["linear_alpha"] = 4
    job["config"]["process"][0]["datasets"][0]["default_caption"] = "${SWEEP_SECRET}"
    path = root / "mine.yaml"
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWEEP_SECRET", "hidden")


def make(config: Path, *texts: str, seeds: Any = (7,), **options: Any) -> list[Trial]:
    return make_trials(str(config), [find_axis(text) for text in texts], seeds, config.parent / "sweep", **options)


def process_of(trial: Trial) -> dict[str, Any]:
    return trial.job["config"]["process"][0]


# -- the grid ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("train.lr=1e-4,3e-4", Axis("train.lr", (1e-4, 3e-4))),
        ("config.process[0].network.linear = 8, 16,8", Axis("network.linear", (8, 16))),
        ("datasets[0].buckets=true,false", Axis("datasets[0].buckets", (True, False))),
        ("coat.activation.exclude=[], ['a.*', 'b']", Axis("coat.activation.exclude", ([], ["a.*", "b"]))),
    ],
)
def test_a_key_and_its_values(text: str, axis: Axis) -> None:
    assert find_axis(text) == axis


@pytest.mark.parametrize("text", ["train.lr", "train.lr=", "=1", "train..lr=1", "a b=1"])
def test_something_else_is_refused(text: str) -> None:
    with pytest.raises(SweepError, match="must be KEY=VALUE,VALUE"):
        find_axis(text)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("training_seed=1,2", "--seeds K"),
        ("validation.hold_out=1,2", "would not compare"),
        ("datasets[0].resolution=64,128", "would not compare"),
        ("name=a,b", "every trial has its own"),
    ],
)
def test_what_the_sweep_decides_is_refused(text: str, rule: str) -> None:
    with pytest.raises(SweepError, match=rule):
        find_axis(text)


def test_trials_are_all_combinations_by_seed(config: Path) -> None:
    trials = make(config, "train.lr=1e-4,3e-4", "network.linear=8,16", seeds=(7, 8))
    assert [trial.name for trial in trials[:5]] == [
        "lr0.0001_linear8_seed7",
        "lr0.0001_linear16_seed7",
        "lr0.0003_linear8_seed7",
        "lr0.0003_linear16_seed7",
        "lr0.0001_linear8_seed8",
    ]
    assert len(trials) == 8
    process = process_of(trials[3])
    assert (process["train"]["lr"], process["network"]) == (3e-4, {"type": "lora", "linear": 16, "linear_alpha": 16})
    assert (process["training_seed"], process["training_folder"]) == (7, str(config.parent / "sweep"))
    # measured on the same photos whatever the seed: by name
    held_out = [process_of(trial)["validation"]["hold_out"] for trial in trials]
    assert held_out == [held_out[0]] * 8
    assert len(held_out[0]) == 1
    assert held_out[0][0].endswith(".png")


def test_what_is_saved_keeps_variables(config: Path) -> None:
    (trial,) = make(config, "train.lr=1e-4")
    assert process_of(trial)["datasets"][0]["default_caption"] == "hidden"
    assert trial.written["config"]["process"][0]["datasets"][0]["default_caption"] == "${SWEEP_SECRET}"
    assert trial.written["config"]["process"][0]["train"]["lr"] == 1e-4


def test_random_takes_some_and_more_of_them_later(config: Path) -> None:
    axes = ("train.lr=1e-4,2e-4,3e-4", "network.linear=4,8,16")
    names = [[trial.name for trial in make(config, *axes, most=most)] for most in (2, 5, 99)]
    assert [len(found) for found in names] == [2, 5, 9]
    assert names[1][:2] == names[0]
    assert names[2][:5] == names[1]
    assert sorted(names[2]) != names[2]


def test_everything_wrong_is_said_at_once_as_check_does(config: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        make(config, "train.lrr=1,2", "network.linear=0,8", "coat.optimizer.m1_format=e4m3,e9m9")
    lines = caught.value.findings
    assert len(lines) == 3
    assert any("train.lrr: unknown key; did you mean 'lr'?" in line for line in lines)
    assert any("network.linear=0: must be a whole number" in line for line in lines)
    assert any("m1_format='e9m9'" in line for line in lines)


@pytest.mark.parametrize(
    ("texts", "rule"),
    [
        (("train.lr=1", "train.lr=2"), "given twice"),
        (("train.lr.x=1",), "is not inside a block"),
        (("datasets[3].num_repeats=1",), r"no entry \[3\]"),
        (("coat.activation.exclude=['a'],[a.]",), "2 trials would have the folder"),
    ],
)
def test_settings_that_make_no_sense(config: Path, texts: tuple[str, ...], rule: str) -> None:
    with pytest.raises(SweepError, match=rule):
        make(config, *texts)


# -- the ranking -------------------------------------------------------------------------------------------------------


def result_of(lr: float, seed: int, losses: list[float], state: str = FINISHED) -> Result:
    trial = Trial(f"lr{lr:g}_seed{seed}", {"train.lr": lr}, seed, {}, {})
    return Result(trial, state, [(10.0 * i, loss) for i, loss in enumerate(losses, 1)], 0.5, "boom" * (state == FAILED))


def test_ranked_by_the_mean_of_the_last_losses() -> None:
    results = [result_of(1, 7, [0.9, 0.50]), result_of(1, 8, [0.9, 0.54])]
    results += [result_of(2, 7, [0.9, 0.40]), result_of(2, 8, [0.3, 0.44]), result_of(3, 7, [math.nan])]
    results += [result_of(4, 7, [0.1], OPEN), result_of(5, 7, [0.1], FAILED)]
    places, noise = rank(results)
    assert [place.settings["train.lr"] for place in places] == [2, 1, 3, 4, 5]
    assert [place.loss for place in places[:2]] == pytest.approx([0.42, 0.52])
    assert places[1].gap == pytest.approx(0.1)
    # pooled over the seeds of settings: both pairs are 0.04 apart, so s = 0.04 / sqrt(2)
    assert noise.by_seeds
    assert noise.spread == pytest.approx(0.04 / math.sqrt(2))
    # 0.1 > 2 · 0.0283 · sqrt(1/2 + 1/2) = 0.057
    assert [place.tied for place in places] == [True, False, False, False, False]
    assert places[0].lowest == (20.0, pytest.approx(0.42))
    assert "lr 2; no other is as good" in sentence_of(places, noise)[0]


def test_one_seed_is_judged_by_what_its_curve_jumps() -> None:
    """On a straight line with noise ±d in turn the second differences are 4 d, so s = 4 d / sqrt(6)."""
    line = [1 - 0.01 * i + (0.003 if i % 2 else -0.003) for i in range(20)]
    noise = spread_of([result_of(1, 7, line)])
    assert not noise.by_seeds
    assert noise.spread == pytest.approx(4 * 0.003 / math.sqrt(6))
    assert spread_of([result_of(1, 7, [1 - 0.01 * i for i in range(20)])]).spread == pytest.approx(0, abs=1e-12)
    assert spread_of([result_of(1, 7, [0.5, 0.4])]).spread is None
    near, far = [loss - 0.01 for loss in line], [loss + 0.1 for loss in line]
    places, _ = rank([result_of(1, 7, line), result_of(2, 7, near), result_of(3, 7, far)])
    assert [(place.settings["train.lr"], place.tied) for place in places] == [(2, True), (1, True), (3, False)]


def test_rows_and_page(config: Path, tmp_path: Path) -> None:
    trials = make(config, "train.lr=1e-4,3e-4", "network.linear=8,16")
    curves = [[(i, 1 / (i + 1 + number)) for i in range(9)] for number in range(2)]
    results = [Result(trial, FINISHED, curve, 0.25) for trial, curve in zip(trials, curves, strict=False)]
    results += [Result(trials[2], FAILED, message="the <loss> was NaN"), Result(trials[3], OPEN)]
    places, noise = rank(results)
    header, *rows = ranking_rows(places, noise)
    assert header[:4] == ["place", "lr", "linear", "held-out loss"]
    assert rows[0][:5] == ["1", "0.0001", "16", "0.100000", ""]
    assert rows[1][:5] == ["2", "0.0001", "8", "0.111111", "+0.011111"]
    assert [row[5] for row in rows] == ["", "?", "", ""]  # one seed cannot tell
    assert [row[-1] for row in rows] == ["finished", "finished", "failed", "not finished"]
    text = write_sweep_page(tmp_path / "report.html", results, JobConfig.from_file(config)).read_text(encoding="utf-8")
    assert "Lowest held-out loss so far: 0.100000 with lr 0.0001, linear 16" in text
    assert "2 of 4 trials are not finished" in text
    assert "the &lt;loss&gt; was NaN" in text
    assert "lr: 0.0001\nnetwork:\n  linear: 16" in text
    assert "lr0.0001_linear16_seed7.safetensors" in text
    nothing = [Result(trial, OPEN) for trial in trials]
    assert sentence_of(*rank(nothing))[0] == "No trial is finished yet; 4 of 4 trials are not finished."


# -- the processes -----------------------------------------------------------------------------------------------------

TRAINER = '''
"""Stands in for `coat-flux train CONFIG`: a step in 0.05 or 0.2 s, resumes, saves when interrupted."""
import json, signal, sys, time
from pathlib import Path
import numpy, yaml
from safetensors.numpy import save_file

job = yaml.safe_load(Path(sys.argv[2]).read_text())
process, name = job["config"]["process"][0], job["config"]["name"]
run = Path(process["training_folder"]) / name
(run / "coat").mkdir(parents=True, exist_ok=True)
(run / "config.yaml").write_text(yaml.safe_dump(job))
if process["train"]["lr"] > 1:
    print("error: the run died")
    sys.exit(2)
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append(1))
table = run / "coat" / "validation.csv"
rows = table.read_text().splitlines() if table.exists() else ["step,loss", "0,1.0"]
while len(rows) < process["train"]["steps"] + 2:
    time.sleep(0.05 if process["train"]["lr"] < 2e-4 else 0.2)
    rows.append(f"{len(rows) - 1},{process['train']['lr'] / len(rows)}")
    table.write_text("\\n".join(rows) + "\\n")
    (run / "coat" / "metrics.csv").write_text("step,s_per_it\\n1,0.05\\n")
    if asked:
        sys.exit(130)
save_file({"a": numpy.zeros(1)}, run / f"{name}.safetensors", {"training_info": json.dumps({"step": len(rows) - 2})})
'''


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER, encoding="utf-8")
    monkeypatch.setattr(sweep, "CLI", tmp_path / "trainer.py")
    monkeypatch.setattr(sweep, "POLL_SECONDS", 0.02)


@pytest.mark.skipif(os.name != "posix", reason="Windows has no signal for one process alone")
def test_trials_run_fail_and_are_interrupted(config: Path, tmp_path: Path, trainer: None) -> None:
    """Interrupted after the first trial, during the second; the next start resumes that, and the third fails."""
    axes = [find_axis("train.lr=1e-4,2e-4,2"), find_axis("train.steps=4")]
    trials = make_trials(str(config), axes, (7,), tmp_path / "sweep")
    lines: list[str] = []

    def note(results: list[Result]) -> None:
        if any(result.state == FINISHED for result in results):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_trials(trials, tmp_path / "sweep", jobs=2, log=lines.append, on_result=note)
    found = [read_trial(trial, tmp_path / "sweep") for trial in trials]
    assert [result.state for result in found] == [FINISHED, OPEN, OPEN]
    assert [len(result.curve) for result in found] == [5, len(found[1].curve), 0]
    assert 1 < len(found[1].curve) < 5  # it was told, and saved
    first = tmp_path / "sweep" / trials[0].name / f"{trials[0].name}.safetensors"
    made = first.stat().st_mtime_ns
    results = run_trials(trials, tmp_path / "sweep", jobs=2, log=lines.append, on_result=lambda _: None)
    assert [result.state for result in results] == [FINISHED, FINISHED, FAILED]
    assert "the run died (exit code 2" in results[2].message
    assert results[1].loss == pytest.approx(2e-4 / 5)
    assert first.stat().st_mtime_ns == made
    assert any("3 trials, 1 of them finished" in line for line in lines)
    others = make_trials(str(config), [*axes[:1], find_axis("train.steps=4")], (7,), tmp_path / "sweep")
    others[0].written["config"]["process"][0]["train"]["batch_size"] = 3
    with pytest.raises(VerifyError, match=r"of a run with other settings.*batch_size"):
        run_trials(others, tmp_path / "sweep", jobs=1, log=lines.append, on_result=lambda _: None)


def test_a_trial_of_full_fine_tuning_is_finished_by_its_model(config: Path, tmp_path: Path) -> None:
    (trial,) = make_trials(str(config), [find_axis("train.steps=4")], (7,), tmp_path / "sweep")
    folder = tmp_path / "sweep" / trial.name / trial.name / "transformer"
    folder.mkdir(parents=True)
    (folder.parents[1] / "coat").mkdir()
    (folder.parents[1] / "config.yaml").write_text("job: extension\n", encoding="utf-8")
    for step, state in ((2, OPEN), (4, FINISHED)):
        info = {"training_info": json.dumps({"step": step})}
        save_file({"a": torch.zeros(1)}, folder / "model.safetensors", metadata=info)
        assert read_trial(trial, tmp_path / "sweep").state == state


def test_a_trial_that_outlived_its_sweep_is_waited_for(config: Path, tmp_path: Path, trainer: None) -> None:
    (trial,) = make_trials(str(config), [find_axis("train.lr=1e-4")], (7,), tmp_path / "sweep")
    lines: list[str] = []
    with ExitStack() as other:

        def log(line: str) -> None:
            lines.append(line)
            if "earlier sweep" in line:
                other.close()

        other.enter_context(held_by_another_process(tmp_path / "sweep" / trial.name))
        (result,) = run_trials([trial], tmp_path / "sweep", jobs=1, log=log, on_result=lambda _: None)
    assert result.state == FINISHED
    told = [line.partition(": ")[2].partition(" (")[0] for line in lines[1:]]
    assert told == [
        "still trains in a process of an earlier sweep, which is waited for",
        "started",
        f"finished, held-out loss {result.loss:.6f} at step 4",
    ]
