"""From dataset settings to samples, and from samples to an endless, resumable, shardable order of batches."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .buckets import BUCKET_STEP, Bucket, bucket_for
from .captions import PLACEHOLDERS, caption_file, inject_trigger, read_caption
from .errors import DatasetError
from .images import image_size

logger = logging.getLogger(__name__)

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")
_OTHER_IMAGES = (".heic", ".heif", ".avif", ".bmp", ".gif", ".tif", ".tiff", ".jxl", ".dng")
_CONTROL_FOLDER = "_controls"  # ai-toolkit keeps conditioning images there
_LISTED = 5


@dataclass(frozen=True)
class Sample:
    """One thing to train on: an image at one size.

    Attributes:
        image_path: The image file.
        caption: Final caption, trigger word included.
        bucket: Training size in pixels.
        dataset_index: Index of the `datasets` entry it comes from.
        flip: Mirrored left to right.
        dropped_caption: The prompt used instead when the caption is dropped: "" or, as in ai-toolkit, the trigger word.
    """

    image_path: Path
    caption: str
    bucket: Bucket
    dataset_index: int
    flip: bool = False
    dropped_caption: str = ""


def find_images(folder: Path | str) -> list[Path]:
    """Images below a folder, sorted: .jpg .jpeg .png .webp, recursively, without hidden files and `_controls`."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != _CONTROL_FOLDER]
        found += [
            Path(root, name) for name in names if name.lower().endswith(IMAGE_EXTENSIONS) and not name.startswith(".")
        ]
    return sorted(found, key=lambda path: path.as_posix())


def scan(dataset_configs: Sequence[Any], trigger_word: str | None = None, *, step: int = BUCKET_STEP) -> list[Sample]:
    """All samples of all datasets: every image at every resolution, `num_repeats` times, and mirrored where `flip_x`.

    Args:
        dataset_configs: Objects with folder_path, caption_ext, default_caption, resolution (list of int), num_repeats,
            flip_x, buckets, shuffle_tokens, cache_text_embeddings (ai-toolkit's meaning of each).
        trigger_word: Goes into every caption; see `inject_trigger`.
        step: Bucket sides are multiples of this many pixels.

    Returns:
        Samples in an order that depends only on settings and file names.

    Raises:
        DatasetError: no datasets, a missing or empty folder, unreadable images or captions.
    """
    if not dataset_configs:
        raise DatasetError("datasets=[]: there is nothing to train on; add an entry with folder_path")
    samples: list[Sample] = []
    for index, config in enumerate(dataset_configs):
        paths = _images_of(index, config)
        _report_unread(config.folder_path)
        sizes = _sizes_of(paths)
        captions = _captions_of(paths, config, trigger_word)
        dropped = inject_trigger("", trigger_word)
        entry = [
            Sample(path, captions[path], _bucket(sizes[path], resolution, config, step), index, False, dropped)
            for resolution in config.resolution
            for path in paths * config.num_repeats
        ]
        if config.flip_x:
            entry += [Sample(s.image_path, s.caption, s.bucket, index, True, dropped) for s in entry]
        logger.info("%s: %d images, %d samples", config.folder_path, len(paths), len(entry))
        samples += entry
    return samples


def _images_of(index: int, config: Any) -> list[Path]:
    where = f"datasets[{index}].folder_path={config.folder_path}"
    wanted = (
        f"put images ({', '.join(IMAGE_EXTENSIONS)}) there, each with a caption of the same name (photo.jpg, "
        f"{caption_file('photo.jpg', config.caption_ext)})"
    )
    if not Path(config.folder_path).is_dir():
        raise DatasetError(f"{where}: there is no such folder; make it and {wanted}, or correct the path")
    paths = find_images(config.folder_path)
    if not paths:
        raise DatasetError(f"{where}: the folder has no images; {wanted}")
    return paths


def _report_unread(folder: Path | str) -> None:
    """Name photos in formats that are not read, such as a phone's HEIC: they would be missed in silence."""
    unread = sorted(path.name for path in Path(folder).rglob("*") if path.suffix.lower() in _OTHER_IMAGES)
    if unread:
        logger.warning(
            "%s: %d images are not read (first: %s); save them as one of %s to train on them",
            folder,
            len(unread),
            unread[0],
            ", ".join(IMAGE_EXTENSIONS),
        )


def _sizes_of(paths: list[Path]) -> dict[Path, tuple[int, int]]:
    sizes: dict[Path, tuple[int, int]] = {}
    problems = []
    for path in paths:
        try:
            sizes[path] = image_size(path)
        except DatasetError as error:
            problems.append(str(error))
    if problems:
        more = f"\n... and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise DatasetError("\n".join(problems[:_LISTED]) + more)
    return sizes


