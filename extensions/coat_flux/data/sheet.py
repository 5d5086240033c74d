"""The contact sheet: every photo as it will be read, its crop, name, sizes, traits and caption."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from .buckets import Sample, covering_size
from .files import DatasetError, printable
from .images import read_photo
from .preflight import DataReport

MOST_PHOTOS = 400
_CELL, _LINE, _MARGIN = 240, 14, 12  # pixels
_CAPTION_LINES = 4
_TEXT = _LINE * (3 + _CAPTION_LINES) + 2
_COLUMNS = 6
_PAPER, _INK, _QUIET, _FRAME, _ALARM, _MISSING = "#f4f4f4", "#202020", "#595959", "#00a040", "#c02020", "#d0d0d0"


def contact_sheet(report: DataReport, *, background: str = "white", transparency: str = "background") -> Image.Image:
    """Draw at most 400 photos as sRGB on `background`, unusable ones first, cropped and masked parts marked."""
    largest: dict[Path, Sample] = {}
    for sample in report.samples:
        known = largest.get(sample.image_path)
        if known is None or sample.bucket.width * sample.bucket.height > known.bucket.width * known.bucket.height:
            largest[sample.image_path] = sample
    paths = [*report.unreadable, *report.photos][:MOST_PHOTOS]
    columns = min(_COLUMNS, max(1, len(paths)))
    rows = max(1, math.ceil(len(paths) / columns))
    size = (columns * (_CELL + _MARGIN) + _MARGIN, rows * (_CELL + _TEXT + _MARGIN) + _MARGIN)
    sheet = Image.new("RGB", size, _PAPER)
    for number, path in enumerate(paths):
        row, column = divmod(number, columns)
        place = (_MARGIN + column * (_CELL + _MARGIN), _MARGIN + row * (_CELL + _TEXT + _MARGIN))
        sheet.paste(_cell(path, report, largest.get(path), background, transparency == "mask"), place)
    return sheet


def _cell(path: Path, report: DataReport, sample: Sample | None, background: str, masked: bool) -> Image.Image:
    cell = Image.new("RGB", (_CELL, _CELL + _TEXT), _PAPER)
    facts = report.photos.get(path)
    picture = None if facts is None else _picture(path, sample, background, masked)
    if picture is None:
        picture = Image.new("RGB", (_CELL, _CELL), _MISSING)
        lines, ink = ["cannot be used"], _ALARM
    else:
        size = f"{facts.size[0]}x{facts.size[1]}"
        trained = f" as {sample.bucket.width}x{sample.bucket.height}" if sample else ""
        lines, ink = [size + trained, *([", ".join(sorted(facts.traits))] if facts.traits else [])], _INK
    cell.paste(picture, ((_CELL - picture.width) // 2, (_CELL - picture.height) // 2))
    draw, font = ImageDraw.Draw(cell), ImageFont.load_default()
    name = printable(path.name)
    name = name if len(name) <= 36 else f"{name[:20]}...{name[-13:]}"
    texts = [(name, _INK), *((line, ink) for line in lines)]
    if sample is not None:
        texts += [(line, _QUIET) for line in _caption_lines(sample.caption, font)]
    for number, (line, colour) in enumerate(texts):
        draw.text((2, _CELL + 2 + _LINE * number), line, fill=colour, font=font)
    return cell


def _caption_lines(caption: str, font: Any) -> list[str]:
    lines = [""]
    for letter in printable(caption.strip() or "(no caption)"):
        if font.getlength(lines[-1] + letter) > _CELL - 4:  # by letters: a caption may have no blanks
            if len(lines) == _CAPTION_LINES:
                return [*lines[:-1], lines[-1][:-3] + "..."]
            head, blank, tail = lines[-1].rpartition(" ")
            lines = [*lines[:-1], *([head, tail] if blank and letter != " " else [lines[-1], ""])]
        lines[-1] = (lines[-1] + letter).lstrip()
    return lines


def _picture(path: Path, sample: Sample | None, background: str, masked: bool) -> Image.Image | None:
    try:
        photo = read_photo(path, background)
    except DatasetError:
        return None  # gone or changed since the report, which has read it
    image = photo.image.copy()
    image.thumbnail((_CELL, _CELL), Image.Resampling.BICUBIC, reducing_gap=2.0)
    if masked and photo.alpha is not None:
        tint = Image.new("RGB", image.size, _ALARM)
        image = Image.composite(image, Image.blend(image, tint, 0.4), photo.alpha.resize(image.size))
    if sample is None:
        return image
    covering = covering_size(photo.image.size, sample.bucket)
    width = round(image.width * sample.bucket.width / covering[0])
    height = round(image.height * sample.bucket.height / covering[1])
    left, top = (image.width - width) // 2, (image.height - height) // 2
    inside = image.crop((left, top, left + width, top + height))
    framed = image.point(lambda level: level // 3)
    framed.paste(inside, (left, top))
    ImageDraw.Draw(framed).rectangle((left, top, left + width - 1, top + height - 1), outline=_FRAME, width=2)
    return framed
