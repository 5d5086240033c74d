"""The heat map of a run's precision as a PNG: layers × kinds, local SQNR."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from ..watch.advice import LOW_DB, Summary
from ..watch.records import KINDS

__all__ = ["ENDS_DB", "as_grid", "heat_map_png"]

ROW_INCHES, HEADER_INCHES, MOST_INCHES = 0.16, 1.4, 90.0
LABEL_POINTS = 6
ENDS_DB = (0.0, 2 * LOW_DB)  # of the colours, red to blue: white is where a tenth of the size is noise


def as_grid(found: Sequence[Summary]) -> tuple[list[str], list[str], list[list[float | None]]]:
    """Layers, kinds, and SQNR [layers][kinds], None where there is none; layers in order of appearance."""
    values = {(s.layer, s.kind): s.sqnr_db for s in found}
    layers = list(dict.fromkeys(s.layer for s in found))
    kinds = [kind for kind in KINDS if any(s.kind == kind for s in found)]
    return [layer or "(layer not known)" for layer in layers], kinds, [
        [values.get((layer, kind)) for kind in kinds] for layer in layers
    ]  # fmt: skip


def heat_map_png(found: Sequence[Summary]) -> bytes:
    """Draw it.

    Args:
        found: at least one.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers, kinds, values = as_grid(found)
    with matplotlib.rc_context({"text.parse_math": False, "text.usetex": False}):
        height = min(HEADER_INCHES + ROW_INCHES * len(layers), MOST_INCHES)
        figure = Figure(figsize=(7, height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        shown = [[math.nan if v is None or math.isinf(v) else v for v in row] for row in values]
        _draw(axes, figure, layers, kinds, shown)
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=100, metadata={"Software": None})
    return png.getvalue()


def _draw(axes: Any, figure: Any, layers: list[str], kinds: list[str], values: list[list[float]]) -> None:
    axes.set_facecolor("#dddddd")
    image = axes.imshow(values, cmap="RdBu", aspect="auto", interpolation="nearest", vmin=ENDS_DB[0], vmax=ENDS_DB[1])
    axes.set_xticks(range(len(kinds)), kinds)
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(layers)), layers, fontsize=LABEL_POINTS)
    figure.colorbar(image, label="local SQNR, dB", extend="both", location="bottom", shrink=0.6)
    axes.set_title("Precision by layer and kind of tensor")
