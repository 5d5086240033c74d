"""Charts as HTML: lines are an SVG that stretches, text keeps its size. The colours are those of `style.STYLE`."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .style import SERIES_COLOURS

__all__ = ["Band", "Points", "bar_chart", "column_name", "heat_map", "line_chart", "thinned"]

Points: TypeAlias = Sequence[tuple[float, float]]
Band: TypeAlias = Sequence[tuple[float, float, float]]
Grid: TypeAlias = Sequence[Sequence[float | None]]

MOST_POINTS = 1200  # per series, more than a screen's columns
MOST_DOTS = 30  # largest series drawn with dots, too
TICKS = 6  # approximate number per axis
SIDE = 1000  # of the drawing, in its own units
MARGIN = 0.04  # of the axis, above the highest value and below the lowest
LOW, MIDDLE, HIGH = (178, 24, 43), (247, 247, 247), (33, 102, 172)  # of heat maps: red, white, blue
LUMINANCE = (0.2126, 0.7152, 0.0722)  # of red, green and blue in sRGB
BLACK_FROM = 0.18  # luminance from which black text has more contrast than white
SHORT = 12  # characters of a cell, or of a word in a column's name, that are never broken


def line_chart(
    title: str,
    series: Mapping[str, Points],
    *,
    x: str,
    y: str,
    log_y: bool = False,
    band: Mapping[str, Band] | None = None,
    faint: str = "",
    marks: Mapping[float, str] | None = None,
) -> str:
    """Return a `<figure>`; empty axes without a finite value.

    Args:
        series: name → points (x, y), x ascending. Points that are not finite, or not positive on a logarithmic axis,
            leave gaps. Long series are thinned, keeping their peaks.
        x, y: labels of the axes, with their units.
        band: name → (x, low, high), filled in the colour of that series.
        faint: name of a series drawn thin: the noisy values behind a smoothed line.
        marks: x → label of a dashed vertical line.
    """
    band, marks = band or {}, marks or {}
    shown = {name: thinned(points) for name, points in series.items()}
    shown = {name: points for name, points in shown.items() if any(_drawable(v, log_y) for _, v in points)}
    xs = [at for points in shown.values() for at, value in points if _drawable(value, log_y)] + list(marks)
    ys = [value for points in shown.values() for _, value in points]
    ys += [edge for name in shown for _, low, high in band.get(name, ()) for edge in (low, high)]
    across = _Axis.around(xs, margin=0.0)
    up = _Axis.around([value for value in ys if _drawable(value, log_y)], log=log_y, margin=MARGIN)

    y_ticks = up.ticks()
    grid = "".join(f"M0 {SIDE - at:g}H{SIDE}" for at, _ in y_ticks)
    drawing = [f'<path class="grid" d="{grid}"/>']
    legend = []
    for number, (name, points) in enumerate(shown.items()):
        colour = f' style="--c: var(--c{number % SERIES_COLOURS})"'
        legend.append(f"<span{colour}>{html.escape(name)}</span>")
        edges = band.get(name, ())
        few = edges[:: math.ceil(len(edges) / MOST_POINTS) or 1]
        few = [(at, low, high) for at, low, high in few if _drawable(low, log_y) and _drawable(high, log_y)]
        if few:
            outline = [(at, high) for at, _, high in few] + [(at, low) for at, low, _ in reversed(few)]
            drawing.append(f'<path class="band"{colour} d="{_line(outline, across, up)}Z"/>')
        kind = "faint" if name == faint else "line"
        drawing.append(f'<path class="{kind}"{colour} d="{_line(points, across, up)}"/>')
        if len(points) <= MOST_DOTS:
            places = [(across.place(at), SIDE - up.place(value)) for at, value in points if _drawable(value, log_y)]
            dots = "".join(f"M{at:g} {height:g}h0" for at, height in places)
            drawing.append(f'<path class="dots"{colour} d="{dots}"/>')
    labels = [f'<span class="tick-y axis" style="bottom: {at / 10:g}%">{text}</span>' for at, text in y_ticks]
    labels += [f'<span class="tick-x axis" style="left: {at / 10:g}%">{text}</span>' for at, text in across.ticks()]
    for at, text in marks.items():
        place = across.place(at)
        drawing.append(f'<path class="mark" d="M{place:g} 0V{SIDE}"/>')
        side = " left" if place > SIDE / 2 else ""
        labels.append(f'<span class="note axis{side}" style="left: {place / 10:g}%">{html.escape(text)}</span>')
    room = max((len(text) for _, text in y_ticks), default=1) * 0.5 + 0.8
    svg = f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" aria-hidden="true">{"".join(drawing)}</svg>'
    plot = f'<div class="plot" style="--ticks: {room:g}rem">{svg}{"".join(labels)}</div>'
    axes = f'<div class="y axis">{html.escape(y)}</div>{plot}<div class="x axis">{html.escape(x)}</div>'
    return _figure(title, legend if len(legend) > 1 or band else [], axes)


def bar_chart(
    title: str,
    bars: Mapping[str, Mapping[str, float]],
    *,
    unit: str,
    expected: Mapping[str, float] | None = None,
    expected_name: str = "expected",
) -> str:
    """Return a `<figure>` of horizontal stacked bars: name → part → length; a line marks each `expected` length."""
    expected = expected or {}
    totals = {name: sum(parts.values()) for name, parts in bars.items()}
    scale = 100 / (max([*totals.values(), *expected.values()], default=0) or 1)
    names = list(dict.fromkeys(part for parts in bars.values() for part, size in parts.items() if size))
    colours = {name: f"--c: var(--c{i})" if i < SERIES_COLOURS else "--c: var(--quiet)" for i, name in enumerate(names)}
    rows = []
    for name, parts in bars.items():
        pieces = "".join(
            f'<i style="{colours[part]}; width: {size * scale:.2f}%"></i>' for part, size in parts.items() if size
        )
        if name in expected:
            pieces += f'<b style="left: {expected[name] * scale:.2f}%"></b>'
        rows.append(f'<span>{html.escape(name)}</span><div class="track">{pieces}</div><span>{totals[name]:.2f}</span>')
    legend = [f'<span style="{colours[name]}">{html.escape(name)}</span>' for name in names]
    legend += [f'<span class="line">{html.escape(expected_name)}</span>'] if expected else []
    return _figure(f"{title}, {unit}", legend, f'<div class="bars">{"".join(rows)}</div>')


def _figure(title: str, legend: Sequence[str], body: str) -> str:
    names = f'<div class="legend">{"".join(legend)}</div>' if legend else ""
    label = html.escape(title)
    return (
        f'<figure class="chart" role="img" aria-label="{label}"><figcaption>{label}</figcaption>{names}{body}</figure>'
    )


def heat_map(
    title: str, rows: Sequence[str], columns: Sequence[str], values: Grid, *, unit: str, ends: tuple[float, float]
) -> str:
    """Return a table with coloured cells: [rows][columns], None is a dash; `ends` are full red and full blue."""
    head = "".join(map(column_name, (unit, *columns)))
    body = "".join(
        f"<tr><th>{html.escape(name)}</th>{''.join(_heat_cell(value, *ends) for value in row)}</tr>"
        for name, row in zip(rows, values, strict=True)
    )
    table = f'<table class="heat"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<h4>{html.escape(title)}</h4>\n<div class="wide">{table}</div>'


def _heat_cell(value: float | None, low: float, high: float) -> str:
    if value is None or not math.isfinite(value):
        return f'<td class="short">{"–" if value is None else value}</td>'
    place = min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 1.0
    start, end, share = (LOW, MIDDLE, 2 * place) if place < 0.5 else (MIDDLE, HIGH, 2 * place - 1)
    colour = [round(a + (b - a) * share) for a, b in zip(start, end, strict=True)]
    luminance = sum(share * (level / 255) ** 2.2 for share, level in zip(LUMINANCE, colour, strict=True))
    ink = "#000" if luminance >= BLACK_FROM else "#fff"
    return f'<td style="background: rgb({colour[0]} {colour[1]} {colour[2]}); color: {ink}">{value:.1f}</td>'


def column_name(name: str) -> str:
    """The cell of a column's name; short words never break."""
    whole = ' class="short"' if max(map(len, name.split()), default=0) <= SHORT else ""
    return f"<th{whole}>{html.escape(name)}</th>"


