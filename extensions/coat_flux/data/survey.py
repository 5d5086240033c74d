"""Each photo read once, in full: only that finds a truncated file."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageStat
from tqdm import tqdm

from .errors import DatasetError, printable
from .images import TRANSPARENT, opened, split_alpha, traits_of, turn_of

_THREADS = 4
_LARGE_PIXELS = 40_000_000  # decoded one at a time: four at once could take gigabytes
_ONE_LARGE = threading.Lock()
_KEPT = 20_000
_QUIET_SECONDS = 2
_SIDEWAYS = {
    *(Image.Transpose.TRANSPOSE, Image.Transpose.ROTATE_270),
    *(Image.Transpose.TRANSVERSE, Image.Transpose.ROTATE_90),
}
VISIBLE_SIDE = 64
_HASH_SIDE = 16
_HASH_MARGIN = 2  # levels; the noise of an even background sets no bit
# A photo saved again, scaled or cropped by 1 % differs by at most 16 of 256 bits, two drawn garments by 22 and more.
_SAME_BITS = 16
_SAME_COLOUR = 12  # levels; the same cut in another colour is another photo


@dataclass(frozen=True)
class PhotoFacts:
    """What is known of a photo after reading it.

    Attributes:
        size: Width and height in pixels, upright.
        traits: Which of `images.TRAITS` it has.
        notes: What could not be known of its colours.
        opacity: Mean alpha from 0 to 1.
        visible: Alpha of the upright photo in a 64×64 grid, [64, 64] uint8; None where it has no transparent parts.
        look: Difference hash, 256 bits as bytes, for finding near duplicates.
        colour: Mean red, green and blue, 0 to 255.
    """

    size: tuple[int, int]
    traits: frozenset[str]
    notes: tuple[str, ...]
    opacity: float
    visible: np.ndarray | None
    look: bytes
    colour: tuple[float, float, float]


def survey(paths: Sequence[Path]) -> dict[Path, PhotoFacts | DatasetError]:
    """Facts of each photo, or why it cannot be read. A file that did not change is not read twice in a process."""
    with ThreadPoolExecutor(_THREADS) as pool:
        found = tqdm(pool.map(_facts_of, paths), "Reading photos", len(paths), delay=_QUIET_SECONDS)
        return dict(zip(paths, found, strict=True))


def near_duplicates(facts: dict[Path, PhotoFacts]) -> list[tuple[Path, Path]]:
    """Pairs of photos that show the same, each photo with the first like it.

    Their difference hashes (brighter or not than the pixel to the left, on a 16×16 grid) differ in at most 16 of 256
    bits and their mean colours in at most 12 of 255 levels.
    """
    paths = list(facts)
    looks = np.array([list(facts[path].look) for path in paths], np.uint8)
    colours = np.array([facts[path].colour for path in paths])
    pairs = []
    for i in range(1, len(paths)):
        near = np.flatnonzero(np.abs(colours[:i] - colours[i]).max(axis=1) <= _SAME_COLOUR)
        bits = np.unpackbits(looks[near] ^ looks[i], axis=1).sum(axis=1)
        alike = near[bits <= _SAME_BITS]
        if alike.size:
            pairs.append((paths[alike[0]], paths[i]))
    return pairs


def _facts_of(path: Path) -> PhotoFacts | DatasetError:
    try:
        status = os.stat(path)
    except OSError as error:
        return DatasetError(f"{printable(path)}: cannot be opened ({error.strerror}); put it back, or remove it")
    return _read(path, (status.st_size, status.st_mtime_ns, status.st_ctime_ns))


@lru_cache(maxsize=_KEPT)
def _read(path: Path, _state: tuple[int, ...]) -> PhotoFacts | DatasetError:
    try:
        with opened(path) as image, _ONE_LARGE if image.width * image.height > _LARGE_PIXELS else nullcontext():
            image.load()
            traits, notes = traits_of(image, path)
            colour, alpha = split_alpha(image)
            opacity = 1.0 if alpha is None else ImageStat.Stat(alpha).mean[0] / 255
            turn, grid = turn_of(image), (VISIBLE_SIDE, VISIBLE_SIDE)
            visible = None
            if TRANSPARENT in traits:
                small = alpha.resize(grid, Image.Resampling.BOX)
                visible = np.asarray(small if turn is None else small.transpose(turn))
            size = image.size[::-1] if turn in _SIDEWAYS else image.size
            return PhotoFacts(size, traits, notes, opacity, visible, *_look(colour, alpha))
    except DatasetError as error:
        return error


def _look(colour: Image.Image, alpha: Image.Image | None) -> tuple[bytes, tuple[float, float, float]]:
    """Difference hash and mean colour, transparent parts white."""
    grid = (_HASH_SIDE + 1, _HASH_SIDE)
    small = colour.resize(grid, Image.Resampling.BOX).convert("RGB")
    if alpha is not None:
        white = Image.new("RGB", grid, "white")
        white.paste(small, mask=alpha.resize(grid, Image.Resampling.BOX))
        small = white
    grey = np.asarray(small.convert("L"), np.int16)
    bits = np.diff(grey, axis=1) > _HASH_MARGIN
    red, green, blue = np.asarray(small, np.float64).mean(axis=(0, 1)).tolist()
    return np.packbits(bits).tobytes(), (red, green, blue)
