"""Output streams that outlive their reader: `coat-flux train CONFIG | head` closes the pipe, and the run goes on."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

__all__ = ["keep_streams"]


class _Steady:
    """A text stream; after the first OSError, what is written to it is dropped."""

    def __init__(self, inner: Any):
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, text: str) -> int:
        try:
            self._inner.write(text)
        except OSError:
            self._drop()
        return len(text)

    def flush(self) -> None:
        try:
            self._inner.flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        """Point the descriptor at nothing, also for what is still in the stream's buffer."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._inner.fileno())
            os.close(nowhere)


def keep_streams() -> None:
    """Let stdout and stderr be such streams, for the rest of the process; may be called twice."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Steady):
            setattr(sys, name, _Steady(stream))
