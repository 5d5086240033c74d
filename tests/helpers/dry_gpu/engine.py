"""A session of the stand-alone engine at FLUX.1-dev's or FLUX.2-dev's geometry, opened as by a run, on the dry GPU.

Stood in for: the encoders and the caches (their tensors have the model's sizes), and the transformer's weights.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from coat_flux.blocks.models.flux1 import make_flux_dev_geometry
from coat_flux.config.job import JobConfig
from coat_flux.data.buckets import Bucket
from coat_flux.data.loader import LatentDataset, Sample
from coat_flux.trainers.standalone import session as sessions
from coat_flux.trainers.standalone.progress import RunLog
from coat_flux.trainers.standalone.session import Session
from coat_flux.trainers.standalone.workers import Workers
from coat_flux.watch.live import LiveRun
from coat_flux.watch.phases import PhaseTracker
from tests.helpers.engine_job import engine_job

from .card import CARD

TEXT_TOKENS = 512
SIZES = {None: (16, 4096, 768), "flux2": (32, 15360, 0)}  # of latents' channels, text embeddings and the pooled ones


class DrySamples(LatentDataset):
    """A data set whose caches hold latents and embeddings of the model's sizes."""

    def __init__(self, job: JobConfig, samples: list[Sample], side: int) -> None:
        self.samples, self.configs, self.device, self.seed = samples, list(job.datasets), CARD, 0
        self.background, self.masked = "white", job.coat.data.transparency == "mask"
        self.vae = self.encoders = None
        channels, text, pooled = SIZES[job.model.arch]
        bf16 = torch.bfloat16
        self._row = {
            "latents": torch.zeros(channels, side // 8, side // 8),
            "prompt_embeds": torch.zeros(TEXT_TOKENS, text, dtype=bf16),
            "pooled": torch.zeros(pooled, dtype=bf16),
        }
        self._has_masks = self._has_reg = False
        if self.masked:
            self._row["mask"] = torch.ones(1, side // 8, side // 8)

    def encoded(self, sample: Sample, prompt: str, *, blur: float = 0.0) -> dict[str, Tensor]:
        return self._row


def dry_session(
    coat: Mapping[str, Any],
    patch: pytest.MonkeyPatch,
    *,
    blocks: tuple[int, int] = (19, 38),
    side: int = 1024,
    train: Mapping[str, Any] | None = None,
    arch: str | None = None,
    full: bool = False,
) -> Session:
    """Open a session of a run at FLUX.1-dev's or FLUX.2-dev's geometry, rank 16, with an EMA.

    `blocks`: double and single; `arch`: "flux2", or None for FLUX.1; `full`: without `network:`.
    """
    folder = Path(tempfile.mkdtemp())
    patch.setenv("XDG_CACHE_HOME", str(folder))  # what the first step measures is kept there
    wanted = {"ema_config": {"use_ema": True}, "gradient_checkpointing": True, **(train or {})}
    if not coat.get("enabled", True):
        wanted = {"optimizer": "adamw", **wanted}
    places = {"model": folder, "images": folder / "photos", "out": folder / "out"}
    raw = engine_job("dry", **places, coat=coat, train=wanted, network={"linear": 16})
    raw["config"]["process"][0]["device"] = "cuda"
    if full:
        del raw["config"]["process"][0]["network"]
    if arch is not None:
        raw["config"]["process"][0]["model"] = {"name_or_path": str(folder), "arch": arch}
    job = JobConfig.from_dict(raw)
    samples = [Sample(folder / f"{i}.png", "a shirt", Bucket(side, side), 0) for i in range(4)]
    encoders = SimpleNamespace(
        vae=None,
        text=SimpleNamespace(models=[nn.Identity(), nn.Identity()]),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )

    def transformer(*_: Any, trained: Callable[[nn.Module], Any] | None = None, **__: Any) -> nn.Module:
        counts = {"num_layers": blocks[0], "num_single_layers": blocks[1]}
        if arch is None:
            model = make_flux_dev_geometry("meta", **counts)
            if trained is not None:
                trained(model)
            return model
        from diffusers import Flux2Transformer2DModel

        with torch.device("meta"):
            model = Flux2Transformer2DModel(**counts)
        return model.to(torch.bfloat16).requires_grad_(False).eval()

    patch.setattr(sessions, "DataReport", lambda *_, **__: SimpleNamespace(usable=lambda: samples))
    patch.setattr(sessions, "load_encoders", lambda *_: encoders)
    patch.setattr(sessions, "load_transformer", transformer)
    patch.setattr(sessions, "_prepare_data", lambda *_: (DrySamples(job, samples, side), None))
    workers = Workers("cpu")
    workers.device = CARD
    log = RunLog(job, CARD, active=False)
    phases, live = PhaseTracker(CARD, None), LiveRun(folder, 0, job.train.steps, samples=False)
    session = Session(job, workers, log, phases, None, {"model": {"fingerprint": "none"}}, live)
    phases.enter("step")
    return session
