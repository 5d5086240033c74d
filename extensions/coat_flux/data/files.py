"""The contents of a dataset folder: images to train on, and findings about all other files.

The walk is ai-toolkit's: images, videos and sounds, recursively, without hidden files and folders, `_controls` and
cache folders; with pillow-heif HEIC, too. Linked folders are not entered: they may form cycles.
"""

from __future__ import annotations

import importlib.util
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.errors import UserError

HEIF_EXTENSIONS = (".heic", ".heif")
READS_HEIF = importlib.util.find_spec("pillow_heif") is not None
IMAGE_EXTENSIONS = (
    *(".jpg", ".jpeg", ".png", ".webp"),
    *(HEIF_EXTENSIONS if READS_HEIF else ()),
)
VIDEO_EXTENSIONS = (".mp4", ".avi", ".mov", ".webm", ".mkv", ".wmv", ".m4v", ".flv")
AUDIO_EXTENSIONS = (".mp3", ".wav", ".flac", ".aac", ".ogg", ".m4a")
MEDIA_EXTENSIONS = (*VIDEO_EXTENSIONS, *AUDIO_EXTENSIONS)
CACHE_FOLDER = "_coat_cache"
# ai-toolkit's folder of conditioning images, <photo>.<kind>.<extension>, then those of its caches
CONTROLS_FOLDER = "_controls"
_NOT_ENTERED = (CONTROLS_FOLDER, "_latent_cache", "_t_e_cache", "_clip_vision_cache", CACHE_FOLDER)
_OTHER_IMAGES = (
    *(".heic", ".heif", ".avif", ".bmp", ".gif", ".tif", ".tiff", ".jxl", ".jfif", ".jpe", ".jp2", ".apng", ".svg"),
    *(".psd", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2"),
)


class DatasetError(UserError, ValueError):
    """A dataset folder, image, caption or cache file that cannot be used."""


def printable(name: object) -> str:
    """A path or text with all that cannot be printed escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(name))


def find_images(folder: Path, media: tuple[str, ...] = ()) -> list[Path]:
    """Images below a folder, sorted, then files with the extensions `media`."""
    listing = Listing(folder)
    others = [path for path in listing.media if path.name.lower().endswith(media)]
    return listing.images + others


def media_read(dataset: Mapping[str, Any], arch: str = "") -> tuple[str, ...]:
    """Extensions of what ai-toolkit reads besides images, by an entry of `datasets`."""
    if arch.startswith("ace_step"):
        return AUDIO_EXTENSIONS
    frames = dataset.get("num_frames") or 1
    if frames > 1 or dataset.get("auto_frame_count"):
        return VIDEO_EXTENSIONS
    return ()


class Listing:
    """A folder's images, videos and sounds, other visible files, and one line per finding; sorted."""

    def __init__(self, folder: Path):
        self.images: list[Path] = []
        self.errors: list[str] = []
        self.warnings: list[str] = []
        links, images, media, others = [], [], [], []
        unlisted: list[OSError] = []
        for root, names, files in os.walk(folder, onerror=unlisted.append):
            names[:] = sorted(name for name in names if not name.startswith(".") and name not in _NOT_ENTERED)
            links += [Path(root, name) for name in names if Path(root, name).is_symlink()]
            for path in (Path(root, name) for name in files if not name.startswith(".")):
                name = path.name.lower()
                if name.endswith(IMAGE_EXTENSIONS):
                    images.append(path)
                elif name.endswith(MEDIA_EXTENSIONS):
                    media.append(path)
                else:
                    others.append(path)
        self.media = sorted(filter(os.path.isfile, media), key=Path.as_posix)
        self.others = sorted(others, key=Path.as_posix)
        for error in unlisted:
            self.errors.append(f"{printable(error.filename)}: cannot be listed ({error.strerror}); make it readable")
        for path in sorted(images, key=Path.as_posix):
            if os.path.isfile(path):
                self.images.append(path)
            else:
                self.errors.append(f"{printable(path)}: is a broken link, or not a file; put the image there")
        for path in links:
            text = "is a link to a folder, which is not entered; give that folder an entry of its own in datasets"
            self.warnings.append(f"{printable(path)}: {text}")
        # unread photo formats, such as a phone's HEIC, would be missed silently
        unread = [path for path in self.others if path.suffix.lower() in _OTHER_IMAGES]
        remedy = f"save them as one of {', '.join(IMAGE_EXTENSIONS)} to train on them"
        if any(path.suffix.lower() in HEIF_EXTENSIONS for path in unread):
            remedy += ", or pip install pillow-heif, which reads HEIC"
        self.warnings += counted(folder, unread, f"images are not read (first: {{first}}); {remedy}")
        by_stem = defaultdict(list)
        for path in self.images:
            by_stem[path.parent, path.stem].append(path)
        for (parent, _), paths in by_stem.items():
            if len(paths) > 1:
                names = " and ".join(printable(path.name) for path in paths)
                text = "share one caption and one name in ai-toolkit's caches; rename all but one"
                self.warnings.append(f"{printable(parent)}: {names} {text}")


def counted(folder: Path, paths: list[Path], text: str) -> list[str]:
    """One warning with the number of files, or none; `{first}` in `text` becomes the first file."""
    if not paths:
        return []
    first = printable(os.path.relpath(paths[0], folder))
    return [f"{printable(folder)}: {len(paths)} {text.replace('{first}', first)}"]
