"""Output streams and signals of a run: what ends its terminal, its reader or the user need not end the run.

`coat-flux train CONFIG | head` closes the pipe, and the run continues. At Ctrl+C, SIGTERM or a closed terminal (SIGHUP)
the current step is finished and saved. A second Ctrl+C or SIGTERM ends the run at once. A hang-up never does: a
terminal is also closed after Ctrl+C, while the save is being written. Ignored hang-ups (`nohup`) stay ignored; Windows
has none.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
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


HANG_UP = getattr(signal, "SIGHUP", None)
SIGNALS = tuple(number for number in (signal.SIGINT, signal.SIGTERM, HANG_UP) if number is not None)
READER_SECONDS = 0.5  # that a reader of our output, which gets the hang-up as we do, may take to end
ONE_PRESS_SECONDS = 1.0  # a launcher forwards signals that the terminal has sent to every process already


class Interrupts:
    """Sets `asked` on a first signal inside a `with` block; only in the main thread."""

    def __init__(self, log: Callable[[str], None]):
        self.asked = False
        self._log = log
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            ignored = {HANG_UP} if HANG_UP and signal.getsignal(HANG_UP) is signal.SIG_IGN else set()
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS if number not in ignored}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:  # others may have replaced it
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == HANG_UP:
            quiet_dead_outputs(READER_SECONDS)
        if not self.asked:
            self.asked, self._first = True, time.monotonic()
            with suppress(OSError):  # raised here it would end the step under way
                self._log("Interrupted: this step is finished and saved. Once more ends at once, without a save")
        elif number != HANG_UP and time.monotonic() - self._first > ONE_PRESS_SECONDS:
            raise KeyboardInterrupt
