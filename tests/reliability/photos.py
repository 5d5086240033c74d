"""Makes the photos and folders of these tests: tagged with colour profiles, cut out, damaged."""

import io
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms

# XYZ of red, green and blue, adapted to D50, as camera makers' profiles have them
DISPLAY_P3 = ((0.51512, 0.24120, -0.00105), (0.29198, 0.69225, 0.04189), (0.15710, 0.06657, 0.78407))
SRGB = ((0.43607, 0.22249, 0.01392), (0.38515, 0.71687, 0.09708), (0.14307, 0.06061, 0.71410))


def noise(size: tuple[int, int] = (64, 64), seed: int = 0) -> Image.Image:
    """An RGB picture that no other seed resembles."""
    coarse = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def jpeg(size: tuple[int, int] = (64, 64), seed: int = 0, **options: object) -> bytes:
    return encoded(noise(size, seed), "JPEG", quality=95, **options)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(width: int, height: int, depth: int, colour: int, rows: bytes) -> bytes:
    """A PNG from its parts: bits per channel, colour type (0 grey, 2 RGB), and rows, each led by its filter byte."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts)


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def deep_png(values: np.ndarray) -> bytes:
    """A 16-bit PNG of [H, W, C] values, C = 1 grey or 3 RGB."""
    height, width, channels = values.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return png(width, height, 16, {1: 0, 3: 2}[channels], rows)


def matrix_profile(primaries: Sequence[tuple[float, float, float]]) -> bytes:
    """An ICC display profile with sRGB's curve and these primaries, XYZ under D50."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    for tag, values in zip((b"rXYZ", b"gXYZ", b"bXYZ"), primaries, strict=True):
        entry = profile.index(tag)  # of the table: name, offset, size
        (offset,) = struct.unpack_from(">I", profile, entry + 4)
        struct.pack_into(">3i", profile, offset + 8, *(round(value * 65536) for value in values))
    return bytes(profile)


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def good_folder(folder: Path, count: int = 3) -> Path:
    """Photos and captions that nothing can be said against at resolution 64, with trigger word ohwx."""
    places = ("on a chair", "in the rain", "by the sea", "at a market", "under a lamp", "beside a horse")
    for i in range(count):
        write(folder / f"good{i}.jpg", jpeg(seed=100 + i))
        write(folder / f"good{i}.txt", f"a photo of ohwx {places[i]}")
    return folder


def animation(kind: str) -> bytes:
    return encoded(noise(seed=1), kind, save_all=True, append_images=[noise(seed=2)], duration=100)


def cutout(alpha: int) -> bytes:
    picture = noise(seed=4)
    picture.putalpha(alpha)
    return encoded(picture, "PNG")


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]
