"""Output streams that outlive their reader: `coat-flux train CONFIG | head` closes the pipe, and the run continues."""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress
from typing import Any


class _Steady:
    """A text stream that drops its output after the first OSError."""

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
        with suppress(OSError, ValueError):
            _send_nowhere(self._inner.fileno())  # also the stream's buffered output


def keep_streams() -> None:
    """Replace stdout and stderr by such streams for the rest of the process; may be called twice."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Steady):
            setattr(sys, name, _Steady(stream))


def quiet_dead_outputs(wait: float = 0.0) -> None:
    """Send stdout and stderr nowhere once their terminal or pipe closes (within `wait` s); not on Windows."""
    if not hasattr(select, "poll"):
        return
    outputs = select.poll()
    for descriptor in (1, 2):
        outputs.register(descriptor, 0)
    for descriptor, event in outputs.poll(1000 * wait):
        if event & (select.POLLERR | select.POLLHUP):
            _send_nowhere(descriptor)


def _send_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
