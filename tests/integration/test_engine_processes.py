"""Two real processes under `accelerate launch` (gloo) against one process with accumulation 2."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from coat_flux.mini_flux.folder import make_tiny_flux
from coat_flux.trainers.standalone.trainer import COATTrainer
from tests import tolerances
from tests.helpers.engine_job import engine_job, write_images

SCRIPT = "import sys; from coat_flux.trainers.standalone.trainer import COATTrainer; COATTrainer(sys.argv[1]).train()"


def launch(config: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "run_training.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, str(script), str(config)], env=env, capture_output=True, text=True, timeout=300)


def losses(run: Path) -> list[float]:
    with (run / "coat" / "metrics.csv").open(encoding="utf-8") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.mark.slow
def test_two_processes_train_as_one_with_accumulation_two(tmp_path: Path) -> None:
    coat = {"optimizer": {"stochastic_rounding": True}}
    place = {"model": make_tiny_flux(tmp_path / "tiny"), "images": write_images(tmp_path / "images")}
    place["out"] = tmp_path / "out"
    settings = {"steps": 4, "lr": 1e-2}
    config = tmp_path / "two.yaml"
    cache = {"cache_latents": False, "cache_latents_to_disk": True}
    job = engine_job("two", **place, coat=coat, train=settings, dataset=cache, save={"save_every": 2})
    config.write_text(yaml.safe_dump(job), encoding="utf-8")
    done = launch(config, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    one = engine_job("one", **place, coat=coat, train={**settings, "gradient_accumulation": 2})
    final = COATTrainer(one).train()
    two, alone = place["out"] / "two", final.parent
    assert losses(two) == pytest.approx(losses(alone), rel=tolerances.PROCESSES_LOSS_RTOL)
    left, right = load_file(two / "two.safetensors"), load_file(final)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(
            tensor, right[name], rtol=tolerances.PROCESSES_LORA_RTOL, atol=tolerances.PROCESSES_LORA_ATOL, msg=name
        )
    assert done.stdout.count("Saved the LoRA to") == 1
    assert len(list((two / "coat" / "tensorboard").iterdir())) == 1
