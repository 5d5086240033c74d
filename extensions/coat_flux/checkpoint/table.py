"""A CSV that grows with a run: whole lines, cut back to the step a resumed run goes on from."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from .files import replacing

__all__ = ["METRICS", "METRICS_FILE", "GrowingTable"]

METRICS_FILE = Path("coat") / "metrics.csv"  # of a run's folder, a row per step, from both hosts
METRICS = ("step", "epoch", "loss", "lr", "grad_norm", "s_per_it", "peak_memory_gb", "skipped")


class GrowingTable:
    """A CSV whose first column is the step; its rows up to `step` are kept, none at the start of a run.

    Args:
        path: of the file; it has its header as soon as this is made.
        columns: the header; rows of an older file that has fewer columns are filled up.
        step: steps done.
        say: takes one line when the disk refuses a row; the run then goes on without the file.

    Attributes:
        kept: rows of an earlier process.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path, columns: Sequence[str], step: int, say: Callable[[str], None]):
        self._path, self._say = path, say
        rows = _rows(path, step) if step > 0 else []
        self.kept = len(rows)
        with replacing(path) as temp:
            lines = [",".join([*row, *[""] * (len(columns) - len(row))]) + "\n" for row in [list(columns), *rows]]
            temp.write_text("".join(lines), encoding="utf-8", newline="")
        self._file: TextIO | None = path.open("a", newline="", encoding="utf-8")

    def append(self, *rows: Iterable[str]) -> None:
        """Add rows."""
        if self._file is None:
            return
        try:
            self._file.write("".join(",".join(row) + "\n" for row in rows))
            self._file.flush()
        except OSError as error:
            self._say(f"{self._path}: cannot be written ({error}); the run goes on without it")
            self.close()

    def close(self) -> None:
        """Close the file; what the disk has refused is given up."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()


def _rows(path: Path, step: int) -> list[list[str]]:
    """Rows without the header up to a step."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as old:
        return [row for row in list(csv.reader(old))[1:] if row and int(row[0]) <= step]
