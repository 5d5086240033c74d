"""`coat/metrics.csv` and `coat/precision.csv` of a job, as the stand-alone trainer writes them, for the run report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .host import host_version, say
from .watch import StepFacts

if TYPE_CHECKING:
    from ...base.table import GrowingTable
    from ...watch.records import Row

__all__ = ["RunRecords"]


class RunRecords:
    """The tables of one run; only the main process has them.

    Args:
        process: the running process, at the step it goes on from.
    """

    def __init__(self, process: Any):
        from ...watch.records import as_cells

        self._process, self._as_cells = process, as_cells
        self._metrics: GrowingTable | None = None
        self._precision: GrowingTable | None = None
        self._held_out: GrowingTable | None = None
        if not process.accelerator.is_main_process:
            return
        try:
            self._open(Path(process.save_root), process.step_num)
        except OSError as error:
            _say(f"{process.save_root}/coat: cannot be written ({error}); the run goes on without its report's files")

    def _open(self, root: Path, done: int) -> None:
        from ...base.table import METRICS, METRICS_FILE, VALIDATION, VALIDATION_FILE, GrowingTable
        from ...saves.versions import write_versions
        from ...watch.records import COLUMNS, FILE

        self._metrics = GrowingTable(root / METRICS_FILE, METRICS, done, _say)
        self._precision = GrowingTable(root / FILE, COLUMNS, done, _say)
        if self._process._held_out is not None:
            self._held_out = GrowingTable(root / VALIDATION_FILE, VALIDATION, done, _say)
        write_versions(root, f"ai-toolkit {host_version()}", self._process.device_torch)

    def step(self, number: int, facts: StepFacts, seconds: float, skipped: int) -> None:
        """Record an optimizer step.

        Args:
            number: of the step, from 1.
            facts: of the step; one that came to no update attempt is not recorded.
            seconds: it took.
            skipped: updates left out so far.
        """
        if self._metrics is None or facts.measured is None:
            return
        from ...watch.memory_stats import GB, peak_bytes

        process = self._process
        peak = peak_bytes(process.device_torch) / GB
        numbers = [repr(value) for value in facts.measured]
        last = [f"{seconds:.4f}", f"{peak:.3f}", str(skipped)]
        self._metrics.append([str(number), str(process.epoch_num), *numbers, *last])

    def held_out(self, done: int, loss: float) -> None:
        """Record the loss on photos held out after `done` steps."""
        if self._held_out is not None:
            self._held_out.append([str(done), repr(loss)])

    def precision(self, rows: Sequence[Row]) -> None:
        """Record what the casts of a step lost; weights only once."""
        if self._precision is not None:
            kept = self._precision.kept
            self._precision.append(*(self._as_cells(row) for row in rows if row.step or not kept))

    def close(self) -> None:
        """Close the files."""
        for table in (self._metrics, self._precision, self._held_out):
            if table is not None:
                table.close()


def _say(line: str) -> None:
    say(f"[coat] {line}")
