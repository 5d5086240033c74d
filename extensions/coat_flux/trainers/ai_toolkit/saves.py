"""Saves of ai-toolkit as whole sets: written aside, committed by one rename, published in the run's folder.

ai-toolkit writes the LoRA, or the folder of a whole model, and `optimizer.pt` one after the other over the old ones,
and continues when `optimizer.pt` could not be written. Here its `save` writes into a staging folder. It finds the
newest of its saves by the time an entry changed (`getctime`), which making and removing hard links changes too:
`_make_newest` puts that right.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .common import info

__all__ = ["Saves", "read_back"]

OPTIMIZER = "optimizer.pt"
TICKS, TICK_SECONDS = 100, 0.001


class Saves:
    """The committed saves of a run.

    Args:
        run_dir: ai-toolkit's save folder of the job.
        name: of the job, with which its saves begin.
        save_every: steps from one save to the next.
    """

    def __init__(self, run_dir: Path, name: str, save_every: int):
        from ...watch.guard import WINDOW

        self._dir, self._name, self._apart = run_dir, name, min(save_every, WINDOW)

    def newest(self) -> Path | None:
        """Repair what a killed process or a damaged disk left, and return the folder of the newest set.

        Returns:
            None without one, or where another program went on with the run: its save says more steps.

        Raises:
            ResumeError: it is damaged, and no other one is whole.
            SaveError: the folder cannot be written.
        """
        from ...saves.commit import damage, newest_set, set_step
        from ...saves.errors import ResumeError
        from ...saves.repair import repair, step_of

        for line in repair(self._dir):
            info(f"[coat] {line}")
        folder = newest_set(self._dir)
        if folder is None:
            return None
        newer = next((path for path in self._saves() if step_of(path) > set_step(folder)), None)
        if newer is not None:
            info(f"[coat] note: {newer.name} is newer than {folder}: order of data and random numbers start over")
            return None
        wrong = damage(folder)
        if wrong is not None:
            raise ResumeError(
                f"{wrong}; no other state of this run is whole: restore it from a backup, or choose another "
                "config.name to start a new run (all that is in this folder stays)"
            )
        self._make_newest(folder)
        return folder

    def commit(self, step: int, write_host: Callable[[Path], None], write_state: Callable[[Path], None]) -> Path:
        """Write a set and publish it.

        Args:
            step: steps done.
            write_host: lets ai-toolkit save into the folder given.
            write_state: writes ours next to it.

        Returns:
            The published LoRA, or the folder of the model.

        Raises:
            SaveError: it could not be written; the previous set is untouched.
        """
        from ...saves.commit import commit

        published: dict[str, str] = {}

        def write(folder: Path) -> None:
            write_host(folder)
            _check_optimizer(folder / OPTIMIZER)
            published.update({path.name: path.name for path in folder.iterdir()})
            write_state(folder)

        self._make_newest(commit(self._dir, step, write, published, apart=self._apart))
        return self._dir / next(name for name in published if name.startswith(self._name) and name != OPTIMIZER)

    def check_room(self, process: Any) -> None:
        """Warn or refuse where the disk has no room for the saves.

        Args:
            process: with what it trains.

        Raises:
            SaveError: not even one save fits, or the folder cannot be written.
        """
        from ...config.findings import ConfigError
        from ...plan.space import save_space
        from ...saves.commit import require_room

        full = process._full
        parameters, whole = (process.network.parameters(), 0) if full is None else (full.trained.values(), full.size)
        try:
            space = save_space(process._job_config(), [parameter.numel() for parameter in parameters], whole)
        except ConfigError:  # a job that only ai-toolkit can run
            space = None
        require_room(self._dir, space, lambda line: info(f"[coat] WARNING: {line}"))

    def way_back(self, since: int) -> str:
        """What to start after the config of a run that diverged was corrected.

        Args:
            since: the first step in doubt.
        """
        from ...saves.repair import way_back

        program = "coat-flux"
        if not shutil.which(program):
            program = f'"{sys.executable}" "{Path(__file__).resolve().parents[2] / "cli"}"'
        command = f'{program} rewind "{self._dir}" --to-step'
        return way_back(
            self._dir,
            since,
            self._apart,
            lambda step: f"go back to step {step} and start the job again: {command} {step}",
            "start the job again",
        )

    def _saves(self) -> list[Path]:
        """What ai-toolkit takes for saves of the run."""
        return [path for path in self._dir.iterdir() if path.name.startswith(self._name)]

    def _make_newest(self, folder: Path) -> None:
        """Let what a set publishes be the last changed; two changes within one tick of the clock have the same time."""
        own = [self._dir / path.name for path in folder.iterdir() if (self._dir / path.name).exists()]
        others = [path.stat().st_ctime_ns for path in self._saves() if path not in own]
        for path in own:
            for _ in range(TICKS):
                os.utime(path)
                if path.stat().st_ctime_ns > max(others, default=0):
                    break
                time.sleep(TICK_SECONDS)


def read_back(process: Any, folder: Path) -> list[str]:
    """Read back what ai-toolkit has saved into a folder; a LoRA that is still zero (a warm-up) is the guard's to judge.

    Returns:
        Lines to say.

    Raises:
        ExportError: the LoRA cannot be loaded elsewhere.
        ResumeError: the model is not the one that was trained.
    """
    from ...export.check import check_export

    if process._full is not None:
        return [process._full.check(folder)]
    if not process.model_config.is_flux or process.network_config.type.lower() != "lora":
        return ["not read back, which is for LoRAs of FLUX"]
    if not any(value.any() for name, value in process.network.named_parameters() if "lora_up" in name):
        return ["the LoRA is still zero"]
    return [check_export(path).line() for path in sorted(folder.glob("*.safetensors"))]


def _check_optimizer(path: Path) -> None:
    """A file of torch ends with its directory: one without was not written to its end, and ai-toolkit went on."""
    if not zipfile.is_zipfile(path):
        raise OSError(errno.EIO, "ai-toolkit could not write it, see its message above", str(path))
