"""Memory in numbers: the lines of a run, the peak in the progress bar, and the sign that a driver has spilled memory.

    [before_forward] Step 100: Allocated: 8.23GB, Reserved: 10.50GB

GB is 1e9 bytes. A CPU has no allocator to ask: there Allocated is the process's resident
set and Reserved its peak so far, and the log explains that once.
"""

from __future__ import annotations

import statistics
import sys
from collections import deque

import psutil
import torch

from ..base.text import GB

__all__ = ["GB", "SpillWatch", "memory_line", "peak_bytes", "peak_reserved_bytes", "reset_peak", "used_bytes"]

CPU_NOTE = "Memory lines on a CPU: Allocated is the process's resident memory, Reserved its peak so far."
WARM_UP = 3  # first steps: compilation, measurement of paths, allocator
BASELINE = 10  # steps after them whose median is what a step takes
SLOWER = 3.0  # times as long as those
IN_A_ROW = 5  # slow steps
NEAR_LIMIT = 0.90  # of the card's memory, reserved


def used_bytes(device: torch.device) -> tuple[int, int]:
    """(allocated, reserved) bytes now: of torch's CUDA allocator, or resident set and its peak on other devices."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    resident = psutil.Process().memory_info().rss
    return resident, max(peak_bytes(device), resident)


def peak_bytes(device: torch.device) -> int:
    """Most bytes allocated so far: by torch on a GPU, by the process on other devices."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_reserved_bytes(device: torch.device) -> int:
    """Most bytes held from the device so far: by torch on a GPU, as `peak_bytes` on other devices."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_bytes(device)


def reset_peak(device: torch.device) -> None:
    """Start a new peak on a GPU, so that samples and saves do not count as training; a process's peak only grows."""
    if device.type == "cuda":
        torch.cuda.init()  # without it the first phase of a run has no statistics to reset
        torch.cuda.reset_peak_memory_stats(device)


def memory_line(moment: str, step: int, allocated: int, reserved: int) -> str:
    """One memory line.

    Args:
        moment: of the step, one of `phases.STEP_MOMENTS`.
        step: the optimizer step under way, from 1.
        allocated: bytes in use.
        reserved: bytes held from the device.
    """
    return f"[{moment}] Step {step}: Allocated: {allocated / GB:.2f}GB, Reserved: {reserved / GB:.2f}GB"


class SpillWatch:
    """Reports once that steps are slow because Windows' driver has moved what does not fit the card to system memory.

    There is no error then, and steps take many times as long. It is certain where torch holds more than the card has.
    Otherwise two signs together distinguish it from other slow steps: several steps in a row are slow, by the median of
    the run's own first steps, and torch holds nearly all of the card. A single slow step (after a sample or a save, or
    a new picture size that is compiled) means nothing.

    Args:
        platform: as `sys.platform`; elsewhere than on win32 nothing spills, a lack of memory is an error.
    """

    def __init__(self, platform: str = sys.platform) -> None:
        self._active = platform == "win32"
        self._steps = 0
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=IN_A_ROW)

    def on_step(self, step_seconds: float, reserved_bytes: int, total_bytes: int) -> str | None:
        """Check a step that is done.

        Args:
            step_seconds: of the step alone, without samples and saves.
            reserved_bytes: what torch's allocator holds of the card.
            total_bytes: the card's memory; 0 where there is no card.

        Returns:
            The warning, or None.
        """
        if not self._active or total_bytes <= 0:
            return None
        if reserved_bytes > total_bytes:
            return self._line(f"torch holds {reserved_bytes / 1e9:.1f} GB", total_bytes)
        self._steps += 1
        if self._steps <= WARM_UP:
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

    def _line(self, found: str, total_bytes: int) -> str:
        self._active = False
        return (
            f"{found} of a card of {total_bytes / 1e9:.1f} GB: the Windows driver has moved memory of this run to "
            "system memory, which is many times slower. Set coat.memory.checkpointing: all or a smaller "
            "coat.memory.budget_gb, or close other programs on this card. To have an error instead: NVIDIA Control "
            "Panel, Manage 3D settings, CUDA - Sysmem Fallback Policy, Prefer No Sysmem Fallback"
        )
