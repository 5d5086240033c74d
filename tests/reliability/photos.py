"""Makes the photos and folders of these tests: tagged with colour profiles, cut out, damaged."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

# CIE xy of red, green, blue; both spaces have the white point D65
DISPLAY_P3 = ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060))
SRGB = ((0.640, 0.330), (0.300, 0.600), (0.150, 0.060))
_D65, _D50 = (0.3127, 0.3290), (0.9642, 1.0, 0.8249)
_BRADFORD = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])


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


def with_chunk(content: bytes, name: bytes, data: bytes) -> bytes:
    """A PNG with one more chunk behind its header."""
    return content[:33] + _chunk(name, data) + content[33:]


def matrix_profile(primaries: Sequence[tuple[float, float]]) -> bytes:
    """A version 2 ICC display profile of CIE xy primaries, white point D65, and sRGB's curve."""
    columns = _adapted(primaries).T
    values = np.linspace(0, 1, 1024)
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    samples = (linear * 65535).round().astype(">u2").tobytes()
    curve = b"curv" + struct.pack(">II", 0, 1024) + samples
    name = b"test\0"
    tags = {
        b"desc": b"desc" + struct.pack(">II", 0, len(name)) + name + bytes(78),
        b"cprt": b"text" + bytes(4) + name,
        b"wtpt": _xyz(_D50),
        **{tag: _xyz(column) for tag, column in zip((b"rXYZ", b"gXYZ", b"bXYZ"), columns, strict=True)},
        **dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve),
    }
    table, body, offset = b"", b"", 132 + 12 * len(tags)
    for tag, content in tags.items():
        content += bytes(-len(content) % 4)
        table += tag + struct.pack(">II", offset + len(body), len(content))
        body += content
    head = struct.pack(">I4sI4s4s4s", offset + len(body), bytes(4), 0x02400000, b"mntr", b"RGB ", b"XYZ ")
    head += bytes(12) + b"acsp" + bytes(28) + _fixed(_D50)
    return head.ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + body


def _adapted(primaries: Sequence[tuple[float, float]]) -> np.ndarray:
    """[3, 3] matrix from linear RGB to XYZ under D50."""
    points = np.array([_to_xyz(*xy) for xy in primaries]).T
    white = np.array(_to_xyz(*_D65))
    matrix = points * np.linalg.solve(points, white)
    ratio = (_BRADFORD @ np.array(_D50)) / (_BRADFORD @ white)
    return np.linalg.inv(_BRADFORD) @ np.diag(ratio) @ _BRADFORD @ matrix


def _to_xyz(x: float, y: float) -> tuple[float, float, float]:
    return x / y, 1.0, (1 - x - y) / y


def _fixed(values: Sequence[float]) -> bytes:
    return struct.pack(">3i", *(round(value * 65536) for value in values))


def _xyz(values: Sequence[float]) -> bytes:
    return b"XYZ " + bytes(4) + _fixed(values)


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
