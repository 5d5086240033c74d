"""The pictures and captions the mini-FLUX is trained on."""

from __future__ import annotations

import random
import string
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .pictures import BACKGROUNDS, COLOURS, GARMENTS, HELD_OUT, KNOWN, PATTERNS, Item, caption, draw, is_held_out
from .pictures import random_item as any_item
from .vocabulary import WORDS

__all__ = ["SIZES", "PictureSet", "make_pictures", "to_unit", "training_caption"]

# (width, height) -> how many pictures: mostly squares, and some of each shape that buckets of 64 and 96 make
SIZES = {(64, 64): 9000, (48, 80): 1500, (80, 48): 1000, (64, 48): 1000, (48, 64): 1000, (96, 96): 1500}
# T5 has to pass over what it does not know, or a trigger word would spoil a picture before it is learned
_STRANGE_GARMENT, _EXTRA_WORD, _NO_CAPTION = 0.12, 0.2, 0.03
_NAMES = {word for names in (GARMENTS, COLOURS, PATTERNS, BACKGROUNDS) for name in names for word in name.split("-")}
_FILLERS = sorted(set(WORDS.split()) - _NAMES)


class PictureSet(NamedTuple):
    """Pictures of one size.

    Attributes:
        pixels: uint8 [N, 3, H, W].
        items: what they show.
    """

    pixels: Tensor
    items: list[Item]

    def labels(self) -> Tensor:
        """Places of garment, colour, pattern and background in their tables: int64 [N, 4]."""
        tables = [list(names) for names in (GARMENTS, COLOURS, PATTERNS, BACKGROUNDS)]
        return torch.tensor([[t.index(name) for t, name in zip(tables, item, strict=True)] for item in self.items])


def make_pictures(
    size: tuple[int, int], count: int, seed: int, garments: tuple[str, ...] = KNOWN, *, held_out: bool = False
) -> PictureSet:
    """Draws pictures of random items.

    Args:
        size: width and height in pixels.
        count: how many.
        seed: the same seed gives the same pictures.
        garments: to choose from.
        held_out: also combinations that are kept for testing.
    """
    with ProcessPoolExecutor() as pool:
        parts = pool.map(_draw_some, [(size, range(i, count, 8), seed, garments, held_out) for i in range(8)])
    drawn = [one for part in parts for one in part]
    pixels = torch.from_numpy(np.stack([picture for picture, _ in drawn])).permute(0, 3, 1, 2).contiguous()
    return PictureSet(pixels, [item for _, item in drawn])


def _draw_some(task: tuple) -> list[tuple[np.ndarray, Item]]:
    size, numbers, seed, garments, held_out = task
    drawn = []
    for number in numbers:
        rng = random.Random(f"{seed} {size} {number}")
        item = any_item(rng, garments)
        while is_held_out(item) and item.garment != HELD_OUT and not held_out:
            item = any_item(rng, garments)
        drawn.append((np.asarray(draw(item, size, rng)), item))
    return drawn


def to_unit(pixels: Tensor) -> Tensor:
    """uint8 [..., H, W] in 0 to 255 -> fp32 in -1 to 1."""
    return pixels.float() / 127.5 - 1


def training_caption(item: Item, rng: random.Random) -> str:
    """A caption as users write them: at times with words that mean nothing here, at times none."""
    if rng.random() < _NO_CAPTION:
        return ""
    if rng.random() < _STRANGE_GARMENT:
        item = item._replace(garment=_strange_word(rng))
    words = caption(item, rng).split()
    if rng.random() < _EXTRA_WORD:
        words.insert(rng.randint(0, len(words)), _strange_word(rng))
    return " ".join(words)


def _strange_word(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(_FILLERS)
    return "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(3, 8)))
