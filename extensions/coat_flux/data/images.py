"""Reading image files as a photographer expects: upright, opaque, 8-bit sRGB.

ai-toolkit does `Image.open`, EXIF transpose, `convert("RGB")`. That drops alpha (exposing the hidden colour, often
black), clips 16-bit greyscale to white and ignores colour profiles (Display P3 phone photos lose saturation, CMYK
scans shift). Here alpha is composited on a background, 16-bit is scaled, and an embedded ICC profile is converted to
sRGB. (Of 16-bit colour, Pillow reads the high byte: at most one level of 255 is lost.)

Only JPEG, PNG and WebP are decoded, regardless of the file name: some of Pillow's other readers start programs.
"""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageCms, ImageColor

from ..config.options import COLOURS
from .files import DatasetError, printable

FORMATS = ("JPEG", "PNG", "WEBP")
_SEVERAL_JPEGS = "MPO"  # Pillow's name for a phone's JPEG with further pictures appended; the first counts
ROTATED, TAGGED, DEEP, CMYK, PALETTE, TRANSPARENT = (
    "EXIF orientation",
    "colour profile",
    "16 bit",
    "CMYK",
    "palette",
    "transparency",
)
TRAITS = (ROTATED, TAGGED, DEEP, CMYK, PALETTE, TRANSPARENT)

# What Pillow raises on damaged or foreign files; anything else is a bug and must surface as itself.
_READ_ERRORS = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)
_EXIF_ORIENTATION, _EXIF_INTEROP, _INTEROP_INDEX, _ADOBE_RGB = 0x0112, 0xA005, 1, "R03"
_TURN = {  # EXIF orientation → the transpose that undoes it
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIXTEEN_BIT = ("I", "I;16", "I;16B", "I;16L", "I;16N")
_PNG_DEPTH_AT = 24
_STARTS = (  # signatures of files often misnamed as images
    (b"GIF8", "a GIF"),
    (b"<", "a web page or an SVG drawing"),
    (b"version https://git-lfs", "a Git LFS pointer, the image itself was not fetched"),
)
SAME_LEVELS = 2  # of 255; one comes from rounding, one from the differing white points of sRGB profiles in use
_PROBES_PER_CHANNEL = 9
_MODES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}


@dataclass(frozen=True)
class Photo:
    """A decoded photo: upright opaque sRGB (mode "RGB"), and its opacity (mode "L", or None)."""

    image: Image.Image
    alpha: Image.Image | None
    traits: frozenset[str]
    notes: tuple[str, ...]


def read_photo(path: Path | str, background: str = "white") -> Photo:
    """Read a JPEG, PNG or WebP file, by content, as upright, opaque, 8-bit sRGB.

    Applies EXIF orientation and an embedded ICC profile, converts palette, greyscale, 16-bit and CMYK files to RGB,
    and composites transparency on `background`, a name of `COLOURS` or "#rrggbb". Raises DatasetError.
    """
    with opened(path) as image:
        image.load()
        traits, notes = traits_of(image, path)
        turn = turn_of(image)
        profile = image.info.get("icc_profile")
        colour, alpha = split_alpha(image if turn is None else image.transpose(turn))
    colour = to_srgb(colour, profile) if profile and TAGGED in traits else colour.convert("RGB")
    if TRANSPARENT not in traits:
        return Photo(colour, None, traits, notes)
    ground = Image.new("RGB", colour.size, rgb(background))
    ground.paste(colour, mask=alpha)
    return Photo(ground, alpha, traits, notes)


def to_tensor(image: Image.Image) -> torch.Tensor:
    """Pixels for the VAE: [3, H, W] float32 in [-1, 1] from an RGB image."""
    pixels_HWC = torch.from_numpy(np.array(image, dtype=np.float32))
    return (pixels_HWC / 127.5 - 1.0).permute(2, 0, 1).contiguous()


