"""Numbers by step, from `coat/metrics.csv` of both hosts, or from the `loss_log.db` of an ai-toolkit without COAT."""

from __future__ import annotations

import csv
import itertools
import math
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from ..base.table import METRICS_FILE, VALIDATION_FILE

__all__ = ["HOST_LOG", "Curve", "read_metrics", "read_validation", "smoothed"]

Curve = list[tuple[float, float]]

HOST_LOG = "loss_log.db"
HOST_NAMES = {"learning_rate": "lr", "grad_norm": "grad_norm"}
SMOOTHING_SHARE = 50  # of a run's steps, one part in so many is averaged over


def read_metrics(folder: Path) -> dict[str, Curve]:
    """Name of the column → curve over steps; empty where there is no log.

    Raises:
        OSError: a file cannot be read.
        ValueError: it is damaged.
    """
    own = folder / METRICS_FILE
    if own.exists():
        return _columns(own)
    return _host_log(folder / HOST_LOG) if (folder / HOST_LOG).exists() else {}


def read_validation(folder: Path) -> Curve:
    """Validation loss over steps; empty where there is none; errors as `read_metrics`."""
    path = folder / VALIDATION_FILE
    return _columns(path).get("loss", []) if path.exists() else []


def _columns(path: Path) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        try:
            for cells in reader:
                step = float(cells.pop("step"))
                for name, cell in cells.items():
                    if cell:
                        curves.setdefault(name, []).append((step, float(cell)))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path.name}: line {reader.line_num} is damaged ({error!r})") from error
    return curves


def _host_log(path: Path) -> dict[str, Curve]:
    """ai-toolkit's own: a table of (step, key, value) and one of wall times."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as log:
            values = log.execute("SELECT step, key, value_real FROM metrics WHERE value_real IS NOT NULL ORDER BY step")
            curves: dict[str, Curve] = {}
            for step, key, value in values:
                name = "loss" if key.endswith("/loss") or key == "loss" else HOST_NAMES.get(key)
                if name is not None:
                    curves.setdefault(name, []).append((float(step), float(value)))
            times = log.execute("SELECT step, wall_time FROM steps ORDER BY step").fetchall()
    except sqlite3.Error as error:
        raise ValueError(f"{path.name}: {error}") from error
    pace = [(float(step), (now - before) / (step - last)) for (last, before), (step, now) in itertools.pairwise(times)]
    return curves | ({"s_per_it": pace} if pace else {})


def smoothed(curve: Sequence[tuple[float, float]]) -> Curve:
    """Exponential moving average over about 2 % of the points, without the pull of its start; gaps are passed over."""
    weight = 1 / max(1.0, len(curve) / SMOOTHING_SHARE)
    mean, total, found = 0.0, 0.0, []
    for step, value in curve:
        if math.isfinite(value):
            mean, total = mean + weight * (value - mean), total + weight * (1 - total)
            found.append((step, mean / total))
    return found
