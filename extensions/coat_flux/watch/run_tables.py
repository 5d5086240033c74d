"""The tables of a run in `coat/`, from both trainers alike: metrics, validation, fidelity, precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..base.files import write_file
from ..base.table import FIDELITY, FIDELITY_FILE, METRICS, METRICS_FILE, VALIDATION, VALIDATION_FILE, GrowingTable
from ..base.text import GB
from ..blocks.held import peak_bytes
from ..saves.state import VERSIONS_FILE, write_versions
from .casts import COLUMNS, PRECISION_FILE, CastPrecision, as_cells


@dataclass
class StepStats:
    """One optimizer step: mean loss, gradient norm before clipping; `skipped` counts nonfinite steps so far."""

    step: int
    epoch: int
    lr: float
    loss: float = math.nan
    grad_norm: float = math.nan
    seconds: float = 0.0
    skipped: int = 0


class RunTables:
    """The tables of one run, and its versions; only the main process has them."""

    def __init__(
        self,
        folder: Path,
        step: int,
        device: torch.device,
        trainer: str,
        log: Callable[[str], None],
        *,
        validates: bool = True,
    ):
        self._folder, self._device, self._log = folder, device, log
        self._metrics = GrowingTable(folder / METRICS_FILE, METRICS, step, log)
        self._precision = GrowingTable(folder / PRECISION_FILE, COLUMNS, step, log)
        self._validation = GrowingTable(folder / VALIDATION_FILE, VALIDATION, step, log) if validates else None
        try:
            write_versions(folder, trainer, device)
        except OSError as error:
            log(f"{folder / VERSIONS_FILE}: cannot be written ({error}); the run goes on without it")

    def step(self, stats: StepStats) -> float:
        """Record an optimizer step; returns the peak memory so far in GB."""
        peak = peak_bytes(self._device) / GB
        exact = [repr(value) for value in (stats.loss, stats.lr, stats.grad_norm)]
        last = [f"{stats.seconds:.4f}", f"{peak:.3f}", str(stats.skipped)]
        self._metrics.append([str(stats.step), str(stats.epoch), *exact, *last])
        return peak

    def validation(self, step: int, loss: float) -> None:
        """Record the fixed-noise loss after `step` steps."""
        if self._validation is not None:
            self._validation.append([str(step), repr(loss)])

    def fidelity(self, rows: Sequence[Sequence[float]]) -> None:
        """Write all measurements of held-out photos, rows of `FIDELITY`."""
        lines = [",".join(FIDELITY), *(",".join(map(repr, row)) for row in rows)]
        try:
            write_file(self._folder / FIDELITY_FILE, "\n".join(lines) + "\n")
        except OSError as error:
            self._log(f"{self._folder / FIDELITY_FILE}: cannot be written ({error}); the run goes on")

    def precision(self, rows: Sequence[CastPrecision]) -> None:
        """Record the precision of casts; weights only once per run."""
        self._precision.append(*(as_cells(row) for row in rows if row.step or not self._precision.kept))

    def close(self) -> None:
        """Close the files; idempotent."""
        for table in (self._metrics, self._precision, self._validation):
            if table is not None:
                table.close()
