"""Drawing clothes with Pillow: a supersampled sheet on which pieces of cloth get patterns, light and folds.

Paths are given in a unit frame: x from -0.5 to 0.5 around the garment's middle, y from 0 (top) to 1. Their steps are
(x, y) corners, (cx, cy, x, y) quadratic and (ax, ay, bx, by, x, y) cubic curves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter

SUPERSAMPLING = 2
CURVE_STEPS = 24

Colour = tuple[int, int, int]
Path2D = Sequence[tuple[float, ...]]
Fold = tuple[Path2D, float, float]  # where, how wide, how strong

COLOURS: dict[str, Colour] = {"white": (244, 243, 239), "mustard": (214, 163, 48), "gum": (196, 158, 112)}


def flatten(path: Path2D) -> list[tuple[float, float]]:
    """Turns (x, y) corners, (cx, cy, x, y) quadratic and (ax, ay, bx, by, x, y) cubic curves into points."""
    points: list[tuple[float, float]] = []
    for step in path:
        if len(step) == 2:
            points.append((step[0], step[1]))
            continue
        controls = [points[-1], *zip(step[::2], step[1::2], strict=True)]
        for i in range(1, CURVE_STEPS + 1):
            layer, t = controls, i / CURVE_STEPS
            while len(layer) > 1:  # de Casteljau
                layer = [(a[0] + (b[0] - a[0]) * t, a[1] + (b[1] - a[1]) * t) for a, b in pairwise(layer)]
            points.append(layer[0])
    return points


def mirror(path: Path2D) -> list[tuple[float, float]]:
    """Completes the right half of a symmetric outline from its top to its bottom middle, or of a line to its middle."""
    right = flatten(path)
    return right + [(-x, y) for x, y in reversed(right)]


def flip(path: Path2D) -> list[tuple[float, float]]:
    """The same path on the left side."""
    return [(-x, y) for x, y in flatten(path)]


@dataclass(frozen=True)
class Fabric:
    """A colour and a pattern: plain, striped, dotted, checked."""

    colour: Colour
    pattern: str = "plain"
    second: Colour = COLOURS["white"]

    def darker(self, factor: float) -> Fabric:
        """The same cloth in shade, without its pattern (linings, ribs, soles)."""
        return Fabric(tuple(round(channel * factor) for channel in self.colour))


class Sheet:
    """A picture being drawn, `SUPERSAMPLING` times too large: colour (H, W, 3) in 0..255, coverage (H, W) in 0..1."""

    def __init__(self, size: tuple[int, int], aspect: float, fill: float = 0.84) -> None:
        """Fits a garment of `aspect` = width / height into the middle of a picture of `size` = (width, height)."""
        self.size = (size[0] * SUPERSAMPLING, size[1] * SUPERSAMPLING)
        self.scale = fill * min(self.size[0] / aspect, self.size[1])
        self.origin = (self.size[0] / 2, (self.size[1] - self.scale) / 2)
        self.colour = np.zeros((self.size[1], self.size[0], 3), np.float32)
        self.coverage = np.zeros((self.size[1], self.size[0]), np.float32)

    def _pixels(self, path: Path2D) -> list[tuple[float, float]]:
        return [(self.origin[0] + x * self.scale, self.origin[1] + y * self.scale) for x, y in flatten(path)]

    def _width(self, width: float) -> int:
        return max(1, round(width * self.scale))

    def _blur(self, image: Image.Image, radius: float) -> Image.Image:
        return image.filter(ImageFilter.GaussianBlur(radius * self.scale))

    def _mask(self, path: Path2D) -> Image.Image:
        mask = Image.new("L", self.size)
        ImageDraw.Draw(mask).polygon(self._pixels(path), fill=255)
        return mask

    def _stroke(self, path: Path2D, width: float) -> Image.Image:
        mask = Image.new("L", self.size)
        draw, pixels = ImageDraw.Draw(mask), self._pixels(path)
        draw.line(pixels, fill=255, width=self._width(width), joint="curve")
        radius = self._width(width) / 2
        for x, y in (pixels[0], pixels[-1]):
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)
        return mask

    def _cloth(self, fabric: Fabric) -> Image.Image:
        """Fills the sheet with a pattern that is fixed to the garment's frame and still seen at 64 pixels."""
        cloth = Image.new("RGB", self.size, fabric.colour)
        draw, (x0, y0), scale = ImageDraw.Draw(cloth), self.origin, self.scale
        left, right = x0 - 0.8 * scale, x0 + 0.8 * scale
        if fabric.pattern == "striped":
            for i in range(-1, 9):
                y = y0 + (0.02 + i * 0.156) * scale
                draw.rectangle((left, y, right, y + 0.068 * scale), fill=fabric.second)
        elif fabric.pattern == "dotted":
            radius, pitch = 0.039 * scale, 0.143 * scale
            for row in range(-1, 11):
                for column in range(-7, 8):
                    x, y = x0 + (column + row % 2 / 2) * pitch, y0 + row * pitch * 0.85
                    draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fabric.second)
        elif fabric.pattern == "checked":
            self._checks(cloth, fabric.second)
        return cloth

    def _checks(self, cloth: Image.Image, colour: Colour) -> None:
        (x0, y0), scale = self.origin, self.scale
        for across in (True, False):
            bands = Image.new("L", self.size)
            draw = ImageDraw.Draw(bands)
            for i in range(-6, 7):
                at, width = i * 0.195 * scale, 0.094 * scale
                if across:
                    draw.rectangle((0, y0 + at, self.size[0], y0 + at + width), fill=130)
                else:
                    draw.rectangle((x0 + at, 0, x0 + at + width, self.size[1]), fill=130)
            cloth.paste(colour, (0, 0), bands)

    def _box(self, mask: Image.Image, margin: float = 0.0) -> tuple[int, int, int, int]:
        """The part of the sheet that `mask` touches, as (left, top, right, bottom); only this is worked on."""
        left, top, right, bottom = mask.getbbox() or (0, 0, 1, 1)
        more = self._width(margin) if margin else 0
        return (
            max(0, left - more),
            max(0, top - more),
            min(self.size[0], right + more),
            min(self.size[1], bottom + more),
        )

    def _paint(self, mask: Image.Image, cloth: Image.Image, light: np.ndarray | None = None) -> None:
        """Lays `cloth` over the sheet where `mask` is set; `light` belongs to the mask's box."""
        box = self._box(mask)
        rows, columns = slice(box[1], box[3]), slice(box[0], box[2])
        share = np.asarray(mask.crop(box), np.float32) / 255
        lit = np.asarray(cloth.crop(box), np.float32)
        if light is not None:
            lit = lit * light[..., None]
        self.colour[rows, columns] += (lit - self.colour[rows, columns]) * share[..., None]
        self.coverage[rows, columns] = np.maximum(self.coverage[rows, columns], share)

    def part(self, path: Path2D, fabric: Fabric, folds: Sequence[Fold] = (), edge: float = 0.3) -> None:
        """Draws one piece of cloth: pattern, light from the upper left, edges darkened by `edge`, and soft folds.

        The strength of a fold is below 0 for a shadow, above 0 for a highlight.
        """
        mask = self._mask(path)
        self._soft_shadow(mask)
        box, wide = self._box(mask), self._box(mask, 0.06)
        inner = (box[0] - wide[0], box[1] - wide[1], box[2] - wide[0], box[3] - wide[1])

        def soft(image: Image.Image, radius: float) -> np.ndarray:
            return np.asarray(self._blur(image.crop(wide), radius).crop(inner), np.float32) / 255

        light = 1.03 - edge * 2 * np.clip(1 - soft(mask, 0.018) - 0.08, 0, 1)
        light += np.linspace(0.05, -0.05, self.size[0], dtype=np.float32)[None, box[0] : box[2]]
        light += np.linspace(0.03, -0.03, self.size[1], dtype=np.float32)[box[1] : box[3], None]
        for fold, width, strength in folds:
            light += strength * soft(self._stroke(fold, width), width * 0.55)
        self._paint(mask, self._cloth(fabric), light)

    def _soft_shadow(self, mask: Image.Image) -> None:
        """Darkens what is under a new part, close to its outline."""
        box = self._box(mask, 0.04)
        rows, columns = slice(box[1], box[3]), slice(box[0], box[2])
        fallen = ImageChops.offset(mask.crop(box), 0, self._width(0.004))
        shadow = np.asarray(self._blur(fallen, 0.01), np.float32) / 255 * self.coverage[rows, columns]
        self.colour[rows, columns] *= 1 - 0.3 * shadow[..., None]

    def line(self, path: Path2D, colour: Colour, width: float = 0.004) -> None:
        """Draws a seam, a cord or a lace."""
        self._paint(self._stroke(path, width), Image.new("RGB", self.size, colour))

    def stitches(self, path: Path2D, fabric: Fabric, factor: float = 0.72) -> None:
        """Draws a dashed seam in a darker shade of the cloth."""
        mask = Image.new("L", self.size)
        draw, run = ImageDraw.Draw(mask), 0.0
        for (ax, ay), (bx, by) in pairwise(self._pixels(path)):
            steps = max(1, round(float(np.hypot(bx - ax, by - ay)) / 2))
            for i in range(steps):
                start = (ax + (bx - ax) * i / steps, ay + (by - ay) * i / steps)
                end = (ax + (bx - ax) * (i + 1) / steps, ay + (by - ay) * (i + 1) / steps)
                run += float(np.hypot(end[0] - start[0], end[1] - start[1]))
                if run % (0.012 * self.scale) < 0.008 * self.scale:
                    draw.line((start, end), fill=255, width=self._width(0.003))
        self._paint(mask, Image.new("RGB", self.size, fabric.darker(factor).colour))

    def finish(self, background: Colour | None, shift: tuple[int, int] = (0, 0)) -> Image.Image:
        """Returns the picture at its final size, moved by (x, y) pixels of the sheet; without background a cut-out."""
        size = (self.size[0] // SUPERSAMPLING, self.size[1] // SUPERSAMPLING)
        alpha = ImageChops.offset(Image.fromarray((self.coverage * 255).round().astype(np.uint8)), *shift)
        colour = np.roll(np.clip(self.colour, 0, 255), shift[::-1], (0, 1))
        if background is None:
            rgb = Image.fromarray(colour.round().astype(np.uint8))
            return Image.merge("RGBA", (*rgb.split(), alpha)).resize(size, Image.Resampling.LANCZOS)
        height, width = self.coverage.shape
        ground = np.linspace(1.0, 0.95, height, dtype=np.float32)[:, None, None] * np.array(background, np.float32)
        ground = np.repeat(ground, width, axis=1)
        fall = ImageChops.offset(alpha, self._width(0.012), self._width(0.022))
        ground *= 1 - 0.28 * np.asarray(self._blur(fall, 0.022), np.float32)[..., None] / 255
        share = np.asarray(alpha, np.float32)[..., None] / 255
        mixed = colour * share + ground * (1 - share)
        return Image.fromarray(mixed.round().astype(np.uint8)).resize(size, Image.Resampling.LANCZOS)
