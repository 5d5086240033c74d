"""On Windows the driver moves what does not fit a card into system memory: no error, steps take many times as long.

It is certain where torch holds more than the card has. Else it is told from other slow steps by two things together:
several steps in a row are slow, by the median of the run's own first steps, and torch holds nearly all of the card. A
single slow step (after a sample or a save, or a new picture size that is compiled) says nothing.
"""

from __future__ import annotations

import statistics
import sys
from collections import deque

__all__ = ["SpillWatch"]

WARM_UP = 3  # first steps: compilation, measurement of paths, allocator
BASELINE = 10  # steps after them whose median is what a step takes
SLOWER = 3.0  # times as long as those
IN_A_ROW = 5  # slow steps
NEAR_LIMIT = 0.90  # of the card's memory, reserved


class SpillWatch:
    """Says once that steps are slow because the driver has spilled memory.

    Args:
        platform: as `sys.platform`; on others than win32 there is no spill, a lack of memory is an error there.
    """

    def __init__(self, platform: str = sys.platform) -> None:
        self._active = platform == "win32"
        self._seen = 0
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=IN_A_ROW)

    def see(self, step_seconds: float, reserved_bytes: int, total_bytes: int) -> str | None:
        """Look at a step that is done.

        Args:
            step_seconds: of the step alone, without samples and saves.
            reserved_bytes: what torch's allocator holds of the card.
            total_bytes: the card's memory; 0 where there is no card.

        Returns:
            A line to say, or None.
        """
        if not self._active or total_bytes <= 0:
            return None
        if reserved_bytes > total_bytes:
            return self._line(f"torch holds {reserved_bytes / 1e9:.1f} GB", total_bytes)
        self._seen += 1
        if self._seen <= WARM_UP:
            return None
        if len(self._first) < BASELINE:
            self._first.append(step_seconds)
            return None
        self._last.append(step_seconds)
        usual = statistics.median(self._first)
        slow = len(self._last) == IN_A_ROW and min(self._last) >= SLOWER * usual
        if not slow or reserved_bytes < NEAR_LIMIT * total_bytes:
            return None
        took = f"steps take {statistics.median(self._last):.1f} s instead of {usual:.1f} s"
        return self._line(f"{took}, and torch holds {reserved_bytes / 1e9:.1f} GB", total_bytes)

    def _line(self, seen: str, total_bytes: int) -> str:
        self._active = False
        return (
            f"{seen} of a card of {total_bytes / 1e9:.1f} GB: the Windows driver has moved memory of this run to "
            "system memory, which is many times slower. Set coat.memory.checkpointing: all or a smaller "
            "coat.memory.budget_gb, or close other programs on this card. To have an error instead: NVIDIA Control "
            "Panel, Manage 3D settings, CUDA - Sysmem Fallback Policy, Prefer No Sysmem Fallback"
        )
