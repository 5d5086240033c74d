"""The fixed-noise loss of the stand-alone trainer: the one number of a short run that is comparable between steps.

The training loss of single steps is mostly the luck of the drawn sigma. Here the same photos get the same noise each
time: those of `validation.hold_out`, or up to 8 of those trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...config.job import JobConfig
from ...data.buckets import Sample
from ...data.hold_out import FixedNoise, choose_hold_out, levels_for
from ...data.loader import LatentDataset
from .flow_matching import noisy_latents, predict_velocity, sample_losses

__all__ = ["Validation", "encoded", "held_out_of", "loss_of", "one_each", "predictions"]

TRAINED_PHOTOS = 8


def held_out_of(job: JobConfig) -> tuple[tuple[Path, ...], ...]:
    """The held-out photos of each dataset: `choose_hold_out`."""
    return choose_hold_out([entry.folder_path for entry in job.datasets], job.validation.hold_out, job.training_seed)


def one_each(samples: Sequence[Sample]) -> list[Sample]:
    """Each photo once, not mirrored, photo i at its (i modulo how many)-th resolution."""
    by_photo: dict[Path, list[Sample]] = {}
    for sample in dict.fromkeys(sample for sample in samples if not sample.flip):
        by_photo.setdefault(sample.image_path.resolve(), []).append(sample)
    return [sizes[i % len(sizes)] for i, sizes in enumerate(by_photo.values())]


def encoded(dataset: LatentDataset, sample: Sample) -> dict[str, Tensor]:
    """A photo for `predictions`: latents (C, h, w) fp32, prompt_embeds (T, D), pooled (P), perhaps mask."""
    embeds, pooled = dataset.text(sample.dataset_index, sample.caption)
    photo = {"latents": dataset.latents(sample), "prompt_embeds": embeds, "pooled": pooled}
    mask = dataset.mask(sample)
    if mask is not None:
        photo["mask"] = mask
    return {name: tensor.contiguous() for name, tensor in photo.items()}


class Validation:
    """The validation loss of a run: on `held_out` samples of any sizes, or else on `trained` ones."""

    def __init__(self, dataset: LatentDataset, held_out: Sequence[Sample], trained: Sequence[Sample]):
        self.held_out = bool(held_out)
        if held_out:
            samples = one_each(held_out)
            self._levels = levels_for(len(samples))
        else:
            count, n = len(trained), TRAINED_PHOTOS
            samples = [trained[i * count // n if count >= n else i % count] for i in range(n)]
            self._levels = 1
        self._noise = FixedNoise([encoded(dataset, sample) for sample in samples], [s.image_path.name for s in samples])

    def loss(self, transformer: nn.Module, *, dtype: torch.dtype, device: torch.device, at_once: int) -> float:
        """The mean loss, leaving random generators alone; `at_once` is the batch size."""
        return loss_of(transformer, self._noise, self._levels, lambda _: at_once, dtype=dtype, device=device)


def loss_of(
    transformer: nn.Module,
    noise: FixedNoise,
    levels: int,
    at_once: Callable[[torch.Size], int],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """`FixedNoise.mean_loss` of a transformer, in eval mode meanwhile."""

    def losses(photos: list[dict[str, Any]], sigmas: Tensor, drawn: Tensor) -> Tensor:
        return predictions(transformer, photos, sigmas, drawn, dtype=dtype, device=device)[1]

    was_training = transformer.training
    transformer.eval()
    try:
        return noise.mean_loss(losses, levels, at_once)
    finally:
        transformer.train(was_training)


@torch.no_grad()
def predictions(
    transformer: nn.Module,
    photos: Sequence[Mapping[str, Tensor]],
    sigmas: Tensor,
    noise: Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Predict velocities (B, C, h, w) fp32 of `FixedNoise.drawn`, and their losses (B,) fp32, on `device`."""
    batch = {part: torch.stack([photo[part] for photo in photos]).to(device) for part in photos[0]}
    latents, sigmas, noise = batch["latents"], sigmas.to(device), noise.to(device)
    x_t = noisy_latents(latents, noise, sigmas)
    velocity = predict_velocity(transformer, x_t, sigmas, batch["prompt_embeds"], batch["pooled"], dtype=dtype)
    return velocity, sample_losses(velocity, latents, noise, mask=batch.get("mask"))
