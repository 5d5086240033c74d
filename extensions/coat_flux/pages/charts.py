"""Charts as HTML: lines are an SVG that stretches, the text around it keeps its size on any screen.

The colours are those of `style.STYLE`, so that a chart follows the reader's light or dark scheme.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .style import SERIES_COLOURS

__all__ = ["Band", "Points", "bar_chart", "line_chart", "thinned"]

Points: TypeAlias = Sequence[tuple[float, float]]
Band: TypeAlias = Sequence[tuple[float, float, float]]

MOST_POINTS = 1200  # per series: more than a screen has columns for
MOST_DOTS = 30  # points of a series that are drawn as dots, too
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
    """Return a `<figure>`; the arguments are those of `Page.curves`. Without a finite value it is empty axes."""
    band, marks = band or {}, marks or {}
    shown = {name: thinned(points) for name, points in series.items()}
    shown = {name: points for name, points in shown.items() if any(_drawable(v, log_y) for _, v in points)}
    xs = [at for points in shown.values() for at, value in points if _drawable(value, log_y)] + list(marks)
    ys = [value for points in shown.values() for _, value in points]
    ys += [edge for name in shown for _, low, high in band.get(name, ()) for edge in (low, high)]
    across = _Axis.around(xs, margin=0.0)
    up = _Axis.around([value for value in ys if _drawable(value, log_y)], log=log_y, margin=MARGIN)

    x_ticks, y_ticks = across.ticks(6), up.ticks(6)
    grid = "".join(f"M0 {SIDE - at:g}H{SIDE}" for at, _ in y_ticks)
    drawing = [f'<path class="grid" d="{grid}"/>']
    legend = []
    for number, (name, points) in enumerate(shown.items()):
        colour = f' style="--c: var(--c{number % SERIES_COLOURS})"'
        legend.append(f"<span{colour}>{html.escape(name)}</span>")
        if band.get(name):
            drawing.append(f'<path class="band"{colour} d="{_outline(band[name], across, up)}"/>')
        line = _line(points, across, up)
        kind = "faint" if name == faint else "line"
        drawing.append(f'<path class="{kind}"{colour} d="{line}"/>')
        if len(points) <= MOST_DOTS:
            drawing.append(f'<path class="dots"{colour} d="{_dots(points, across, up)}"/>')
    notes = []
    for at, text in marks.items():
        place = across.place(at)
        drawing.append(f'<path class="mark" d="M{place:g} 0V{SIDE}"/>')
        side = " left" if place > SIDE / 2 else ""
        notes.append(f'<span class="note axis{side}" style="left: {place / 10:g}%">{html.escape(text)}</span>')
    labels = [f'<span class="tick-y axis" style="bottom: {at / 10:g}%">{text}</span>' for at, text in y_ticks]
    labels += [f'<span class="tick-x axis" style="left: {at / 10:g}%">{text}</span>' for at, text in x_ticks]
    room = max((len(text) for _, text in y_ticks), default=1) * 0.5 + 0.8
    svg = f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" aria-hidden="true">{"".join(drawing)}</svg>'
    plot = f'<div class="plot" style="--ticks: {room:g}rem">{svg}{"".join(labels + notes)}</div>'
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
    """Return a `<figure>` of horizontal stacked bars.

    Args:
        title: above the chart.
        bars: name of the bar → part → length, not negative; parts have one colour in all bars.
        unit: of the lengths.
        expected: name of the bar → length that is marked by a line.
        expected_name: of that line, in the legend.
    """
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


@dataclass(frozen=True)
class _Axis:
    """An axis from `low` to `high`; of a logarithmic one these are exponents of 10."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def around(cls, values: Sequence[float], *, log: bool = False, margin: float) -> _Axis:
        """The axis that holds all values, and some room where they are one."""
        ends = [math.log10(value) if log else value for value in (min(values, default=1), max(values, default=1))]
        room = (ends[1] - ends[0]) * margin or (0.0 if ends[1] > ends[0] else 0.5 if log else abs(ends[0]) / 2 or 0.5)
        return cls(ends[0] - room, ends[1] + room, log)

    def place(self, value: float) -> float:
        """Where the value stands, from 0 to `SIDE`."""
        at = math.log10(value) if self.log else value
        return round((at - self.low) / (self.high - self.low) * SIDE, 1)

    def ticks(self, about: int) -> list[tuple[float, str]]:
        """(place, label) of round numbers, about so many."""
        values = self._powers(about) if self.log else []
        labels = [f"{value:,.0f}" if 1 <= value < 1e7 else _short(value) for value in values]
        if len(values) < 2:
            low, high = (10**self.low, 10**self.high) if self.log else (self.low, self.high)
            step = _round_step((high - low) / about)
            first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
            values = [step * i for i in range(first, last + 1) if step * i > 0 or not self.log]
            labels = _labels(values)
        return [(self.place(value), label) for value, label in zip(values, labels, strict=True)]

    def _powers(self, about: int) -> list[float]:
        exponents = range(math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9) + 1)
        return [10.0**e for e in exponents if e % math.ceil(len(exponents) / about) == 0]


def _round_step(rough: float) -> float:
    """1, 2 or 5 times a power of 10, not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))


def _labels(values: Sequence[float]) -> list[str]:
    """Tick values with as many decimals as they need: 1,000 and 0.05, but 1e-5."""
    largest = max(map(abs, values), default=0.0)
    if largest and not 1e-3 <= largest < 1e7:
        return [_short(value) for value in values]
    for decimals in range(9):
        texts = [f"{value:,.{decimals}f}" for value in values]
        if all(math.isclose(float(t.replace(",", "")), v, rel_tol=1e-6) for t, v in zip(texts, values, strict=True)):
            return texts
    return [_short(value) for value in values]


def _short(value: float) -> str:
    return f"{value:.3g}".replace("e-0", "e-").replace("e+", "e")


def _line(points: Points, across: _Axis, up: _Axis) -> str:
    """The path through the points; one that cannot be drawn is a gap."""
    path, pen = [], "M"
    for at, value in points:
        if not _drawable(value, up.log):
            pen = "M"
            continue
        path.append(f"{pen}{across.place(at):g} {SIDE - up.place(value):g}")
        pen = "L"
    return "".join(path)


def _dots(points: Points, across: _Axis, up: _Axis) -> str:
    found = [(across.place(at), SIDE - up.place(value)) for at, value in points if _drawable(value, up.log)]
    return "".join(f"M{at:g} {height:g}h0" for at, height in found)


def _outline(band: Band, across: _Axis, up: _Axis) -> str:
    few = band[:: math.ceil(len(band) / MOST_POINTS)]
    few = [edge for edge in few if _drawable(edge[1], up.log) and _drawable(edge[2], up.log)]
    there = [(at, high) for at, _, high in few]
    back = [(at, low) for at, low, _ in reversed(few)]
    return _line(there + back, across, up) + "Z" if few else ""


def _drawable(value: float, log_y: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log_y)


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """Keep at most about `most` points: the lowest and the highest of each stretch, in their order."""
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
