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
from typing import Any

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


def read_status(run_dir: Path) -> dict[str, Any] | None:
    """The content of `status.json`, and whether the run is "alive"; None if missing or damaged."""
    try:
        status = json.loads((run_dir / STATUS_FILE).read_text(encoding="utf-8"))
        status |= {"first": int(status["first"]), "steps": int(status["steps"]), "takes": [*status["takes"]]}
        status["alive"] = status["ended"] is None
        if status["alive"] and status["machine"] != platform.node():
            signs = [run_dir / name for name in SIGNS_OF_LIFE if (run_dir / name).exists()]
            status["alive"] = time.time() - max(path.stat().st_mtime for path in signs) < QUIET_SECONDS
        elif status["alive"]:
            status["alive"] = abs(psutil.Process(status["pid"]).create_time() - status["created"]) < 1
    except psutil.Error:
        status["alive"] = False
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return status


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
