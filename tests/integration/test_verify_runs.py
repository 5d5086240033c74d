"""`verify` end to end on the embedded model: paired runs, verdict, page, an interruption, refusals; and a `sweep`."""

import csv
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from coat_flux.cli.entry import main
from coat_flux.study import BF16, Study, Verdict, VerifyError, open_study, verify
from coat_flux.study.compare import LOSSLESS
from coat_flux.trainers.standalone.session import Session
from coat_flux.trainers.standalone.trainer import COATTrainer
from coat_flux.watch.guard import DeadRunError
from tests.helpers.asserts import assert_all_bitwise
from tests.helpers.engine_job import engine_job

STEPS, SEED, PHOTOS = 3, 7, 5


def job_of(place: dict[str, Path], name: str = "mine", **train: Any) -> dict[str, Any]:
    train = {"batch_size": 2, "lr": 3e-3, "disable_sampling": False} | train
    coat = {"memory": {"log_memory_stats": False}}
    return engine_job(name, **place, coat=coat, train=train, save={"save_every": 2})


def opened(place: dict[str, Path], name: str = "mine", **train: Any) -> Study:
    return open_study(job_of(place, name, **train), steps=STEPS, hold_out=1, every=STEPS)


@pytest.fixture(scope="module")
def verdict(place: dict[str, Path]) -> Verdict:
    """Two seeds of three steps; the first run is interrupted after its second step, and the command started again."""

    def stop(session: Session) -> None:
        if session.step == 2:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coat_flux.study.study.COATTrainer", partial(COATTrainer, observer=stop))
        with pytest.raises(KeyboardInterrupt):
            verify(opened(place), seeds=2)
    return verify(opened(place), seeds=2)


def test_pairs_are_twins_on_the_photos_that_are_left_whose_losses_fall(verdict, place):
    folder = place["out"] / "mine_verify"
    assert [run.name for run in verdict.runs] == ["bf16_seed7", "coat_seed7", "bf16_seed8", "coat_seed8"]
    assert not (place["out"] / "mine").exists()
    assert len(verdict.study.held_out) == 1

    def first_loss(name: str) -> float:
        with (verdict.study.folder / name / "coat" / "metrics.csv").open(encoding="utf-8") as file:
            return float(next(csv.DictReader(file))["loss"])

    assert verdict.runs[0].curve[0][1] == pytest.approx(verdict.runs[1].curve[0][1], rel=0.02)
    assert verdict.runs[0].curve[0][1] == pytest.approx(verdict.base, rel=1e-6)
    assert first_loss("bf16_seed7") == pytest.approx(first_loss("coat_seed7"), rel=0.02)
    assert first_loss("bf16_seed7") != pytest.approx(first_loss("bf16_seed8"), rel=0.02)
    for run in verdict.runs:
        job = yaml.safe_load((folder / run.name / "config.yaml").read_text(encoding="utf-8"))
        assert job["config"]["process"][0]["validation"] == {"hold_out": verdict.study.held_out, "every": STEPS}
        assert run.lora == folder / run.name / f"{run.name}.safetensors"
        assert len(run.samples) == 1
        assert run.steps_per_s > 0
        assert [step for step, _ in run.curve] == [0, STEPS]
        assert run.final_own == run.curve[-1][1] < run.curve[0][1]
        final = verdict.losses[run.name]
        assert final < verdict.base
        # the LoRA was saved in fp16, the run has it in fp32; COAT's own precision is not bf16's
        assert final == pytest.approx(run.final_own, rel=1e-3 if run.arm == "bf16" else 0.02)


def test_an_interrupted_run_ends_as_one_that_was_not(verdict, place):
    whole, resumed = opened(place, "whole").train_arm("bf16", BF16, SEED), verdict.runs[0]
    assert whole.curve == resumed.curve
    assert_all_bitwise(load_file(whole.lora), load_file(resumed.lora))


