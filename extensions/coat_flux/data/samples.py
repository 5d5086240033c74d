"""One thing to train on, and how the images and settings of a dataset become a list of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .buckets import Bucket, bucket_for


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


def resolutions(config: Any) -> tuple[int, ...]:
    """The resolutions of a dataset's settings; ai-toolkit writes one as a plain number."""
    return (config.resolution,) if isinstance(config.resolution, int) else tuple(config.resolution)


def training_size(size: tuple[int, int], resolution: int, config: Any, step: int) -> Bucket:
    """The bucket of an image of `size` (width, height) under a dataset's settings."""
    return (
        bucket_for(*size, resolution, step) if config.buckets else bucket_for(resolution, resolution, resolution, step)
    )


def make_samples(
    index: int,
    config: Any,
    sizes: Mapping[Path, tuple[int, int]],
    captions: Mapping[Path, str],
    dropped_caption: str,
    step: int,
) -> list[Sample]:
    """Every image at every resolution, `num_repeats` times, and mirrored where `flip_x`.

    Args:
        index: Of the dataset.
        config: Its settings.
        sizes: Image -> width and height in pixels, in order.
        captions: Image -> final caption.
        dropped_caption: See `Sample`.
        step: Bucket sides are multiples of this many pixels.
    """
    plain = [
        Sample(
            path, captions[path], training_size(sizes[path], resolution, config, step), index, False, dropped_caption
        )
        for resolution in resolutions(config)
        for path in list(sizes) * config.num_repeats
    ]
    if not config.flip_x:
        return plain
    return plain + [Sample(s.image_path, s.caption, s.bucket, index, True, dropped_caption) for s in plain]
