"""Makes the photos and folders of these tests: tagged with colour profiles, cut out, and broken in every usual way."""

from __future__ import annotations

import io
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

# CIE xy of red, green, blue; both spaces have the white point D65
DISPLAY_P3 = ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060))
ADOBE_RGB = ((0.640, 0.330), (0.210, 0.710), (0.150, 0.060))
SRGB = ((0.640, 0.330), (0.300, 0.600), (0.150, 0.060))
ADOBE_GAMMA = 563 / 256
_D65, _D50 = (0.3127, 0.3290), (0.9642, 1.0, 0.8249)
_BRADFORD = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])


def noise(size: tuple[int, int] = (64, 64), seed: int = 0) -> Image.Image:
    """An RGB picture that no other seed resembles."""
    coarse = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def jpeg(size: tuple[int, int] = (64, 64), seed: int = 0, **options: object) -> bytes:
    """Bytes of a JPEG."""
    return encoded(noise(size, seed), "JPEG", quality=95, **options)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    """Bytes of an image file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(width: int, height: int, depth: int, colour: int, rows: bytes) -> bytes:
    """A PNG from its parts, also one that no program would write.

    Args:
        width: Of the header, in pixels.
        height: Of the header.
        depth: Bits per channel.
        colour: PNG's colour type: 0 grey, 2 RGB, 4 grey with alpha, 6 RGBA.
        rows: The pixels as stored, each row led by its filter byte.
    """
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


def matrix_profile(primaries: Sequence[tuple[float, float]], gamma: float | None = None) -> bytes:
    """A version 2 ICC display profile: three primaries and one curve, all a camera's or phone's profile has.

    Args:
        primaries: CIE xy of red, green and blue, white point D65.
        gamma: Exponent of the curve; None is sRGB's.
    """
    columns = _adapted(primaries).T
    values = np.linspace(0, 1, 1024)
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    samples = (linear * 65535).round().astype(">u2").tobytes()
    if gamma is None:
        curve = b"curv" + struct.pack(">II", 0, 1024) + samples
    else:
        curve = b"curv" + struct.pack(">IIH", 0, 1, round(gamma * 256)) + b"\0\0"
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


def from_srgb(image: Image.Image, primaries: Sequence[tuple[float, float]], gamma: float | None = None) -> Image.Image:
    """The same colours as numbers of another space, computed apart from any colour management."""
    values = np.asarray(image, np.float64) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    matrix = np.linalg.inv(_adapted(primaries)) @ _adapted(SRGB)
    linear = (linear @ matrix.T).clip(0, 1)
    if gamma is None:
        stored = np.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear ** (1 / 2.4) - 0.055)
    else:
        stored = linear ** (1 / gamma)
    return Image.fromarray((stored * 255).round().astype(np.uint8))


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
    """A file and the folders above it; text as UTF-8."""
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


# --- spoiling a good folder: each returns a function of the folder, or is one -----------------------------------------


def image(name: str, content: bytes | str) -> Callable[[Path], None]:
    """A file beside the good ones, with a caption."""

    def make(folder: Path) -> None:
        write(folder / name, content)
        write((folder / name).with_suffix(".txt"), "a photo of ohwx in a field")

    return make


def caption(content: bytes | str) -> Callable[[Path], None]:
    return lambda folder: write(folder / "good1.txt", content) and None


def captions(*texts: str) -> Callable[[Path], None]:
    """As many photos as texts, with these captions."""

    def make(folder: Path) -> None:
        for i, text in enumerate(texts):
            write(folder / f"good{i}.jpg", jpeg(seed=100 + i))
            write(folder / f"good{i}.txt", text)

    return make


def extra(name: str, content: bytes | str = b"x") -> Callable[[Path], None]:
    return lambda folder: write(folder / name, content) and None


def settings(**changes: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: changes


def emptied(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def renamed(extension: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for path in folder.glob("*.txt"):
            path.rename(path.with_suffix(extension))

    return make


def removed(folder: Path) -> None:
    shutil.rmtree(folder)


def replaced_by_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b"x")


def broken_link(folder: Path) -> None:
    (folder / "bad.jpg").symlink_to(folder / "nowhere.jpg")


def self_link(folder: Path) -> None:
    (folder / "bad.jpg").symlink_to("bad.jpg")


def linked_folder(folder: Path) -> None:
    good_folder(folder.parent / "elsewhere", 1)
    (folder / "more").symlink_to(folder.parent / "elsewhere", target_is_directory=True)


def linked_loop(folder: Path) -> None:
    (folder / "again").symlink_to(folder, target_is_directory=True)


def linked_cache(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    (folder / "_coat_cache").symlink_to(folder.parent / "elsewhere", target_is_directory=True)


def linked_cache_inside(folder: Path) -> None:
    (folder / "_coat_cache").mkdir()
    (folder / "_coat_cache" / "latents").symlink_to(folder.parent, target_is_directory=True)


def linked_device(folder: Path) -> None:
    (folder / "bad.jpg").symlink_to("/dev/zero")


def pipe(name: str) -> Callable[[Path], None]:
    return lambda folder: os.mkfifo(folder / name)


def caption_folder(folder: Path) -> None:
    (folder / "good1.txt").unlink()
    (folder / "good1.txt").mkdir()


def caption_pipe(folder: Path) -> None:
    (folder / "good1.txt").unlink()
    os.mkfifo(folder / "good1.txt")


def caption_link(folder: Path) -> None:
    (folder / "good1.txt").unlink()
    (folder / "good1.txt").symlink_to("nowhere.txt")


def image_folder(folder: Path) -> None:
    good_folder(folder / "bad.jpg", 1)
    write(folder / "bad.jpg" / "good0.jpg", jpeg(seed=9))


def twins(folder: Path) -> None:
    write(folder / "good1.png", encoded(noise(seed=55), "PNG"))


def copies(folder: Path) -> None:
    smaller = noise((128, 128), seed=100).resize((96, 96))
    image("copy.png", encoded(smaller, "PNG"))(folder)


def wide(folder: Path) -> None:
    image("bad.jpg", jpeg((2000, 40), seed=3))(folder)


def named(name: str | bytes) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        path = os.path.join(os.fsencode(folder), os.fsencode(name))
        for extension, content in ((b".jpg", jpeg(seed=3)), (b".txt", b"a photo of ohwx in a field")):
            with open(path + extension, "wb") as file:
                file.write(content)

    return make


def animation(kind: str) -> bytes:
    return encoded(noise(seed=1), kind, save_all=True, append_images=[noise(seed=2)], duration=100)


def cutout(alpha: int) -> bytes:
    picture = noise(seed=4)
    picture.putalpha(alpha)
    return encoded(picture, "PNG")


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]
