"""Several processes over gloo against one process with as much accumulation; one run is started by `accelerate`."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

from coat_flux.trainers.standalone.trainer import COATTrainer
from tests import tolerances
from tests.architecture.sources import ROOT
from tests.helpers.driver import until
from tests.helpers.engine_job import engine_job, write_images
from tests.helpers.tiny_flux import make_tiny_flux
from tests.helpers.together import Together, needs_fork, train_together

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
LAUNCH += [str(ROOT / "configs" / "accelerate" / "ddp.yaml"), "--num_processes", "2", "-m", "coat_flux.cli", "train"]
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "extensions")])


def losses(run: Path) -> list[float]:
    with (run / "coat" / "metrics.csv").open(encoding="utf-8") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    root = tmp_path_factory.mktemp("processes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coat_flux.trainers.standalone.loading.MAX_TEXT_TOKENS", 16)
        yield {"model": make_tiny_flux(root / "tiny"), "images": write_images(root / "images"), "out": root / "out"}


def job_of(place: dict[str, Path], name: str, *, steps: int, accumulation: int, **coat: Any) -> dict[str, Any]:
    coat = {"optimizer": {"stochastic_rounding": True}, **coat}
    settings = {"steps": steps, "lr": 1e-2, "gradient_accumulation": accumulation}
    cache = {"cache_latents": False, "cache_latents_to_disk": True}
    return engine_job(name, **place, coat=coat, train=settings, dataset=cache, save={"save_every": 2})


def assert_same(run: Path, other: Path) -> None:
    """Within fp32 rounding; the LoRAs are the two folders' only ones without a step in their names."""
    assert losses(run) == pytest.approx(losses(other), rel=tolerances.PROCESSES_LOSS_RTOL)
    left, right = (load_file(folder / f"{folder.name}.safetensors") for folder in (run, other))
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(
            tensor, right[name], rtol=tolerances.PROCESSES_LORA_RTOL, atol=tolerances.PROCESSES_LORA_ATOL, msg=name
        )


@needs_fork
def test_one_two_and_three_processes_are_one_run(place: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are one with accumulation two, which resumes them; three resume them where `allow` names it."""
    out = train_together(job_of(place, "two", steps=2, accumulation=1), 2)
    run = place["out"] / "two"
    assert out.count("Saved the LoRA to") == 1
    assert len(list((run / "coat" / "tensorboard").iterdir())) == 1
    three, alone = ({**place, "out": place["out"].with_name(name)} for name in ("three", "alone"))
    for copy in (three, alone):
        shutil.copytree(run, copy["out"] / "two")
    one = COATTrainer(job_of(place, "one", steps=4, accumulation=2)).train().parent
    COATTrainer(job_of(place, "two", steps=4, accumulation=2)).train()
    assert_same(run, one)

    codes, out = Together(job_of(three, "two", steps=4, accumulation=1), 3).end()
    assert 0 not in codes
    assert out.count("ResumeError: ") == out.count("world_size 2 -> 3") == 1  # by one of the three processes
    train_together(job_of(three, "two", steps=4, accumulation=1, resume={"allow": ["world_size"]}), 3)
    monkeypatch.setattr("coat_flux.trainers.standalone.resume.require_same_run", lambda *_: [])
    COATTrainer(job_of(alone, "two", steps=4, accumulation=3)).train()
    assert_same(three["out"] / "two", alone["out"] / "two")


@needs_fork
def test_with_fsdp2_two_processes_share_the_frozen_codes_out_and_are_one(place: dict[str, Path]) -> None:
    """With samples and a loss on photos held out, for which all processes run the transformer."""
    job = job_of(place, "shared", steps=2, accumulation=1)
    process = job["config"]["process"][0]
    process["train"]["disable_sampling"], process["validation"] = False, {"hold_out": 1, "every": 2}
    out = train_together(job, 2, fsdp2=True)
    assert out.count("FSDP2: each of 2 processes keeps 0.00 GB of the blocks' codes") == 1
    alone = job_of(place, "not_shared", steps=2, accumulation=2)
    alone["config"]["process"][0]["validation"] = process["validation"]
    one = COATTrainer(alone).train().parent
    assert_same(place["out"] / "shared", one)
    tables = [(run / "coat" / "validation.csv").read_text() for run in (place["out"] / "shared", one)]
    assert tables[0] == tables[1]
    assert len(list((place["out"] / "shared" / "samples").glob("*.jpg"))) == 2


def test_a_killed_process_ends_all_with_one_message(place: dict[str, Path]) -> None:
    """As users start it: the launcher ends with an error, one process says why, and the run can be resumed."""
    config, run = place["out"].parent / "killed.yaml", place["out"] / "killed"
    config.write_text(yaml.safe_dump(job_of(place, "killed", steps=1000, accumulation=1)), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS}
    streams: dict[str, Any] = {"stdout": PIPE, "stderr": STDOUT, "text": True, "start_new_session": True}
    process = subprocess.Popen([*LAUNCH, str(config)], env=environment, **streams)
    table = run / "coat" / "metrics.csv"
    until(lambda: table.is_file() and len(losses(run)) >= 3, 180, "three steps")
    (victim,) = [child for child in psutil.Process(process.pid).children() if child.environ().get("RANK") == "1"]
    victim.kill()
    out, _ = process.communicate(timeout=90)
    assert process.returncode != 0
    assert out.count("error: ") == 1
    assert "error: another process of this run has ended or does not answer, so all of them end" in out
    done, sets = len(losses(run)), sorted((run / "coat").glob("state-*"))
    steps = int(sets[-1].name.partition("-")[2])
    assert steps in (done, done - 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coat_flux.trainers.standalone.loading.MAX_TEXT_TOKENS", 512)  # as in the processes
        COATTrainer(job_of(place, "killed", steps=steps + 1, accumulation=2)).train()
        one = COATTrainer(job_of(place, "never_killed", steps=steps + 1, accumulation=2)).train().parent
    assert_same(run, one)
