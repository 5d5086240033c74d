"""The report's section on FP8: worst layers, what to change, heat map, curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ..base.files import write_file
from ..watch.advice import LOW_DB, OUTLIER_DB, Summary, exclude_yaml, kind_medians, standing_out, summaries, worst
from ..watch.precision import FILE, KINDS, CastPrecision, read_rows
from .charts import heat_map_png
from .html import Page
from .run import RunFolder

__all__ = ["PICTURE", "as_grid", "show_layers", "show_precision"]

PICTURE = "precision.png"
ENDS_DB = (0.0, 2 * LOW_DB)  # of the heat map's colours, red to blue: white is where a tenth of the size is noise
NOT_MEASURED = (
    "No FP8 cast was measured: coat/precision.csv is missing. Runs with coat.enabled: true write it at their second "
    "step and every coat.guard.health_every steps."
)
HOW_TO_READ = (
    "Local SQNR: signal to quantization noise of 128 neighbours at a time, in dB, averaged as noise power. Gaussian "
    "values have 31.5 dB in e4m3 and 25.5 dB in e5m2; 20 dB is a tenth of the size, at 0 dB everything is lost. "
    "docs/report.md says more."
)
KIND_REMEDIES = {
    "weight": "coat.weight.granularity: per_row",
    "input": "coat.activation.linear_granularity: per_row",
    "gradient": "coat.activation.linear_granularity: per_row, or grad_format: bf16",
    "saved": "coat.activation.nonlinear_granularity: per_group with a smaller group_size",
    "exp_avg": "coat.optimizer.use_dynamic_range_expansion: true, or a smaller block_size",
    "exp_avg_sq": "coat.optimizer.use_dynamic_range_expansion: true, or a smaller block_size",
}


def show_precision(page: Page, run: RunFolder, picture_folder: Path) -> None:
    """Add the section, and write the heat map as `precision.png`; OSError and ValueError where a file is damaged."""
    rows = read_rows(run.path / FILE) if (run.path / FILE).exists() else []
    found = summaries(rows)
    if not found:
        page.missing(NOT_MEASURED)
        return
    page.paragraph(HOW_TO_READ)
    _show_kinds(page, found)
    page.heading("The ten worst layers", 3)
    header = ["layer", "kind", "SQNR", "below the kind's median", "lowest", "underflow", "saturation", "range used"]
    table = []
    for s in worst(found):
        used = "" if math.isnan(s.range_used) else f"{s.range_used:.0%}"
        sizes = map(_db, (s.sqnr_db, s.below_median_db, s.lowest_db))
        table.append([s.layer, s.kind, *sizes, _share(s.underflow), _share(s.saturation), used])
    page.table(header, table)
    _show_advice(page, run, found)
    grid = as_grid(found)
    page.heat_map("Local SQNR by layer, median over the measured steps", *grid, unit="dB", ends=ENDS_DB)
    _show_curves(page, rows)
    title = "Precision by layer and kind of tensor"
    try:
        picture = heat_map_png(title, *grid, unit="local SQNR, dB", ends=ENDS_DB)
    except ImportError as error:
        page.missing(f"{PICTURE}: not drawn ({error}); pip install matplotlib")
        return
    write_file(picture_folder / PICTURE, picture)
    page.paragraph(
        f"The heat map as a picture: {PICTURE} next to this page; all numbers: {FILE.as_posix()} in the run."
    )


def show_layers(page: Page, runs: Sequence[Path]) -> None:
    """The kinds of tensors and the worst layers of several run folders together, in short."""
    files = [run / FILE for run in runs]
    found = summaries(row for path in files if path.exists() for row in read_rows(path))
    if not found:
        page.missing(NOT_MEASURED)
        return
    page.table(["tensors", "median SQNR, dB"], [[kind, f"{value:.1f}"] for kind, value in kind_medians(found).items()])
    page.table(
        ["layers furthest below the median", "tensors", "SQNR, dB", "below the median, dB"],
        [[row.layer, row.kind, f"{row.sqnr_db:.1f}", f"{row.below_median_db:.1f}"] for row in worst(found)],
    )


def as_grid(found: Sequence[Summary]) -> tuple[list[str], list[str], list[list[float | None]]]:
    """Layers, kinds, and SQNR [layers][kinds], None where there is none; layers in order of appearance."""
    values = {(s.layer, s.kind): s.sqnr_db for s in found}
    layers = list(dict.fromkeys(s.layer for s in found))
    kinds = [kind for kind in KINDS if any(s.kind == kind for s in found)]
    grid = [[values.get((layer, kind)) for kind in kinds] for layer in layers]
    return [layer or "(layer not known)" for layer in layers], kinds, grid


def _show_kinds(page: Page, found: Sequence[Summary]) -> None:
    page.heading("By kind of tensor", 3)
    table: list[list[Any]] = []
    for kind, middle in kind_medians(found).items():
        own = [s for s in found if s.kind == kind]
        low = min(own, key=lambda s: s.sqnr_db)
        underflow = _share(max(s.underflow for s in own))
        remedy = KIND_REMEDIES[kind] if middle < LOW_DB else ""
        table.append([kind, len(own), _db(middle), f"{_db(low.sqnr_db)} {low.layer}", underflow, remedy])
    page.table(["kind", "layers", "SQNR, median", "lowest", "underflow, highest", "change"], table)


def _show_advice(page: Page, run: RunFolder, found: Sequence[Summary]) -> None:
    layers = standing_out(found)
    if not layers:
        page.paragraph(
            f"No layer stands out: none is more than {OUTLIER_DB:g} dB below the median of its kind, and no input "
            f"is below {LOW_DB:g} dB. There is nothing to exclude."
        )
        return
    activation = run.block("coat").get("activation") or {}
    known = {s.layer for s in found if s.layer}
    page.paragraph(
        f"{len(layers)} layers stand out: an input or gradient more than {OUTLIER_DB:g} dB below the median of its "
        f"kind, or an input below {LOW_DB:g} dB. To multiply them in bf16, paste this into the config's process entry:"
    )
    page.code(exclude_yaml(layers, known, activation.get("exclude") or ()))
    page.paragraph("activation.min_sqnr_db does that by itself for inputs, from a threshold in dB.")


def _show_curves(page: Page, rows: Sequence[CastPrecision]) -> None:
    groups: dict[tuple[str, int], list[CastPrecision]] = {}
    for row in rows:
        if row.step and not math.isnan(row.sqnr_db):
            groups.setdefault((row.kind, row.step), []).append(row)
    curves: list[dict[str, list[tuple[float, float]]]] = [{}, {}, {}]
    for kind, step in sorted(groups, key=lambda group: (KINDS.index(group[0]), group[1])):
        found = groups[kind, step]
        values = (median(row.sqnr_db for row in found), min(row.sqnr_db for row in found))
        for curve, value in zip(curves, (*values, 100 * max(row.underflow for row in found)), strict=True):
            curve.setdefault(kind, []).append((step, value))
    page.curves("Local SQNR over the run, median of the layers", curves[0], x="step", y="dB")
    page.curves("Local SQNR over the run, lowest layer", curves[1], x="step", y="dB")
    page.curves("Underflow in the worst layer", curves[2], x="step", y="% of the nonzero elements")


def _db(value: float) -> str:
    return "exact" if value == math.inf else f"{value:.1f} dB"


def _share(value: float) -> str:
    return "0" if not value else "<0.01%" if value < 1e-4 else f"{value:.2%}"
