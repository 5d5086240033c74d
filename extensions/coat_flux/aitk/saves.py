"""Saves of ai-toolkit as whole sets: written aside, committed by one rename, published in the run's folder.

ai-toolkit writes the LoRA and `optimizer.pt` one after the other over the old ones, and goes on when `optimizer.pt`
could not be written. Here its `save` writes into a staging folder. It finds the newest of its saves by the time a
file's entry changed (`getctime`), which making and removing hard links changes too: `_make_newest` puts that right.
"""

from __future__ import annotations

import errno
import json
import os
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from .host import say

__all__ = ["Saves"]

OPTIMIZER = "optimizer.pt"
TICKS, TICK_SECONDS = 100, 0.001


class Saves:
    """The committed saves of a run.

    Args:
        run_dir: ai-toolkit's save folder of the job.
        name: of the job, with which its LoRA files begin.
    """

    def __init__(self, run_dir: Path, name: str):
        self._dir, self._name = run_dir, name

    def newest(self) -> Path | None:
        """Put right what a killed process left, and return the folder of the newest set.

        Returns:
            None without one, or where another program went on with the run: its LoRA says more steps.

        Raises:
            ResumeError: the set is damaged.
            SaveError: the folder cannot be written.
        """
        from ..checkpoint import ResumeError, damage, newest_set, repair, set_step

        for line in repair(self._dir):
            say(f"[coat] {line}")
        folder = newest_set(self._dir)
        if folder is None:
            return None
        newer = next((path for path in self._loras() if _step(path) > set_step(folder)), None)
        if newer is not None:
            say(f"[coat] note: {newer.name} is newer than {folder}: order of data and random numbers start anew")
            return None
        wrong = damage(folder)
        if wrong is not None:
            raise ResumeError(f"{wrong}; restore it from a backup, or choose another config.name to start a new run")
        self._make_newest(folder)
        return folder

    def commit(self, step: int, write_host: Callable[[Path], None], write_state: Callable[[Path], None]) -> Path:
        """Write a set and publish it.

        Args:
            step: steps done.
            write_host: lets ai-toolkit save into the folder given.
            write_state: writes ours beside it.

        Returns:
            The published LoRA.

        Raises:
            SaveError: it could not be written; the previous set is untouched.
        """
        from ..checkpoint import commit

        published: dict[str, str] = {}

        def write(folder: Path) -> None:
            write_host(folder)
            _check_optimizer(folder / OPTIMIZER)
            published.update({path.name: path.name for path in folder.iterdir()})
            write_state(folder)

        self._make_newest(commit(self._dir, step, write, published))
        return self._dir / next(name for name in published if name.endswith(".safetensors"))

    def _loras(self) -> list[Path]:
        return [path for path in self._dir.glob("*.safetensors") if path.name.startswith(self._name)]

    def _make_newest(self, folder: Path) -> None:
        """Let the files of a set be the last changed; two changes within one tick of the clock have the same time."""
        own = [self._dir / path.name for path in folder.iterdir() if path.is_file()]
        others = [path.stat().st_ctime_ns for path in self._loras() if path not in own]
        for path in own:
            for _ in range(TICKS):
                os.utime(path)
                if path.stat().st_ctime_ns > max(others, default=0):
                    break
                time.sleep(TICK_SECONDS)


def _step(path: Path) -> int:
    """Steps done by the metadata of a LoRA; -1 where they do not say."""
    try:
        with safe_open(path, framework="pt") as file:
            return int(json.loads((file.metadata() or {})["training_info"])["step"])
    except (OSError, SafetensorError, KeyError, ValueError, TypeError):
        return -1


def _check_optimizer(path: Path) -> None:
    """A file of torch ends with its directory: one without was not written to its end, and ai-toolkit went on."""
    if not zipfile.is_zipfile(path):
        raise OSError(errno.EIO, "ai-toolkit could not write it, see its message above", str(path))
