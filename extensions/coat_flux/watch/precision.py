"""Losses of casts by layer: the rows of `coat/precision.csv`, and the layers `activation.min_sqnr_db` leaves out."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..blocks.cast_loss import WEIGHT_PRECISION, Measures
from ..blocks.runner import BlockRunner
from .casts import EXP_AVG, EXP_AVG_SQ, GRADIENT, INPUT, SAVED, CastPrecision, ObservedCast, rows_of

if TYPE_CHECKING:
    from ..blocks.report import CoatReport

__all__ = ["COLUMNS", "FILE", "KINDS", "PrecisionWatch", "as_cells", "read_rows", "weight_rows"]

FILE = Path("coat") / "precision.csv"
WEIGHT = "weight"
KINDS = (WEIGHT, INPUT, GRADIENT, SAVED, EXP_AVG, EXP_AVG_SQ)
KEY = "coat.activation.min_sqnr_db"
EXACT_DB = 999.0
COLUMNS = CastPrecision._fields


def weight_rows(model: nn.Module) -> list[CastPrecision]:
    """Rows of all measured weights of a model."""
    casts = []
    for name, module in model.named_modules():
        text = vars(module).get(WEIGHT_PRECISION)
        if text is not None:
            elements = module.in_features * module.out_features
            measures = Measures(*map(float, text.split()))
            casts.append(ObservedCast(WEIGHT, measures, elements, block=name.removesuffix(".base_layer")))
    return rows_of(0, casts)


def as_cells(row: CastPrecision) -> list[str]:
    """The row's cells in the file; nan is empty."""
    shown = [f"{row.sqnr_db:.3f}", f"{row.underflow:.6g}", f"{row.saturation:.6g}", f"{row.range_used:.4f}"]
    return [str(row.step), row.layer, row.kind, *("" if cell == "nan" else cell for cell in shown), str(row.elements)]


def read_rows(path: Path) -> list[CastPrecision]:
    """Read `precision.csv`; OSError if unreadable, ValueError (with file and line) if malformed."""
    rows = []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        try:
            for cells in reader:
                losses = [float(cells[name]) if cells[name] else math.nan for name in COLUMNS[3:7]]
                names = (int(cells["step"]), cells["layer"], cells["kind"])
                rows.append(CastPrecision(*names, *losses, int(cells["elements"])))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: line {reader.line_num} is not a row of precision.csv ({error!r})") from error
    return rows


class PrecisionWatch:
    """Writes the precision rows of a run, and leaves layers below `activation.min_sqnr_db` in bf16.

    The choice is made once, from forward inputs in the first observed step (the second of a run), by the mean over its
    batches and processes; a resumed run reuses it. Gradients do not count: tokens far from the loss have small ones,
    which a scale for all of them loses without harm; `activation.grad_format` is for them.
    """

    def __init__(
        self,
        model: nn.Module,
        minimum: float | None,
        report: CoatReport | None,
        log: Callable[[str], None],
        write: Callable[[Sequence[CastPrecision]], None],
        *,
        mean: Callable[[Tensor], Tensor] = lambda value: value,
    ) -> None:
        self._model, self._minimum, self._report = model, minimum, report
        self._log, self._write, self._mean = log, write, mean
        self._left_out: list[str] | None = None

    @property
    def pending(self) -> bool:
        """Whether a step must be observed because the layers are not chosen yet."""
        return self._minimum is not None and self._left_out is None

    def begin(self) -> None:
        """Write the rows of the weights, once the run's files are open."""
        self._write(weight_rows(self._model))

    def record(self, rows: Sequence[CastPrecision]) -> None:
        """Record the rows of a finished step."""
        self._write(rows)
        if self.pending:
            self._choose(rows)

    def _choose(self, rows: Sequence[CastPrecision]) -> None:
        measured = {row.layer: row.sqnr_db for row in rows if row.kind == INPUT and row.layer}
        names = sorted(measured)
        if not names:
            self._left_out = []
            self._log(f"{KEY}={self._minimum:g}: no layer multiplies in FP8 here, none is left out")
            return
        # means need finite values: exact casts count as very good
        local = torch.tensor([measured[name] for name in names]).nan_to_num(nan=EXACT_DB, posinf=EXACT_DB)
        values = self._mean(local).tolist()
        below = {name: value for name, value in zip(names, values, strict=True) if value < self._minimum}
        self._left_out = list(below)
        if not below:
            low = min(values)
            self._log(f"{KEY}={self._minimum:g}: the lowest of {len(names)} layers has {low:.1f} dB, none is left out")
            return
        self._apply()
        listed = ", ".join(f"{name} ({value:.1f} dB)" for name, value in below.items())
        count = f"{len(below)} of {len(names)} layers"
        self._log(f"{KEY}={self._minimum:g}: {count} multiply in bf16 from here on: {listed}")

    def _apply(self) -> None:
        modules = dict(self._model.named_modules())
        linears = [modules.get(f"{name}.base_layer", modules.get(name)) for name in self._left_out]
        BlockRunner.of(self._model).multiply_in_bf16(linears)
        if self._report is not None:
            reason = f"input below activation.min_sqnr_db: {self._minimum:g}"
            self._report.why.update(dict.fromkeys(self._left_out, reason))

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON; empty without the option."""
        return {} if self._minimum is None else {"minimum": self._minimum, "left_out": self._left_out}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Leave out the layers a saved run left out; with another threshold they are chosen again."""
        left_out = state.get("left_out")
        if self._minimum is None or left_out is None or self._left_out is not None:
            return
        if state["minimum"] != self._minimum:
            self._log(f"{KEY}: {state['minimum']:g} -> {self._minimum:g}, layers are chosen again")
            return
        known = {name.removesuffix(".base_layer") for name, _ in self._model.named_modules()}
        self._left_out = [name for name in left_out if name in known]
        if self._left_out:
            self._apply()
            self._log(f"{KEY}: {len(self._left_out)} layers multiply in bf16 as before: {', '.join(self._left_out)}")
