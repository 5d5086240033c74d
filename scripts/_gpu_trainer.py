"""What `gpu_check.py` measures of the stand-alone trainer: its session and `train_step`, inputs cached.

The transformer has FLUX.1-dev's geometry and random weights, encoders and VAE are those of the embedded mini-FLUX, the
photos are noise. Sampling, validation and saves are left out; guard, EMA and the files of a step are not.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image

from coat_flux.base.interrupts import Interrupts
from coat_flux.base.names import COAT_OPTIMIZER
from coat_flux.bench import worker
from coat_flux.bench.limits import Geometry
from coat_flux.bench.runner import STEP, Configuration
from coat_flux.bench.worker import SEED, TORCHS_PRECISION, Sizes, wait
from coat_flux.blocks.models.flux1 import make_flux_dev_geometry
from coat_flux.config.job import JobConfig
from coat_flux.mini_flux import MINI_FLUX
from coat_flux.plan.job import JobFacts
from coat_flux.plan.predict import predict
from coat_flux.trainers.standalone import session as trainer
from coat_flux.trainers.standalone.progress import RunLog
from coat_flux.trainers.standalone.saving import identity_of
from coat_flux.trainers.standalone.trainer import settle, train_step
from coat_flux.trainers.standalone.workers import Workers
from coat_flux.watch.live import LiveRun
from coat_flux.watch.oom import release_memory
from coat_flux.watch.phases import PhaseTracker, peak_bytes

BATCHES = 2  # of photos: a pass over them ends, and the next begins, while steps are timed


def measure_trainer(
    row: Configuration, geometry: Geometry, sizes: Sizes, device: torch.device, calls: tuple[int, int]
) -> Iterator[dict[str, Any]]:
    """Optimizer steps of the stand-alone trainer, from data to EMA, after those of the warm-up."""
    for resolution, batch in sizes:
        release_memory()
        torch.set_float32_matmul_precision(TORCHS_PRECISION)  # the session changes it, for a run of its own
        with tempfile.TemporaryDirectory() as folder:
            model_sizes = _write_model(Path(folder), geometry)
            job = _job(row, geometry.rank, resolution, batch, device, sum(calls), Path(folder))
            yield {**_measured(job, model_sizes, device, calls), "resolution": resolution, "batch": batch}


def _measured(job: JobConfig, sizes: dict[str, int], device: torch.device, calls: tuple[int, int]) -> dict[str, Any]:
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    predicted = sum(predict(JobFacts(job), total).phases[STEP].values())
    workers = Workers(job.device)
    log, phases = RunLog(job, workers.device, active=True), PhaseTracker(workers.device, None)
    live = LiveRun(job.folder, 0, job.train.steps, samples=False)

    def transformer(_: str, dtype: torch.dtype, *__: Any, trained: Any = None, **___: Any) -> Any:
        model = make_flux_dev_geometry(device, dtype, seed=SEED, **sizes)
        if trained is not None:
            trained(model)
        return model

    try:
        with mock.patch.object(trainer, "load_transformer", transformer):
            session = trainer.Session(job, workers, log, phases, None, identity_of(job, workers.size), live)
        log.open(0)
        with live:
            log.start(0)
            phases.enter(STEP)
            timing = _timed(session, *calls)
    finally:
        phases.close()
        log.close()
        workers.close()
    figures = {"steps_per_second": 1e3 / timing["samples_ms"][0], "predicted_peak_bytes": predicted}
    return {**timing, "what": STEP, "figures": figures}


def _timed(session: trainer.Session, warmup: int, steps: int) -> dict[str, Any]:
    """Time whole steps, as `time_calls` does, also those whose numbers are read late; one sample, their mean."""
    batches, interrupts, device = iter(session.sampler), Interrupts(session.log.info), session.workers.device

    def run(count: int) -> tuple[float, float]:
        started = time.perf_counter()
        for _ in range(count):
            train_step(session, batches, interrupts)
        called = time.perf_counter() - started
        settle(session)
        wait(device)
        return 1e3 * (time.perf_counter() - started), 1e3 * called

    first_ms, _ = run(1)
    run(warmup - 1)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    total_ms, called_ms = run(steps)
    pool = 0 if session.graphs is None else session.graphs.bytes
    timing = {"samples_ms": [total_ms / steps], "first_ms": first_ms, "host_ms": called_ms / steps}
    return {**timing, "peak_bytes": peak_bytes(device) + pool}


def _write_model(folder: Path, geometry: Geometry) -> dict[str, int]:
    """Make a model folder, without the weights of its transformer; return how that differs from FLUX.1-dev's."""
    model = folder / "model"
    shutil.copytree(MINI_FLUX, model, ignore=shutil.ignore_patterns("transformer"))
    tokenizer = model / "tokenizer_2" / "tokenizer_config.json"
    settings = json.loads(tokenizer.read_text(encoding="utf-8"))
    tokenizer.write_text(json.dumps({**settings, "model_max_length": 512}), encoding="utf-8")
    clip, t5 = (json.loads((model / part / "config.json").read_text()) for part in ("text_encoder", "text_encoder_2"))
    sizes = {
        **geometry.sizes(),
        "joint_attention_dim": t5["d_model"],
        "pooled_projection_dim": clip["hidden_size"],
    }
    make_flux_dev_geometry("meta", **sizes).save_config(model / "transformer")
    return sizes


def _job(
    row: Configuration, rank: int, resolution: int, batch: int, device: torch.device, steps: int, folder: Path
) -> JobConfig:
    """The job of a row; its photos are written."""
    draw = np.random.default_rng(SEED)
    (folder / "photos").mkdir()
    for i in range(BATCHES * batch):
        pixels = draw.integers(0, 255, (resolution, resolution, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "photos" / f"{i}.png")
        (folder / "photos" / f"{i}.txt").write_text(f"noise, number {i}", encoding="utf-8")
    cached = {"cache_latents": True, "cache_text_embeddings": True}
    process = {
        "type": "coat_flux_trainer",
        "training_folder": str(folder / "output"),
        "device": str(device),
        "training_seed": SEED,
        "datasets": [{"folder_path": str(folder / "photos"), "resolution": resolution, **cached}],
        "train": {
            "steps": steps,
            "batch_size": batch,
            "lr": 1e-4,
            "dtype": "bf16",
            "optimizer": COAT_OPTIMIZER if row.coat is not None else "adamw",
            "gradient_checkpointing": row.recomputes,
            "ema_config": {"use_ema": not row.full},
            "fused_backward": row.full,
            "disable_sampling": True,
        },
        "model": {"name_or_path": str(folder / "model"), "is_flux": True},
        "coat": {"enabled": False} if row.coat is None else dict(row.coat),
    }
    if not row.full:
        process["network"] = {"type": "lora", "linear": rank}
    return JobConfig.from_dict({"job": "extension", "config": {"name": "bench", "process": [process]}})


if __name__ == "__main__":
    worker.main(partial(worker.run, measure=measure_trainer))
