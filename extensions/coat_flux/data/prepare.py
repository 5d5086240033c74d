"""A copy of a dataset folder in which ai-toolkit reads every photo correctly.

What it misreads (`data/images.py`) is rewritten as upright, opaque 8-bit sRGB PNGs, other files are linked or copied.
With `alpha_mask`, all are RGBA.

    <target>/images/…           the folder to train on
    <target>/masks/<name>.png   with `transparency: mask`: opacity of every image, white if opaque. ai-toolkit finds
                                masks by name alone, in one folder, and takes black for a missing one; so no two images
                                have the same name.
    <target>/prepared.json      the source photos: while they are unchanged, the next run reuses the copy with the
                                latents that ai-toolkit cached in it

The copy is written beside the target and renamed into place. Captions and controls are linked again by every run.
"""

from __future__ import annotations

import glob
import json
import os
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

from PIL import Image

from ..base.files import TEMP_PREFIX, discard, file_sha256, link_or_copy, replacing, replacing_folder
from ..config.coat import DataOptions
from .files import CONTROLS_FOLDER, IMAGE_EXTENSIONS, MEDIA_EXTENSIONS, DatasetError, Listing, printable
from .images import DEEP, DEFAULTS, FORMATS, HEIC, ROTATED, TAGGED, TRANSPARENT, read_photo, rgb, survey

IMAGES, MASKS = "images", "masks"  # folders of a copy
MISREAD = frozenset({ROTATED, TAGGED, DEEP, TRANSPARENT, HEIC})
NO_ALPHA = "no alpha channel"
_VERSION = 4  # of the files written; raise it when they change
_RECORD = "prepared.json"
_PNG_EFFORT = 1  # of zlib: a photo gets little smaller with more
_NO_MASK = Image.new("L", (64, 64), 255)  # ai-toolkit brings masks to the image's size


def prepare_copy(
    folder: Path | str,
    target: Path | str,
    options: DataOptions = DEFAULTS,
    keep: frozenset[Path] | None = None,
    *,
    alpha_mask: bool = False,
) -> dict[Path, frozenset[str]] | None:
    """Create or refresh the copy at `target`; returns the photos that it corrects, with their traits.

    Without `keep`, the files to copy, nothing is written if ai-toolkit reads all of them correctly: returns None. One
    process at a time may do it. Raises DatasetError.
    """
    folder, target = Path(folder), Path(target)
    if folder.resolve() in (target.resolve(), *target.resolve().parents):
        raise DatasetError(
            f"{printable(target)}: is within the dataset {printable(folder)}; choose a training_folder outside of it"
        )
    listing = Listing(folder)
    if keep is not None:
        listing.images = [path for path in listing.images if path in keep]
        listing.media = [path for path in listing.media if path in keep]
    corrected = {}
    for path, facts in survey(listing.images).items():
        if isinstance(facts, DatasetError):
            raise facts
        traits = facts.traits & MISREAD
        if alpha_mask:
            traits -= {TRANSPARENT}
            with Image.open(path, formats=FORMATS) as image:
                if image.mode != "RGBA":
                    traits |= {NO_ALPHA}
        if traits:
            corrected[path] = traits
    if not corrected and keep is None:
        return None
    masked = options.transparency == "mask" and not alpha_mask
    background = None if alpha_mask else options.background
    names = _names(folder, [*listing.images, *listing.media], corrected, masked)
    try:
        _refresh(target, names, corrected, background, masked)
        _link_captions(target / IMAGES, names, listing)
    except OSError as error:
        raise DatasetError(
            f"{printable(target)}: cannot be written ({error.strerror or error}); make the folder writable and free "
            "some disk"
        ) from error
    return corrected


def _names(folder: Path, files: list[Path], corrected: Collection[Path], masked: bool) -> dict[Path, str]:
    """Path of each file in the copy, without its extension; if `masked`, no two have the same stem."""
    names: dict[Path, str] = {}
    taken: set[str] = set()
    for path in files:
        parent, stem = path.parent.relative_to(folder), path.stem
        suffix = ".png" if path in corrected else path.suffix
        number = 1
        while (key := stem if masked else f"{parent}/{stem}{suffix}").lower() in taken:
            stem = f"{path.stem}_{number}"
            if number == 1:
                stem = "_".join((*parent.parts, path.stem, path.suffix[1:]))
            number += 1
        taken.add(key.lower())
        names[path] = (parent / stem).as_posix()
    return names


def _refresh(
    target: Path, names: dict[Path, str], corrected: Collection[Path], background: str | None, masked: bool
) -> None:
    files: dict[str, list[Any]] = {}
    for path, name in names.items():
        if path.name.lower().endswith(MEDIA_EXTENSIONS):  # large
            status = path.stat()
            state = [status.st_size, status.st_mtime_ns]
        else:
            state = [file_sha256(path), path in corrected]
        files[f"{name}{path.suffix}"] = state
    policy = {"background": background and rgb(background), "masked": masked}
    record = json.dumps({"version": _VERSION, **policy, "files": files})
    for left in target.parent.glob(f"{TEMP_PREFIX}*{target.name}"):  # by a run that was killed
        discard(left)
    if (target / _RECORD).is_file() and (target / _RECORD).read_text(encoding="utf-8") == record:
        return
    with replacing_folder(target) as made:
        (made / IMAGES).mkdir(parents=True)
        for path, name in names.items():
            _make(path, made, name, path in corrected, background, masked)
        (made / _RECORD).write_text(record, encoding="utf-8")


def _make(path: Path, made: Path, name: str, corrected: bool, background: str | None, masked: bool) -> None:
    place = made / IMAGES / f"{name}{'.png' if corrected else path.suffix}"
    place.parent.mkdir(parents=True, exist_ok=True)
    alpha = None
    if corrected:
        image, alpha = read_photo(path, background)
        if background is None:
            image.putalpha(alpha or 255)
        image.save(place, format="PNG", compress_level=_PNG_EFFORT, icc_profile=None)
    else:
        _link(path, place)
    if masked:
        (made / MASKS).mkdir(exist_ok=True)
        mask = alpha or _NO_MASK
        mask.save(made / MASKS / f"{Path(name).name}.png", format="PNG", compress_level=_PNG_EFFORT)


def _link_captions(images: Path, names: dict[Path, str], listing: Listing) -> None:
    sidecars = defaultdict(list)
    for path in listing.others:
        sidecars[path.parent, path.stem].append(path)
    wanted = {}
    for path, name in names.items():
        for sidecar in sidecars[path.parent, path.stem]:
            wanted[images / f"{name}{sidecar.suffix}"] = sidecar
        for control in (path.parent / CONTROLS_FOLDER).glob(f"{glob.escape(path.stem)}.*"):
            kind = control.name.removeprefix(path.stem)
            place = images / Path(name).parent / CONTROLS_FOLDER
            wanted[place / f"{Path(name).name}{kind}"] = control
    from_refresh = (*IMAGE_EXTENSIONS, *MEDIA_EXTENSIONS)
    for link in images.rglob("*.*"):
        cached = any(part.startswith("_") for part in link.relative_to(images).parts[:-1])
        if link not in wanted and not cached and link.suffix.lower() not in from_refresh:
            link.unlink()
    for link, sidecar in wanted.items():
        link.parent.mkdir(exist_ok=True)
        with replacing(link, sync=False) as temp:
            _link(sidecar, temp)


def _link(source: Path, place: Path) -> None:
    try:
        os.symlink(source.resolve(), place)
    except (OSError, NotImplementedError):
        link_or_copy(source.resolve(), place)
