"""Reading image files the way a photographer expects to see them: upright, opaque, 8-bit sRGB.

ai-toolkit does `Image.open`, EXIF transpose, `convert("RGB")`. That drops alpha (showing whatever colour hides under
it, often black), clips 16-bit greyscale to white and ignores colour profiles (Display P3 phone photos lose saturation,
CMYK scans shift). Here alpha is laid on white, 16-bit is scaled, and an embedded ICC profile is converted to sRGB.
"""

from __future__ import annotations

import io
import logging
import struct
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageCms, ImageOps

from .errors import DatasetError

logger = logging.getLogger(__name__)

# What Pillow raises on damaged or foreign files; anything else is a bug and must surface as itself.
_READ_ERRORS = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)
_EXIF_ORIENTATION = 0x0112
_SIDEWAYS = (5, 6, 7, 8)
_SIXTEEN_BIT = ("I", "I;16", "I;16B", "I;16L", "I;16N")


def image_size(path: Path | str) -> tuple[int, int]:
    """Width and height in pixels as seen after EXIF rotation, from the header only.

    Raises:
        DatasetError: the file cannot be read as an image.
    """
    try:
        with Image.open(path) as image:
            width, height = image.size
            sideways = image.getexif().get(_EXIF_ORIENTATION) in _SIDEWAYS
    except _READ_ERRORS as error:
        raise _unreadable(path, error) from error
    return (height, width) if sideways else (width, height)


def load_image(path: Path | str) -> Image.Image:
    """Read an image file as upright, opaque, 8-bit sRGB.

    EXIF orientation is applied, transparency is composited on white, an embedded ICC profile is converted to sRGB, and
    palette, greyscale, 16-bit and CMYK files become RGB.

    Args:
        path: Image file; the content decides the format, not the extension.

    Returns:
        Image in mode "RGB".

    Raises:
        DatasetError: the file cannot be read; names the file and what to do.
    """
    try:
        with Image.open(path) as opened:
            opened.load()
            image = ImageOps.exif_transpose(opened)
    except _READ_ERRORS as error:
        raise _unreadable(path, error) from error
    profile = image.info.get("icc_profile")
    colour, alpha = _split_alpha(image)
    colour = _to_srgb(colour, profile, path)
    if alpha is None:
        return colour
    white = Image.new("RGB", colour.size, "white")
    white.paste(colour, mask=alpha)
    return white


def to_tensor(image: Image.Image) -> torch.Tensor:
    """Pixels for the VAE: [3, H, W] float32 in [-1, 1] from an RGB image."""
    pixels_HWC = torch.from_numpy(np.array(image, dtype=np.float32))
    return (pixels_HWC / 127.5 - 1.0).permute(2, 0, 1).contiguous()


def _unreadable(path: Path | str, error: Exception) -> DatasetError:
    if isinstance(error, Image.DecompressionBombError):
        return DatasetError(f"{path}: is too large to be read ({error}); make it smaller, or remove it")
    return DatasetError(
        f"{path}: cannot be read as an image ({error}); open it and save it again as PNG or JPEG, or remove it"
    )


def _split_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Colour part in mode L, RGB or CMYK, and the alpha channel (mode L) where there is one."""
    if image.mode in _SIXTEEN_BIT:
        values = np.asarray(image).astype(np.int64).clip(0, 65535)
        return Image.fromarray(((values + 128) // 257).astype(np.uint8)), None
    if image.mode in ("LA", "La"):
        grey = image.convert("LA")
        return grey.getchannel("L"), grey.getchannel("A")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return rgba.convert("RGB"), rgba.getchannel("A")
    if image.mode in ("1", "L"):
        return image.convert("L"), None
    return (image if image.mode == "CMYK" else image.convert("RGB")), None


def _to_srgb(colour: Image.Image, profile: bytes | None, path: Path | str) -> Image.Image:
    if not profile:
        return colour.convert("RGB")
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        converted = ImageCms.profileToProfile(colour, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
    except (ImageCms.PyCMSError, OSError) as error:
        logger.warning("%s: its colour profile does not fit the image (%s); read as sRGB without it", path, error)
        return colour.convert("RGB")
    return converted
