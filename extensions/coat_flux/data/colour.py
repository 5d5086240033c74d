"""Colour profiles: from what a photo is tagged with to sRGB.

A profile that gives every probed colour sRGB's values within two levels is sRGB under another name; such photos keep
their pixels bit for bit.
"""

from __future__ import annotations

import io
from functools import lru_cache

import numpy as np
from PIL import Image, ImageCms

SAME_LEVELS = 2  # of 255; one comes from rounding, one from the differing white points of sRGB profiles in use
_PROBES_PER_CHANNEL = 9
_MODES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}


class ProfileError(ValueError):
    """A profile cannot be used for an image; the message says why."""


def to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """An image in mode RGB with sRGB's values.

    Args:
        image: In mode L, RGB or CMYK.
        profile: Bytes of the ICC profile it is tagged with. A grey image may have an RGB profile.

    Raises:
        ProfileError: the profile is damaged, or made for another kind of image.
    """
    transform, mode = _transform(profile, image.mode)
    image = image.convert(mode)
    return image.convert("RGB") if transform is None else ImageCms.applyTransform(image, transform)


def is_srgb(mode: str, profile: bytes) -> bool:
    """Whether images in `mode` with this profile have sRGB's values already.

    Raises:
        ProfileError: as `to_srgb`.
    """
    return _transform(profile, mode)[0] is None


@lru_cache(maxsize=64)
def _transform(profile: bytes, mode: str) -> tuple[ImageCms.ImageCmsTransform | None, str]:
    """The transform to sRGB (None where it would change nothing) and the mode it takes."""
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        space = source.profile.xcolor_space.strip()
        wanted = _MODES.get(space)
        if wanted is None or (wanted != mode and (wanted, mode) != ("RGB", "L")):
            raise ProfileError(f"it is made for {space} images, this is {mode}")
        transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), wanted, "RGB")
    except (ImageCms.PyCMSError, OSError) as error:
        raise ProfileError(str(error)) from error
    probe = _probe(wanted)
    converted = np.asarray(ImageCms.applyTransform(probe, transform), np.int16)
    same = wanted != "CMYK" and np.abs(converted - np.asarray(probe.convert("RGB"), np.int16)).max() <= SAME_LEVELS
    return (None if same else transform), wanted


def _probe(mode: str) -> Image.Image:
    """Colours spread evenly over a mode."""
    levels = np.linspace(0, 255, _PROBES_PER_CHANNEL).round().astype(np.uint8)
    grid = np.meshgrid(*[levels] * Image.getmodebands(mode), indexing="ij")
    return Image.merge(mode, [Image.fromarray(channel.reshape(1, -1)) for channel in grid])
