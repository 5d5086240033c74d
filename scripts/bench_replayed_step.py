"""Time the host needs for a step replayed as a CUDA graph: `python scripts/bench_replayed_step.py [--steps N]`.

A run of the stand-alone trainer on a CPU, on the embedded tiny FLUX and the example photos, with EMA and guard, whose
graphs replay nothing. What is left of a step is Python: the batch from its caches, noise, copies into the graph's
inputs, the guard, the log. FLUX.1-dev's text embeddings are larger (4 MB a prompt, read from the disk's cache).
Prints the median of CPU time over the steps that were replayed.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from coat_flux.mini_flux.folder import make_tiny_flux
from coat_flux.trainers.standalone import optim, session, step_graph, trainer
from coat_flux.trainers.standalone.session import Session
from coat_flux.trainers.standalone.trainer import COATTrainer

PHOTOS = Path(__file__).parents[1] / "datasets_example" / "clothing"
CACHES = ("cache_latents", "cache_text_embeddings")
FIRST = 5  # steps before the first replay


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    milliseconds: list[float] = []
    train_step, build = trainer.train_step, optim.build_optimizer

    def timed(*args: Any) -> Any:
        begin = time.process_time()
        asked = train_step(*args)
        milliseconds.append(1e3 * (time.process_time() - begin))
        return asked

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(trainer, "train_step", timed),
        mock.patch.object(optim, "build_optimizer", lambda *args, **kw: build(*args, **{**kw, "capturable": True})),
        mock.patch.object(session, "_capture_obstacle", return_value=""),
        mock.patch.object(step_graph, "capture", return_value=empty_graph()),
        mock.patch.object(step_graph, "_difference", return_value=""),
        suppress(StopIteration),
    ):
        COATTrainer(job(Path(folder), steps), observer=lambda run: stop_at(steps, run)).train()
    found = milliseconds[FIRST:]
    print(f"{len(found)} replayed steps: {statistics.median(found):.2f} ms of the host (lowest {min(found):.2f})")
    return 0


def stop_at(steps: int, run: Session) -> None:
    """End the run before its LoRA, which nothing has trained, would be saved."""
    if run.step == steps:
        raise StopIteration


def empty_graph() -> tuple[Any, torch.Tensor]:
    """A graph without work, and the numbers it leaves: others at each replay, which the guard looks at."""
    numbers = torch.ones(2)
    return SimpleNamespace(pool=lambda: None, replay=lambda: numbers.add_(1e-4)), numbers


def job(folder: Path, steps: int) -> dict[str, Any]:
    """A run without saves, pictures and health steps."""
    photos = shutil.copytree(PHOTOS, folder / "photos")  # caches are written there
    process = {
        "type": "coat_flux_trainer",
        "training_folder": str(folder),
        "device": "cpu",
        "network": {"type": "lora", "linear": 16},
        "datasets": [{"folder_path": str(photos), "resolution": 64, **dict.fromkeys(CACHES, True)}],
        "train": {
            "steps": steps + 1,
            "optimizer": "coat_fp8_adamw",
            "dtype": "bf16",
            "ema_config": {"use_ema": True},
            "disable_sampling": True,
        },
        "model": {"name_or_path": str(make_tiny_flux(folder / "model")), "is_flux": True},
        "coat": {"guard": {"health_every": 10 * steps}, "memory": {"log_memory_stats": False}},
    }
    return {"job": "extension", "config": {"name": "replayed", "process": [process]}}


if __name__ == "__main__":
    raise SystemExit(main())
