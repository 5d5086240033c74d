"""FP8 precision on a page: worst layers, what to write into `activation.exclude`, heat map, curves.

A layer stands out when its SQNR is well below the median of its kind: gradients in e5m2 are 6 dB below inputs in e4m3
by format, which is no defect. Where a whole kind is bad, no layer stands out and the kind is named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml

from ..base.files import write_file
from ..watch.casts import GRADIENT, INPUT, CastPrecision
from ..watch.precision import FILE, KINDS, read_rows
from .charts import heat_map_png
from .html import Page
from .run import RunFolder

__all__ = ["Summary", "as_grid", "exclude_yaml", "show_layers", "show_precision", "standing_out", "summaries", "worst"]

PICTURE = "precision.png"
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
KIND_REMEDIES = {
    "weight": "coat.weight.granularity: per_row",
    "input": "coat.activation.linear_granularity: per_row",
    "gradient": "coat.activation.linear_granularity: per_row, or grad_format: bf16",
    "saved": "coat.activation.nonlinear_granularity: per_group with a smaller group_size",
    "exp_avg": "coat.optimizer.use_dynamic_range_expansion: true, or a smaller block_size",
    "exp_avg_sq": "coat.optimizer.use_dynamic_range_expansion: true, or a smaller block_size",
}


class Summary(NamedTuple):
    """A kind of tensor in a layer over the run; `below_median_db` is measured from all layers of its kind."""

    layer: str
    kind: str
    sqnr_db: float
    lowest_db: float
    underflow: float
    saturation: float
    range_used: float
    below_median_db: float


def summaries(rows: Iterable[CastPrecision]) -> list[Summary]:
    """Summarize the steps of each (layer, kind), in order of appearance; all-zero ones are left out."""
    groups: dict[tuple[str, str], list[CastPrecision]] = {}
    for row in rows:
        if not math.isnan(row.sqnr_db):
            groups.setdefault((row.layer, row.kind), []).append(row)
    typical = {key: median(row.sqnr_db for row in group) for key, group in groups.items()}
    middles = {kind: _median(value for (_, other), value in typical.items() if other == kind) for kind in KINDS}
    summed = []
    for (layer, kind), group in groups.items():
        value, middle = typical[layer, kind], middles[kind]
        lowest = min(row.sqnr_db for row in group)
        shares = max(row.underflow for row in group), max(row.saturation for row in group)
        below = 0.0 if middle == value else middle - value  # both may be inf
        summed.append(Summary(layer, kind, value, lowest, *shares, _median(row.range_used for row in group), below))
    return summed


def _median(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return median(known) if known else math.nan


def worst(found: Sequence[Summary], count: int = 10) -> list[Summary]:
    """The layers furthest below the median of a kind, each with its worst kind."""
    first: dict[str, Summary] = {}
    for summary in sorted((s for s in found if s.layer), key=lambda s: -s.below_median_db):
        first.setdefault(summary.layer, summary)
    return list(first.values())[:count]


def standing_out(found: Sequence[Summary]) -> list[str]:
    """Layers `activation.exclude` would help: an input or gradient far below its kind, or an input below 20 dB."""
    layers = []
    for s in found:
        outlier = s.kind in (INPUT, GRADIENT) and s.below_median_db > OUTLIER_DB
        if s.layer and (outlier or (s.kind == INPUT and s.sqnr_db < LOW_DB)):
            layers.append(s.layer)
    return list(dict.fromkeys(layers))


def exclude_yaml(layers: Sequence[str], known: Iterable[str], already: Sequence[str] = ()) -> str:
    """YAML that leaves layers out of FP8; a pattern may stand for several layers, but for no other `known` one."""
    known, patterns = list(known), dict.fromkeys(already)
    for layer in layers:
        family = re.sub(r"\.\d+\.", ".*.", layer, count=1)
        matched = {name for name in known if fnmatchcase(name, family)}
        patterns[family if len(matched) > 1 and matched <= set(layers) else layer] = None
    return yaml.safe_dump({"coat": {"activation": {"exclude": list(patterns)}}}, sort_keys=False, allow_unicode=True)


def as_grid(found: Sequence[Summary]) -> tuple[list[str], list[str], list[list[float | None]]]:
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
    if not found:
        page.missing(NOT_MEASURED)
        return
    _show_kinds(page, found)
    page.table(
        ["layers furthest below the median", "tensors", "SQNR, dB", "below the median, dB"],
        [[row.layer, row.kind, f"{row.sqnr_db:.1f}", f"{row.below_median_db:.1f}"] for row in worst(found)],
    )


def show_precision(page: Page, run: RunFolder, picture_folder: Path) -> None:
    """Add the section, and write the heat map as `precision.png`; OSError and ValueError for damaged files."""
    rows = read_rows(run.path / FILE) if (run.path / FILE).exists() else []
    found = summaries(rows)
    if not found:
        page.missing(NOT_MEASURED)
        return
    page.paragraph(HOW_TO_READ)
    page.heading("By kind of tensor", 3)
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


def _show_kinds(page: Page, found: Sequence[Summary]) -> None:
    table: list[list[Any]] = []
    for kind in KINDS:
        own = [s for s in found if s.kind == kind]
        if own:
            middle, low = median(s.sqnr_db for s in own), min(own, key=lambda s: s.sqnr_db)
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
    page.paragraph(
        f"{len(layers)} layers stand out: an input or gradient more than {OUTLIER_DB:g} dB below the median of its "
        f"kind, or an input below {LOW_DB:g} dB. To multiply them in bf16, paste this into the config's process entry:"
    )
    page.code(exclude_yaml(layers, {s.layer for s in found if s.layer}, activation.get("exclude") or ()))
    page.paragraph("activation.min_sqnr_db does that by itself for inputs, from a threshold in dB.")


def _show_curves(page: Page, rows: Sequence[CastPrecision]) -> None:
    groups: dict[tuple[str, int], list[CastPrecision]] = {}
    for row in rows:
        if row.step and not math.isnan(row.sqnr_db):
            groups.setdefault((row.kind, row.step), []).append(row)
    curves: list[dict[str, list[tuple[float, float]]]] = [{}, {}, {}]
    for kind, step in sorted(groups, key=lambda group: (KINDS.index(group[0]), group[1])):
        group = groups[kind, step]
        values = (median(row.sqnr_db for row in group), min(row.sqnr_db for row in group))
        for curve, value in zip(curves, (*values, 100 * max(row.underflow for row in group)), strict=True):
            curve.setdefault(kind, []).append((step, value))
    page.curves("Local SQNR over the run, median of the layers", curves[0], x="step", y="dB")
    page.curves("Local SQNR over the run, lowest layer", curves[1], x="step", y="dB")
    page.curves("Underflow in the worst layer", curves[2], x="step", y="% of the nonzero elements")


def _db(value: float) -> str:
    return "exact" if value == math.inf else f"{value:.1f} dB"


def _share(value: float) -> str:
    if 0 < value < 1e-4:
        return "<0.01%"
    return f"{value:.2%}" if value else "0"
