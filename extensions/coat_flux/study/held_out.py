"""The photos that are kept out of training, and the loss on them.

Their folders hold links to the user's files (copies where a file system has no hard links), so that each run is an
ordinary run on an ordinary folder, and the user's own folder stays as it is. They are encoded once, before the first
run; every run of every arm repeats its forwards with the same noise, so that differences between runs are free of the
luck of the draw.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..base.files import link_or_copy, remove, replacing
from ..config.job import JobConfig
from ..data.captions import caption_file
from ..data.dataset import scan
from ..data.files import find_images
from ..data.hold_out import FixedNoise, Point
from ..data.loader import cache_all
from ..trainers.standalone.loading import load_encoders
from ..trainers.standalone.session import TORCH_DTYPES
from ..trainers.standalone.validation import encoded, loss_of, one_each, predictions
from .runs import VerifyError

__all__ = ["HeldOut", "Split", "choose_held_out", "encode_held_out", "split_photos", "validation_entry"]

HELD_OUT_SHARE, MOST_HELD_OUT = 0.1, 16
EACH_ONCE = {"num_repeats": 1, "flip_x": False, "caption_dropout_rate": 0.0}
CACHED = {"cache_latents": True, "cache_latents_to_disk": False}
TOKENS_AT_ONCE = 4096  # one picture of 1024 pixels: any card that holds the model runs it without gradients


@dataclass(frozen=True)
class Split:
    """Datasets to train on and to validate on, as entries of `datasets`.

    Attributes:
        train: without the photos held out.
        held_out: those alone, each once, never mirrored.
        names: of the photos held out, for people.
    """

    train: tuple[dict[str, Any], ...]
    held_out: tuple[dict[str, Any], ...]
    names: tuple[str, ...]


def choose_held_out(photos: Sequence[Path], count: int | None) -> list[Path]:
    """Photos to hold out, evenly spread over the sorted list, so that every group of names is represented.

    They are the same on every machine that has the same file names. A count of None is a tenth, from 1 to 16.

    Raises:
        VerifyError: no photo would be left to train on.
    """
    distinct = list(dict.fromkeys(path.resolve() for path in photos))
    wanted = min(max(1, round(len(distinct) * HELD_OUT_SHARE)), MOST_HELD_OUT) if count is None else count
    if wanted < 1 or wanted >= len(distinct):
        raise VerifyError(
            f"--hold-out {wanted}: must be from 1 to {len(distinct) - 1}, there are {len(distinct)} photos and the "
            "others are trained on; give --validation FOLDER with other photos of the same thing to train on all"
        )
    return [distinct[(2 * i + 1) * len(distinct) // (2 * wanted)] for i in range(wanted)]


def split_photos(entries: Sequence[Mapping[str, Any]], folder: Path, count: int | None) -> Split:
    """Fill `folder` with links to the photos and captions of the datasets, split in two.

    The folder is emptied first. A photo that several datasets hold is held out of all, and validated on once; a dataset
    of which no photo is left is not trained on. The count is that of `choose_held_out`.

    Raises:
        VerifyError: no photo would be left to train on.
        OSError: the folder cannot be written.
    """
    photos = [find_images(Path(entry["folder_path"])) for entry in entries]
    chosen = choose_held_out([path for found in photos for path in found], count)
    remove(folder)
    train, held_out, seen = [], [], set()
    for number, (entry, found) in enumerate(zip(entries, photos, strict=True)):
        kept = [path for path in found if path.resolve() not in chosen]
        out = [path for path in found if path.resolve() in chosen and path.resolve() not in seen]
        seen |= {path.resolve() for path in out}
        for paths, place, result, settings in (
            (kept, folder / "train" / str(number), train, {}),
            (out, folder / "held_out" / str(number), held_out, EACH_ONCE | CACHED),
        ):
            if paths:
                _link(paths, entry, place)
                result.append({**entry, **settings, "folder_path": str(place)})
    return Split(tuple(train), tuple(held_out), tuple(path.name for path in chosen))


def _link(photos: Sequence[Path], entry: Mapping[str, Any], place: Path) -> None:
    root = Path(entry["folder_path"])
    for photo in photos:
        for path in (photo, caption_file(photo, entry.get("caption_ext") or "txt")):
            if path.is_file():
                target = place / path.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(path.resolve(), target)


def validation_entry(entries: Sequence[Mapping[str, Any]], folder: Path) -> Split:
    """Train on all photos, validate on those of another folder, with the settings of the first dataset.

    Raises:
        VerifyError: no such folder, or it has no images.
    """
    if not folder.is_dir():
        raise VerifyError(f"--validation {folder}: there is no such folder; give one with images and captions")
    photos = find_images(folder)
    if not photos:
        raise VerifyError(f"--validation {folder}: has no images; put some there, with captions as for training")
    entry = {**entries[0], **EACH_ONCE, **CACHED, "folder_path": str(folder)}
    return Split(tuple(map(dict, entries)), (entry,), tuple(path.name for path in photos))


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
        """Run one batch of `batches`; see `validation.predictions`."""
        return predictions(transformer, *self.drawn(points), dtype=dtype, device=device)

    def loss(self, transformer: nn.Module, levels: int, *, dtype: torch.dtype, device: torch.device) -> float:
        """The mean loss over all forwards; see `validation.loss_of`."""
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
        for model in encoders.text.models:
            model.to(device)
    return HeldOut([encoded(dataset, sample) for sample in chosen], [sample.image_path.name for sample in chosen])
