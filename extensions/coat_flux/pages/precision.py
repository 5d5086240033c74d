"""FP8 precision on a page: worst layers, what to write into `activation.exclude`, heat map, curves.

A layer stands out when its SQNR is well below the median of its kind: gradients in e5m2 are 6 dB below inputs in e4m3
by format, which is no defect. Where a whole kind is bad, no layer stands out and the kind is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from ..watch.casts import GRADIENT, INPUT, CastPrecision
from ..watch.precision import FILE, KINDS, REMEDIES, read_rows
from .html import Page
from .run import RunFolder

__all__ = ["as_grid", "show_layers", "show_precision", "standing_out", "summaries", "worst"]

OUTLIER_DB = 6.0  # below the median of its kind: a bit of the mantissa
LOW_DB = 20.0  # noise of a tenth of the signal
ENDS_DB = (0.0, 2 * LOW_DB)  # of the heat map, red to blue: white at `LOW_DB`
NOT_MEASURED = (
    "No FP8 cast was measured: coat/precision.csv is missing. Runs with coat.enabled: true write it at their second "
    "step and every 100 steps."
)
HOW_TO_READ = (
    "Local SQNR: signal to quantization noise of 128 neighbours at a time, in dB, averaged as noise power. Gaussian "
    "values have 31.5 dB in e4m3 and 25.5 dB in e5m2; 20 dB is a tenth of the size, at 0 dB everything is lost. "
    "docs/report.md says more."
)


def summaries(rows: Iterable[CastPrecision]) -> list[CastPrecision]:
    """One row for each layer and kind: the median SQNR of its steps, the worst shares; without what was always zero."""
    groups: dict[tuple[str, str], list[CastPrecision]] = {}
    for row in rows:
        if not math.isnan(row.sqnr_db):
            groups.setdefault((row.layer, row.kind), []).append(row)
    summed = []
    for group in groups.values():
        typical = median(row.sqnr_db for row in group)
        shares = {name: max(getattr(row, name) for row in group) for name in ("underflow", "saturation")}
        summed.append(group[0]._replace(sqnr_db=typical, **shares))
    return summed


def below_median(found: Sequence[CastPrecision]) -> list[tuple[float, CastPrecision]]:
    """Each row of a known layer after its distance to the median of its kind, in dB; the furthest below first."""
    middles = {kind: median(row.sqnr_db for row in found if row.kind == kind) for kind in {row.kind for row in found}}
    distances = []
    for row in found:
        middle = middles[row.kind]
        if row.layer:
            distances.append((0.0 if middle == row.sqnr_db else middle - row.sqnr_db, row))  # both may be inf
    return sorted(distances, key=lambda item: -item[0])


def worst(found: Sequence[CastPrecision], count: int = 10) -> list[tuple[float, CastPrecision]]:
    """The layers furthest below the median of a kind, each with its worst kind."""
    first: dict[str, tuple[float, CastPrecision]] = {}
    for below, row in below_median(found):
        first.setdefault(row.layer, (below, row))
    return list(first.values())[:count]


def standing_out(found: Sequence[CastPrecision]) -> list[str]:
    """Layers `activation.exclude` would help: an input or gradient far below its kind, or an input below 20 dB."""
    layers = []
    for below, row in below_median(found):
        outlier = row.kind in (INPUT, GRADIENT) and below > OUTLIER_DB
        if outlier or (row.kind == INPUT and row.sqnr_db < LOW_DB):
            layers.append(row.layer)
    return list(dict.fromkeys(layers))


def as_grid(found: Sequence[CastPrecision]) -> tuple[list[str], list[str], list[list[float | None]]]:
    """Layers, kinds, and SQNR [layers][kinds] (None if missing), in order of appearance."""
    values = {(s.layer, s.kind): s.sqnr_db for s in found}
    layers = list(dict.fromkeys(s.layer for s in found))
    kinds = [kind for kind in KINDS if any(s.kind == kind for s in found)]
    grid = [[values.get((layer, kind)) for kind in kinds] for layer in layers]
    return [layer or "(layer not known)" for layer in layers], kinds, grid


# -- the page ----------------------------------------------------------------------------------------------------------


def show_layers(page: Page, runs: Sequence[Path]) -> None:
    """The worst layers of several runs together, in short."""
    files = [run / FILE for run in runs]
    found = summaries(row for path in files if path.exists() for row in read_rows(path))
    if found:
        _show_kinds(page, found)
        _show_worst(page, found)
    else:
        page.missing(NOT_MEASURED)


def show_precision(page: Page, run: RunFolder) -> None:
    """Add the section; OSError and ValueError for damaged files."""
    rows = read_rows(run.path / FILE) if (run.path / FILE).exists() else []
    found = summaries(rows)
    if not found:
        page.missing(NOT_MEASURED)
        return
    page.paragraph(HOW_TO_READ)
    page.heading("By kind of tensor", 3)
    _show_kinds(page, found)
    page.heading("The ten worst layers", 3)
    _show_worst(page, found)
    _show_advice(page, run, standing_out(found))
    page.heat_map("Local SQNR by layer, median over the measured steps", *as_grid(found), unit="dB", ends=ENDS_DB)
    _show_curves(page, rows)
    page.paragraph(f"All numbers: {FILE.as_posix()} in the run.")


def _show_worst(page: Page, found: Sequence[CastPrecision]) -> None:
    table = []
    for below, row in worst(found):
        sizes = _db(row.sqnr_db), _db(below), _share(row.underflow), _share(row.saturation)
        table.append([row.layer, row.kind, *sizes])
    page.table(["layer", "kind", "SQNR", "below the kind's median", "underflow", "saturation"], table)


def _show_curves(page: Page, rows: Sequence[CastPrecision]) -> None:
    groups: dict[tuple[str, int], list[CastPrecision]] = {}
    for row in rows:
        if row.step and row.kind in KINDS and not math.isnan(row.sqnr_db):
            groups.setdefault((row.kind, row.step), []).append(row)
    kinds = [kind for kind in KINDS if any(kind == other for other, _ in groups)]
    middle, lowest, lost = ({kind: [] for kind in kinds} for _ in range(3))
    for (kind, step), group in sorted(groups.items()):
        middle[kind].append((step, median(row.sqnr_db for row in group)))
        lowest[kind].append((step, min(row.sqnr_db for row in group)))
        lost[kind].append((step, 100 * max(row.underflow for row in group)))
    page.curves("Local SQNR over the run, median of the layers", middle, x="step", y="dB")
    page.curves("Local SQNR over the run, lowest layer", lowest, x="step", y="dB")
    page.curves("Underflow in the worst layer", lost, x="step", y="% of the nonzero elements")


def _show_kinds(page: Page, found: Sequence[CastPrecision]) -> None:
    table: list[list[Any]] = []
    for kind in KINDS:
        own = [s for s in found if s.kind == kind]
        if own:
            middle, low = median(s.sqnr_db for s in own), min(own, key=lambda s: s.sqnr_db)
            underflow = _share(max(s.underflow for s in own))
            remedy = REMEDIES[kind] if middle < LOW_DB else ""
            table.append([kind, len(own), _db(middle), f"{_db(low.sqnr_db)} {low.layer}", underflow, remedy])
    page.table(["kind", "layers", "SQNR, median", "lowest", "underflow, highest", "change"], table)


def _show_advice(page: Page, run: RunFolder, layers: Sequence[str]) -> None:
    if not layers:
        page.paragraph(
            f"No layer stands out: none is more than {OUTLIER_DB:g} dB below the median of its kind, and no input "
            f"is below {LOW_DB:g} dB. There is nothing to exclude."
        )
        return
    page.paragraph(
        f"{len(layers)} layers stand out: an input or gradient more than {OUTLIER_DB:g} dB below the median of its "
        f"kind, or an input below {LOW_DB:g} dB. To multiply them in bf16, paste this into the config's process entry:"
    )
    already = (run.block("coat").get("activation") or {}).get("exclude") or []
    exclude = list(dict.fromkeys([*already, *layers]))
    page.code(yaml.safe_dump({"coat": {"activation": {"exclude": exclude}}}, sort_keys=False, allow_unicode=True))
    page.paragraph("activation.min_sqnr_db does that by itself for inputs, from a threshold in dB.")


def _db(value: float) -> str:
    return "exact" if value == math.inf else f"{value:.1f} dB"


def _share(value: float) -> str:
    if 0 < value < 1e-4:
        return "<0.01%"
    return f"{value:.2%}" if value else "0"
