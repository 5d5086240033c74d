"""Reading image files as a photographer expects: upright, opaque, 8-bit sRGB.

ai-toolkit does `Image.open`, EXIF transpose, `convert("RGB")`: that drops alpha, clips 16-bit greyscale to white and
ignores colour profiles. Here alpha is composited on a background, 16-bit is scaled, and an ICC profile is converted to
sRGB.

Only JPEG, PNG, WebP and, with pillow-heif, HEIC are decoded, whatever the name: some other readers of Pillow
start programs.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageColor, ImageOps, ImageStat
from tqdm import tqdm

from ..base.run_log import bar_options
from ..config.coat import DataOptions
from ..config.options import COLOURS
from .files import READS_HEIF, DatasetError, printable

if READS_HEIF:
    import pillow_heif

    pillow_heif.register_heif_opener()

DEFAULTS = DataOptions()
HEIF = "HEIF"
HEIF_STARTS = (b"ftypheic", b"ftypheix", b"ftypmif1")  # after four bytes
FORMATS = ("JPEG", "PNG", "WEBP", *([HEIF] if READS_HEIF else []))
_SEVERAL = ("MPO", HEIF)  # of a phone, with several pictures; the first counts
TRAITS = ("EXIF orientation", "colour profile", "16 bit", "CMYK", "transparency", "HEIC")
ROTATED, TAGGED, DEEP, CMYK, TRANSPARENT, HEIC = TRAITS

# Pillow's on damaged or foreign files; anything else is a bug
_READ_ERRORS = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)
_EXIF_ORIENTATION = 0x0112
_TURN = {  # EXIF orientation → the transpose that undoes it
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that exchange width and height
_SIXTEEN_BIT = ("I", "I;16", "I;16B", "I;16L", "I;16N")
_PNG_DEPTH_AT = 24
SAME_LEVELS = 2  # of 255: rounding, and the differing white points of sRGB profiles
_PROBES_PER_CHANNEL = 9
_THREADS, _CACHED, _QUIET_SECONDS = 4, 20_000, 2
_HASH_SIDE = 16
_FLAT = 4  # levels; less contrast shows nothing
_HASH_MARGIN = 2  # levels; the noise of an even background sets no bit
# A photo saved again, scaled or cropped by 1 % differs by at most 16 of 256 bits, two drawn garments by 22 and more.
_SAME_BITS = 16
_SAME_COLOUR = 12  # levels; the same cut in another colour is another photo
_MODES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}


def read_photo(path: Path | str, background: str | None = "white") -> tuple[Image.Image, Image.Image | None]:
    """Read a photo as upright, opaque, 8-bit sRGB (mode "RGB"), and its opacity (mode "L"), None if opaque.

    Transparent parts become `background`, a name of `COLOURS` or "#rrggbb", or stay (None). Raises DatasetError.
    """
    with _opened(path) as image:
        image.load()
        colour, alpha = _split_alpha(image)
        traits, _ = _traits_of(image, path, colour.mode, alpha)
        turn = _TURN.get(image.getexif().get(_EXIF_ORIENTATION))
        profile = image.info.get("icc_profile")
    if turn is not None:
        colour = colour.transpose(turn)
        alpha = alpha and alpha.transpose(turn)
    if TAGGED in traits:
        transform, mode = _transform(profile, colour.mode)
        colour = ImageCms.applyTransform(colour.convert(mode), transform)
    colour = colour.convert("RGB")
    if TRANSPARENT not in traits:
        return colour, None
    if background is None:
        return colour, alpha
    ground = Image.new("RGB", colour.size, rgb(background))
    ground.paste(colour, mask=alpha)
    return ground, alpha


def read_mask(path: Path | str, *, alpha: bool = False, inverted: bool = False) -> Image.Image:
    """Read a mask upright, mode "L": an image's brightness, or with `alpha` its opacity; raises DatasetError."""
    with _opened(path) as image:
        image.load()
        turn = _TURN.get(image.getexif().get(_EXIF_ORIENTATION))
        colour, opacity = _split_alpha(image if turn is None else image.transpose(turn))
    if alpha:
        mask = opacity or Image.new("L", colour.size, 255)
    else:
        mask = colour.convert("RGB").convert("L")
    return ImageOps.invert(mask) if inverted else mask


