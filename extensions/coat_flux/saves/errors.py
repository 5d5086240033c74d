"""Errors of saving and resuming, and disk errors in words."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ..base.errors import UserError

TORCH_WRITE_ERRORS = ("inline_container", "iostream error", "PytorchStreamWriter")  # of torch.save on a full disk
REMEDY_FORBIDDEN = "make the folder writable for this user, or set training_folder to one that is"
REMEDY_SPACE = "free some of this disk, or set training_folder to another one"
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


class SaveError(UserError, RuntimeError):
    """A checkpoint could not be written; the previous one is unchanged."""


class ResumeError(UserError, RuntimeError):
    """A run folder holds a checkpoint that this run cannot resume from."""


@contextmanager
def save_errors(run_dir: Path, what: str, state: str, needed_bytes: int = 0) -> Iterator[None]:
    """Turn disk errors inside the block into a SaveError with path, reason, needed and free space, and remedy."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        text = str(error)
        if isinstance(error, RuntimeError) and not any(mark in text for mark in TORCH_WRITE_ERRORS):
            raise
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):  # torch raises another error over the system's
            cause = cause.__cause__ or cause.__context__
        reason = getattr(cause, "strerror", None) or next(iter(text.splitlines()), type(error).__name__)
        where = getattr(cause, "filename", None) or run_dir
        sizes = f"needs {needed_bytes / 1e6:,.1f} MB, " if needed_bytes else ""
        folder = run_dir
        while not folder.is_dir() and folder != folder.parent:
            folder = folder.parent
        try:
            free = f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB are free"
        except OSError as unknown:
            free = f"free space is not known ({unknown.strerror})"
        remedy = REMEDY_FORBIDDEN if cause is not None and cause.errno in FORBIDDEN else REMEDY_SPACE
        raise SaveError(f"{where}: {what} ({reason}); {sizes}{free}; {remedy}; {state}") from error
