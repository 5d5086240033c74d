"""Charts as HTML: lines are an SVG that stretches, text keeps its size; colours are the style sheet's."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

__all__ = ["SERIES_COLOURS", "Band", "Points", "bar_chart", "line_chart"]

Points: TypeAlias = Sequence[tuple[float, float]]
Band: TypeAlias = Sequence[tuple[float, float, float]]

SERIES_COLOURS = 8  # --c0 to --c7
MOST_POINTS = 1200  # per series, more than a screen's columns
MOST_DOTS = 30  # largest series drawn with dots, too
TICKS = 6  # approximate number per axis
SIDE = 1000  # of the drawing, in its own units
MARGIN = 0.04  # of the axis, above the highest value and below the lowest


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
    lines: dict[str, Points] = {}
    xs, ys = list(marks), []
    for name, points in series.items():
        drawable = [(at, value) for at, value in points if math.isfinite(value) and (value > 0 or not log_y)]
        if drawable:
            gaps = [(at, math.nan if value <= 0 and log_y else value) for at, value in points]
            lines[name] = thinned(gaps)
            xs += [at for at, _ in drawable]
            ys += [value for _, value in drawable]
            ys += [end for _, low, high in band.get(name, ()) for end in (low, high)]
    across = _Axis(xs, margin=0.0, whole=x == "step")
    up = _Axis(ys, margin=MARGIN, log=log_y)
    ticks = up.ticks()
    grid = "".join(f"M0 {SIDE - at:g}H{SIDE}" for at, _ in ticks)
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
            finite = [(at, value) for at, value in points if math.isfinite(value)]
            dots = "".join(f"M{across.place(at):g} {SIDE - up.place(value):g}h0" for at, value in finite)
            drawing.append(f'<path class="dots"{colour} d="{dots}"/>')
    labels = []
    for at, text in ticks:
        labels.append(f'<span class="tick-y axis" style="bottom: {at / 10:g}%">{text}</span>')
    for at, text in across.ticks():
        labels.append(f'<span class="tick-x axis" style="left: {at / 10:g}%">{text}</span>')
    for at, text in marks.items():
        place = across.place(at)
        drawing.append(f'<path class="mark" d="M{place:g} 0V{SIDE}"/>')
        side = " left" if place > SIDE / 2 else ""
        labels.append(f'<span class="note axis{side}" style="left: {place / 10:g}%">{html.escape(text)}</span>')
    room = max((len(text) for _, text in ticks), default=1) * 0.5 + 0.8
    body = [
        f'<div class="y axis">{html.escape(y)}</div>',
        f'<div class="plot" style="--ticks: {room:g}rem">',
        f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" aria-hidden="true">',
        *drawing,
        "</svg>",
        *labels,
        "</div>",
        f'<div class="x axis">{html.escape(x)}</div>',
    ]
    return _figure(title, legend if len(legend) > 1 or band else [], "".join(body))


def thinned(points: Points) -> Points:
    """Keep about `MOST_POINTS`: the lowest and the highest of each stretch, in order."""
    if len(points) <= MOST_POINTS:
        return points
    stretch = math.ceil(2 * len(points) / MOST_POINTS)
    few: list[tuple[float, float]] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        finite = [point for point in part if math.isfinite(point[1])] or part[:1]
        few += sorted({min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])})
    return few


class _Axis:
    """An axis around values, from `low` to `high`, which are exponents of 10 on a logarithmic one."""

    def __init__(self, values: Sequence[float], *, margin: float, log: bool = False, whole: bool = False) -> None:
        low, high = min(values, default=1), max(values, default=1)
        if log:
            low, high = math.log10(low), math.log10(high)
        room = (high - low) * margin
        if high == low:
            room = 0.5 if log else abs(low) / 2 or 0.5
        self.low, self.high, self.log, self.whole = low - room, high + room, log, whole

    def place(self, value: float) -> float:
        """Where a value stands, from 0 to `SIDE`."""
        at = math.log10(value) if self.log else value
        return round((at - self.low) / (self.high - self.low) * SIDE, 1)

    def ticks(self) -> list[tuple[float, str]]:
        """(position, label) of round numbers: powers of 10 if at least two fit, else 1, 2 or 5 times one apart."""
        if self.log:
            exponents = range(math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9) + 1)
            shown = [e for e in exponents if e % math.ceil(len(exponents) / TICKS) == 0]
            if len(shown) > 1:
                return [(self.place(10.0**e), _label(10.0**e, 10.0**e, max(0, -e))) for e in shown]
        low, high = (10**self.low, 10**self.high) if self.log else (self.low, self.high)
        rough = (high - low) / TICKS
        exponent = math.floor(math.log10(rough))
        factor = next(factor for factor in (1, 2, 5, 10) if 10.0**exponent * factor >= rough * (1 - 1e-9))
        step, decimals = 10.0**exponent * factor, max(0, -exponent - (factor == 10))
        if self.whole and step < 1:
            step, decimals = 1.0, 0
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        values = [step * i for i in range(first, last + 1) if i > 0 or not self.log]
        largest = max(map(abs, values), default=0.0)
        return [(self.place(value), _label(value, largest, decimals)) for value in values]


def _label(value: float, largest: float, decimals: int) -> str:
    """A tick's label on an axis up to `largest`: 1,000 and 0.05, but 1e-5."""
    if largest == 0 or 1e-3 <= largest < 1e7:
        return f"{value:,.{decimals}f}"
    return f"{value:.3g}".replace("e-0", "e-").replace("e+", "e")


def _line(points: Points, across: _Axis, up: _Axis) -> str:
    path, pen = [], "M"
    for at, value in points:
        if math.isfinite(value):
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
    colours: dict[str, str] = {}
    rows = []
    for name, parts in bars.items():
        rows.append(f'<span>{html.escape(name)}</span><div class="track">')
        for part, size in parts.items():
            if size:
                number = len(colours)
                fresh = f"var(--c{number})" if number < SERIES_COLOURS else "var(--quiet)"
                colour = colours.setdefault(part, fresh)
                rows.append(f'<i style="--c: {colour}; width: {size * scale:.2f}%"></i>')
        if name in expected:
            rows.append(f'<b style="left: {expected[name] * scale:.2f}%"></b>')
        rows.append(f"</div><span>{totals[name]:.2f}</span>")
    legend = [f'<span style="--c: {colour}">{html.escape(name)}</span>' for name, colour in colours.items()]
    if expected:
        legend.append(f'<span class="line">{html.escape(expected_name)}</span>')
    return _figure(f"{title}, {unit}", legend, f'<div class="bars">{"".join(rows)}</div>')


def _figure(title: str, legend: Sequence[str], body: str) -> str:
    label = html.escape(title)
    parts = [f'<figure class="chart" role="img" aria-label="{label}">', f"<figcaption>{label}</figcaption>"]
    if legend:
        parts += ['<div class="legend">', *legend, "</div>"]
    return "".join([*parts, body, "</figure>"])
