"""Which photos are kept out of training, and folders for those that are trained on and those that are not.

The folders hold links to the user's files (copies where a file system has no hard links), so that each run is an
ordinary run on an ordinary folder, and the user's own folder stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.errors import UserError
from ..base.files import link_or_copy, remove
from ..data.captions import caption_file
from ..data.files import find_images

__all__ = ["HoldOutError", "Split", "choose_held_out", "default_hold_out", "split_photos", "validation_entry"]

HELD_OUT_SHARE = 0.1
MOST_HELD_OUT = 16
AS_SHOWN_ONCE = {"num_repeats": 1, "flip_x": False, "caption_dropout_rate": 0.0}
CACHED = {"cache_latents": True, "cache_latents_to_disk": False}


class HoldOutError(UserError, ValueError):
    """The photos cannot be split as asked."""


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


def default_hold_out(photos: int) -> int:
    """A tenth of the photos, at least 1, at most 16."""
    return min(max(1, round(photos * HELD_OUT_SHARE)), MOST_HELD_OUT)


def choose_held_out(photos: Sequence[Path], count: int | None) -> list[Path]:
    """Photos to hold out, evenly spread over the sorted list, so that every group of names is represented.

    Args:
        photos: of all datasets, in their order.
        count: how many; None is `default_hold_out`.

    Returns:
        They are the same on every machine that has the same file names.

    Raises:
        HoldOutError: no photo would be left to train on.
    """
    distinct = list(dict.fromkeys(path.resolve() for path in photos))
    wanted = default_hold_out(len(distinct)) if count is None else count
    if wanted < 1 or wanted >= len(distinct):
        raise HoldOutError(
            f"--hold-out {wanted}: must be from 1 to {len(distinct) - 1}, there are {len(distinct)} photos and the "
            "others are trained on; give --validation FOLDER with other photos of the same thing to train on all"
        )
    return [distinct[(2 * i + 1) * len(distinct) // (2 * wanted)] for i in range(wanted)]


def split_photos(entries: Sequence[Mapping[str, Any]], folder: Path, count: int | None) -> Split:
    """Fill `folder` with links to the photos and captions of the datasets, split in two.

    Args:
        entries: `datasets` of a job, with folder_path and caption_ext.
        folder: is emptied first.
        count: photos held out; None is `default_hold_out`.

    Returns:
        The datasets. A photo that several of them hold is held out of all, and validated on once; one of which no photo
        is left is not trained on.

    Raises:
        HoldOutError: no photo would be left to train on.
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
            (out, folder / "held_out" / str(number), held_out, AS_SHOWN_ONCE | CACHED),
        ):
            if paths:
                _link(paths, entry, place)
                result.append({**entry, **settings, "folder_path": str(place)})
    return Split(tuple(train), tuple(held_out), tuple(path.name for path in chosen))


def validation_entry(entries: Sequence[Mapping[str, Any]], folder: Path) -> Split:
    """Train on all photos, validate on those of another folder, with the settings of the first dataset.

    Raises:
        HoldOutError: no such folder, or it has no images.
    """
    if not folder.is_dir():
        raise HoldOutError(f"--validation {folder}: there is no such folder; give one with images and captions")
    photos = find_images(folder)
    if not photos:
        raise HoldOutError(f"--validation {folder}: has no images; put some there, with captions as for training")
    entry = {**entries[0], **AS_SHOWN_ONCE, **CACHED, "folder_path": str(folder)}
    return Split(tuple(map(dict, entries)), (entry,), tuple(path.name for path in photos))


def _link(photos: Sequence[Path], entry: Mapping[str, Any], place: Path) -> None:
    root = Path(entry["folder_path"])
    for photo in photos:
        for path in (photo, caption_file(photo, entry.get("caption_ext") or "txt")):
            if path.is_file():
                target = place / path.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(path.resolve(), target)
