"""TensorBoard's file of a run, kept going: a folder that was removed or a full disk costs points, never the run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

__all__ = ["Board"]


class Board:
    """Scalars for TensorBoard.

    Args:
        folder: of its files; made again where it was removed.
        step: steps done; what a crashed run wrote after them is left out.
        say: takes one line, at the first failure.
    """

    def __init__(self, folder: Path, step: int, say: Callable[[str], None]):
        self._folder, self._say = folder, say
        self._writer: SummaryWriter | None = None
        self._failed = False
        self._hook = threading.excepthook
        threading.excepthook = self._quiet
        with self._kept_going():
            self._open(step)

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Add a point."""
        with self._kept_going():
            if self._writer is None or not self._folder.is_dir():
                self._close_writer()
                self._open(step - 1)
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        """Close the files; may be called twice."""
        self._close_writer()
        if threading.excepthook == self._quiet:
            threading.excepthook = self._hook

    def _open(self, step: int) -> None:
        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1)

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(OSError):
                writer.close()

    @contextmanager
    def _kept_going(self) -> Iterator[None]:
        """Say the first OSError; the next point begins with a new writer."""
        try:
            yield
        except OSError as error:
            if not self._failed:
                self._say(f"TensorBoard: {self._folder} cannot be written ({error}); the run goes on")
            self._failed = True
            self._close_writer()

    def _quiet(self, failure: Any) -> None:
        """TensorBoard writes in a thread, whose error comes back with the next point: no traceback for it."""
        if not (type(failure.thread).__module__.startswith("tensorboard.") and isinstance(failure.exc_value, OSError)):
            self._hook(failure)
