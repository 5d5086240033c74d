"""One HTML file that shows everything it has to show by itself.

Texts are escaped, charts and pictures are `data:` URIs, and a content security policy keeps browsers from fetching
anything, whatever the texts are.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..checkpoint.files import replacing
from .charts import Band, Points, line_chart
from .pictures import LONGEST_SIDE, embeddable

__all__ = ["Page"]

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; }
h1, h2, h3 { line-height: 1.2; margin: 1.6em 0 .5em; }
h1 { margin-top: .5em; }
.subtitle, figcaption, .missing { opacity: .75; }
.wide { overflow: auto; max-height: 85vh; margin: 1em 0; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { border: 1px solid #8886; padding: .2rem .5rem; text-align: left; vertical-align: top; }
td { overflow-wrap: anywhere; }
thead th { position: sticky; top: 0; background: Canvas; }
.heat td { text-align: right; }
pre { overflow: auto; max-height: 85vh; padding: .75rem; border: 1px solid #8886; font-size: .8rem; }
figure { margin: 1em 0; }
figure > img { width: 100%; background: #fff; border-radius: .3rem; }
.grid { display: grid; gap: .5rem; grid-template-columns: repeat(var(--columns), minmax(6rem, 1fr)); overflow: auto; }
.grid figure { margin: 0; }
.grid figcaption { font-size: .8rem; overflow-wrap: anywhere; }
"""
LOW, MIDDLE, HIGH = (178, 24, 43), (247, 247, 247), (33, 102, 172)  # of heat maps: red, white, blue
BRIGHT = 140  # mean of a colour's channels from which on black text is better read than white


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

    def missing(self, text: str) -> None:
        """Say what could not be shown, and why."""
        self._parts.append(f'<p class="missing">{_text(text)}</p>')

    def code(self, text: str) -> None:
        """Add text as it is, to be copied."""
        self._parts.append(f"<pre>{_text(text)}</pre>")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Add a table; cells are shown as `str` gives them, None as a dash."""
        head = "".join(f"<th>{_text(cell)}</th>" for cell in header)
        body = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        self._parts.append(_wide(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"))

    def curves(
        self,
        title: str,
        series: Mapping[str, Points],
        *,
        x: str,
        y: str,
        log_y: bool = False,
        band: Mapping[str, Band] | None = None,
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
        """
        if not any(math.isfinite(value) for points in series.values() for _, value in points):
            self.missing(f"{title}: there is nothing to show")
            return
        try:
            svg = line_chart(title, series, x=x, y=y, log_y=log_y, band=band or {})
        except ImportError as error:
            self.missing(f"{title}: not drawn ({error}); pip install matplotlib")
            return
        self._parts.append(_figure(title, "image/svg+xml", svg))

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
            values: [R][C]; None stays empty.
            unit: of the values.
            ends: values of full red and full blue; default: the lowest and the highest.
        """
        finite = [value for row in values for value in row if value is not None and math.isfinite(value)]
        if not finite:
            self.missing(f"{title}: there is nothing to show")
            return
        low, high = ends or (min(finite), max(finite))
        head = "".join(f"<th>{_text(cell)}</th>" for cell in (f"{unit}", *columns))
        body = "".join(
            f"<tr><th>{_text(name)}</th>{''.join(_heat(value, low, high) for value in row)}</tr>"
            for name, row in zip(rows, values, strict=True)
        )
        self._parts.append(f"<h4>{_text(title)}</h4>")
        self._parts.append(_wide(f'<table class="heat"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'))

    def images(
        self, title: str, items: Sequence[tuple[str, Path]], *, columns: int = 4, longest_side: int = LONGEST_SIDE
    ) -> None:
        """Add a grid of pictures, large ones made smaller; one that cannot be read is named.

        Args:
            title: above the grid; "" is none.
            items: (caption, file), row by row.
            columns: pictures per row.
            longest_side: of a picture, in pixels; larger ones are made smaller.
        """
        if not items:
            self.missing(f"{title}: there is nothing to show")
            return
        cells = "".join(_picture(caption, path, longest_side) for caption, path in items)
        if title:
            self._parts.append(f"<h4>{_text(title)}</h4>")
        self._parts.append(f'<div class="grid" style="--columns: {columns:d}">{cells}</div>')

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


def _cell(value: object) -> str:
    return "–" if value is None else _text(value)


def _wide(table: str) -> str:
    return f'<div class="wide">{table}</div>'


def _figure(caption: str, media_type: str, content: bytes) -> str:
    return f'<figure><img alt="{_text(caption)}" src="{_data_uri(media_type, content)}"></figure>'


def _picture(caption: str, path: Path, longest_side: int) -> str:
    try:
        media_type, content = embeddable(path, longest_side)
    except (OSError, ValueError) as error:
        text = _text(f"{caption}: cannot be read ({error})")
        return f'<figure><figcaption class="missing">{text}</figcaption></figure>'
    image = f'<img alt="{_text(caption)}" src="{_data_uri(media_type, content)}">'
    return f"<figure>{image}<figcaption>{_text(caption)}</figcaption></figure>"


def _data_uri(media_type: str, content: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def _heat(value: float | None, low: float, high: float) -> str:
    if value is None or not math.isfinite(value):
        return f"<td>{_cell(value)}</td>"
    place = min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 1.0
    start, end, share = (LOW, MIDDLE, 2 * place) if place < 0.5 else (MIDDLE, HIGH, 2 * place - 1)
    colour = [round(a + (b - a) * share) for a, b in zip(start, end, strict=True)]
    ink = "#000" if sum(colour) / 3 >= BRIGHT else "#fff"
    return f'<td style="background: rgb({colour[0]} {colour[1]} {colour[2]}); color: {ink}">{value:.4g}</td>'
