"""Losses of casts by layer: `coat/precision.csv`, its line in the log, and the guard's verdict."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from statistics import fmean

from torch import nn

from coat_core.casts import GRADIENT, INPUT

from ..blocks.cast_loss import WEIGHT_PRECISION
from ..config.coat import GuardOptions
from .casts import EXP_AVG, EXP_AVG_SQ, SAVED, CastPrecision, row_of

FILE = Path("coat") / "precision.csv"
COLUMNS = CastPrecision._fields
WEIGHT = "weight"
KINDS = {
    WEIGHT: "weights",
    INPUT: "linear inputs",
    GRADIENT: "gradients",
    SAVED: "saved activations",
    EXP_AVG: "exp_avg",
    EXP_AVG_SQ: "exp_avg_sq",
}
EXPANSION = "coat.optimizer.use_dynamic_range_expansion: true, or a smaller coat.optimizer.block_size"
REMEDIES = {
    WEIGHT: "coat.weight.granularity: per_row",
    INPUT: "coat.activation.linear_granularity: per_row, or coat.activation.format: e5m2",
    GRADIENT: "coat.activation.grad_format: e5m2 or bf16, or coat.activation.linear_granularity: per_row",
    SAVED: "coat.activation.nonlinear_granularity: per_group, a smaller group_size, or coat.activation.format: e5m2",
    EXP_AVG: EXPANSION,
    EXP_AVG_SQ: EXPANSION,
}


def weight_rows(model: nn.Module) -> list[CastPrecision]:
    """Rows of all measured weights of a model."""
    rows = []
    for name, module in model.named_modules():
        losses = vars(module).get(WEIGHT_PRECISION)
        if losses is not None:
            cast = list(map(float, losses.split())), module.in_features * module.out_features
            rows.append(row_of(0, name.removesuffix(".base_layer"), WEIGHT, [cast]))
    return rows


def as_cells(row: CastPrecision) -> list[str]:
    """The row's cells in the file; nan is empty."""
    sqnr = "" if math.isnan(row.sqnr_db) else f"{row.sqnr_db:.3f}"
    shares = f"{row.underflow:.6g}", f"{row.saturation:.6g}"
    return [str(row.step), row.layer, row.kind, sqnr, *shares, str(row.elements)]


def read_rows(path: Path) -> list[CastPrecision]:
    """Rows of `precision.csv`, if there is one; OSError if unreadable, ValueError (with file and line) if malformed."""
    rows: list[CastPrecision] = []
    if not path.exists():
        return rows
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        try:
            for cells in reader:
                shares = float(cells["underflow"]), float(cells["saturation"])
                losses = float(cells["sqnr_db"] or math.nan), *shares, int(cells["elements"])
                rows.append(CastPrecision(int(cells["step"]), cells["layer"], cells["kind"], *losses))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: line {reader.line_num} is not a row of precision.csv ({error!r})") from error
    return rows


def health_line(rows: Sequence[CastPrecision]) -> str:
    """One line: per kind the share cast to zero, mean and worst, and any saturation."""
    texts = []
    for kind, name in KINDS.items():
        of_kind = [row for row in rows if row.kind == kind]
        if of_kind:
            lost = max(of_kind, key=attrgetter("underflow"))
            beyond = max(of_kind, key=attrgetter("saturation"))
            text = f"{name} {fmean(row.underflow for row in of_kind):.2%}"
            if lost.underflow:
                text += f" ({lost.underflow:.2%} in {lost.layer})"
            if beyond.saturation:
                text += f", {beyond.saturation:.2%} saturated in {beyond.layer}"
            texts.append(text)
    return f"FP8 casts, mean share cast to zero (worst): {', '.join(texts)}"


def health_verdict(rows: Sequence[CastPrecision], options: GuardOptions) -> str | None:
    """The worst cast and what to change, where a share exceeds its threshold."""
    for share, limit in (("saturation", options.max_saturation), ("underflow", options.max_underflow)):
        worst = max(rows, key=attrgetter(share))
        lost = getattr(worst, share)
        if lost <= limit:
            continue
        text = f"{lost:.1%} of the {KINDS[worst.kind]} of {worst.layer}"
        if share == "saturation":
            text += (
                f" lie beyond the largest FP8 code (limit: {limit}); lower train.lr and check that train.dtype is bf16"
            )
        else:
            text += f" that are not zero became zero in FP8 (limit: {limit}); set {REMEDIES[worst.kind]}"
        if worst.kind in (INPUT, GRADIENT) and worst.layer:
            text += f", or take the layer out of FP8 with coat.activation.exclude: [{worst.layer}]"
        return text
    return None
