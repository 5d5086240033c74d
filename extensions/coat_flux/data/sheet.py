"""The contact sheet: every photo, its crop, name, sizes, traits and caption."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from .buckets import Sample, covering_size
from .files import DatasetError, printable
from .images import read_mask, read_photo
from .preflight import DataReport

MOST_PHOTOS = 400
_CELL, _LINE, _MARGIN = 240, 14, 12  # pixels
_CAPTION_LINES, _CAPTION_LETTERS = 4, 40
_TEXT = _LINE * (3 + _CAPTION_LINES) + 2
_COLUMNS = 6
_PAPER, _INK, _QUIET, _FRAME, _ALARM, _MISSING = "#f4f4f4", "#202020", "#595959", "#00a040", "#c02020", "#d0d0d0"


def contact_sheet(report: DataReport) -> Image.Image:
    """Draw at most 400 photos, unusable ones first, with their crop and mask."""
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
        sheet.paste(_cell(path, report, largest.get(path)), place)
    return sheet


def _cell(path: Path, report: DataReport, sample: Sample | None) -> Image.Image:
    cell = Image.new("RGB", (_CELL, _CELL + _TEXT), _PAPER)
    name = printable(path.name)
    texts = [(name if len(name) <= 36 else f"{name[:20]}...{name[-13:]}", _INK)]
    facts = report.photos.get(path)
    picture = None if facts is None else _picture(path, report, sample)
    if picture is None:
        picture = Image.new("RGB", (_CELL, _CELL), _MISSING)
        texts.append(("cannot be used", _ALARM))
    else:
        trained = f" as {sample.bucket.width}x{sample.bucket.height}" if sample else ""
        texts.append((f"{facts.size[0]}x{facts.size[1]}{trained}", _INK))
        if facts.traits:
            texts.append((", ".join(sorted(facts.traits)), _INK))
    if sample is not None:
        caption = printable(sample.caption.strip() or "(no caption)")
        lines = textwrap.wrap(caption, _CAPTION_LETTERS, max_lines=_CAPTION_LINES, placeholder="...")
        texts += [(line, _QUIET) for line in lines]
    cell.paste(picture, ((_CELL - picture.width) // 2, (_CELL - picture.height) // 2))
    draw, font = ImageDraw.Draw(cell), ImageFont.load_default()
    for number, (line, colour) in enumerate(texts):
        draw.text((2, _CELL + 2 + _LINE * number), line, fill=colour, font=font)
    return cell


def _picture(path: Path, report: DataReport, sample: Sample | None) -> Image.Image | None:
    try:
        photo, mask = read_photo(path, report.options.background)
        if sample is not None and sample.mask is not None:
            mask = read_mask(sample.mask.path, alpha=sample.mask.alpha, inverted=sample.mask.inverted)
        elif report.options.transparency != "mask":
            mask = None
    except DatasetError:
        return None  # gone or changed since the report
    image = photo.copy()
    image.thumbnail((_CELL, _CELL), Image.Resampling.BICUBIC, reducing_gap=2.0)
    if mask is not None:
        tint = Image.new("RGB", image.size, _ALARM)
        image = Image.composite(image, Image.blend(image, tint, 0.4), mask.resize(image.size))
    if sample is None:
        return image
    covering = covering_size(photo.size, sample.bucket)
    width = round(image.width * sample.bucket.width / covering[0])
    height = round(image.height * sample.bucket.height / covering[1])
    left, top = (image.width - width) // 2, (image.height - height) // 2
    inside = image.crop((left, top, left + width, top + height))
    framed = image.point(lambda level: level // 3)
    framed.paste(inside, (left, top))
    ImageDraw.Draw(framed).rectangle((left, top, left + width - 1, top + height - 1), outline=_FRAME, width=2)
    return framed
