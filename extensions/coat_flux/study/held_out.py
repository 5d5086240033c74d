"""The loss on photos that are not trained on, with noise that is the same for every run: `data.hold_out`.

Every run of every arm repeats its forwards exactly, so that differences between runs are free of the luck of the draw.
The photos are encoded once, before the first run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..base.files import replacing
from ..config.job import JobConfig
from ..data.dataset import scan
from ..data.hold_out import FixedNoise, Point
from ..data.loader import cache_all
from ..trainers.standalone.loading import load_encoders
from ..trainers.standalone.session import TORCH_DTYPES
from ..trainers.standalone.validation import encoded, loss_of, one_each, predictions

__all__ = ["HeldOut", "encode_held_out"]

TOKENS_AT_ONCE = 4096  # one picture of 1024 pixels: any card that holds the model runs it without gradients


def _as_many_as_fit(shape: torch.Size) -> int:
    return TOKENS_AT_ONCE * 4 // shape[1:].numel()


class HeldOut(FixedNoise):
    """Encoded photos and their captions.

    Args:
        photos: for each, latents (C, h, w) fp32, prompt_embeds (T, D) and pooled (P) bf16, and perhaps mask (1, h, w).
        names: of the files.
    """

    def batches(self, levels: int, at_once: Callable[[torch.Size], int] = _as_many_as_fit) -> Iterator[list[Point]]:
        """`FixedNoise.batches`, by default as many at once as fit."""
        return super().batches(levels, at_once)

    def predictions(
        self, transformer: nn.Module, points: Sequence[Point], *, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Run one batch of `batches`; `engine.validation.predictions`."""
        return predictions(transformer, *self.drawn(points), dtype=dtype, device=device)

    def loss(self, transformer: nn.Module, levels: int, *, dtype: torch.dtype, device: torch.device) -> float:
        """The mean loss over all forwards; `engine.validation.loss_of`."""
        return loss_of(transformer, self, levels, _as_many_as_fit, dtype=dtype, device=device)

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
    encoders = load_encoders(job.model.name_or_path, TORCH_DTYPES[job.train.dtype], job.model.extras_name_or_path)
    dataset = cache_all(
        chosen := one_each(samples),
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
    return HeldOut([encoded(dataset, sample) for sample in chosen], [sample.image_path.name for sample in chosen])
