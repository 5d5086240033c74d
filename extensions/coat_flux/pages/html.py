"""One HTML file that shows everything it has to show by itself.

Texts are escaped, charts and pictures are `data:` URIs, and a content security policy keeps browsers from fetching
anything, whatever the texts are.
"""

from __future__ import annotations

import base64
import html
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

from ..base.files import replacing
from .charts import Band, Points, bar_chart, line_chart
from .pictures import LONGEST_SIDE, embeddable
from .style import STYLE

__all__ = ["Page", "Tone"]

Tone: TypeAlias = Literal["good", "bad", "open", "plain"]

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
LOW, MIDDLE, HIGH = (178, 24, 43), (247, 247, 247), (33, 102, 172)  # of heat maps: red, white, blue
LUMINANCE = (0.2126, 0.7152, 0.0722)  # of red, green and blue in sRGB
BLACK_FROM = 0.18  # luminance from which black text has more contrast than white
NUMBER = re.compile(r"–|[-+±~<]?(>=)?[\d.,]+(e-?\d+)?( ?(%|dB|GB|MB|s))?")
SHORT = 12  # characters of a cell, or of a word in a column's name, that are never broken
STACKED_COLUMNS = 4  # from so many on, the rows of a table become blocks on a narrow screen


class Page:
    """A page that is built from its top to its end.

    Args:
        title: heading, and name of the browser's tab.
        subtitle: one line below it.
    """

    def __init__(self, title: str, subtitle: str = ""):
        self._title = title
        self._parts: list[str] = [f"<h1>{_text(title)}</h1>"]
        if subtitle:
            self._parts.append(f'<p class="subtitle">{_text(subtitle)}</p>')

    def heading(self, text: str, level: int = 2) -> None:
        """Begin a section (level 2) or a part of one (3 to 6)."""
        if not 2 <= level <= 6:
            raise ValueError(f"level={level}: must be from 2 to 6; 1 is the page's title")
        self._parts.append(f"<h{level}>{_text(text)}</h{level}>")

    def paragraph(self, text: str) -> None:
        """Add a paragraph; lines of the text stay lines."""
        self._parts.append(f"<p>{_text(text).replace(chr(10), '<br>')}</p>")

    def verdict(self, text: str, tone: Tone) -> None:
        """Add the one sentence that says what came out, on green (good), red (bad), yellow (open) or blue (plain)."""
        self._parts.append(f'<p class="verdict {tone}" role="status">{_text(text)}</p>')

    @contextmanager
    def details(self, title: str, *, opened: bool = False) -> Iterator[None]:
        """Fold what is added inside the `with` block away until a reader opens it."""
        self._parts.append(f"<details{' open' if opened else ''}><summary>{_text(title)}</summary>")
        try:
            yield
        finally:
            self._parts.append("</details>")

    def missing(self, text: str) -> None:
        """Say what could not be shown, and why."""
        self._parts.append(f'<p class="missing">{_text(text)}</p>')

    def code(self, text: str) -> None:
        """Add text as it is, to be copied."""
        self._parts.append(f"<pre>{_text(text)}</pre>")

    def lora_file(self, path: Path, model: str, trigger: str | None) -> None:
        """Name a LoRA's file, and how ComfyUI and diffusers load it.

        Args:
            path: of the file.
            model: that it was trained for, as diffusers finds it.
            trigger: word that belongs in a prompt.
        """
        path = path.resolve()
        self.code(str(path))
        word = f" Put the trigger word in your prompts: {trigger}." if trigger else ""
        self.paragraph(f"ComfyUI: copy the file to ComfyUI/models/loras and load it with a Load LoRA node.{word}")
        self.paragraph("diffusers:")
        self.code(
            f"pipe = FluxPipeline.from_pretrained({model!r}, torch_dtype=torch.bfloat16)\n"
            f"pipe.load_lora_weights({str(path.parent)!r}, weight_name={path.name!r})"
        )

    def table(self, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Add a table; cells are shown as `str` gives them, None as a dash. A header of empty names is left out."""
        cells = "".join(map(_name, header))
        head = f"<thead><tr>{cells}</tr></thead>" if any(header) else ""
        body = "".join(
            f"<tr>{''.join(_cell(cell, name) for cell, name in zip(row, header, strict=True))}</tr>" for row in rows
        )
        kind = ' class="facts"' if not head else ' class="stacking"' if len(header) >= STACKED_COLUMNS else ""
        self._parts.append(_wide(f"<table{kind}>{head}<tbody>{body}</tbody></table>"))

    def curves(
        self,
        title: str,
        series: Mapping[str, Points],
        *,
        x: str,
        y: str,
        log_y: bool = False,
        band: Mapping[str, Band] | None = None,
        faint: str = "",
        marks: Mapping[float, str] | None = None,
    ) -> None:
        """Add a line chart.

        Args:
            title: above the chart.
            series: name → points (x, y) in the order of x. Points that are not finite, or not positive on a
                logarithmic axis, leave gaps. Long series are thinned out, their peaks stay.
            x: label of the horizontal axis, with its unit.
            y: label of the vertical axis, with its unit.
            log_y: logarithmic vertical axis.
            band: name → (x, low, high), filled in the colour of the series of that name.
            faint: name of a series that is drawn thin: the noisy values behind a smoothed line.
            marks: x → text of a dashed vertical line.
        """
        if not any(math.isfinite(value) for points in series.values() for _, value in points):
            self.missing(f"{title}: there is nothing to show")
            return
        self._parts.append(line_chart(title, series, x=x, y=y, log_y=log_y, band=band, faint=faint, marks=marks))

    def bars(
        self,
        title: str,
        bars: Mapping[str, Mapping[str, float]],
        *,
        unit: str,
        expected: Mapping[str, float] | None = None,
        expected_name: str = "expected",
    ) -> None:
        """Add horizontal stacked bars; the arguments are those of `bar_chart`."""
        self._parts.append(bar_chart(title, bars, unit=unit, expected=expected, expected_name=expected_name))

    def heat_map(
        self,
        title: str,
        rows: Sequence[str],
        columns: Sequence[str],
        values: Sequence[Sequence[float | None]],
        *,
        unit: str,
        ends: tuple[float, float] | None = None,
    ) -> None:
        """Add a table whose cells are coloured: low values red, high ones blue.

        Args:
            title: above the table.
            rows: names, R.
            columns: names, C.
            values: [R][C], shown with one decimal; None is a dash.
            unit: of the values.
            ends: values of full red and full blue; default: the lowest and the highest.
        """
        finite = [value for row in values for value in row if value is not None and math.isfinite(value)]
        if not finite:
            self.missing(f"{title}: there is nothing to show")
            return
        low, high = ends or (min(finite), max(finite))
        head = "".join(map(_name, (unit, *columns)))
        body = "".join(
            f"<tr><th>{_text(name)}</th>{''.join(_heat(value, low, high) for value in row)}</tr>"
            for name, row in zip(rows, values, strict=True)
        )
        self._parts.append(f"<h4>{_text(title)}</h4>")
        self._parts.append(_wide(f'<table class="heat"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'))

    def images(
        self,
        title: str,
        items: Sequence[tuple[str, Path]],
        *,
        columns: int = 4,
        header: Sequence[str] = (),
        longest_side: int = LONGEST_SIDE,
        width: int = 160,
    ) -> None:
        """Add a grid of pictures, large ones made smaller; one that cannot be read is named.

        Args:
            title: above the grid; "" is none.
            items: (caption, file), row by row; "" is no caption.
            columns: pictures per row. On a narrow screen rows wrap, unless there is a header or a single column.
            header: names of the columns, above the first row.
            longest_side: of a picture, in pixels; larger ones are made smaller.
            width: of a column on a wide screen, in pixels.
        """
        if not items:
            self.missing(f"{title}: there is nothing to show")
            return
        cells = "".join(f'<div class="head">{_text(name)}</div>' for name in header)
        cells += "".join(_picture(caption, path, longest_side) for caption, path in items)
        caption = f"<figcaption>{_text(title)}</figcaption>" if title else ""
        wrapping = " wrapping" if columns > 1 and not header else ""
        grid = f'<div class="grid{wrapping}" style="--columns: {columns:d}">{cells}</div>'
        self._parts.append(
            f'<figure class="gallery" style="width: min(100%, {columns * width:d}px)">{caption}{grid}</figure>'
        )

    def html(self) -> str:
        """Return the page as it is now."""
        head = (
            f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{_text(self._title)}</title><style>{STYLE}</style>"
        )
        body = "\n".join(self._parts)
        return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'

    def write(self, path: Path) -> Path:
        """Write the page; a reader sees the old file or the new one, never a part. Returns `path`."""
        with replacing(path) as temp:
            temp.write_bytes(self.html().encode(errors="replace"))
        return path


def _text(text: object) -> str:
    return html.escape(str(text))


def _name(column: str) -> str:
    whole = ' class="short"' if max(map(len, column.split()), default=0) <= SHORT else ""
    return f"<th{whole}>{_text(column)}</th>"


def _cell(value: object, column: str = "") -> str:
    text = "–" if value is None else str(value)
    kinds = ["short"] * (len(text) <= SHORT) + ["number"] * bool(NUMBER.fullmatch(text))
    attributes = f' class="{" ".join(kinds)}"' if kinds else ""
    attributes += f' data-label="{_text(column)}"' if column else ""
    return f"<td{attributes}>{_text(text)}</td>"


def _wide(table: str) -> str:
    return f'<div class="wide">{table}</div>'


def _picture(caption: str, path: Path, longest_side: int) -> str:
    try:
        media_type, content = embeddable(path, longest_side)
    except (OSError, ValueError) as error:
        text = _text(f"{caption}: cannot be read ({error})")
        return f'<figure><figcaption class="missing">{text}</figcaption></figure>'
    image = f'<img alt="{_text(caption)}" src="{_data_uri(media_type, content)}">'
    below = f"<figcaption>{_text(caption)}</figcaption>" if caption else ""
    return f"<figure>{image}{below}</figure>"


def _data_uri(media_type: str, content: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def _heat(value: float | None, low: float, high: float) -> str:
    if value is None or not math.isfinite(value):
        return _cell(value)
    place = min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 1.0
    start, end, share = (LOW, MIDDLE, 2 * place) if place < 0.5 else (MIDDLE, HIGH, 2 * place - 1)
    colour = [round(a + (b - a) * share) for a, b in zip(start, end, strict=True)]
    luminance = sum(share * (level / 255) ** 2.2 for share, level in zip(LUMINANCE, colour, strict=True))
    ink = "#000" if luminance >= BLACK_FROM else "#fff"
    return f'<td style="background: rgb({colour[0]} {colour[1]} {colour[2]}); color: {ink}">{value:.1f}</td>'
