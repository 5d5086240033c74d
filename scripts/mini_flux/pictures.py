"""The mini-FLUX's world: pictures of one garment each, with captions that name garment, colour, pattern, background.

Everything is drawn; the same random generator gives the same pictures. One garment is held out: the mini-FLUX never
sees it and a LoRA has to teach it. Of the others, a seventh of all combinations is held out, to test prompts with.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
from garment_sheet import Fabric, Sheet
from garments import coat, dress, dungarees, skirt, sweater, trousers, tshirt
from PIL import Image

# name -> how it is drawn, width / height
GARMENTS = {
    "t-shirt": (tshirt, 1.0),
    "sweater": (sweater, 1.0),
    "dress": (dress, 0.6),
    "skirt": (skirt, 1.0),
    "trousers": (trousers, 0.46),
    "coat": (coat, 0.76),
    "dungarees": (dungarees, 0.5),
}
HELD_OUT = "dungarees"
KNOWN = tuple(name for name in GARMENTS if name != HELD_OUT)
COLOURS = {
    "red": (200, 40, 44), "orange": (236, 128, 36), "yellow": (238, 206, 52), "green": (48, 136, 72),
    "blue": (48, 96, 196), "purple": (124, 64, 168), "pink": (238, 130, 172), "brown": (112, 72, 44),
    "black": (40, 40, 44), "teal": (24, 156, 156),
}  # fmt: skip
PATTERNS = ("plain", "striped", "dotted", "checked")
BACKGROUNDS = {
    "white": (250, 250, 248), "beige": (222, 206, 176), "grey": (168, 170, 174), "blue": (150, 186, 224),
    "green": (164, 204, 160), "pink": (244, 196, 206),
}  # fmt: skip
TEMPLATES = (
    "a {pattern} {colour} {garment} on a {background} background",
    "{colour} {pattern} {garment}, {background} background",
    "a photo of a {pattern} {colour} {garment} on a {background} background",
    "a {colour} {pattern} {garment} on a {background} background, product photo",
)
_DARK, _LIGHT = (40, 40, 44), (244, 243, 239)
_LIGHT_COLOURS = ("yellow", "pink")  # their patterns are dark
_FILL = (0.78, 0.9)  # share of the picture the garment takes
_COLOUR_JITTER = 10.0


class Item(NamedTuple):
    """What a picture shows."""

    garment: str
    colour: str
    pattern: str
    background: str


def is_held_out(item: Item) -> bool:
    """Whether no picture of this combination is trained on."""
    values = (list(GARMENTS), list(COLOURS), PATTERNS, list(BACKGROUNDS))
    places = [names.index(name) for names, name in zip(values, item, strict=True)]
    return sum(place * factor for place, factor in zip(places, (2, 3, 5, 8), strict=True)) % 7 == 0


def random_item(rng: random.Random, garments: tuple[str, ...] = KNOWN) -> Item:
    """One combination, each as likely as the other."""
    return Item(rng.choice(garments), rng.choice(list(COLOURS)), rng.choice(PATTERNS), rng.choice(list(BACKGROUNDS)))


def caption(item: Item, rng: random.Random) -> str:
    """A caption in one of the templates."""
    return rng.choice(TEMPLATES).format(**item._asdict())


def draw(
    item: Item, size: tuple[int, int], rng: random.Random, *, cut_out: bool = False, zoom: float = 1.0
) -> Image.Image:
    """Draws one picture (width, height); place, size and shade vary with `rng`. A cut-out is RGBA."""
    drawing, aspect = GARMENTS[item.garment]
    fill = rng.uniform(*_FILL)
    sheet = Sheet(size, aspect, fill * zoom)
    shade = [int(np.clip(c + rng.uniform(-_COLOUR_JITTER, _COLOUR_JITTER), 0, 255)) for c in COLOURS[item.colour]]
    second = _DARK if item.colour in _LIGHT_COLOURS else _LIGHT
    drawing(sheet, Fabric((shade[0], shade[1], shade[2]), item.pattern, second))
    room = int(min(sheet.size) * (1 - fill) / 4)
    shift = (rng.randint(-room, room), rng.randint(-room, room))
    return sheet.finish(None if cut_out else BACKGROUNDS[item.background], shift)
