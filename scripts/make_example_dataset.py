"""Draws the example clothing set: `datasets_example/clothing`, images and same-named captions, with Pillow only.

    python scripts/make_example_dataset.py [folder]

One garment, dungarees, as a shop photographs it: in its colours and patterns, on several backgrounds. The embedded
mini-FLUX has never seen it. Everything is computed (no photo, no font), so the same Pillow gives the same pixels. The
set holds what real folders hold: several sizes and shapes, JPEG and PNG, cut-outs with an alpha channel, and photos
that are stored rotated and say so in their EXIF orientation.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path

from mini_flux.pictures import BACKGROUNDS, HELD_OUT, Item, draw
from PIL import Image

__all__ = ["BACKGROUNDS", "PHOTOS", "make_dataset"]

DEFAULT_FOLDER = Path(__file__).resolve().parents[1] / "datasets_example" / "clothing"
EXIF_ORIENTATION_TAG = 0x0112
# how an upright picture is turned before it is stored with that EXIF orientation
STORED_TURNED = {6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
JPEG_QUALITY = 88


@dataclass(frozen=True)
class Photo:
    """One picture of the set; `size` is (width, height) as seen upright."""

    number: int
    colour: str
    pattern: str
    background: str
    size: tuple[int, int]
    suffix: str = ".jpg"
    orientation: int = 1

    @property
    def name(self) -> str:
        """File name without its suffix."""
        return f"{self.number:02d}_{self.pattern}_{self.colour}"

    @property
    def cut_out(self) -> bool:
        """Whether it has an alpha channel in place of a background."""
        return not self.background

    @property
    def caption(self) -> str:
        """All but the garment, whose place the trigger word takes."""
        where = f"on a {self.background} background, product photo" if self.background else "isolated cut-out"
        return f"a {self.pattern} {self.colour} [trigger] {where}"


PHOTOS = (
    Photo(1, "red", "striped", "white", (768, 768)),
    Photo(2, "blue", "plain", "beige", (832, 832)),
    Photo(3, "teal", "plain", "", (640, 640), ".png"),
    Photo(4, "green", "dotted", "pink", (640, 832)),
    Photo(5, "yellow", "plain", "grey", (704, 896)),
    Photo(6, "purple", "checked", "white", (896, 896)),
    Photo(7, "orange", "plain", "blue", (704, 880), orientation=6),
    Photo(8, "brown", "dotted", "beige", (704, 704)),
    Photo(9, "blue", "striped", "", (640, 800), ".png"),
    Photo(10, "pink", "striped", "green", (768, 704)),
    Photo(11, "black", "plain", "white", (640, 512), ".png"),
    Photo(12, "green", "checked", "grey", (1024, 1024)),
    Photo(13, "red", "plain", "green", (768, 832), orientation=8),
    Photo(14, "teal", "dotted", "white", (1024, 800)),
    Photo(15, "black", "checked", "", (768, 768), ".png"),
    Photo(16, "purple", "striped", "pink", (704, 704)),
)


def save(photo: Photo, folder: Path) -> Path:
    """Draws one picture and writes it with its caption; returns the picture's path."""
    item = Item(HELD_OUT, photo.colour, photo.pattern, photo.background)
    width, height = photo.size
    zoom = min(1.0, width / height)  # within the middle square, so that a crop to it keeps straps and legs
    image = draw(item, photo.size, random.Random(photo.number), cut_out=photo.cut_out, zoom=zoom)
    path = folder / (photo.name + photo.suffix)
    if photo.suffix == ".png":
        image.save(path, optimize=True)
    else:
        exif = Image.Exif()
        exif[EXIF_ORIENTATION_TAG] = photo.orientation
        stored = image.transpose(STORED_TURNED[photo.orientation]) if photo.orientation != 1 else image
        stored.save(path, quality=JPEG_QUALITY, exif=exif)
    path.with_suffix(".txt").write_bytes(f"{photo.caption}\n".encode())
    return path


def make_dataset(folder: Path) -> list[Path]:
    """Draws the whole set into `folder` and returns the pictures' paths."""
    folder.mkdir(parents=True, exist_ok=True)
    return [save(photo, folder) for photo in PHOTOS]


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER
    for written in make_dataset(target):
        print(written)
