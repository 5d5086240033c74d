"""Pre-flight of the data before a model is loaded: the one set of rules for `check`, `data` and both trainers."""

from __future__ import annotations

import math
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageStat
from tqdm import tqdm

from .buckets import BUCKET_STEP, Bucket, Sample, covering_size, cropped_share, make_samples, resolutions, training_size
from .captions import caption_file, inject_trigger, lint_captions, lint_files, read_caption
from .files import IMAGE_EXTENSIONS, DatasetError, Listing, counted, list_folder, printable
from .images import TRAITS, TRANSPARENT, opened, split_alpha, traits_of, turn_of

SMALL_SHARE = 0.75  # of the pixels a resolution asks for
CROPPED_SHARE = 0.25
INVISIBLE = 0.002  # mean alpha
LEAST_VISIBLE = 0.01  # mean alpha in the crop, if alpha is the loss mask
_LISTED = 5
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


@dataclass
class DataReport:
    """Errors (which stop training), warnings, tables of buckets and corrections, and the trainable samples."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    photos: dict[Path, PhotoFacts] = field(default_factory=dict)
    unreadable: list[Path] = field(default_factory=list)

    def error_text(self) -> str:
        """The first errors, a line each, and how many more there are."""
        more = len(self.errors) - _LISTED
        return "\n".join(
            self.errors[:_LISTED] + ([f"... and {more} more; `coat-flux data` lists them all"] if more > 0 else [])
        )


def inspect_datasets(
    dataset_configs: Sequence[Any],
    trigger_word: str | None = None,
    *,
    background: str = "white",
    transparency: str = "background",
    step: int = BUCKET_STEP,
    t5_of: str | None = "",
) -> DataReport:
    """Read every image in full and every caption, and report.

    `dataset_configs` have folder_path, caption_ext, default_caption, resolution (a number or several), num_repeats,
    flip_x, buckets, shuffle_tokens and cache_text_embeddings, with ai-toolkit's meaning. `background` and
    `transparency` are `coat.data`'s; bucket sides are multiples of `step` pixels; `t5_of` as in `lint_captions`.
    """
    report = DataReport()
    if not dataset_configs:
        report.errors.append("datasets=[]: there is nothing to train on; add an entry with folder_path")
    for index, config in enumerate(dataset_configs):
        _inspect(index, config, trigger_word, step, t5_of, report)
    if transparency == "mask" and report.photos:
        _check_masks(report)
    report.errors = list(dict.fromkeys(report.errors))  # several entries may share a folder
    report.warnings = list(dict.fromkeys(report.warnings))
    return report


def _inspect(
    index: int, config: Any, trigger_word: str | None, step: int, t5_of: str | None, report: DataReport
) -> None:
    folder = Path(config.folder_path)
    where = f"datasets[{index}].folder_path={printable(folder)}"
    wanted = (
        f"put images ({', '.join(IMAGE_EXTENSIONS)}) there, each with a caption of the same name (photo.jpg, "
        f"{caption_file('photo.jpg', config.caption_ext)})"
    )
    if not folder.is_dir():
        kind = "this is a file, not a folder" if folder.exists() else "there is no such folder"
        report.errors.append(f"{where}: {kind}; make it and {wanted}, or correct the path")
        return
    listing = list_folder(folder)
    report.errors += listing.errors
    report.warnings += listing.warnings
    if not listing.images:
        if not listing.errors:
            report.errors.append(f"{where}: the folder has no images; {wanted}")
        return
    photos = _photos_of(listing.images, report)
    raw = _captions_of(listing, config, report)
    report.warnings += lint_captions(folder, raw, trigger_word, config.default_caption, t5_of)
    if config.shuffle_tokens and config.cache_text_embeddings:
        report.warnings.append(
            f"{printable(folder)}: shuffle_tokens has no effect with cache_text_embeddings: true (each caption is "
            "encoded once, unshuffled); set one of them to false"
        )
    report.warnings += _about_photos(folder, photos, config, step)
    default = (config.default_caption or "").strip()
    captions = {path: inject_trigger(raw.get(path) or default, trigger_word) for path in photos}
    sizes = {path: facts.size for path, facts in photos.items()}
    report.samples += make_samples(index, config, sizes, captions, inject_trigger("", trigger_word), step)
    report.tables.append(_table(where, photos, raw, config, step))


def _photos_of(paths: list[Path], report: DataReport) -> dict[Path, PhotoFacts]:
    photos = {}
    for path, found in survey(paths).items():
        problem = str(found) if isinstance(found, DatasetError) else _unusable(path, found)
        if problem is None:
            photos[path] = report.photos[path] = found
            report.warnings += [f"{printable(path)}: {note}" for note in found.notes]
        else:
            report.errors.append(problem)
            report.unreadable.append(path)
    return photos


def _unusable(path: Path, facts: PhotoFacts) -> str | None:
    width, height = facts.size
    if min(width, height) < BUCKET_STEP:
        return f"{printable(path)}: is {width}x{height} pixels, sides of at least {BUCKET_STEP} are needed; remove it"
    if facts.opacity < INVISIBLE:
        return f"{printable(path)}: is transparent all over, nothing is to be seen; export it again, or remove it"
    return None


def _captions_of(listing: Listing, config: Any, report: DataReport) -> dict[Path, str]:
    """Image → unprocessed caption; without images whose caption is missing or unreadable."""
    errors, warnings = lint_files(
        Path(config.folder_path), listing, config.caption_ext.lstrip("."), config.default_caption
    )
    report.errors += errors
    report.warnings += warnings
    raw = {}
    for path in listing.images:
        try:
            caption = read_caption(path, config.caption_ext)
        except DatasetError as error:
            report.errors.append(str(error))
        else:
            if caption is not None:
                raw[path] = caption
    return raw


def _about_photos(folder: Path, photos: dict[Path, PhotoFacts], config: Any, step: int) -> list[str]:
    resolution = max(resolutions(config))
    buckets = {path: training_size(facts.size, resolution, config, step) for path, facts in photos.items()}
    small = [p for p, facts in photos.items() if facts.size[0] * facts.size[1] < SMALL_SHARE * resolution**2]
    cut = [path for path, bucket in buckets.items() if cropped_share(photos[path].size, bucket) > CROPPED_SHARE]
    lines = []
    if small:
        smallest = min(small, key=lambda path: photos[path].size[0] * photos[path].size[1])
        width, height = photos[smallest].size
        bucket = buckets[smallest]
        grown = "enlarged" if not config.buckets else "not enlarged"
        lines = counted(
            folder,
            [smallest] * len(small),
            f"images are small for resolution {resolution} and are {grown}: the smallest, {{first}} of "
            f"{width}x{height}, trains at {bucket.width}x{bucket.height}; take larger photos, or a lower resolution",
        )
    lines += counted(
        folder,
        cut,
        f"images lose more than {CROPPED_SHARE:.0%} of their area to the crop (first: {{first}}); cut them to a shape "
        "less long yourself, or pad them",
    )
    pairs = near_duplicates(photos)
    alike = f"like {printable(pairs[0][0].name)}" if pairs else ""
    return lines + counted(
        folder,
        [second for _, second in pairs],
        f"images show nearly the same as another (first: {{first}}, {alike}) and weigh double; remove them",
    )


def _check_masks(report: DataReport) -> None:
    if not any(TRANSPARENT in facts.traits for facts in report.photos.values()):
        report.warnings.append("coat.data.transparency=mask: no photo has transparent parts; it has no effect")
    for sample in dict.fromkeys(report.samples):
        facts = report.photos[sample.image_path]
        if facts.visible is not None and _visible_share(facts, sample.bucket) < LEAST_VISIBLE:
            report.errors.append(
                f"{printable(sample.image_path)}: nothing visible is left in its crop to {sample.bucket.width}x"
                f"{sample.bucket.height}; move the product to the middle of the picture, or remove it"
            )


def _visible_share(facts: PhotoFacts, bucket: Bucket) -> float:
    """Mean opacity, from 0 to 1, of the grid cells that lie wholly within the crop."""
    inside = []
    for kept, covering in zip((bucket.height, bucket.width), covering_size(facts.size, bucket)[::-1], strict=True):
        margin = math.ceil((1 - kept / covering) / 2 * VISIBLE_SIDE)
        inside.append(slice(margin, max(margin + 1, VISIBLE_SIDE - margin)))
    return float(facts.visible[inside[0], inside[1]].mean()) / 255


def _table(where: str, photos: dict[Path, PhotoFacts], raw: Mapping[Path, str], config: Any, step: int) -> str:
    captions = sum(bool(caption) for caption in raw.values())
    lines = [
        f"{where}: {len(photos)} images, {captions} captions",
        "  resolution      bucket  images  cropped  at most",
    ]
    for resolution in resolutions(config):
        members: defaultdict[Bucket, list[float]] = defaultdict(list)
        for facts in photos.values():
            bucket = training_size(facts.size, resolution, config, step)
            members[bucket].append(cropped_share(facts.size, bucket))
        for bucket, shares in sorted(members.items()):
            size = f"{bucket.width}x{bucket.height}"
            mean = sum(shares) / len(shares)
            lines.append(f"  {resolution:>10}  {size:>10}  {len(shares):>6}  {mean:>6.1%}  {max(shares):>7.1%}")
    counts = Counter(trait for facts in photos.values() for trait in facts.traits)
    found = [f"{counts[trait]} {trait}" for trait in TRAITS if counts[trait]]
    lines.append(f"  corrected while reading: {', '.join(found) or 'nothing'}")
    return "\n".join(lines)


@dataclass(frozen=True)
class PhotoFacts:
    """Facts of a decoded photo.

    Attributes:
        size: width and height in pixels, upright.
        notes: doubts about its colours.
        opacity: mean alpha from 0 to 1.
        visible: alpha of the upright photo in a 64×64 grid, [64, 64] uint8; None if opaque.
        look: difference hash, 256 bits as bytes.
        colour: mean red, green and blue, 0 to 255.
    """

    size: tuple[int, int]
    traits: frozenset[str]
    notes: tuple[str, ...]
    opacity: float
    visible: np.ndarray | None
    look: bytes
    colour: tuple[float, float, float]


def survey(paths: Sequence[Path]) -> dict[Path, PhotoFacts | DatasetError]:
    """Facts of each photo, or why it cannot be read; unchanged files are read once per process."""
    with ThreadPoolExecutor(_THREADS) as pool:
        found = tqdm(pool.map(_facts_of, paths), "Reading photos", len(paths), delay=_QUIET_SECONDS)
        return dict(zip(paths, found, strict=True))


def near_duplicates(facts: dict[Path, PhotoFacts]) -> list[tuple[Path, Path]]:
    """Pairs of photos that show the same, each photo with the first like it.

    Their 16×16 difference hashes differ in at most 16 of 256 bits, their mean colours in at most 12 of 255 levels.
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