def test_json_and_page_hold_the_verdict(verdict):
    content = json.loads((verdict.study.folder / "verdict.json").read_text(encoding="utf-8"))
    assert content["outcome"] == verdict.judgement.outcome
    assert content["sentence"] == verdict.judgement.sentence
    runs = content["runs"]
    assert [run["seed"] for run in runs] == [7, 7, 8, 8]
    for model, final in (("in_bf16_model", "final_bf16_model"), ("in_own_precision", "final_own")):
        gaps = [runs[i + 1][final] - runs[i][final] for i in (0, 2)]
        assert content[model]["gap"] == pytest.approx(sum(gaps) / 2)
    assert content["held_out"] == verdict.study.held_out
    page = (verdict.study.folder / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/jpeg") == 4
    assert ">input</td>" in page  # of the precision of FP8 tensors
    assert not re.search(r"(src|href)\s*=\s*[\"']?\s*(https?:)?//", page)


def test_finished_runs_are_not_repeated_and_seeds_can_be_added(verdict, place, monkeypatch):
    trained: list[str] = []

    def sessions(job: Any, *arguments: Any) -> Session:
        trained.append(job.name)
        raise DeadRunError("it died at once")

    before = {run.name: run.lora.stat().st_mtime_ns for run in verdict.runs}
    scores = verdict.base, verdict.losses
    monkeypatch.setattr("coat_flux.study.compare.score_loras", lambda *_: scores)
    monkeypatch.setattr("coat_flux.trainers.standalone.trainer.Session", sessions)
    assert verify(opened(place), seeds=2).judgement == verdict.judgement
    assert trained == []
    with pytest.raises(DeadRunError, match="at once"):  # of bf16: the config itself cannot be trained
        verify(opened(place), seeds=3)
    assert trained == ["bf16_seed9"]
    assert {run.name: run.lora.stat().st_mtime_ns for run in verdict.runs} == before


def test_a_coat_run_that_dies_is_not_lossless(verdict, place, monkeypatch):
    plain = Study.train_arm

    def train_arm(self: Study, name: str, arm: Any, seed: int) -> Any:
        if (name, seed) == ("coat", 8):
            raise DeadRunError("step 3: every loss is NaN")
        return plain(self, name, arm, seed)

    with pytest.raises(VerifyError, match=r"process\[0\]\.train\.lr 0\.003 -> 0\.5"):  # another comparison's folder
        verify(opened(place, lr=0.5), seeds=2)
    monkeypatch.setattr(Study, "train_arm", train_arm)
    died = verify(opened(place), seeds=2)
    assert died.judgement.sentence == "not lossless here: the COAT run of seed 8 died: step 3: every loss is NaN"
    assert [run.name for run in died.runs] == ["bf16_seed7", "coat_seed7", "bf16_seed8"]
    assert died.as_json()["in_bf16_model"] is None


def test_command_says_the_sentence_and_its_exit_code(verdict, place, tmp_path, capsys, monkeypatch):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_of(place)), encoding="utf-8")
    asked: list[Any] = []

    def run(study: Study, *, seeds: int) -> Verdict:
        asked.extend([study.steps, len(study.held_out), study.every, study.folder, seeds])
        return verdict

    monkeypatch.setattr("coat_flux.study.compare.verify", run)
    options = ["--seeds", "4", "--steps", "9", "--hold-out", "2", "--every", "3", "--out", str(tmp_path / "there")]
    code = main(["verify", str(path), *options])
    assert code == (0 if verdict.judgement.outcome == LOSSLESS else 1)
    assert asked == [9, 2, 3, tmp_path / "there", 4]
    report = tmp_path / "there" / "report.html"
    assert capsys.readouterr().out.splitlines()[-2:] == [f"report: {report}", verdict.judgement.sentence]
    monkeypatch.undo()
    assert main(["verify", str(path), "--out", str(tmp_path / "v"), "--seeds", "1"]) == 2
    assert "--seeds 1" in capsys.readouterr().err


def test_a_trial_of_the_real_trainer_is_ranked(place, tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    job = engine_job("mine", **place, train={"steps": 9, "batch_size": 4, "disable_sampling": False})
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    command = ["sweep", str(path), "--set", "train.lr=1e-3", "--set", "train.steps=1"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    folder = place["out"] / "mine_sweep"
    run = folder / "lr0.001_steps1_seed7"
    rows = [line.split(",") for line in (run / "coat" / "validation.csv").read_text().split()]
    assert [row[0] for row in rows] == ["step", "0", "1"]
    assert f"held-out loss {float(rows[-1][1]):.6f} at step 1 (1 of 1 finished)" in printed
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Lowest held-out loss" in page
    assert page.count("data:image/jpeg") == 1
    assert not (place["out"] / "mine").exists()
    assert main(command) == 0
    assert "1 trials, 1 of them finished" in capsys.readouterr().out
