"""Line charts as SVG."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

__all__ = ["Band", "Points", "line_chart", "thinned"]

Points: TypeAlias = Sequence[tuple[float, float]]
Band: TypeAlias = Sequence[tuple[float, float, float]]

MOST_POINTS = 1200  # per series: more than a screen has columns for
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
SETTINGS = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "coat",  # the same chart gives the same file
    "text.parse_math": False,  # a name with dollar signs is a name
    "text.usetex": False,
    "axes.formatter.useoffset": False,
}


def line_chart(
    title: str, series: Mapping[str, Points], *, x: str, y: str, log_y: bool, band: Mapping[str, Band]
) -> bytes:
    """Draw a chart; the arguments are those of `Page.curves`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        _draw(axes, series, band, log_y)
        axes.set_title(title)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        svg = io.BytesIO()
        figure.savefig(svg, format="svg", metadata=NO_METADATA)
    return svg.getvalue()


def _draw(axes: Any, series: Mapping[str, Points], band: Mapping[str, Band], log_y: bool) -> None:
    if log_y:
        axes.set_yscale("log", nonpositive="mask")
    lines = {}
    for name, points in series.items():
        shown = [(at, _drawable(value, log_y)) for at, value in thinned(points)]
        if not any(map(math.isfinite, (value for _, value in shown))):
            continue
        marker = "o" if len(shown) <= 30 else None
        lines[name] = axes.plot(*zip(*shown, strict=True), linewidth=1.3, marker=marker, markersize=3)[0]
        if band.get(name):
            at, low, high = zip(*_few(band[name]), strict=True)
            axes.fill_between(at, low, high, color=lines[name].get_color(), alpha=0.18, linewidth=0)
    if len(lines) > 1 or band:
        names = [name.lstrip("_") or name for name in lines]  # matplotlib leaves out names that begin with one
        axes.legend(list(lines.values()), names, fontsize="small", frameon=False)


def _drawable(value: float, log_y: bool) -> float:
    return value if math.isfinite(value) and (value > 0 or not log_y) else math.nan


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """Keep at most about `most` points: the lowest and the highest of each stretch, in their order."""
    if len(points) <= most:
        return points
    stretch = math.ceil(2 * len(points) / most)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), stretch):
        part = range(start, min(start + stretch, len(points)))
        finite = [i for i in part if math.isfinite(points[i][1])]
        kept += [points[i] for i in sorted({*_ends(finite, points)})] if finite else [points[start]]
    return kept


def _ends(places: Sequence[int], points: Points) -> Iterable[int]:
    return min(places, key=lambda i: points[i][1]), max(places, key=lambda i: points[i][1])


def _few(band: Band) -> Band:
    return band[:: math.ceil(len(band) / MOST_POINTS)]
