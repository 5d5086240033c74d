"""The photos that `verify` keeps out of training, and the loss on them.

Their folders hold hard links to the user's files (copies where there are none), so that each run is an ordinary run on
an ordinary folder. Every run of every arm repeats the same forwards with the same noise: only training differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..base.files import link_or_copy, remove
from ..config.job import JobConfig
from ..data.captions import caption_file
from ..data.dataset import scan
from ..data.files import find_images
from ..data.hold_out import FixedNoise, Point
from ..data.loader import cache_all
from ..trainers.standalone.loading import load_encoders
from ..trainers.standalone.session import TORCH_DTYPES
from ..trainers.standalone.validation import encoded, loss_of, one_each
from .runs import VerifyError

__all__ = ["HeldOut", "Split", "choose_held_out", "encode_held_out", "held_out_count", "split_photos"]

HELD_OUT_SHARE, MOST_HELD_OUT = 0.1, 16
EACH_ONCE = {"num_repeats": 1, "flip_x": False, "caption_dropout_rate": 0.0}
CACHED = {"cache_latents": True, "cache_latents_to_disk": False}
TOKENS_AT_ONCE = 4096  # one picture of 1024 pixels: fits wherever the model does


@dataclass(frozen=True)
class Split:
    """Entries of `datasets` to train on and to validate on (each photo once, never mirrored); names of the latter."""

    train: tuple[dict[str, Any], ...]
    held_out: tuple[dict[str, Any], ...]
    names: tuple[str, ...]


def held_out_count(photos: int) -> int:
    """A tenth of the photos, from 1 to 16."""
    return min(max(1, round(photos * HELD_OUT_SHARE)), MOST_HELD_OUT)


def choose_held_out(photos: Sequence[Path], count: int | None) -> list[Path]:
    """Photos to hold out, evenly spread over the sorted list, so the same everywhere; VerifyError if none is left."""
    distinct = list(dict.fromkeys(path.resolve() for path in photos))
    wanted = held_out_count(len(distinct)) if count is None else count
    if wanted < 1 or wanted >= len(distinct):
        raise VerifyError(
            f"--hold-out {wanted}: must be from 1 to {len(distinct) - 1}, there are {len(distinct)} photos and the "
            "others are trained on; give --validation FOLDER with other photos of the same thing to train on all"
        )
    return [distinct[(2 * i + 1) * len(distinct) // (2 * wanted)] for i in range(wanted)]


def split_photos(entries: Sequence[Mapping[str, Any]], folder: Path, count: int | None) -> Split:
    """Replace `folder` by links to photos and captions, split in two; a photo of several datasets is in one half."""
    photos = [find_images(Path(entry["folder_path"])) for entry in entries]
    chosen = choose_held_out([path for paths in photos for path in paths], count)
    remove(folder)
    train: list[dict[str, Any]] = []
    held_out: list[dict[str, Any]] = []
    seen: set[Path] = set()
    for number, (entry, paths) in enumerate(zip(entries, photos, strict=True)):
        rest = [path for path in paths if path.resolve() not in chosen]
        out = [path for path in paths if path.resolve() in chosen and path.resolve() not in seen]
        seen |= {path.resolve() for path in out}
        if rest:
            train.append({**entry, "folder_path": _linked(rest, entry, folder / "train" / str(number))})
        if out:
            place = _linked(out, entry, folder / "held_out" / str(number))
            held_out.append({**entry, **EACH_ONCE, **CACHED, "folder_path": place})
    return Split(tuple(train), tuple(held_out), tuple(path.name for path in chosen))


def _linked(photos: Sequence[Path], entry: Mapping[str, Any], place: Path) -> str:
    root = Path(entry["folder_path"])
    for photo in photos:
        for path in (photo, caption_file(photo, entry.get("caption_ext") or "txt")):
            if path.is_file():
                target = place / path.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(path.resolve(), target)
    return str(place)


def validation_entry(entries: Sequence[Mapping[str, Any]], folder: Path) -> Split:
    """Train on all photos, validate on another folder's, with the settings of the first dataset."""
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
    """Encoded photos and their captions: latents (C, h, w), prompt_embeds (T, D), pooled (P), perhaps mask."""

    def batches(self, levels: int, at_once: Callable[[torch.Size], int] = _as_many_as_fit) -> Iterator[list[Point]]:
        """`FixedNoise.batches`, by default with as many at once as fit."""
        return super().batches(levels, at_once)

    def loss(self, transformer: nn.Module, levels: int, *, dtype: torch.dtype, device: torch.device) -> float:
        """Mean loss over all forwards; see `validation.loss_of`."""
        return loss_of(transformer, self, levels, _as_many_as_fit, dtype=dtype, device=device)


def encode_held_out(job: JobConfig, device: torch.device) -> HeldOut:
    """Encode the photos of a job's datasets, each at one of its resolutions in turn."""
    photos = job.coat.data
    samples = scan(job.datasets, job.trigger_word, background=photos.background, transparency=photos.transparency)
    encoders = load_encoders(job.model.name_or_path, TORCH_DTYPES[job.train.dtype], job.model.extras_name_or_path)
    chosen = one_each(samples)
    dataset = cache_all(
        chosen,
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
