"""FP8 precision on a page: worst layers, what to write into `activation.exclude`, heat map, a curve.

A layer stands out when its SQNR is well below the median of its kind: gradients in e5m2 are 6 dB below inputs
in e4m3 by format, which is no defect.
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
ENDS_DB = (0.0, 2 * LOW_DB)  # of the table, red to green: neither at `LOW_DB`
NOT_MEASURED = "No FP8 cast was measured: coat/precision.csv is missing. Runs with coat.enabled: true write it."
HOW_TO_READ = (
    "Local SQNR: signal to quantization noise of 128 neighbours at a time. Gaussian values have 31.5 dB in e4m3 and "
    "25.5 dB in e5m2; at 20 dB the noise is a tenth of the signal, at 0 dB as large. docs/report.md says more."
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


def below_median(layers: Sequence[CastPrecision]) -> list[tuple[float, CastPrecision]]:
    """Each row of a known layer and how far it is below the median of its kind; the furthest first."""
    medians = {kind: median(row.sqnr_db for row in layers if row.kind == kind) for kind in {row.kind for row in layers}}
    distances = []
    for row in layers:
        middle = medians[row.kind]
        if row.layer:
            distances.append((0.0 if middle == row.sqnr_db else middle - row.sqnr_db, row))  # both may be inf
    return sorted(distances, key=lambda item: -item[0])


def worst(layers: Sequence[CastPrecision], count: int = 10) -> list[tuple[float, CastPrecision]]:
    """The layers furthest below the median of a kind, each with its worst kind."""
    first: dict[str, tuple[float, CastPrecision]] = {}
    for below, row in below_median(layers):
        first.setdefault(row.layer, (below, row))
    return list(first.values())[:count]


def standing_out(layers: Sequence[CastPrecision]) -> list[str]:
    """Layers with an input or gradient far below its kind, or an input below 20 dB."""
    names = []
    for below, row in below_median(layers):
        outlier = row.kind in (INPUT, GRADIENT) and below > OUTLIER_DB
        if outlier or (row.kind == INPUT and row.sqnr_db < LOW_DB):
            names.append(row.layer)
    return list(dict.fromkeys(names))


def as_grid(rows: Sequence[CastPrecision]) -> tuple[list[str], list[str], list[list[float | None]]]:
    """Layers, kinds, and SQNR [layers][kinds] (None if missing), in order of appearance."""
    values = {(row.layer, row.kind): row.sqnr_db for row in rows}
    layers = list(dict.fromkeys(row.layer for row in rows))
    kinds = [kind for kind in KINDS if any(row.kind == kind for row in rows)]
    grid = [[values.get((layer, kind)) for kind in kinds] for layer in layers]
    return [layer or "(layer not known)" for layer in layers], kinds, grid


# -- the page


def show_layers(page: Page, runs: Sequence[Path]) -> None:
    """The worst layers of several runs together, in short."""
    files = [run / FILE for run in runs]
    layers = summaries(row for path in files if path.exists() for row in read_rows(path))
    if layers:
        _show_tables(page, layers)
    else:
        page.missing(NOT_MEASURED)


def show_precision(page: Page, run: RunFolder) -> None:
    """Add the section; OSError and ValueError for damaged files."""
    rows = read_rows(run.path / FILE) if (run.path / FILE).exists() else []
    layers = summaries(rows)
    if not layers:
        page.missing(NOT_MEASURED)
        return
    page.paragraph(HOW_TO_READ)
    _show_tables(page, layers)
    names = standing_out(layers)
    if names:
        page.paragraph(
            f"{len(names)} layers stand out: an input or gradient more than {OUTLIER_DB:g} dB below the median of its "
            f"kind, or an input below {LOW_DB:g} dB. To multiply them in bf16, paste this into the config's process "
            "entry; activation.min_sqnr_db does that by itself for inputs, from a threshold in dB."
        )
        already = (run.block("coat").get("activation") or {}).get("exclude") or []
        exclude = {"coat": {"activation": {"exclude": list(dict.fromkeys([*already, *names]))}}}
        page.code(yaml.safe_dump(exclude, sort_keys=False, allow_unicode=True))
    else:
        page.paragraph(
            f"No layer stands out: none is more than {OUTLIER_DB:g} dB below the median of its kind, and no input "
            f"is below {LOW_DB:g} dB. There is nothing to exclude."
        )
    grid, kinds, values = as_grid(layers)
    page.heading("Local SQNR by layer in dB, median over the measured steps", 3)
    page.table(["layer", *kinds], [[layer, *row] for layer, row in zip(grid, values, strict=True)], ENDS_DB)
    lowest: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.step and row.kind in KINDS and not math.isnan(row.sqnr_db):
            steps = lowest.setdefault(row.kind, {})
            steps[row.step] = min(row.sqnr_db, steps.get(row.step, math.inf))
    curves = {kind: sorted(lowest[kind].items()) for kind in KINDS if kind in lowest}
    page.curves("Local SQNR over the run, lowest layer", curves, x="step", y="dB")
    page.paragraph(f"All numbers: {FILE.as_posix()} in the run.")


def _show_tables(page: Page, layers: Sequence[CastPrecision]) -> None:
    page.heading("By kind of tensor", 3)
    table: list[list[Any]] = []
    for kind in KINDS:
        rows = [row for row in layers if row.kind == kind]
        if rows:
            middle, low = median(row.sqnr_db for row in rows), min(rows, key=lambda row: row.sqnr_db)
            underflow = _share(max(row.underflow for row in rows))
            remedy = REMEDIES[kind] if middle < LOW_DB else ""
            table.append([kind, len(rows), _db(middle), f"{_db(low.sqnr_db)} {low.layer}", underflow, remedy])
    page.table(["kind", "layers", "SQNR, median", "lowest", "underflow, highest", "change"], table)
    page.heading("The ten worst layers", 3)
    table = []
    for below, row in worst(layers):
        table.append([row.layer, row.kind, _db(row.sqnr_db), _db(below), _share(row.underflow), _share(row.saturation)])
    page.table(["layer", "kind", "SQNR", "below the kind's median", "underflow", "saturation"], table)


def _db(value: float) -> str:
    return "exact" if value == math.inf else f"{value:.1f} dB"


def _share(value: float) -> str:
    if 0 < value < 1e-4:
        return "<0.01%"
    return f"{value:.2%}" if value else "0"
