"""A CSV that grows with a run in whole lines and is cut back to the step a run resumes from."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from .files import write_file

METRICS_FILE = Path("coat") / "metrics.csv"  # of a run's folder, a row per step, from both trainers
METRICS = ("step", "epoch", "loss", "lr", "grad_norm", "s_per_it", "peak_memory_gb", "skipped")
VALIDATION_FILE = Path("coat") / "validation.csv"  # a row per measurement of the fixed-noise loss
VALIDATION = ("step", "loss")
FIDELITY_FILE = Path("coat") / "fidelity.csv"  # a row per save, one without LoRA; CIEDE2000, octaves of contrast
FIDELITY = ("step", "colour", "colour_p95", "texture", "vae_colour", "vae_colour_p95", "vae_texture")


class GrowingTable:
    """A CSV whose first column is the step; rows after `step` are dropped when it is opened.

    A table that another program has changed (a spreadsheet: semicolons, quotes, decimals) is moved to another name.
    File errors never end the run: rows that cannot be written now are written later, with one line to `log`. A link at
    `path` is replaced, not followed. `kept` is the number of rows of earlier processes.
    """

    def __init__(self, path: Path, columns: Sequence[str], step: int, log: Callable[[str], None]):
        self._path, self._log = path, log
        rows = self._take_over(columns, step) if step > 0 else []
        self.kept = len(rows)
        self._lines = [",".join(row) + "\n" for row in [columns, *rows]]
        self._is_whole = self._failed = False
        self.append()

    def append(self, *rows: Iterable[str]) -> None:
        """Add rows, or try again to write earlier ones."""
        lines = [",".join(row) + "\n" for row in rows]
        self._lines += lines
        try:
            if self._is_whole and self._path.is_file() and not self._path.is_symlink():
                with self._path.open("a", newline="", encoding="utf-8") as file:
                    file.write("".join(lines))
            else:
                write_file(self._path, "".join(self._lines))
            self._is_whole = True
        except OSError as error:
            self._is_whole = False
            if not self._failed:
                self._log(f"{self._path}: cannot be written ({error}); the run goes on and tries again")
            self._failed = True

    def close(self) -> None:
        """Write what could not be written yet; may be called twice."""
        if not self._is_whole:
            self.append()

    def _take_over(self, columns: Sequence[str], step: int) -> list[list[str]]:
        try:
            return _rows(self._path, columns, step)
        except OSError as error:
            self._log(f"{self._path}: cannot be read ({error}); a new table begins")
        except (ValueError, csv.Error) as error:
            aside, number = self._path, 0
            while aside.exists():
                number += 1
                aside = self._path.with_name(f"{self._path.stem}-changed-{number}{self._path.suffix}")
            with suppress(OSError):
                os.replace(self._path, aside)
            self._log(f"{self._path}: was changed by another program ({error}); kept as {aside}, a new table begins")
        return []


def _rows(path: Path, columns: Sequence[str], step: int) -> list[list[str]]:
    """Rows without the header up to a step; raises ValueError if the file was changed."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as old:
        header, *rows = [row for row in csv.reader(old) if row] or [[]]
    if header and header != list(columns):
        raise ValueError(f"its first line is {','.join(header)[:40]!r}")
    if rows and len(rows[-1]) < len(header):
        rows.pop()  # torn when a machine went down
    for row in rows:
        if len(row) != len(header) or not row[0].isdecimal() or any(set(cell) & set(',;"\n\0') for cell in row):
            raise ValueError(f"a line is {','.join(row)[:40]!r}")
    return [row for row in rows if int(row[0]) <= step]
