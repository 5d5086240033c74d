"""Ctrl+C: the step under way is finished and saved, then the run ends; a second one ends it at once.

ai-toolkit's run.py ends with exit code 0 on a KeyboardInterrupt, and the steps since the last save are lost.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["EXIT_CODE", "StopRequest"]

EXIT_CODE = 130  # of a process that was interrupted


class StopRequest:
    """Notes the first interrupt while it is listening.

    Args:
        say: takes one line.

    Attributes:
        asked: an interrupt came.
    """

    def __init__(self, say: Callable[[str], None]):
        self.asked = False
        self._say = say
        self._before: Any = None
        self._listening = False

    def listen(self) -> None:
        """Take over the interrupt; only the main thread may, in another one Ctrl+C stays ai-toolkit's."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._interrupt)
            self._listening = True

    def close(self) -> None:
        """Give the interrupt back."""
        if self._listening:
            signal.signal(signal.SIGINT, self._before)
            self._listening = False

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            self.close()
            raise KeyboardInterrupt
        self.asked = True
        self._say("[coat] interrupted: this step is finished and saved; press Ctrl+C again to end at once, unsaved")
