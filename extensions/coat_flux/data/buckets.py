"""Aspect-ratio buckets: the training size of an image, resize and crop to it, and the samples.

The rule is ai-toolkit's. An image is scaled down to the pixel budget resolution² (never up), each side is rounded down
or up to a multiple of a step, and the size within the budget is taken whose area is nearest to the target. Only sides
shorter than one step grow.

For FLUX.1 a step is 32: 8 (VAE) × 2 (packing) × 2. One difference: for strips thinner than a step ai-toolkit may
exceed the budget; here the long side is cut.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

STEP = 32  # also the least resolution


@dataclass(frozen=True, order=True)
class Bucket:
    """A training size in pixels."""

    width: int
    height: int


def bucket_for(width: int, height: int, resolution: int) -> Bucket:
    """The bucket of an upright image."""
    budget = resolution * resolution
    target = min(width * height, budget)
    scale = (target / (width * height)) ** 0.5
    ideal = (width * scale / STEP, height * scale / STEP)
    sides = [sorted({math.floor(side), math.ceil(side)} - {0}) for side in ideal]
    sizes = [(w * STEP, h * STEP) for w, h in itertools.product(*sides) if w * h * STEP * STEP <= budget]
    if sizes:
        return Bucket(*min(sizes, key=lambda size: abs(size[0] * size[1] - target)))
    longest = budget // (STEP * STEP)
    return Bucket(*(min(max(1, math.floor(side)), longest) * STEP for side in ideal))


def fit_to_bucket(
    image: Image.Image, bucket: Bucket, size: tuple[int, int] | None = None, *, flip: bool = False
) -> Image.Image:
    """Resize (bicubic) so that the image just covers the bucket, as one of `size` would, then crop its centre."""
    if flip:
        image = ImageOps.mirror(image)
    covering = covering_size(size or image.size, bucket)
    left, top = (covering[0] - bucket.width) // 2, (covering[1] - bucket.height) // 2
    resized = image.resize(covering, Image.Resampling.BICUBIC)
    return resized.crop((left, top, left + bucket.width, top + bucket.height))


def covering_size(size: tuple[int, int], bucket: Bucket) -> tuple[int, int]:
    """The smallest width and height in pixels at the image's aspect ratio that cover the bucket."""
    width, height = size
    if bucket.width * height >= bucket.height * width:
        return bucket.width, -(-height * bucket.width // width)
    return -(-width * bucket.height // height), bucket.height


def cropped_share(size: tuple[int, int], bucket: Bucket) -> float:
    """The fraction of an image's area that the crop to its bucket cuts off."""
    width, height = covering_size(size, bucket)
    return 1.0 - bucket.width * bucket.height / (width * height)


@dataclass(frozen=True)
class Sample:
    """An image at one size, its caption, that if dropped ("" or, as in ai-toolkit, the trigger word), and its mask."""

    image_path: Path
    caption: str
    bucket: Bucket
    dataset_index: int
    flip: bool = False
    dropped_caption: str = ""
    mask: Any = None  # a `masks.Mask`


def training_size(size: tuple[int, int], resolution: int, config: Any) -> Bucket:
    """The bucket of an image of `size` (width, height) under a dataset's settings."""
    width, height = size if config.buckets else (resolution, resolution)
    return bucket_for(width, height, resolution)
