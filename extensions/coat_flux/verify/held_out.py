"""The loss on photos that are not trained on, with noise that is the same for every run.

Photo i of n meets S noise levels, one in each S-th of the range, shifted from photo to photo so that all n · S levels
are different and evenly spread:

    sigma_ij = (j + (i + 1/2) / n) / S,   noise from (i, j)

so a loss is the mean of n · S forwards that every run of every arm repeats exactly, and differences between runs are
free of the luck of the draw. The photos are encoded once, before the first run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..checkpoint.files import replacing
from ..config import JobConfig
from ..data.dataset import Sample, scan
from ..data.loader import LatentDataset, cache_all
from ..engine.flow_matching import noisy_latents, predict_velocity, sample_losses
from ..engine.loading import load_encoders
from ..engine.seeding import Stream, generator_for
from ..engine.session import TORCH_DTYPES

__all__ = ["HeldOut", "Point", "encode_held_out"]

TOKENS_AT_ONCE = 4096  # one picture of 1024 pixels: any card that holds the model runs it without gradients
MOST_AT_ONCE = 32
PARTS = ("latents", "prompt_embeds", "pooled", "mask")


@dataclass(frozen=True)
class Point:
    """One forward: photo i at sigma, with the noise of draw number `index`."""

    photo: int
    sigma: float
    index: int


class HeldOut:
    """Encoded photos and their captions.

    Args:
        photos: for each, latents (C, h, w) fp32, prompt_embeds (T, D) and pooled (P) bf16, and perhaps mask (1, h, w).
        names: of the files.
    """

    def __init__(self, photos: Sequence[Mapping[str, Tensor]], names: Sequence[str]):
        self.photos = [dict(photo) for photo in photos]
        self.names = tuple(names)

    def points(self, sigmas: int) -> list[Point]:
        """All forwards of one loss, `sigmas` noise levels per photo."""
        count = len(self.photos)
        return [
            Point(photo, (level + (photo + 0.5) / count) / sigmas, photo * sigmas + level)
            for photo in range(count)
            for level in range(sigmas)
        ]

    def batches(self, sigmas: int) -> Iterator[list[Point]]:
        """The same forwards, those of one picture size together, as many at once as fit."""
        by_shape: dict[torch.Size, list[Point]] = {}
        for point in self.points(sigmas):
            by_shape.setdefault(self.photos[point.photo]["latents"].shape, []).append(point)
        for shape, points in by_shape.items():
            at_once = min(max(1, TOKENS_AT_ONCE * 4 // (shape[1] * shape[2])), MOST_AT_ONCE)
            for start in range(0, len(points), at_once):
                yield points[start : start + at_once]

    @torch.no_grad()
    def predictions(
        self, transformer: nn.Module, points: Sequence[Point], *, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Run one batch of `batches`.

        Args:
            transformer: in eval mode, on `device`.
            points: B of them.
            dtype: of the transformer's inputs.
            device: where it runs.

        Returns:
            predicted velocities (B, C, h, w) fp32, and their losses (B,) fp32, on `device`.
        """
        photos = [self.photos[point.photo] for point in points]
        latents, embeds, pooled = (torch.stack([photo[part] for photo in photos]).to(device) for part in PARTS[:3])
        mask = torch.stack([photo["mask"] for photo in photos]).to(device) if "mask" in photos[0] else None
        draws = [generator_for(0, Stream.VALIDATION, point.index) for point in points]
        noise = torch.stack([torch.randn(latents.shape[1:], generator=draw) for draw in draws]).to(device)
        sigmas = torch.tensor([point.sigma for point in points], device=device)
        x_t = noisy_latents(latents, noise, sigmas)
        velocity = predict_velocity(transformer, x_t, sigmas, embeds, pooled, dtype=dtype)
        return velocity, sample_losses(velocity, latents, noise, mask=mask)

    def loss(self, transformer: nn.Module, sigmas: int, *, dtype: torch.dtype, device: torch.device) -> float:
        """The mean loss over all forwards, the transformer in eval mode meanwhile; see the module's text."""
        was_training = transformer.training
        transformer.eval()
        try:
            losses = [
                self.predictions(transformer, points, dtype=dtype, device=device)[1] for points in self.batches(sigmas)
            ]
            return torch.cat(losses).double().mean().item()
        finally:
            transformer.train(was_training)

    def save(self, path: Path, key: str) -> None:
        """Write a file that `load` finds again by `key`."""
        tensors = {f"{i}.{part}": tensor for i, photo in enumerate(self.photos) for part, tensor in photo.items()}
        with replacing(path) as temp:
            save_file(tensors, temp, {"key": key, "names": json.dumps(self.names)})

    @classmethod
    def load(cls, path: Path, key: str) -> HeldOut | None:
        """Read a file of `save`; None where there is none or it is of another key."""
        if not path.exists():
            return None
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("key") != key:
                return None
            names = json.loads(metadata["names"])
            photos: list[dict[str, Tensor]] = [{} for _ in names]
            for name in file.keys():  # noqa: SIM118
                number, part = name.split(".")
                photos[int(number)][part] = file.get_tensor(name)
        return cls(photos, names)


def encode_held_out(job: JobConfig, device: torch.device) -> HeldOut:
    """Encode the photos of a job's datasets, each at one of its resolutions in turn.

    Args:
        job: its datasets are the photos held out.
        device: where VAE and text encoders run.

    Raises:
        DatasetError: the photos cannot be used.
        ModelLoadError: the encoders cannot be loaded.
    """
    photos = job.coat.data
    samples = scan(job.datasets, job.trigger_word, background=photos.background, transparency=photos.transparency)
    encoders = load_encoders(job.model.name_or_path, TORCH_DTYPES[job.train.dtype])
    dataset = cache_all(
        chosen := _one_each(samples),
        encoders.vae,
        encoders.text,
        device,
        dataset_configs=job.datasets,
        background=photos.background,
        transparency=photos.transparency,
    )
    if dataset.encoders is not None:
        encoders.text.clip.to(device)
        encoders.text.t5.to(device)
    return HeldOut([_encoded(dataset, sample) for sample in chosen], [sample.image_path.name for sample in chosen])


def _one_each(samples: Sequence[Sample]) -> list[Sample]:
    """Photo i at its (i modulo how many)-th resolution."""
    by_photo: dict[Any, list[Sample]] = {}
    for sample in samples:
        by_photo.setdefault((sample.dataset_index, sample.image_path), []).append(sample)
    return [sizes[i % len(sizes)] for i, sizes in enumerate(by_photo.values())]


def _encoded(dataset: LatentDataset, sample: Sample) -> dict[str, Tensor]:
    embeds, pooled = dataset.text(sample.dataset_index, sample.caption)
    mask = dataset.mask(sample)
    photo = {"latents": dataset.latents(sample), "prompt_embeds": embeds, "pooled": pooled}
    return {name: tensor.contiguous() for name, tensor in (photo if mask is None else photo | {"mask": mask}).items()}
