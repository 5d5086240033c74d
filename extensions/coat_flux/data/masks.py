"""Loss masks, as ai-toolkit reads them: white is trained, black is not.

A mask is a photo's alpha channel (`alpha_mask`), or the file with its name in `mask_path`. It is inverted, mirrored
and cut with its photo, blurred by up to 0.5 % of its shorter side, by chance at each draw, and read at the upper left
pixel of each latent. Level v of 255 weighs m = mask_min_value + (1 - mask_min_value) v / 255, and

    loss of a sample = mean over elements of m / (mean of m over the batch) · error

where a photo without a mask has m = 0 beside photos that have one, and counts whole in a batch without masks.

Source: ai-toolkit's MaskFileItemDTOMixin and SDTrainer (behaviour).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor
from torch.nn.functional import interpolate

from .buckets import Bucket, Sample, covering_size, fit_to_bucket
from .files import counted, printable
from .images import read_mask

MASK_EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")  # looked for in this order
BLUR_SHARE = 0.005  # of the shorter side
OTHER_SHAPE = 0.02  # relative difference of the aspect ratio
_BLACK = 8  # levels; what is darker is taken for the noise of a JPEG


@dataclass(frozen=True)
class Mask:
    """A photo's mask: its file, upright size in pixels, the photo's, how its levels are read."""

    path: Path
    size: tuple[int, int]
    photo_size: tuple[int, int]
    alpha: bool = False
    inverted: bool = False
    least: float = 0.0
    box: tuple[int, int, int, int] | None = None  # left, top, right, bottom of what is not black

    def radius(self, chance: float) -> int:
        """The blur in pixels of a draw with `chance` from 0 to 1."""
        return int(min(self.size) * chance * BLUR_SHARE)

    def cut(self, bucket: Bucket, *, flip: bool = False, radius: int = 0) -> Image.Image:
        """The mask of the photo's crop to a bucket, mode "L"; raises DatasetError."""
        image = read_mask(self.path, alpha=self.alpha, inverted=self.inverted)
        blurred = image.filter(ImageFilter.GaussianBlur(radius))
        return fit_to_bucket(blurred, bucket, self.photo_size, flip=flip)

    def levels(self, bucket: Bucket, size: tuple[int, int], *, flip: bool = False, radius: int = 0) -> Tensor:
        """Levels at latents of `size` (rows, columns): uint8 [1, rows, columns]; raises DatasetError."""
        crop = np.array(self.cut(bucket, flip=flip, radius=radius))
        return interpolate(torch.from_numpy(crop)[None, None], size=size)[0]

    def weights(self, levels: Tensor) -> Tensor:
        """The weight of each level, fp32 from `least` to 1."""
        return self.least + levels.float() / 255 * (1 - self.least)

    def shows_in(self, bucket: Bucket) -> bool:
        """Whether some of the mask's white is inside the photo's crop to a bucket."""
        if self.box is None:
            return False
        covering, crop = covering_size(self.photo_size, bucket), (bucket.width, bucket.height)
        for axis in (0, 1):
            scale = covering[axis] / self.size[axis]
            first = (covering[axis] - crop[axis]) // 2
            if self.box[axis + 2] * scale <= first or self.box[axis] * scale >= first + crop[axis]:
                return False
        return True


def normalized(weights: Tensor) -> Tensor:
    """Weights with mean 1: 1 everywhere if none is above 0, as without masks."""
    return weights / weights.mean() if weights.any() else torch.ones_like(weights)


def find_mask(photo: Path, photo_size: tuple[int, int], config: Any) -> Mask | None:
    """The mask of a photo under an entry of `datasets`, None without one; raises DatasetError."""
    places = [photo] if config.alpha_mask else []
    if not places and config.mask_path:
        names = [Path(config.mask_path, photo.stem + extension) for extension in MASK_EXTENSIONS]
        places = [path for path in names if path.exists()]
    if not places:
        return None
    image = read_mask(places[0], alpha=config.alpha_mask, inverted=config.invert_mask)
    box = image.point(lambda level: level if level >= _BLACK else 0).getbbox()
    reading = config.alpha_mask, config.invert_mask, config.mask_min_value
    return Mask(places[0], image.size, photo_size, *reading, box)


def lint_masks(folder: Path, samples: list[Sample], config: Any) -> tuple[list[str], list[str]]:
    """Errors and warnings about the masks of a folder's samples: missing, of another shape, or black all over."""
    masks = {sample.image_path: sample.mask for sample in samples}
    missing = [path for path, mask in masks.items() if mask is None]
    where = f"mask_path={printable(config.mask_path)}"
    if not config.alpha_mask and folder.resolve() in Path(config.mask_path).resolve().parents:
        return [f"{where}: is inside {printable(folder)}, where masks train as photos; move it beside that folder"], []
    if len(missing) == len(masks):
        rule = f"has no mask of a photo in {printable(folder)}"
        return [f"{where}: {rule}; give each its photo's name, with one of {', '.join(MASK_EXTENSIONS)}"], []
    text = (
        f"of {len(masks)} photos have no mask in {printable(config.mask_path)} (first: {{first}}); they count nothing "
        "beside others in a batch, and train whole alone"
    )
    errors, warnings = [], counted(folder, missing, text)
    scaled = []
    black = {each.image_path for each in samples if each.mask is not None and not each.mask.shows_in(each.bucket)}
    for path, mask in masks.items():
        if mask is None:
            continue
        (width, height), (across, down) = mask.size, mask.photo_size
        if abs(width * down / (height * across) - 1) > OTHER_SHAPE:
            text = f"is {width}x{height}, its photo {printable(path.name)} {across}x{down}; make it as wide and high"
            errors.append(f"{printable(mask.path)}: {text}")
        elif mask.size != mask.photo_size:
            scaled.append(path)
        if path in black and mask.least == 0:
            text = "its crop is black, so nothing would be trained; paint the subject white, or write invert_mask: true"
            errors.append(f"{printable(mask.path)}: {text}")
    text = "masks have another size than their photos (first: that of {first}); they are scaled"
    warnings += counted(folder, scaled, text)
    if config.mask_min_value > 0:
        text = "crops have black masks (first: that of {first}); all of such a photo counts the same"
        warnings += counted(folder, sorted(black), text)
    return errors, warnings
