"""One process at a time in a run's folder: a second one would remove what the first is writing."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from .errors import ResumeError, save_errors

__all__ = ["run_lock"]

LOCK_FILE = Path("coat") / "lock"
TAKEN = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Lock `run_dir` for the block, if its file system can; raises ResumeError if locked, SaveError if read-only."""
    path = run_dir / LOCK_FILE
    with save_errors(run_dir, "the run's folder cannot be made", "nothing was written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():  # its target would be overwritten
            path.unlink()
        file = path.open("a+", encoding="utf-8")
    with file:
        try:
            _lock(file)
        except OSError as error:
            if error.errno in TAKEN:
                owner = ""
                with suppress(OSError):  # Windows keeps others from a locked file
                    text = path.read_text(encoding="utf-8").strip()
                    owner = f" ({text})" if text.isdecimal() else ""
                raise ResumeError(
                    f"{run_dir}: another process{owner} is training in this folder; wait for it, end it, or "
                    "choose another config.name"
                ) from error
        else:
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
        yield


if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[str]) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(file: IO[str]) -> None:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of the process: no child of it holds it on
