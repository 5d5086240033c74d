"""Image files, made small enough for a page that carries hundreds of them."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image, ImageOps

__all__ = ["LONGEST_SIDE", "embeddable"]

SMALL_BYTES = 192 * 1024
LONGEST_SIDE = 448  # pixels
QUALITY = 82
MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}


def embeddable(path: Path, longest_side: int = LONGEST_SIDE) -> tuple[str, bytes]:
    """Return (media type, content): a small file as it is, others made smaller, as a JPEG on white.

    Args:
        path: of the picture.
        longest_side: that it may have, in pixels.

    Raises:
        OSError: the file cannot be read, or is no picture.
        ValueError: likewise.
    """
    with Image.open(path) as image:
        small = max(image.size) <= longest_side and path.stat().st_size <= SMALL_BYTES
        if small and image.format in MEDIA_TYPES:
            image.load()  # refuses a file that ends early
            return MEDIA_TYPES[image.format], path.read_bytes()
        upright = ImageOps.exif_transpose(image)
        upright.thumbnail((longest_side, longest_side), Image.Resampling.LANCZOS)
        colours = upright.convert("RGBA")
    paper = Image.new("RGBA", colours.size, "white")
    jpeg = io.BytesIO()
    Image.alpha_composite(paper, colours).convert("RGB").save(jpeg, "JPEG", quality=QUALITY)
    return "image/jpeg", jpeg.getvalue()
