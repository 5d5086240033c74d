"""Charts as HTML: lines are an SVG that stretches, text keeps its size. The colours are those of the style sheet."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["SERIES_COLOURS", "Band", "Points", "bar_chart", "heat_map", "line_chart", "table_head"]

Points: TypeAlias = Sequence[tuple[float, float]]
Band: TypeAlias = Sequence[tuple[float, float, float]]
Grid: TypeAlias = Sequence[Sequence[float | None]]

SERIES_COLOURS = 8  # --c0 to --c7
MOST_POINTS = 1200  # per series, more than a screen's columns
MOST_DOTS = 30  # largest series drawn with dots, too
TICKS = 6  # approximate number per axis
SIDE = 1000  # of the drawing, in its own units
MARGIN = 0.04  # of the axis, above the highest value and below the lowest
LOW, MIDDLE, HIGH = (178, 24, 43), (247, 247, 247), (33, 102, 172)  # of heat maps: red, white, blue
BLACK_TEXT = (0.125, 0.935)  # between these places of a heat map's scale black has more contrast than white
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
        x, y: labels of the axes, with their units; steps are whole numbers.
        band: name → (x, low, high), filled in the colour of that series.
        faint: name of a series drawn thin: the noisy values behind a smoothed line.
        marks: x → label of a dashed vertical line.
    """
    band, marks = band or {}, marks or {}
    lines = {name: thinned(points) for name, points in series.items()}
    lines = {name: points for name, points in lines.items() if any(_drawable(v, log_y) for _, v in points)}
    across, up = _axes(lines, band, marks, log_y=log_y, whole_x=x == "step")
    grid = "".join(f"M0 {SIDE - at:g}H{SIDE}" for at, _ in up.ticks())
    drawing = [f'<path class="grid" d="{grid}"/>']
    legend = []
    for number, (name, points) in enumerate(lines.items()):
        colour = f' style="--c: var(--c{number % SERIES_COLOURS})"'
        legend.append(f"<span{colour}>{html.escape(name)}</span>")
        if name in band:
            above = [(at, high) for at, _, high in band[name]]
            below = [(at, low) for at, low, _ in reversed(band[name])]
            drawing.append(f'<path class="band"{colour} d="{_line(above + below, across, up)}Z"/>')
        kind = "faint" if name == faint else "line"
        drawing.append(f'<path class="{kind}"{colour} d="{_line(points, across, up)}"/>')
        if len(points) <= MOST_DOTS:
            drawable = [(at, value) for at, value in points if _drawable(value, log_y)]
            dots = "".join(f"M{across.place(at):g} {SIDE - up.place(value):g}h0" for at, value in drawable)
            drawing.append(f'<path class="dots"{colour} d="{dots}"/>')
    labels = [f'<span class="tick-y axis" style="bottom: {at / 10:g}%">{text}</span>' for at, text in up.ticks()]
    labels += [f'<span class="tick-x axis" style="left: {at / 10:g}%">{text}</span>' for at, text in across.ticks()]
    for at, text in marks.items():
        place = across.place(at)
        drawing.append(f'<path class="mark" d="M{place:g} 0V{SIDE}"/>')
        side = " left" if place > SIDE / 2 else ""
        labels.append(f'<span class="note axis{side}" style="left: {place / 10:g}%">{html.escape(text)}</span>')
    room = max((len(text) for _, text in up.ticks()), default=1) * 0.5 + 0.8
    svg = f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" aria-hidden="true">{"".join(drawing)}</svg>'
    plot = f'<div class="plot" style="--ticks: {room:g}rem">{svg}{"".join(labels)}</div>'
    body = f'<div class="y axis">{html.escape(y)}</div>{plot}<div class="x axis">{html.escape(x)}</div>'
    return _figure(title, legend if len(legend) > 1 or band else [], body)


def _drawable(value: float, log_y: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log_y)


def thinned(points: Points) -> Points:
    """Keep about `MOST_POINTS`: the lowest and the highest of each stretch, in order."""
    if len(points) <= MOST_POINTS:
        return points
    stretch = math.ceil(2 * len(points) / MOST_POINTS)
    few: list[tuple[float, float]] = []
    for start in range(0, len(points), stretch):
        part = range(start, min(start + stretch, len(points)))
        finite = [i for i in part if math.isfinite(points[i][1])]
        ends = {start}
        if finite:
            ends = {min(finite, key=lambda i: points[i][1]), max(finite, key=lambda i: points[i][1])}
        few += [points[i] for i in sorted(ends)]
    return few