def to_tensor(image: Image.Image | NDArray[np.uint8]) -> torch.Tensor:
    """Pixels for the VAE: [3, H, W] float32 in [-1, 1] from an RGB image, or its values [H, W, 3]."""
    pixels_HWC = torch.from_numpy(np.array(image, dtype=np.float32))
    return (pixels_HWC / 127.5 - 1.0).permute(2, 0, 1).contiguous()


def rgb(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of a name of `COLOURS` or "#rrggbb"."""
    return ImageColor.getrgb(COLOURS.get(colour, colour))[:3]


@contextlib.contextmanager
def _opened(path: Path | str) -> Iterator[Image.Image]:
    """Open an image file and read its header; any error inside the block becomes a DatasetError."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            frames = getattr(image, "n_frames", 1)
            if frames > 1 and image.format not in _SEVERAL:
                raise DatasetError(
                    f"{printable(path)}: is an animation of {frames} frames; save the frame to train on as PNG or JPEG"
                )
            yield image
    except DatasetError:
        raise
    except _READ_ERRORS as error:
        why = printable(error)
        if isinstance(error, Image.UnidentifiedImageError):  # such as GIF, HEIC, a web page, a Git LFS pointer
            with open(path, "rb") as file:
                start = file.read(24)
            why = f"it is not JPEG, PNG or WebP, but begins with {start!r}"
            if start[4:12] in HEIF_STARTS and not READS_HEIF:
                why = "it is HEIC, as of a phone; pip install pillow-heif reads it"
        remedy = "save it again as a readable PNG or JPEG, or remove it"
        raise DatasetError(f"{printable(path)}: cannot be read as an image ({why}); {remedy}") from error


def _traits_of(
    image: Image.Image, path: Path | str, colour_mode: str, alpha: Image.Image | None
) -> tuple[frozenset[str], tuple[str, ...]]:
    """Which of `TRAITS` a decoded file has, and notes on doubts; `colour_mode` and `alpha` are of `_split_alpha`."""
    traits, notes = set(), []
    profile = image.info.get("icc_profile")
    if image.getexif().get(_EXIF_ORIENTATION) in _TURN:
        traits.add(ROTATED)
    with open(path, "rb") as file:
        start = file.read(_PNG_DEPTH_AT + 1)
    if image.mode in _SIXTEEN_BIT or (image.format == "PNG" and start[_PNG_DEPTH_AT] == 16):
        traits.add(DEEP)
    if image.mode == "CMYK":
        traits.add(CMYK)
    if image.format == HEIF:
        traits.add(HEIC)
    if alpha is not None and alpha.getextrema()[0] < 255:
        traits.add(TRANSPARENT)
    try:
        if profile and _transform(profile, colour_mode)[0] is not None:
            traits.add(TAGGED)
    except ProfileError as error:
        notes.append(f"its colour profile cannot be used ({error}); save it again as sRGB")
    if image.mode == "CMYK" and TAGGED not in traits:
        notes.append("it is CMYK without a usable colour profile, its colours are a guess; save it again as sRGB")
    return frozenset(traits), tuple(notes)


def _split_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Colours in mode L, RGB or CMYK, and the alpha channel (mode L) or None."""
    if image.mode in _SIXTEEN_BIT:
        values = np.asarray(image).astype(np.int64).clip(0, 65535)
        return Image.fromarray(((values + 128) // 257).astype(np.uint8)), None
    if image.mode in ("LA", "La"):
        grey = image.convert("LA")
        return grey.getchannel("L"), grey.getchannel("A")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return rgba.convert("RGB"), rgba.getchannel("A")
    return image.convert({"1": "L", "L": "L", "CMYK": "CMYK"}.get(image.mode, "RGB")), None


class ProfileError(ValueError):
    """A profile cannot be used for an image; the message says why."""


@lru_cache(maxsize=64)
def _transform(profile: bytes, mode: str) -> tuple[ImageCms.ImageCmsTransform | None, str]:
    """The transform to sRGB, None if it changes nothing, and its input mode; raises ProfileError."""
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        space = source.profile.xcolor_space.strip()
        wanted = _MODES.get(space)
        if wanted is None or (wanted != mode and (wanted, mode) != ("RGB", "L")):
            raise ProfileError(f"it is made for {space} images, this is {mode}")
        transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), wanted, "RGB")
    except (ImageCms.PyCMSError, OSError) as error:
        raise ProfileError(str(error)) from error
    levels = np.linspace(0, 255, _PROBES_PER_CHANNEL).round().astype(np.uint8)
    grid = np.meshgrid(*[levels] * Image.getmodebands(wanted), indexing="ij")
    probe = Image.merge(wanted, [Image.fromarray(channel.reshape(1, -1)) for channel in grid])
    converted = np.asarray(ImageCms.applyTransform(probe, transform), np.int16)
    same = wanted != "CMYK" and np.abs(converted - np.asarray(probe.convert("RGB"), np.int16)).max() <= SAME_LEVELS
    return (None if same else transform), wanted


@dataclass(frozen=True)
class PhotoFacts:
    """Upright size in pixels, `TRAITS`, doubts about colours, mean alpha 0 to 1, difference hash, mean RGB 0 to 255."""

    size: tuple[int, int]
    traits: frozenset[str]
    notes: tuple[str, ...]
    opacity: float
    look: bytes
    colour: tuple[float, float, float]


def survey(paths: Sequence[Path]) -> dict[Path, PhotoFacts | DatasetError]:
    """Facts of each photo, or why it cannot be read; each version of a file is read once per process."""
    with ThreadPoolExecutor(_THREADS) as pool:
        shown = {"desc": "Reading photos", "delay": _QUIET_SECONDS, **bar_options()}
        facts = tqdm(pool.map(_facts_of, paths), total=len(paths), **shown)
        return dict(zip(paths, facts, strict=True))


def near_duplicates(facts: Mapping[Path, PhotoFacts]) -> list[tuple[Path, Path]]:
    """Pairs of a photo and the first one that shows the same: close 16×16 difference hashes and mean colours."""
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
        return _facts_of_state(path, (status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    except OSError as error:
        return DatasetError(f"{printable(path)}: cannot be opened ({error.strerror}); put it back, or remove it")
    except DatasetError as error:
        return error


@lru_cache(maxsize=_CACHED)
def _facts_of_state(path: Path, _state: tuple[int, ...]) -> PhotoFacts:
    with _opened(path) as image:
        image.load()
        colour, alpha = _split_alpha(image)
        traits, notes = _traits_of(image, path, colour.mode, alpha)
        opacity = 1.0 if alpha is None else ImageStat.Stat(alpha).mean[0] / 255
        sideways = image.getexif().get(_EXIF_ORIENTATION) in _SIDEWAYS
        size = image.size[::-1] if sideways else image.size
        grid = (_HASH_SIDE + 1, _HASH_SIDE)
        small = colour.resize(grid, Image.Resampling.BOX).convert("RGB")
        if alpha is not None:
            white = Image.new("RGB", grid, "white")
            white.paste(small, mask=alpha.resize(grid, Image.Resampling.BOX))
            small = white
    if all(high - low < _FLAT for low, high in small.getextrema()):
        notes += ("shows one colour all over; remove it",)
    bits = np.diff(np.asarray(small.convert("L"), np.int16), axis=1) > _HASH_MARGIN
    red, green, blue = np.asarray(small, np.float64).mean(axis=(0, 1)).tolist()
    return PhotoFacts(size, traits, notes, opacity, np.packbits(bits).tobytes(), (red, green, blue))
