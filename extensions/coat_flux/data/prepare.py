"""A copy of a dataset folder in which ai-toolkit reads every photo right.

ai-toolkit drops alpha, clips 16-bit greyscale and ignores colour profiles; with `fast_image_size` it also takes the
size of a photo before its EXIF rotation. Photos of these kinds are rewritten as upright, opaque 8-bit sRGB PNGs.
Everything else in the folder is linked (copied where links cannot be made), and the originals are only read.

    <target>/images/…           the folder to train on
    <target>/masks/<name>.png   with `transparency="mask"`: opacity of every image, white where it has none, because
                                ai-toolkit looks masks up by name alone, in one folder, and takes black for a missing
                                one. Images of one name in several sub-folders get distinct names for that.
    <target>/prepared.json      what was made from what; the next run makes only what changed

Every file is written under another name and moved into place. Where an image changed, ai-toolkit's caches of it, which
go by name, are removed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from ..base.files import file_sha256, link_or_copy, replacing, write_file
from .files import DatasetError, Listing, list_folder, printable
from .images import DEEP, ROTATED, TAGGED, TRANSPARENT, read_photo, rgb
from .preflight import survey

MISREAD = frozenset({ROTATED, TAGGED, DEEP, TRANSPARENT})
_VERSION = 1  # of what is written; raise it when that changes
_RECORD = "prepared.json"
_DIGEST_LETTERS = 22
_PNG_EFFORT = 1  # of zlib: a photo gets little smaller with more
_NO_MASK = Image.new("L", (64, 64), 255)  # ai-toolkit brings masks to the image's size


@dataclass(frozen=True)
class PreparedCopy:
    """A folder for ai-toolkit.

    Attributes:
        folder: Takes the place of `folder_path`.
        mask_folder: Takes the place of `mask_path`; None where transparency is not a mask.
        corrected: The originals that are read from a corrected copy.
        traits: How many of them have each trait, for a log line.
    """

    folder: Path
    mask_folder: Path | None
    corrected: tuple[Path, ...]
    traits: dict[str, int]


def prepare_copy(
    folder: Path | str,
    target: Path | str,
    *,
    background: str = "white",
    transparency: str = "background",
    keep: frozenset[Path] | None = None,
    correct: bool = True,
) -> PreparedCopy | None:
    """Make or refresh the copy; None where ai-toolkit reads every photo right, and nothing is written.

    One process at a time may do it.

    Args:
        folder: The dataset's folder, checked by `inspect_datasets`.
        target: Where the copy goes; only files that an earlier call made there are replaced or removed.
        background: What transparent parts become; a name of `config.options.COLOURS` or "#rrggbb".
        transparency: `mask` also makes the mask folder; else `background`.
        keep: The only photos to copy, or None for all; with some a copy is always made.
        correct: False links misread photos, too.

    Raises:
        DatasetError: a photo cannot be read, `target` is inside `folder`, or cannot be written.
    """
    folder, target = Path(folder), Path(target)
    if folder.resolve() in (target.resolve(), *target.resolve().parents):
        raise DatasetError(
            f"{printable(target)}: the corrected copies would lie within the dataset {printable(folder)}; "
            "choose a training_folder outside of it"
        )
    listing = list_folder(folder)
    listing.images = [path for path in listing.images if keep is None or path in keep]
    traits = _traits(listing.images) if correct else {}
    corrected = tuple(path for path, found in traits.items() if found & MISREAD)
    if not corrected and keep is None:
        return None
    masked = transparency == "mask" and correct
    try:
        _refresh(target, _plan(folder, listing, frozenset(corrected), masked), background, masked)
    except OSError as error:
        raise DatasetError(
            f"{printable(target)}: the corrected copies cannot be written ({error.strerror or error}); make the folder "
            "writable and free some disk, or set coat.data.prepare: never"
        ) from error
    counts = Counter(trait for path in corrected for trait in traits[path] & MISREAD)
    return PreparedCopy(
        target / "images", target / "masks" if masked else None, corrected, dict(sorted(counts.items()))
    )


def _traits(images: list[Path]) -> dict[Path, frozenset[str]]:
    traits = {}
    for path, facts in survey(images).items():
        if isinstance(facts, DatasetError):
            raise facts
        traits[path] = facts.traits
    return traits


@dataclass(frozen=True)
class _Item:
    """A file of the copy: its original, its paths below the target (image or caption, mask), and how it is made."""

    source: Path
    outputs: tuple[str, ...]
    corrected: bool


def _plan(folder: Path, listing: Listing, corrected: frozenset[Path], masked: bool) -> list[_Item]:
    """The files of the copy. What belongs to an image by name (its caption) follows it."""
    sidecars = defaultdict(list)
    for path in listing.others:
        sidecars[path.parent, path.stem].append(path)
    items: list[_Item] = []
    taken: set[str] = set()
    for path in listing.images:
        parent = path.parent.relative_to(folder)
        stem = next(stem for stem in _stems(path, parent) if _key(parent / stem, masked) not in taken)
        taken.add(_key(parent / stem, masked))
        name = (Path("images") / parent / stem).as_posix()
        extension = ".png" if path in corrected else path.suffix
        mask = (f"masks/{stem}.png",) if masked else ()
        items.append(_Item(path, (name + extension, *mask), path in corrected))
        items += [_Item(sidecar, (name + sidecar.suffix,), False) for sidecar in sidecars[path.parent, path.stem]]
    return items


def _key(name: Path, masked: bool) -> str:
    """What must differ between two images: ai-toolkit finds masks by name alone, captions and caches by path."""
    return (name.name if masked else name.as_posix()).lower()


def _stems(path: Path, parent: Path) -> Iterator[str]:
    """Names for an image in the copy, its own first."""
    yield path.stem
    yield "_".join((*parent.parts, path.stem, path.suffix[1:]))
    yield from (f"{path.stem}_{number}" for number in itertools.count(2))


def _refresh(target: Path, items: list[_Item], background: str, masked: bool) -> None:
    """Make what is missing or changed, remove what no longer belongs, and record what there is."""
    policy = [_VERSION, *rgb(background), masked]
    record = _read_record(target / _RECORD)
    known = record["files"] if record["policy"] == policy else {}
    files: dict[str, str] = {}
    for item in items:
        digest = file_sha256(item.source)
        files |= dict.fromkeys(item.outputs, digest)
        if not all(known.get(output) == digest and (target / output).is_file() for output in item.outputs):
            _forget_caches(target / item.outputs[0])
            _make(item, target, background)
    for stale in record["files"].keys() - files.keys():
        _remove(target, stale)
    write_file(target / _RECORD, json.dumps({"policy": policy, "files": files}, indent=1))


def _read_record(path: Path) -> dict:
    with contextlib.suppress(FileNotFoundError, ValueError):
        record = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(record, dict) and record.keys() == {"policy", "files"}:
            return record
    return {"policy": None, "files": {}}


def _remove(target: Path, stale: str) -> None:
    """Remove what an earlier call made; a record that was tampered with cannot lead outside the target."""
    path = target / stale
    if path.parent.resolve().is_relative_to(target.resolve()):
        _forget_caches(path)
        path.unlink(missing_ok=True)


def _make(item: _Item, target: Path, background: str) -> None:
    outputs = [target / output for output in item.outputs]
    mask = _NO_MASK
    if item.corrected:
        photo = read_photo(item.source, background)
        mask = photo.alpha or _NO_MASK
        _save(photo.image, outputs[0])
    else:
        _link(item.source, outputs[0])
    for output in outputs[1:]:
        _save(mask, output)


def _save(image: Image.Image, output: Path) -> None:
    with replacing(output) as temp:
        image.save(temp, format="PNG", compress_level=_PNG_EFFORT, icc_profile=None)


def _link(source: Path, output: Path) -> None:
    with replacing(output, sync=False) as temp:
        try:
            os.symlink(source.resolve(), temp)
        except (OSError, NotImplementedError):
            link_or_copy(source.resolve(), temp)


def _forget_caches(image: Path) -> None:
    """Remove what ai-toolkit cached of an image: <name>_<22 letters of a digest of its settings>.safetensors."""
    for cached in (image.parent / "_latent_cache").glob("*.safetensors"):
        if cached.stem[:-_DIGEST_LETTERS] == f"{image.stem}_":
            cached.unlink()