def _captions_of(paths: list[Path], config: Any, trigger_word: str | None) -> dict[Path, str]:
    raw = {path: read_caption(path, config.caption_ext, config.default_caption) for path in paths}
    missing = [path for path in paths if not caption_file(path, config.caption_ext).is_file()]
    if missing:
        logger.warning(
            "%s: %d of %d images have no %s caption (first: %s); they train with %s",
            config.folder_path,
            len(missing),
            len(paths),
            config.caption_ext,
            missing[0].name,
            "default_caption" if config.default_caption else "the trigger word alone, or nothing",
        )
    holders = sum(any(holder in caption for holder in PLACEHOLDERS) for caption in raw.values())
    if holders and not trigger_word:
        logger.warning(
            "%s: %d captions use [trigger] or [name] but trigger_word is not set; the placeholder is removed",
            config.folder_path,
            holders,
        )
    if config.shuffle_tokens and config.cache_text_embeddings:
        logger.warning(
            "%s: shuffle_tokens has no effect with cache_text_embeddings: true (each caption is encoded once, as "
            "written); set one of them to false",
            config.folder_path,
        )
    return {path: inject_trigger(caption, trigger_word) for path, caption in raw.items()}


def _bucket(size: tuple[int, int], resolution: int, config: Any, step: int) -> Bucket:
    if config.buckets:
        return bucket_for(*size, resolution, step)
    return bucket_for(resolution, resolution, resolution, step)


@dataclass(frozen=True)
class Batch:
    """Indices of samples that share a bucket size, and the number of the draw since the start of training."""

    indices: tuple[int, ...]
    draw: int


class BucketBatchSampler:
    """Endless order of batches of equal image size, one shuffle per epoch.

    The order of epoch e depends on (samples, batch_size, seed, e) only. Rank r of `world_size` takes batches r,
    r + world_size, ... of that one sequence, across epoch borders, so that N processes see together what one process
    sees with N accumulation steps. A bucket whose size is not a multiple of `batch_size` fills its last batch by
    starting over with its first samples: no image is left out and every batch weighs the same.

    Args:
        samples: As returned by `scan`.
        batch_size: Samples per batch and process.
        seed: Of the order.
        rank: This process.
        world_size: Number of processes.

    Raises:
        ValueError: no samples, batch_size < 1, or rank not in [0, world_size).
    """

    def __init__(
        self, samples: Sequence[Sample], batch_size: int, seed: int = 0, rank: int = 0, world_size: int = 1
    ) -> None:
        if not samples:
            raise ValueError("samples=[]: there is nothing to train on; scan a dataset folder with images")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: must be at least 1; use 1")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}: must be from 0 to world_size - 1 = {world_size - 1}; check the launcher")
        self.batch_size, self.seed, self.rank, self.world_size = batch_size, seed, rank, world_size
        self._buckets: dict[Bucket, list[int]] = {}
        for index, sample in enumerate(samples):
            self._buckets.setdefault(sample.bucket, []).append(index)
        self.batches_per_epoch = sum(-(-len(members) // batch_size) for members in self._buckets.values())
        self._sample_count = len(samples)
        self._position = 0  # in the sequence over all epochs, all ranks together
        self._order: tuple[int, list[tuple[int, ...]]] = (-1, [])

    def epoch_batches(self, epoch: int) -> list[tuple[int, ...]]:
        """All batches of an epoch, all ranks together, in order."""
        rng = random.Random(f"{self.seed}/{epoch}")
        batches = []
        for members in self._buckets.values():
            shuffled = rng.sample(members, len(members))
            for start in range(0, len(shuffled), self.batch_size):
                stop = start + self.batch_size
                batches.append(tuple(shuffled[i % len(shuffled)] for i in range(start, stop)))
        rng.shuffle(batches)
        return batches

    def __iter__(self) -> Iterator[Batch]:
        while True:
            draw = self._position + self.rank
            self._position += self.world_size
            yield Batch(self._at(draw), draw)

    def _at(self, draw: int) -> tuple[int, ...]:
        epoch, position = divmod(draw, self.batches_per_epoch)
        if self._order[0] != epoch:
            self._order = (epoch, self.epoch_batches(epoch))
        return self._order[1][position]

    def state_dict(self) -> dict[str, int]:
        """Where the next batch comes from; the same on every rank after as many batches."""
        epoch, position = divmod(self._position, self.batches_per_epoch)
        return {
            "epoch": epoch,
            "position": position,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "samples": self._sample_count,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where `state` was taken; says so when the data or settings changed and the order is another one."""
        mine = self.state_dict()
        changed = [
            f"{key} {state[key]} -> {mine[key]}" for key in ("seed", "batch_size", "samples") if state[key] != mine[key]
        ]
        if changed:
            logger.warning(
                "resume: %s; training continues in epoch %d with a new order", ", ".join(changed), state["epoch"]
            )
        position = min(state["position"], self.batches_per_epoch)
        self._position = state["epoch"] * self.batches_per_epoch + position
