"""The report's section on FP8: worst layers, what to change, heat map, curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from ..base.files import replacing
from ..watch.advice import LOW_DB, OUTLIER_DB, Summary, exclude_yaml, kind_medians, standing_out, summaries, worst
from ..watch.records import FILE, KINDS, Row, read_rows
from .heat_map import ENDS_DB, as_grid, heat_map_png
from .html import Page
from .run import RunFolder

__all__ = ["PICTURE", "show_precision"]

PICTURE = "precision.png"
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
    """Add the section, and write the heat map as a PNG.

    Args:
        page: of the run.
        run: likewise.
        picture_folder: where `precision.png` goes.

    Raises:
        OSError: the rows cannot be read, or the picture cannot be written.
        ValueError: the rows are damaged.
    """
    rows = read_rows(run.path / FILE) if (run.path / FILE).exists() else []
    found = summaries(rows)
    if not found:
        page.missing(NOT_MEASURED)
        return
    page.paragraph(HOW_TO_READ)
    _show_kinds(page, found)
    _show_worst(page, found)
    _show_advice(page, run, found)
    layers, kinds, values = as_grid(found)
    title = "Local SQNR by layer, median over the steps that were looked at"
    page.heat_map(title, layers, kinds, values, unit="dB", ends=ENDS_DB)
    _show_curves(page, rows)
    _write_picture(page, found, picture_folder)


def _show_kinds(page: Page, found: Sequence[Summary]) -> None:
    page.heading("By kind of tensor", 3)
    table = []
    for kind, middle in kind_medians(found).items():
        own = [s for s in found if s.kind == kind]
        low = min(own, key=lambda s: s.sqnr_db)
        remedy = KIND_REMEDIES[kind] if middle < LOW_DB else ""
        table.append(
            [
                kind,
                len(own),
                _db(middle),
                f"{_db(low.sqnr_db)} {low.layer}",
                _share(max(s.underflow for s in own)),
                remedy,
            ]
        )
    page.table(["kind", "layers", "SQNR, median", "lowest", "underflow, highest", "change"], table)


def _show_worst(page: Page, found: Sequence[Summary]) -> None:
    page.heading("The ten worst layers", 3)
    page.table(
        ["layer", "kind", "SQNR", "below the kind's median", "lowest", "underflow", "saturation", "range used"],
        [
            [
                s.layer,
                s.kind,
                _db(s.sqnr_db),
                _db(s.below_median_db),
                _db(s.lowest_db),
                _share(s.underflow),
                _share(s.saturation),
                "" if math.isnan(s.range_used) else f"{s.range_used:.0%}",
            ]
            for s in worst(found)
        ],
    )


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


def _show_curves(page: Page, rows: Sequence[Row]) -> None:
    middle: dict[str, list[tuple[float, float]]] = {}
    lowest: dict[str, list[tuple[float, float]]] = {}
    lost: dict[str, list[tuple[float, float]]] = {}
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        if row.step and not math.isnan(row.sqnr_db):
            groups.setdefault((row.kind, row.step), []).append(row)
    for kind in KINDS:
        for (_, step), found in sorted(item for item in groups.items() if item[0][0] == kind):
            middle.setdefault(kind, []).append((step, median(row.sqnr_db for row in found)))
            lowest.setdefault(kind, []).append((step, min(row.sqnr_db for row in found)))
            lost.setdefault(kind, []).append((step, 100 * max(row.underflow for row in found)))
    page.curves("Local SQNR over the run, median of the layers", middle, x="step", y="dB")
    page.curves("Local SQNR over the run, lowest layer", lowest, x="step", y="dB")
    page.curves("Underflow in the worst layer", lost, x="step", y="% of the nonzero elements")


def _write_picture(page: Page, found: Sequence[Summary], folder: Path) -> None:
    try:
        content = heat_map_png(found)
    except ImportError as error:
        page.missing(f"{PICTURE}: not drawn ({error}); pip install matplotlib")
        return
    with replacing(folder / PICTURE) as temp:
        temp.write_bytes(content)
    page.paragraph(f"The heat map as a picture: {PICTURE} beside this page; all numbers: {FILE.as_posix()} in the run.")


def _db(value: float) -> str:
    return "exact" if value == math.inf else f"{value:.1f} dB"


def _share(value: float) -> str:
    return "0" if not value else "<0.01%" if value < 1e-4 else f"{value:.2%}"
