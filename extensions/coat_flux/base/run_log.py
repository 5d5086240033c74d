"""The log of a run, for both trainers: every line with its time to `coat/log.txt`, the important ones to the console.

The console shows saves, samples, losses and warnings; *details* (memory lines, FP8 casts, the full start table) only
with `--verbose`. Lines are buffered until the run's folder may be written.
"""

from __future__ import annotations

import logging
import sys
import textwrap
import warnings
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

LOG_FILE = Path("coat") / "log.txt"
PACKAGES = ("coat_core", "coat_flux")
REDRAW_S, REDRAW_FILE_S = 0.5, 30.0  # of a progress bar, on a terminal and in a file
NOISE = (  # library messages irrelevant to the user, quoted
    "Failed to load CPU gemm_4bit_forward from kernels-community",  # bitsandbytes, imported by others
    "Failed to load /",  # torchao, of kernels for other GPUs
    "Detected no triton, on systems without Triton certain kernels will not work",  # the same
    "ImageProcessor` requires torchvision (not installed); falling back to",  # transformers, imported by diffusers
    "`torch_dtype` is deprecated! Use `dtype` instead!",  # transformers, called by diffusers
)


class Lines(logging.Handler):
    """Takes the lines of a run, and our packages' log records, and drops them unless `active`.

    `write` writes to the console.
    """

    def __init__(self, write: Callable[[str], None], *, verbose: bool = False, active: bool = True):
        super().__init__(logging.INFO)
        self.verbose = verbose
        self._write = write if active else lambda line: None
        self._waiting: list[str] = []
        self._run: Path | None = None  # its folder
        self._given_up = not active
        self._levels: dict[str, int] = {}

    def restart(self, *, verbose: bool) -> None:
        """Forget the run before; lines of the next one are collected until `open`."""
        self.close()
        self.verbose = verbose
        self._waiting, self._given_up = [], False

    def info(self, line: str) -> None:
        """Write to the console and the file."""
        self._write(line)
        self.record(line)

    def detail(self, line: str) -> None:
        """Write to the file, and to the console if verbose."""
        if self.verbose:
            self._write(line)
        self.record(line)

    def record(self, text: str) -> None:
        """Write to the file only, with the time."""
        entry = f"{datetime.now():%Y-%m-%d %H:%M:%S}  "
        self._waiting.append(entry + textwrap.indent(text, " " * len(entry)).lstrip() + "\n")
        if self._run is not None:
            self.open(self._run)
        elif self._given_up:
            self._waiting = []

    def open(self, run: Path) -> None:
        """Append to the log in the folder `run`; a link there is replaced, not followed; a failure is logged."""
        self._run, path = run, run / LOG_FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_symlink():
                path.unlink()
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(self._waiting)
        except OSError as error:
            self._run, self._given_up = None, True
            self._write(f"{LOG_FILE.as_posix()}: cannot be written ({error}); the run goes on without it")
        self._waiting = []

    def emit(self, record: logging.LogRecord) -> None:
        """Log a warning as a line, anything below as a detail."""
        record.coat_shown = True
        if record.levelno >= logging.WARNING:
            self.info(f"{record.levelname}: {record.getMessage()}")
        else:
            self.detail(record.getMessage())

    def listen(self) -> None:
        """Receive our packages' log records, from INFO up."""
        for name in PACKAGES:
            logger = logging.getLogger(name)
            self._levels[name] = logger.level
            logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))
            logger.addHandler(self)

    def close(self) -> None:
        """Stop listening, and leave the file; may be called twice."""
        for name, level in self._levels.items():
            logging.getLogger(name).removeHandler(self)
            logging.getLogger(name).setLevel(level)
        self._levels = {}
        self._run = None
        super().close()


def bar_options() -> dict[str, Any]:
    """Arguments of tqdm: two redraws a second on a terminal, two a minute in a file."""
    pause = REDRAW_S if sys.stderr.isatty() else REDRAW_FILE_S
    shown: dict[str, Any] = {
        "mininterval": pause,
        "maxinterval": 2 * pause,
        "miniters": 1,
        "dynamic_ncols": True,
    }
    if not sys.stderr.isatty():
        shown["position"] = 0  # below another bar it would move the cursor
    return shown


def quiet_libraries() -> None:
    """Drop the library messages in `NOISE` from a command's console output."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    warnings.filterwarnings("ignore", message=r"`torch\.jit\.script", category=DeprecationWarning)
    for library in (diffusers_logging, transformers_logging):
        library.get_logger()  # makes its handler
        library.disable_progress_bar()  # one bar per model file; we log a line per model
    drop_noise("", "diffusers", "transformers")


def drop_noise(*loggers: str) -> None:
    """Drop the messages in `NOISE` from the output of these loggers' handlers; "" is the root."""
    for name in loggers:
        for handler in logging.getLogger(name or None).handlers:
            handler.addFilter(lambda record: not any(part in record.getMessage() for part in NOISE))