def rgb(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of a name of `COLOURS` or "#rrggbb"."""
    return ImageColor.getrgb(COLOURS.get(colour, colour))[:3]


@contextlib.contextmanager
def opened(path: Path | str) -> Iterator[Image.Image]:
    """Open an image file and read its header; any error inside the block becomes a DatasetError."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            frames = getattr(image, "n_frames", 1)
            if frames > 1 and image.format != _SEVERAL_JPEGS:
                raise DatasetError(
                    f"{printable(path)}: is an animation of {frames} frames; save the frame to train on as PNG or JPEG"
                )
            yield image
    except DatasetError:
        raise
    except _READ_ERRORS as error:
        raise _unreadable(path, error) from error


def turn_of(image: Image.Image) -> Image.Transpose | None:
    """The transpose that makes a file's pixels upright, or None."""
    return _TURN.get(image.getexif().get(_EXIF_ORIENTATION))


def traits_of(image: Image.Image, path: Path | str) -> tuple[frozenset[str], tuple[str, ...]]:
    """Which of `TRAITS` a decoded file has, and notes on what cannot be known."""
    traits, notes = set(), []
    profile = image.info.get("icc_profile")
    if turn_of(image) is not None:
        traits.add(ROTATED)
    if image.mode in _SIXTEEN_BIT or (image.format == "PNG" and _png_depth(path) == 16):
        traits.add(DEEP)
    traits |= {trait for mode, trait in (("CMYK", CMYK), ("P", PALETTE)) if image.mode == mode}
    if _is_transparent(image):
        traits.add(TRANSPARENT)
    try:
        if profile and not is_srgb(_colour_mode(image), profile):
            traits.add(TAGGED)
    except ProfileError as error:
        notes.append(f"its colour profile cannot be used ({error}), it is read as sRGB; save it again as sRGB")
    if image.mode == "CMYK" and TAGGED not in traits:
        notes.append("it is CMYK without a usable colour profile, its colours are a guess; save it again as sRGB")
    if not profile and _interop_index(image) == _ADOBE_RGB:
        notes.append(
            "its camera says Adobe RGB but no colour profile is embedded, it is read as sRGB; save it again as sRGB"
        )
    return frozenset(traits), tuple(notes)


def _interop_index(image: Image.Image) -> str | None:
    # Pillow before 13 raises if the directory is missing, or returns None if it or its parent is damaged
    with contextlib.suppress(KeyError, TypeError, AttributeError):
        return image.getexif().get_ifd(_EXIF_INTEROP).get(_INTEROP_INDEX)
    return None


def split_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Colour part in mode L, RGB or CMYK, and the alpha channel (mode L) or None."""
    if image.mode in _SIXTEEN_BIT:
        values = np.asarray(image).astype(np.int64).clip(0, 65535)
        hidden = image.info.get("transparency")
        alpha = None if hidden is None else Image.fromarray(np.where(values == hidden, 0, 255).astype(np.uint8))
        return Image.fromarray(((values + 128) // 257).astype(np.uint8)), alpha
    if image.mode in ("LA", "La"):
        grey = image.convert("LA")
        return grey.getchannel("L"), grey.getchannel("A")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return rgba.convert("RGB"), rgba.getchannel("A")
    return image.convert(_colour_mode(image)), None


def _colour_mode(image: Image.Image) -> str:
    if image.mode in ("CMYK", "LA", "La", *_SIXTEEN_BIT):
        return "CMYK" if image.mode == "CMYK" else "L"
    return "L" if image.mode in ("1", "L") and not image.has_transparency_data else "RGB"


def _is_transparent(image: Image.Image) -> bool:
    if not image.has_transparency_data:
        return False
    alpha = image.getchannel("A") if image.mode in ("RGBA", "LA") else split_alpha(image)[1]
    return alpha is not None and alpha.getextrema()[0] < 255


def _png_depth(path: Path | str) -> int:
    with open(path, "rb") as file:
        return file.read(_PNG_DEPTH_AT + 1)[_PNG_DEPTH_AT]


def _unreadable(path: Path | str, error: Exception) -> DatasetError:
    name = printable(path)
    if isinstance(error, Image.DecompressionBombError):
        return DatasetError(f"{name}: is too large to be read ({error}); make it smaller, or remove it")
    if isinstance(error, OSError) and error.errno is not None:
        return DatasetError(f"{name}: cannot be opened ({error.strerror}); make the file readable, or remove it")
    why = _kind(path) if isinstance(error, Image.UnidentifiedImageError) else printable(error)
    return DatasetError(
        f"{name}: cannot be read as an image ({why}); open it and save it again as PNG or JPEG, or remove it"
    )


def _kind(path: Path | str) -> str:
    with open(path, "rb") as file:
        start = file.read(256)
    if not start:
        return "the file is empty"
    if start[4:8] == b"ftyp":
        return f"it is a phone's {start[8:12].decode('ascii', 'replace').strip().upper()} file"
    for magic, kind in _STARTS:
        if start.startswith(magic):
            return f"it is {kind}"
    return "it is not JPEG, PNG or WebP, or its beginning is damaged"


class ProfileError(ValueError):
    """A profile cannot be used for an image; the message says why."""


def to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """Convert an image in mode L, RGB or CMYK to sRGB; raises ProfileError for a damaged or unsuitable ICC profile."""
    transform, mode = _transform(profile, image.mode)
    image = image.convert(mode)
    return image.convert("RGB") if transform is None else ImageCms.applyTransform(image, transform)


def is_srgb(mode: str, profile: bytes) -> bool:
    """Whether images in `mode` with this profile have sRGB values already; raises ProfileError as `to_srgb`."""
    return _transform(profile, mode)[0] is None


@lru_cache(maxsize=64)
def _transform(profile: bytes, mode: str) -> tuple[ImageCms.ImageCmsTransform | None, str]:
    """The transform to sRGB (None if it is the identity) and its input mode."""
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
    levels = np.linspace(0, 255, _PROBES_PER_CHANNEL).round().astype(np.uint8)
    grid = np.meshgrid(*[levels] * Image.getmodebands(mode), indexing="ij")
    return Image.merge(mode, [Image.fromarray(channel.reshape(1, -1)) for channel in grid])