@dataclass(frozen=True)
class _Axis:
    """An axis from `low` to `high`, which are exponents of 10 on a logarithmic one."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def around(cls, values: Sequence[float], *, log: bool = False, margin: float) -> _Axis:
        ends = [math.log10(value) if log else value for value in (min(values, default=1), max(values, default=1))]
        room = (ends[1] - ends[0]) * margin or (0.0 if ends[1] > ends[0] else 0.5 if log else abs(ends[0]) / 2 or 0.5)
        return cls(ends[0] - room, ends[1] + room, log)

    def place(self, value: float) -> float:
        at = math.log10(value) if self.log else value
        return round((at - self.low) / (self.high - self.low) * SIDE, 1)

    def ticks(self) -> list[tuple[float, str]]:
        """(position, label) of round numbers: powers of 10 if at least two fit, else steps of 1, 2 or 5."""
        values: list[float] = []
        if self.log:
            exponents = range(math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9) + 1)
            values = [10.0**e for e in exponents if e % math.ceil(len(exponents) / TICKS) == 0]
            labels = [f"{value:,.0f}" if 1 <= value < 1e7 else _short(value) for value in values]
        if len(values) < 2:
            low, high = (10**self.low, 10**self.high) if self.log else (self.low, self.high)
            rough = (high - low) / TICKS
            power = 10.0 ** math.floor(math.log10(rough))
            step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
            first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
            values = [step * i for i in range(first, last + 1) if step * i > 0 or not self.log]
            labels = _labels(values)
        return [(self.place(value), label) for value, label in zip(values, labels, strict=True)]


def _labels(values: Sequence[float]) -> list[str]:
    """Tick labels with as many decimals as they need: 1,000 and 0.05, but 1e-5."""
    largest = max(map(abs, values), default=0.0)
    for decimals in range(9) if not largest or 1e-3 <= largest < 1e7 else ():
        texts = [f"{value:,.{decimals}f}" for value in values]
        if all(math.isclose(float(t.replace(",", "")), v, rel_tol=1e-6) for t, v in zip(texts, values, strict=True)):
            return texts
    return [_short(value) for value in values]


def _short(value: float) -> str:
    return f"{value:.3g}".replace("e-0", "e-").replace("e+", "e")


def _line(points: Points, across: _Axis, up: _Axis) -> str:
    path, pen = [], "M"
    for at, value in points:
        if not _drawable(value, up.log):
            pen = "M"
            continue
        path.append(f"{pen}{across.place(at):g} {SIDE - up.place(value):g}")
        pen = "L"
    return "".join(path)


def _drawable(value: float, log_y: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log_y)


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """Keep about `most` points at most: the lowest and the highest of each stretch, in order."""
    if len(points) <= most:
        return points
    stretch = math.ceil(2 * len(points) / most)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), stretch):
        part = range(start, min(start + stretch, len(points)))
        finite = [i for i in part if math.isfinite(points[i][1])]
        ends = {min(finite, key=lambda i: points[i][1]), max(finite, key=lambda i: points[i][1])} if finite else {start}
        kept += [points[i] for i in sorted(ends)]
    return kept
