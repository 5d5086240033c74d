"""`verify` end to end on the embedded model: paired runs, verdict, page, an interruption, and what it refuses."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from coat_flux.cli.entry import main
from coat_flux.data.files import find_images
from coat_flux.study import BF16, Settings, Study, Verdict, VerifyError, open_study, verify
from coat_flux.trainers.standalone.session import Session
from coat_flux.trainers.standalone.trainer import COATTrainer
from coat_flux.watch.guard import DeadRunError
from tests.helpers.asserts import assert_bitwise
from tests.helpers.engine_job import engine_job, write_images
from tests.helpers.tiny_flux import make_tiny_flux

STEPS, SEED, PHOTOS = 4, 7, 6
QUIET = {"memory": {"log_memory_stats": False}}
SETTINGS = Settings(steps=STEPS, hold_out=2, every=2, final_sigmas=2)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    root = tmp_path_factory.mktemp("verify")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coat_flux.trainers.standalone.loading.MAX_TEXT_TOKENS", 48)
        images = write_images(root / "images", PHOTOS)
        yield {"model": make_tiny_flux(root / "tiny"), "images": images, "out": root / "out"}


def job_of(place: dict[str, Path], name: str = "mine", **train: Any) -> dict[str, Any]:
    train = {"batch_size": 2, "lr": 3e-3, "disable_sampling": False} | train
    return engine_job(name, **place, coat=QUIET, train=train, save={"save_every": 2})


@pytest.fixture(scope="module")
def verdict(place: dict[str, Path]) -> Verdict:
    """Two seeds of four steps; the first run is interrupted after its third step, and the command started again."""
    stopped = []

    def train_arm(self: Study, *arguments: Any, on_step: Any = None) -> Any:
        def stop(step: int) -> None:
            on_step(step)
            if step == 3 and not stopped:
                stopped.append(step)
                raise KeyboardInterrupt

        return plain(self, *arguments, on_step=stop)

    plain = Study.train_arm
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Study, "train_arm", train_arm)
        with pytest.raises(KeyboardInterrupt):
            verify(job_of(place), seeds=2, settings=SETTINGS)
        return verify(job_of(place), seeds=2, settings=SETTINGS)


def test_runs_are_ordinary_runs_on_the_photos_that_are_left(verdict: Verdict, place: dict[str, Path]) -> None:
    folder = place["out"] / "mine_verify"
    assert [run.name for run in verdict.runs] == ["bf16_seed7", "coat_seed7", "bf16_seed8", "coat_seed8"]
    assert not (place["out"] / "mine").exists()
    for run in verdict.runs:
        job = yaml.safe_load((folder / run.name / "config.yaml").read_text(encoding="utf-8"))
        process = job["config"]["process"][0]
        assert run.lora == folder / run.name / f"{run.name}.safetensors"
        assert len(find_images(Path(process["datasets"][0]["folder_path"]))) == PHOTOS - 2
        assert process["training_seed"] == run.seed
        assert process["train"]["optimizer"] == ("adamw" if run.arm == "bf16" else "coat_fp8_adamw")
        assert len(run.samples) == 1
        assert run.steps_per_s > 0
    assert len(find_images(place["images"])) == PHOTOS


def test_pairs_are_twins_whose_losses_fall(verdict: Verdict) -> None:
    def first_loss(name: str) -> float:
        with (verdict.study.folder / name / "coat" / "metrics.csv").open(encoding="utf-8") as file:
            return float(next(csv.DictReader(file))["loss"])

    assert verdict.runs[0].curve[0][1] == pytest.approx(verdict.runs[1].curve[0][1], rel=0.02)
    assert first_loss("bf16_seed7") == pytest.approx(first_loss("coat_seed7"), rel=0.02)
    assert first_loss("bf16_seed7") != pytest.approx(first_loss("bf16_seed8"), rel=0.02)
    for run in verdict.runs:
        assert [step for step, _ in run.curve] == [0, 2, 4]
        assert run.curve[-1][1] < run.curve[0][1]
        final = verdict.scores.losses[run.name]
        assert final < verdict.scores.base
        # the LoRA was saved in fp16, the run has it in fp32; COAT's own precision is not bf16's
        assert final == pytest.approx(run.final_own, rel=1e-3 if run.arm == "bf16" else 0.02)


def test_an_interrupted_run_ends_as_one_that_was_not(verdict: Verdict, place: dict[str, Path]) -> None:
    study = open_study(job_of(place, "whole"), SETTINGS)
    whole, resumed = study.train_arm("bf16", BF16, SEED), verdict.runs[0]
    assert whole.curve == resumed.curve
    assert whole.final_own == resumed.final_own
    left, right = load_file(whole.lora), load_file(resumed.lora)
    for name in left:
        assert_bitwise(left[name], right[name])


def test_being_observed_changes_nothing(verdict: Verdict, place: dict[str, Path]) -> None:
    raw = verdict.study.prepare("coat", {}, SEED)
    raw["config"]["name"] = "alone"
    raw["config"]["process"][0]["training_folder"] = str(place["out"])
    left, right = load_file(COATTrainer(raw).train()), load_file(verdict.runs[1].lora)
    for name in left:
        assert_bitwise(left[name], right[name])


def test_json_and_page_hold_the_verdict(verdict: Verdict) -> None:
    content = json.loads(verdict.json_path.read_text(encoding="utf-8"))
    assert content["outcome"] == verdict.judgement.outcome
    assert content["sentence"] == verdict.sentence
    assert [run["seed"] for run in content["runs"]] == [7, 7, 8, 8]
    gaps = [b["final_bf16_model"] - a["final_bf16_model"] for a, b in zip(*[iter(content["runs"])] * 2, strict=True)]
    assert content["in_bf16_model"]["gap"] == pytest.approx(sum(gaps) / 2)
    assert len(content["layer_cosines"]) == 40
    for kind in ("weights", "output_change"):
        assert content["cosines"][kind]["bf16_and_coat"] > content["cosines"][kind]["bf16_seeds"]
    assert content["held_out"] == ["1.png", "4.png"]
    page = verdict.page_path.read_text(encoding="utf-8")
    assert page.count("data:image/jpeg") == 4
    assert not re.search(r"(src|href)\s*=\s*[\"']?\s*(https?:)?//", page)


def test_finished_runs_are_not_repeated_and_seeds_can_be_added(
    verdict: Verdict, place: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []

    def sessions(job: Any, *arguments: Any) -> Session:
        trained.append(job.name)
        raise DeadRunError("it died at once")

    before = {run.name: run.lora.stat().st_mtime_ns for run in verdict.runs}
    monkeypatch.setattr("coat_flux.study.compare.score_loras", lambda *_, **options: verdict.scores)
    monkeypatch.setattr("coat_flux.trainers.standalone.trainer.Session", sessions)
    assert verify(job_of(place), seeds=2, settings=SETTINGS).sentence == verdict.sentence
    assert trained == []
    with pytest.raises(DeadRunError, match="at once"):  # of bf16: the config itself cannot be trained
        verify(job_of(place), seeds=3, settings=SETTINGS)
    assert trained == ["bf16_seed9"]
    assert {run.name: run.lora.stat().st_mtime_ns for run in verdict.runs} == before


def test_a_coat_run_that_dies_is_not_lossless(
    verdict: Verdict, place: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Study.train_arm

    def train_arm(self: Study, name: str, arm: Any, seed: int, **keywords: Any) -> Any:
        if (name, seed) == ("coat", 8):
            raise DeadRunError("step 3: every loss is NaN")
        return plain(self, name, arm, seed, **keywords)

    monkeypatch.setattr(Study, "train_arm", train_arm)
    died = verify(job_of(place), seeds=2, settings=SETTINGS)
    assert died.sentence == "not lossless here: the COAT run of seed 8 died: step 3: every loss is NaN"
    assert not died.lossless
    assert [run.name for run in died.runs] == ["bf16_seed7", "coat_seed7", "bf16_seed8"]


def test_another_comparison_in_the_folder_is_refused(verdict: Verdict, place: dict[str, Path]) -> None:
    with pytest.raises(VerifyError, match=r"settings\.steps 4 -> 9"):
        verify(job_of(place), seeds=2, settings=Settings(**{**vars(SETTINGS), "steps": 9}))
    with pytest.raises(VerifyError, match=r"process\[0\]\.train\.lr 0\.003 -> 0\.5"):
        verify(job_of(place, lr=0.5), seeds=2, settings=SETTINGS)


def job_file(folder: Path, job: dict[str, Any]) -> str:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    return str(path)


def test_command_says_the_sentence_and_its_exit_code(
    verdict: Verdict, place: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: Any
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr("coat_flux.study.verify", lambda job, **keywords: asked.update(keywords) or verdict)
    options = ["--seeds", "4", "--steps", "9", "--hold-out", "2", "--every", "3", "--out", "there"]
    code = main(["verify", job_file(tmp_path, job_of(place)), *options])
    assert code == (0 if verdict.lossless else 1)
    assert asked == {"seeds": 4, "settings": Settings(9, 2, None, 3), "folder": Path("there")}
    assert capsys.readouterr().out.splitlines()[-2:] == [f"report: {verdict.page_path}", verdict.sentence]


def test_command_refuses_with_exit_code_2(
    place: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = job_file(tmp_path, job_of(place))
    assert main(["verify", path, "--out", str(tmp_path / "v"), "--seeds", "1"]) == 2
    assert "--seeds 1" in capsys.readouterr().err
