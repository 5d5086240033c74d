"""Real processes under `accelerate launch` (gloo) against one process with as much accumulation.

Only the first test is for CI; a launch takes half a minute of two cores.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
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

ACCELERATE = ROOT / "configs" / "accelerate"
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "extensions")])


def launch(config: Path, processes: int, how: str = "ddp.yaml") -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS}
    command = [*LAUNCH, str(ACCELERATE / how), "--num_processes", str(processes)]
    command += ["-m", "coat_flux.cli", "train", str(config)]
    return subprocess.Popen(command, env=environment, stdout=PIPE, stderr=STDOUT, text=True, start_new_session=True)


def train(config: Path, processes: int, how: str = "ddp.yaml") -> str:
    process = launch(config, processes, how)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out[-3000:]
    return out


def losses(run: Path) -> list[float]:
    with (run / "coat" / "metrics.csv").open(encoding="utf-8") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("processes")
    model, images = make_tiny_flux(root / "tiny"), write_images(root / "images")
    return {"model": model, "images": images, "out": root / "out"}


def job_of(place: dict[str, Path], name: str, *, steps: int, accumulation: int, **coat: Any) -> dict[str, Any]:
    coat = {"optimizer": {"stochastic_rounding": True}, **coat}
    settings = {"steps": steps, "lr": 1e-2, "gradient_accumulation": accumulation}
    cache = {"cache_latents": False, "cache_latents_to_disk": True}
    return engine_job(name, **place, coat=coat, train=settings, dataset=cache, save={"save_every": 2})


def written(place: dict[str, Path], job: dict[str, Any]) -> Path:
    path = place["out"].parent / f"{job['config']['name']}.yaml"
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    return path


def assert_same(run: Path, other: Path) -> None:
    """Within fp32 rounding; the LoRAs are the two folders' only ones without a step in their names."""
    assert losses(run) == pytest.approx(losses(other), rel=tolerances.PROCESSES_LOSS_RTOL)
    left, right = (load_file(folder / f"{folder.name}.safetensors") for folder in (run, other))
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(
            tensor, right[name], rtol=tolerances.PROCESSES_LORA_RTOL, atol=tolerances.PROCESSES_LORA_ATOL, msg=name
        )


@pytest.fixture(scope="module")
def two(place: dict[str, Path]) -> str:
    """Four steps of two processes, and a copy of their folder."""
    out = train(written(place, job_of(place, "two", steps=4, accumulation=1)), 2)
    shutil.copytree(place["out"] / "two", place["out"].parent / "kept" / "two")
    return out


@pytest.mark.slow
def test_two_processes_train_as_one_with_accumulation_two_which_resumes_them(place: dict[str, Path], two: str) -> None:
    assert two.count("Saved the LoRA to") == 1
    run = place["out"] / "two"
    assert len(list((run / "coat" / "tensorboard").iterdir())) == 1
    one = COATTrainer(job_of(place, "one", steps=6, accumulation=2)).train().parent
    assert losses(run) == pytest.approx(losses(one)[:4], rel=tolerances.PROCESSES_LOSS_RTOL)
    COATTrainer(job_of(place, "two", steps=6, accumulation=2)).train()
    assert_same(run, one)


@pytest.mark.slow
def test_with_fsdp2_two_processes_share_the_frozen_codes_out_and_are_one(place: dict[str, Path]) -> None:
    """With samples and a loss on photos held out, for which all processes run the transformer."""
    job = job_of(place, "shared", steps=4, accumulation=1)
    process = job["config"]["process"][0]
    process["train"]["disable_sampling"], process["validation"] = False, {"hold_out": 1, "every": 2}
    out = train(written(place, job), 2, "fsdp2.yaml")
    assert out.count("FSDP2: each of 2 processes keeps 0.00 GB of the blocks' codes") == 1
    alone = job_of(place, "not_shared", steps=4, accumulation=2)
    alone["config"]["process"][0]["validation"] = process["validation"]
    one = COATTrainer(alone).train().parent
    assert_same(place["out"] / "shared", one)
    tables = [(run / "coat" / "validation.csv").read_text() for run in (place["out"] / "shared", one)]
    assert tables[0] == tables[1]
    assert len(list((place["out"] / "shared" / "samples").glob("*.jpg"))) == 2


@pytest.mark.slow
def test_three_processes_train_as_one_with_accumulation_three(place: dict[str, Path]) -> None:
    train(written(place, job_of(place, "three", steps=4, accumulation=1)), 3)
    one = COATTrainer(job_of(place, "alone", steps=4, accumulation=3)).train().parent
    assert_same(place["out"] / "three", one)


@pytest.mark.slow
def test_three_processes_resume_a_run_of_two(place: dict[str, Path], two: str) -> None:
    """Three photos a step are another run than two, so `allow` must name it; the photos go on where they were."""
    place = {**place, "out": place["out"].parent / "kept"}
    config = written(place, job_of(place, "two", steps=6, accumulation=1))
    process = launch(config, 3)
    out, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert out.count("world_size 2 -> 3") == 1  # by one of the three processes
    train(written(place, job_of(place, "two", steps=6, accumulation=1, resume={"allow": ["world_size"]})), 3)
    assert len(losses(place["out"] / "two")) == 6


@pytest.mark.slow
def test_a_killed_process_ends_all_with_one_message(place: dict[str, Path]) -> None:
    process = launch(written(place, job_of(place, "killed", steps=1000, accumulation=1)), 2)
    run = place["out"] / "killed"
    table = run / "coat" / "metrics.csv"
    until(lambda: table.is_file() and len(losses(run)) >= 3, 120, "three steps")
    (victim,) = [child for child in psutil.Process(process.pid).children() if child.environ().get("RANK") == "1"]
    victim.kill()
    out, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert out.count("error: ") == 1
    assert "error: another process of this run has ended or does not answer, so all of them end" in out
    done, sets = len(losses(run)), sorted((run / "coat").glob("state-*"))
    steps = int(sets[-1].name.partition("-")[2])
    assert steps in (done, done - 1)
    COATTrainer(job_of(place, "killed", steps=steps + 2, accumulation=2)).train()
    one = COATTrainer(job_of(place, "never_killed", steps=steps + 2, accumulation=2)).train().parent
    assert_same(run, one)
