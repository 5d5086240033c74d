"""Rows of `coat/precision.csv`, one per (step, layer, kind).

Weights have step 0. Casts whose layer is not known have that of the block they belong to, or none.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from ..blocks.cast_loss import Measures, decibels

__all__ = ["COLUMNS", "FILE", "KINDS", "Row", "as_cells", "merged", "read_rows"]

FILE = Path("coat") / "precision.csv"
WEIGHT, INPUT, GRADIENT, SAVED, EXP_AVG, EXP_AVG_SQ = KINDS = (
    "weight", "input", "gradient", "saved", "exp_avg", "exp_avg_sq",
)  # fmt: skip
COLUMNS = ("step", "layer", "kind", "sqnr_db", "underflow", "saturation", "range_used", "elements")


class Row(NamedTuple):
    """What the casts of one kind in one layer lost in one step.

    Attributes:
        step: the number of the step, from 1; 0 for weights.
        layer: full name of the linear, as `activation.exclude` matches it; of its block for what is saved.
        kind: one of `KINDS`.
        sqnr_db: local SQNR (`measure`); inf where the cast was exact, nan where all values were zero.
        underflow: share of nonzero elements that became zero.
        saturation: share of elements beyond the largest code.
        range_used: share of the format's octaves asked for; nan where that says nothing.
        elements: in all casts together.
    """

    step: int
    layer: str
    kind: str
    sqnr_db: float
    underflow: float
    saturation: float
    range_used: float
    elements: int


def merged(step: int, casts: Iterable[tuple[str, str, int, Measures]]) -> list[Row]:
    """Put casts (layer, kind, elements, measures) of one step together, means weighted by elements."""
    groups: dict[tuple[str, str], list[tuple[int, Measures]]] = {}
    for layer, kind, elements, measures in casts:
        groups.setdefault((layer, kind), []).append((elements, measures))
    return [
        Row(
            step,
            layer,
            kind,
            decibels(_mean(found, "noise")),
            _mean(found, "underflow"),
            _mean(found, "saturation"),
            _mean(found, "range_used"),
            sum(elements for elements, _ in found),
        )
        for (layer, kind), found in groups.items()
    ]


def _mean(found: list[tuple[int, Measures]], name: str) -> float:
    known = [(weight, getattr(measures, name)) for weight, measures in found if not math.isnan(getattr(measures, name))]
    total = sum(weight for weight, _ in known)
    return sum(weight * value for weight, value in known) / total if total else math.nan


def as_cells(row: Row) -> list[str]:
    """The cells of a row in the file; nan is empty."""
    shown = [f"{row.sqnr_db:.3f}", f"{row.underflow:.6g}", f"{row.saturation:.6g}", f"{row.range_used:.4f}"]
    return [str(row.step), row.layer, row.kind, *("" if cell == "nan" else cell for cell in shown), str(row.elements)]


def read_rows(path: Path) -> list[Row]:
    """Read the file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not such a file; names it and the line.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        try:
            return [_row(cells) for cells in reader]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: line {reader.line_num} is not a row of precision.csv ({error!r})") from error


def _row(cells: Mapping[str, str]) -> Row:
    numbers = [float(cells[name]) if cells[name] else math.nan for name in COLUMNS[3:7]]
    return Row(int(cells["step"]), cells["layer"], cells["kind"], *numbers, int(cells["elements"]))
