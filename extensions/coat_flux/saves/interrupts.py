"""Ctrl+C, SIGTERM or a closed terminal (SIGHUP): the current step is finished and saved.

A second Ctrl+C or SIGTERM ends the run at once. A hang-up never does: a terminal is also closed after Ctrl+C, while
the save is being written. Ignored hang-ups (`nohup`) stay ignored; Windows has none.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from ..base.streams import quiet_dead_outputs

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
            with contextlib.suppress(OSError):  # raised here it would end the step under way
                self._log("Interrupted: this step is finished and saved. Once more ends at once, without a save")
        elif number != HANG_UP and time.monotonic() - self._first > ONE_PRESS_SECONDS:
            raise KeyboardInterrupt