@dataclass(frozen=True)
class _Axis:
    """An axis from `low` to `high`, which are exponents of 10 on a logarithmic one."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    @classmethod
    def around(cls, values: Sequence[float], *, margin: float, log: bool = False, whole: bool = False) -> _Axis:
        low, high = min(values, default=1), max(values, default=1)
        if log:
            low, high = math.log10(low), math.log10(high)
        if high > low:
            room = (high - low) * margin
        elif log:
            room = 0.5
        else:
            room = abs(low) / 2 or 0.5
        return cls(low - room, high + room, log, whole)

    def place(self, value: float) -> float:
        """Where a value stands, from 0 to `SIDE`."""
        at = math.log10(value) if self.log else value
        return round((at - self.low) / (self.high - self.low) * SIDE, 1)

    def ticks(self) -> list[tuple[float, str]]:
        """(position, label) of round numbers: powers of 10 if at least two fit, else 1, 2 or 5 times one apart."""
        if self.log:
            exponents = range(math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9) + 1)
            powers = [10.0**e for e in exponents if e % math.ceil(len(exponents) / TICKS) == 0]
            if len(powers) > 1:
                return [(self.place(power), _label(power)) for power in powers]
        low, high = (10**self.low, 10**self.high) if self.log else (self.low, self.high)
        rough = (high - low) / TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
        if self.whole:
            step = max(step, 1.0)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        values = [step * i for i in range(first, last + 1) if i > 0 or not self.log]
        return list(zip(map(self.place, values), _labels(values), strict=True))


def _axes(
    lines: Mapping[str, Points], bands: Mapping[str, Band], marks: Mapping[float, str], *, log_y: bool, whole_x: bool
) -> tuple[_Axis, _Axis]:
    """The horizontal and the vertical axis around everything that is drawn."""
    xs, ys = list(marks), []
    for points in lines.values():
        drawable = [(at, value) for at, value in points if _drawable(value, log_y)]
        xs += [at for at, _ in drawable]
        ys += [value for _, value in drawable]
    for name in lines:
        for _, low, high in bands.get(name, ()):
            ys += [low, high]
    return _Axis.around(xs, margin=0.0, whole=whole_x), _Axis.around(ys, margin=MARGIN, log=log_y)


def _labels(values: Sequence[float]) -> list[str]:
    """Tick labels with as many decimals as they need: 1,000 and 0.05, but 1e-5."""
    largest = max(map(abs, values), default=0.0)
    if largest and not 1e-3 <= largest < 1e7:
        return [_label(value) for value in values]
    for decimals in range(9):
        texts = [f"{value:,.{decimals}f}" for value in values]
        exact = [float(text.replace(",", "")) for text in texts]
        if all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(exact, values, strict=True)):
            return texts
    return [_label(value) for value in values]


def _label(value: float) -> str:
    if 1 <= value < 1e7:
        return f"{value:,.0f}"
    return f"{value:.3g}".replace("e-0", "e-").replace("e+", "e")


def _line(points: Points, across: _Axis, up: _Axis) -> str:
    path, pen = [], "M"
    for at, value in points:
        if _drawable(value, up.log):
            path.append(f"{pen}{across.place(at):g} {SIDE - up.place(value):g}")
            pen = "L"
        else:
            pen = "M"
    return "".join(path)


def bar_chart(
    title: str, bars: Mapping[str, Mapping[str, float]], *, unit: str, expected: Mapping[str, float], expected_name: str
) -> str:
    """Return a `<figure>` of horizontal stacked bars: name → part → length; a line marks each `expected` length."""
    totals = {name: sum(parts.values()) for name, parts in bars.items()}
    scale = 100 / (max([*totals.values(), *expected.values()], default=0) or 1)
    names = list(dict.fromkeys(part for parts in bars.values() for part, size in parts.items() if size))
    colours = {name: f"--c: var(--c{i})" if i < SERIES_COLOURS else "--c: var(--quiet)" for i, name in enumerate(names)}
    rows = []
    for name, parts in bars.items():
        sizes = {part: size * scale for part, size in parts.items() if size}
        pieces = "".join(f'<i style="{colours[part]}; width: {size:.2f}%"></i>' for part, size in sizes.items())
        if name in expected:
            pieces += f'<b style="left: {expected[name] * scale:.2f}%"></b>'
        rows.append(f'<span>{html.escape(name)}</span><div class="track">{pieces}</div><span>{totals[name]:.2f}</span>')
    legend = [f'<span style="{colours[name]}">{html.escape(name)}</span>' for name in names]
    if expected:
        legend.append(f'<span class="line">{html.escape(expected_name)}</span>')
    return _figure(f"{title}, {unit}", legend, f'<div class="bars">{"".join(rows)}</div>')


def _figure(title: str, legend: Sequence[str], body: str) -> str:
    names = f'<div class="legend">{"".join(legend)}</div>' if legend else ""
    label = html.escape(title)
    return (
        f'<figure class="chart" role="img" aria-label="{label}"><figcaption>{label}</figcaption>{names}{body}</figure>'
    )


def table_head(names: Sequence[str]) -> str:
    """The row of a table's column names; short words never break."""
    cells = []
    for name in names:
        whole = ' class="short"' if max(map(len, name.split()), default=0) <= SHORT else ""
        cells.append(f"<th{whole}>{html.escape(name)}</th>")
    return f"<thead><tr>{''.join(cells)}</tr></thead>"


def heat_map(
    title: str, rows: Sequence[str], columns: Sequence[str], values: Grid, *, unit: str, ends: tuple[float, float]
) -> str:
    """Return a table with coloured cells: [rows][columns], None is a dash; `ends` are full red and full blue."""
    body = []
    for name, row in zip(rows, values, strict=True):
        cells = "".join(_heat_cell(value, *ends) for value in row)
        body.append(f"<tr><th>{html.escape(name)}</th>{cells}</tr>")
    table = f'<table class="heat">{table_head([unit, *columns])}<tbody>{"".join(body)}</tbody></table>'
    return f'<h4>{html.escape(title)}</h4>\n<div class="wide">{table}</div>'


def _heat_cell(value: float | None, low: float, high: float) -> str:
    if value is None or not math.isfinite(value):
        return f'<td class="short">{"–" if value is None else value}</td>'
    place = min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 1.0
    if place < 0.5:
        colour = [round(a + (b - a) * 2 * place) for a, b in zip(LOW, MIDDLE, strict=True)]
    else:
        colour = [round(a + (b - a) * (2 * place - 1)) for a, b in zip(MIDDLE, HIGH, strict=True)]
    ink = "#000" if BLACK_TEXT[0] <= place <= BLACK_TEXT[1] else "#fff"
    return f'<td style="background: rgb({colour[0]} {colour[1]} {colour[2]}); color: {ink}">{value:.1f}</td>'
