"""Ctrl+C, or SIGTERM from outside: the step under way is finished and saved; a second one ends the run at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Interrupts"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ONE_PRESS_SECONDS = 1.0  # a launcher passes on what the terminal has sent to every process already


class Interrupts:
    """Notes a first signal, from `listen` to `close` or in a `with` block; outside of the main thread it notes nothing.

    Args:
        say: takes one line.

    Attributes:
        asked: a signal came.
    """

    def __init__(self, say: Callable[[str], None]):
        self.asked = False
        self._say = say
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Take over both signals."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def close(self) -> None:
        """Give them back; may be called twice."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __enter__(self) -> Interrupts:
        """`listen`."""
        self.listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """`close`."""
        self.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            self.asked, self._first = True, time.monotonic()
            self._say("Interrupted: this step is finished and saved. Once more ends at once, without a save")
        elif time.monotonic() - self._first > ONE_PRESS_SECONDS:
            raise KeyboardInterrupt
