"""Status of a live run, and commands to it, through files in its folder: any process or machine can watch it.

coat/status.json       the training process, first and last step, how it ended
coat/commands/<name>   an empty file, created by a watcher, removed by the run, which obeys after its step
"""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from ..base.files import discard, write_file
from ..base.table import METRICS_FILE

logger = logging.getLogger(__name__)

COMMANDS = ("sample", "save", "stop")
STATUS_FILE = Path("coat") / "status.json"
COMMAND_FOLDER = Path("coat") / "commands"
SIGNS_OF_LIFE = (METRICS_FILE, Path("coat") / "memory.json", STATUS_FILE)
QUIET_SECONDS = 600.0  # without a sign of life, a run on another machine counts as ended


class LiveRun:
    """The training process's side: a `with` block around the training."""

    def __init__(self, run_dir: Path, first: int, steps: int, *, samples: bool, active: bool = True):
        self._folder, self._active = run_dir, active
        self._commands = run_dir / COMMAND_FOLDER
        process = psutil.Process()
        self._status: dict[str, Any] = {
            "pid": process.pid,
            "created": process.create_time(),
            "machine": platform.node(),
            "first": first,
            "steps": steps,
            "takes": [name for name in COMMANDS if samples or name != "sample"],
            "ended": None,
        }

    def __enter__(self) -> LiveRun:
        """Publish the status; old commands are dropped."""
        if self._active:
            discard(self._commands)
            self._write()
        return self

    def poll(self) -> frozenset[str]:
        """Commands given since the last call; one `stat` if there are none."""
        if not self._active or not self._commands.is_dir():
            return frozenset()
        commands = set()
        for name in COMMANDS:
            with suppress(OSError):
                (self._commands / name).unlink()
                commands.add(name)
        with suppress(OSError):  # another command has arrived: the next call finds it
            self._commands.rmdir()
        return frozenset(commands)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._active:
            self._status["ended"] = "finished" if error is None else str(error)
            if isinstance(error, KeyboardInterrupt | SystemExit):
                self._status["ended"] = "stopped"
            self._write()

    def _write(self) -> None:
        try:
            write_file(self._folder / STATUS_FILE, json.dumps(self._status, indent=1) + "\n")
        except OSError as error:
            logger.warning("%s: cannot be written (%s); the run goes on without it", self._folder / STATUS_FILE, error)


class RunStatus(NamedTuple):
    """Status of a run; `takes` are the commands it accepts, `ended` is None, "finished", "stopped", or the error."""

    alive: bool
    first: int
    steps: int
    takes: tuple[str, ...]
    ended: str | None


def read_status(run_dir: Path) -> RunStatus | None:
    """The status of a run; None if missing or damaged."""
    try:
        status = json.loads((run_dir / STATUS_FILE).read_text(encoding="utf-8"))
        takes = tuple(name for name in COMMANDS if name in status["takes"])
        alive = status["ended"] is None and _is_alive(run_dir, status)
        return RunStatus(alive, int(status["first"]), int(status["steps"]), takes, status["ended"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_alive(run_dir: Path, status: dict[str, Any]) -> bool:
    if status["machine"] != platform.node():
        ages = [time.time() - (run_dir / name).stat().st_mtime for name in SIGNS_OF_LIFE if (run_dir / name).exists()]
        return min(ages) < QUIET_SECONDS
    try:
        return abs(psutil.Process(status["pid"]).create_time() - status["created"]) < 1
    except psutil.Error:
        return False


def give_command(run_dir: Path, name: str) -> None:
    """Send a run one of `COMMANDS`; OSError if it cannot be written."""
    folder = run_dir / COMMAND_FOLDER
    for attempt in range(3):  # the run may remove the folder between the two calls
        folder.mkdir(exist_ok=True)
        try:
            os.close(os.open(folder / name, os.O_CREAT | os.O_WRONLY))
            return
        except FileNotFoundError:
            if attempt == 2:
                raise
