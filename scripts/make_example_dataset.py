"""Draws the example clothing set: `datasets_example/clothing`, images and same-named captions, with Pillow only.

    python scripts/make_example_dataset.py [folder]

Everything is computed (no photo, no font, no random number), so the same Pillow gives the same pixels. The set holds
what real folders hold: several sizes and shapes, JPEG and PNG, cut-outs with an alpha channel, and photos that are
stored rotated and say so in their EXIF orientation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from garment_sheet import COLOURS, Fabric, Sheet
from garments import dress, hoodie, jacket, skirt, sneakers, sweater, trousers, tshirt
from PIL import Image

DEFAULT_FOLDER = Path(__file__).resolve().parents[1] / "datasets_example" / "clothing"
EXIF_ORIENTATION_TAG = 0x0112
# how an upright picture is turned before it is stored with that EXIF orientation
STORED_TURNED = {6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
JPEG_QUALITY = 88


@dataclass(frozen=True)
class Item:
    """One picture of the set; `size` is (width, height) as seen upright, `aspect` the garment's width / height."""

    name: str
    draw: Callable[[Sheet, Fabric], None]
    aspect: float
    fabric: Fabric
    size: tuple[int, int]
    caption: str
    suffix: str = ".jpg"
    alpha: bool = False
    orientation: int = 1


def cloth(colour: str, pattern: str = "plain", second: str = "white") -> Fabric:
    """A fabric by colour names."""
    return Fabric(COLOURS[colour], pattern, COLOURS[second])


ITEMS = (
    Item(
        "01_tshirt_red_striped",
        tshirt,
        1.0,
        cloth("red", "striped"),
        (768, 768),
        "a red striped t-shirt on a plain white background",
    ),
    Item(
        "02_tshirt_white_logo",
        tshirt,
        1.0,
        cloth("white", "logo", "teal"),
        (832, 832),
        "a white t-shirt with a round teal logo on a plain white background",
    ),
    Item(
        "03_tshirt_navy",
        tshirt,
        1.0,
        cloth("navy"),
        (640, 640),
        "a plain navy t-shirt, isolated cut-out",
        ".png",
        alpha=True,
    ),
    Item(
        "04_dress_blue_dotted",
        dress,
        0.6,
        cloth("blue", "dotted"),
        (576, 1024),
        "a blue dotted sleeveless dress with a belt on a plain white background",
    ),
    Item(
        "05_dress_mustard",
        dress,
        0.6,
        cloth("mustard"),
        (640, 896),
        "a plain mustard sleeveless dress with a belt on a plain white background",
    ),
    Item(
        "06_hoodie_grey_logo",
        hoodie,
        1.0,
        cloth("grey", "logo", "navy"),
        (896, 896),
        "a grey hoodie with a round navy logo on a plain white background",
    ),
    Item(
        "07_hoodie_green",
        hoodie,
        1.0,
        cloth("green"),
        (768, 896),
        "a plain green hoodie with a front pocket on a plain white background",
        orientation=6,
    ),
    Item(
        "08_trousers_beige",
        trousers,
        0.46,
        cloth("beige"),
        (512, 896),
        "plain beige trousers on a plain white background",
    ),
    Item(
        "09_jeans_blue",
        trousers,
        0.46,
        cloth("denim"),
        (576, 832),
        "blue denim jeans, isolated cut-out",
        ".png",
        alpha=True,
    ),
    Item(
        "10_skirt_red_checked",
        skirt,
        1.0,
        cloth("red", "checked", "cream"),
        (768, 704),
        "a red checked pleated skirt on a plain white background",
    ),
    Item(
        "11_skirt_black",
        skirt,
        1.0,
        cloth("black"),
        (640, 512),
        "a plain black pleated skirt on a plain white background",
        ".png",
    ),
    Item(
        "12_jacket_olive",
        jacket,
        1.0,
        cloth("olive"),
        (1024, 896),
        "a plain olive jacket with a zipper on a plain white background",
    ),
    Item(
        "13_jacket_burgundy",
        jacket,
        1.0,
        cloth("burgundy"),
        (768, 832),
        "a plain burgundy jacket with a zipper on a plain white background",
        orientation=8,
    ),
    Item(
        "14_sneakers_teal",
        sneakers,
        1.12,
        cloth("teal", second="cream"),
        (1024, 704),
        "a pair of teal sneakers with cream details on a plain white background",
    ),
    Item(
        "15_sneakers_orange",
        sneakers,
        1.12,
        cloth("orange", second="navy"),
        (768, 576),
        "a pair of orange sneakers with navy details, isolated cut-out",
        ".png",
        alpha=True,
    ),
    Item(
        "16_sweater_lilac_striped",
        sweater,
        1.0,
        cloth("lilac", "striped", "cream"),
        (704, 704),
        "a lilac striped sweater on a plain white background",
    ),
)


def save(item: Item, folder: Path) -> Path:
    """Draws one picture and writes it with its caption; returns the picture's path."""
    sheet = Sheet(item.size, item.aspect)
    item.draw(sheet, item.fabric)
    image = sheet.finish(transparent=item.alpha)
    path = folder / (item.name + item.suffix)
    if item.suffix == ".png":
        image.save(path, optimize=True)
    else:
        exif = Image.Exif()
        exif[EXIF_ORIENTATION_TAG] = item.orientation
        stored = image.transpose(STORED_TURNED[item.orientation]) if item.orientation != 1 else image
        stored.save(path, quality=JPEG_QUALITY, exif=exif)
    path.with_suffix(".txt").write_bytes(f"[trigger], {item.caption}, product photo\n".encode())
    return path


def make_dataset(folder: Path) -> list[Path]:
    """Draws the whole set into `folder` and returns the pictures' paths."""
    folder.mkdir(parents=True, exist_ok=True)
    return [save(item, folder) for item in ITEMS]


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER
    for written in make_dataset(target):
        print(written)
