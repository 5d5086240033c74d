"""`coat-flux sweep` without training: what trials are made, what is refused, the ranking, its page, the processes."""

import html
import math
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from coat_flux.base.errors import UserError
from coat_flux.cli.entry import main
from coat_flux.config.findings import ConfigError
from coat_flux.study import sweep as sweeps
from coat_flux.study.study import VerifyError
from coat_flux.study.sweep import FAILED, FINISHED, OPEN, Run, Sweep, Trial, find_axis, rank, sentence_of, tie
from tests.helpers.engine_job import engine_job, write_images
from tests.helpers.tiny_flux import make_tiny_flux


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A job that can be checked: model and photos are there."""
    root = tmp_path_factory.mktemp("sweep")
    images, model = write_images(root / "images", 12), make_tiny_flux(root / "tiny")
    job = engine_job("mine", model=model, images=images, out=root / "out", coat={})
    job["config"]["process"][0]["network"]["linear_alpha"] = 4
    job["config"]["process"][0]["datasets"][0]["default_caption"] = "${SWEEP_SECRET}"
    path = root / "mine.yaml"
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWEEP_SECRET", "hidden")
        yield path


def make(config: Path, *texts: str, seeds: Any = (7,), folder: Path | None = None, **options: Any) -> Sweep:
    axes = [find_axis(text) for text in texts]
    return Sweep(str(config), axes, seeds, folder or config.parent / "sweep", **options)


def chosen(sweep: Sweep) -> list[Run]:
    """The runs of a whole sweep, none trained."""
    study, waiting = sweep._open_study(), []
    while sweep._next(study, waiting) is not None:
        pass
    return sweep.runs


def process_of(run: Run) -> dict[str, Any]:
    return run.job["config"]["process"][0]


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("train.lr=1e-4,3e-4", ("train.lr", [1e-4, 3e-4])),
        ("config.process[0].network.linear = 8, 16,8", ("network.linear", [8, 16])),
        ("datasets[0].buckets=true,false", ("datasets[0].buckets", [True, False])),
        ("coat.activation.exclude=[], ['a.*', 'b']", ("coat.activation.exclude", [[], ["a.*", "b"]])),
    ],
)
def test_a_key_and_its_values(text, axis):
    assert find_axis(text) == axis


def test_trials_are_all_combinations_of_all_seeds(config, tmp_path):
    axes = ("train.lr=1e-4", "network.linear=8,16", "train.lr=1e-4,3e-4")
    by_name = {run.name: process_of(run) for run in chosen(make(config, *axes, seeds=(7, 8), folder=tmp_path))}
    assert set(by_name) == {
        f"lr{lr}_linear{rank}_seed{seed}" for lr in ("0.0001", "0.0003") for rank in (8, 16) for seed in (7, 8)
    }
    process = by_name["lr0.0003_linear16_seed7"]
    assert (process["train"]["lr"], process["network"]) == (3e-4, {"type": "lora", "linear": 16, "linear_alpha": 16})
    assert (process["training_seed"], process["training_folder"]) == (7, str(tmp_path))
    assert process["datasets"][0]["default_caption"] == "${SWEEP_SECRET}"  # what is saved keeps variables
    # measured on the same photos whatever the seed: by name
    held_out = [process["validation"]["hold_out"] for process in by_name.values()]
    assert held_out == [held_out[0]] * 8
    assert [Path(name).suffix for name in held_out[0]] == [".png"]


def test_without_optuna_the_extra_is_named(config, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(UserError, match=r"pip install 'coat-flux\[sweep\]'"):
        make(config, "train.lr=1e-4")


def test_everything_wrong_is_said_at_once_as_check_does(config):
    with pytest.raises(ConfigError) as caught:
        make(config, "train.lrr=1,2", "network.linear=0,8", "coat.optimizer.m1_format=e4m3,e9m9")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    for wrong in ("train.lrr", "network.linear=0", "m1_format='e9m9'"):
        assert any(wrong in line for line in lines)
    assert not (config.parent / "sweep").exists()


@pytest.mark.parametrize(
    ("texts", "rule"),
    [
        *(([text], "KEY=VALUE,VALUE") for text in ("train.lr", "=1", "train..lr=1")),
        (["training_seed=1,2"], "--seeds K"),
        (["validation.hold_out=1,2"], "would not compare"),
        (["datasets[0].resolution=64,128"], "would not compare"),
        (["name=a,b"], "every trial has its own"),
        (["datasets[3].num_repeats=1"], "no such place"),
        (["train=1"], "must be mappings"),
    ],
)
def test_settings_that_make_no_sense(config, texts, rule):
    with pytest.raises(UserError, match=rule):
        make(config, *texts)


def trial_of(lr: float, *curves: list[float], state: str = FINISHED) -> Trial:
    """A trial with a run for each curve of losses after 10, 20, … steps."""
    runs = []
    for seed, losses in enumerate(curves, 7):
        curve = [(10.0 * i, loss) for i, loss in enumerate(losses, 1)]
        runs.append(Run(f"lr{lr:g}_seed{seed}", 20, {}, state, curve, 0.5))
    return Trial({"train.lr": lr}, runs, [])


def test_ranked_by_the_mean_of_the_last_losses():
    trials = [trial_of(1, [0.9, 0.50], [0.9, 0.54]), trial_of(2, [0.9, 0.40], [0.3, 0.44]), trial_of(3, [math.nan])]
    trials += [trial_of(4, [0.1], state=OPEN), trial_of(5, [0.1], state=FAILED)]
    ranked, spread = rank(trials)
    assert [trial.settings["train.lr"] for trial in ranked] == [2, 1, 3, 4, 5]
    assert [trial.loss for trial in ranked[:2]] == pytest.approx([0.42, 0.52])
    # pooled over the seeds of settings: both pairs are 0.04 apart, so s = 0.04 / sqrt(2)
    assert spread == pytest.approx(0.04 / math.sqrt(2))
    # 0.1 > 2 · 0.0283 · sqrt(1/2 + 1/2) = 0.057
    assert [tie(trial, ranked[0], spread) for trial in ranked] == [True, False, False, False, False]
    assert sweeps.lowest(ranked[0]) == (20.0, pytest.approx(0.42))
    sentence, tone = sentence_of(ranked, spread, 7)
    assert ("lr 2" in sentence, "±0.028" in sentence, tone) == (True, True, "plain")  # two are not finished
    assert sentence_of(ranked, spread, 5)[1] == "good"
    near, _ = rank([*trials, trial_of(6, [0.45])])  # 0.03 < 2 · 0.0283 · sqrt(1 + 1/2)
    assert [tie(trial, near[0], spread) for trial in near[:3]] == [True, True, False]


def finish(run: Run, curve: list[tuple[float, float]], folder: Path) -> None:
    run.state, run.curve, run.seconds = FINISHED, curve, 0.25
    (folder / run.name / "samples").mkdir(parents=True)
    (folder / run.name / "config.yaml").touch()


def test_rows_and_page(config, tmp_path):
    sweep = make(config, "train.lr=1e-4,3e-4", "network.linear=8,16", folder=tmp_path)
    first, second, failed, _ = chosen(sweep)
    for run, number in ((first, 0), (second, 1)):
        finish(run, [(i, 1 / (i + 1 + number)) for i in range(9)], tmp_path)
    first.curve.append((9, 0.15))
    failed.state, failed.message = FAILED, "the <loss> was NaN"
    ranked, spread = rank(sweep.trials)
    assert (spread, sentence_of(ranked, spread, 2)[1]) == (None, "open")  # one seed says nothing of luck
    _, *rows = sweeps.ranking_rows(ranked, spread)
    lr, linear = sweep.trials[1].settings.values()
    assert rows[0][:5] == ["1", f"{lr:g}", str(linear), "0.100000", ""]
    assert rows[1][3:] == ["0.150000", "+0.050000", "not known", "0.111111 at step 8", "0.25", "finished"]
    assert [row[-1] for row in rows[2:]] == ["failed", "not finished"]
    text = sweeps.write_sweep_page(sweep).read_text(encoding="utf-8")
    assert "the &lt;loss&gt; was NaN" in text
    assert f"{second.name}.safetensors" in text
    several, spread = rank([trial_of(1, [0.4], [0.5]), trial_of(2, [0.4], [0.41]), trial_of(3, [0.9], [0.9])])
    several[2].runs[1].state = FAILED
    _, *rows = sweeps.ranking_rows(several, spread)
    assert [row[4] for row in rows] == ["", "no", "yes"]  # more than luck
    assert [row[-2:] for row in rows[1:]] == [["2", "finished"], ["1", "failed"]]


def test_the_block_to_copy_is_a_valid_config(config, tmp_path):
    """Also where an entry of a list was varied; what it holds besides stays, variables unexpanded."""
    axes = ("datasets[0].num_repeats=1,3", "coat.optimizer.block_size=64", "network.linear=8")
    sweep = make(config, *axes, folder=tmp_path)
    best = next(run for run in chosen(sweep) if process_of(run)["datasets"][0]["num_repeats"] == 3)
    finish(best, [(0, 0.5)], tmp_path)
    blocks = re.findall(r"<pre>([^<]*)</pre>", sweeps.write_sweep_page(sweep).read_text(encoding="utf-8"))
    block = yaml.safe_load(html.unescape(blocks[-1]))
    job = yaml.safe_load(config.read_text(encoding="utf-8"))
    process = job["config"]["process"][0]
    assert block["datasets"] == [{**process["datasets"][0], "num_repeats": 3}]
    assert block["coat"] == {"optimizer": {"block_size": 64}}
    process["datasets"] = block["datasets"]
    for name in ("coat", "network"):  # alpha goes with the rank
        process[name] |= block[name]
    copied = tmp_path / "copied.yaml"
    copied.write_text(yaml.safe_dump(job), encoding="utf-8")
    assert main(["check", "--host", "standalone", str(copied)]) == 0


TRAINER = '''
"""Stands in for `coat-flux train CONFIG`: resumes, saves when interrupted; an lr of 2e-4 is slow at first."""
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
slow = process["train"]["lr"] == 2e-4 and not table.exists()
rows = table.read_text().splitlines() if table.exists() else ["step,loss", "0,1.0"]
while len(rows) < process["train"]["steps"] + 2:
    time.sleep(1.0 if slow else 0.05)
    rows.append(f"{len(rows) - 1},{process['train']['lr'] / len(rows)}")
    table.write_text("\\n".join(rows) + "\\n")
    (run / "coat" / "metrics.csv").write_text("step,s_per_it\\n1,0.05\\n")
    if asked:
        sys.exit(130)
save_file({"a": numpy.zeros(1)}, run / f"{name}.safetensors", {"training_info": json.dumps({"step": len(rows) - 2})})
'''


@pytest.mark.skipif(os.name != "posix", reason="Windows has no signal for one process alone")
def test_trials_run_fail_and_are_interrupted(config, tmp_path, monkeypatch):
    """Interrupted after a first trial; the next start resumes the one under way, and one fails each time."""
    (tmp_path / "trainer.py").write_text(TRAINER, encoding="utf-8")
    monkeypatch.setattr("coat_flux.study.sweep.CLI", tmp_path / "trainer.py")
    monkeypatch.setattr("coat_flux.study.sweep.POLL_SECONDS", 0.02)
    axes = ("train.lr=1e-4,2e-4,2", "train.steps=4")
    lines: list[str] = []
    sweep = make(config, *axes, folder=tmp_path / "sweep")

    def stop() -> None:
        if {FINISHED, FAILED} <= {run.state for run in sweep.runs}:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        sweep.run(jobs=3, log=lines.append, on_result=stop)
    runs = {trial.settings["train.lr"]: trial.runs[0] for trial in sweep.trials}
    assert [runs[lr].state for lr in (1e-4, 2e-4, 2)] == [FINISHED, OPEN, FAILED]
    assert len(runs[1e-4].curve) == 5
    assert 1 < len(runs[2e-4].curve) < 5  # it was told, and saved
    first = tmp_path / "sweep" / runs[1e-4].name / f"{runs[1e-4].name}.safetensors"
    made = first.stat().st_mtime_ns
    sweep = make(config, *axes, folder=tmp_path / "sweep")
    trials = sweep.run(jobs=2, log=lines.append, on_result=list)
    resumed = {trial.settings["train.lr"]: trial.runs[0] for trial in trials}
    assert [resumed[lr].state for lr in (1e-4, 2e-4, 2)] == [FINISHED, FINISHED, FAILED]
    assert "the run died (exit code 2" in resumed[2].message
    assert resumed[2e-4].loss == pytest.approx(2e-4 / 5)
    assert first.stat().st_mtime_ns == made
    assert any("3 trials, 1 of them finished" in line for line in lines)
    told = {one.params["train.lr"]: one.value for one in sweep._open_study().trials}
    assert told == {"0.0001": pytest.approx(1e-4 / 5), "0.0002": pytest.approx(2e-4 / 5), "2": None}
    other = make(config, "train.lr=1e-4", "train.steps=4", folder=tmp_path / "sweep")
    other.held_out.append("b.png")
    with pytest.raises(VerifyError, match="hold_out"):
        other.run(jobs=1, log=lines.append, on_result=list)
