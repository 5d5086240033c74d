"""The memory lines of a run, and the peak shown in the progress bar.

    [before_forward] Step 100: Allocated: 8.23GB, Reserved: 10.50GB

GB is 1e9 bytes. A CPU has no allocator to ask: there Allocated is the process's resident
set and Reserved its peak so far, and the log says so once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import psutil
import torch

__all__ = ["PHASES", "MemoryLog", "memory_line", "peak_bytes", "peak_reserved_bytes", "reset_peak", "used_bytes"]

PHASES = ("before_forward", "after_forward", "after_backward", "after_optimizer_step")
GB = 1e9  # as everywhere here: memory.budget_gb, metrics.csv, EXPERIMENTS.md
CPU_NOTE = "Memory lines on a CPU: Allocated is the process's resident memory, Reserved its peak so far."


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


def memory_line(phase: str, step: int, allocated: int, reserved: int) -> str:
    """One memory line.

    Args:
        phase: one of `PHASES`.
        step: the optimizer step under way, from 1.
        allocated: bytes in use.
        reserved: bytes held from the device.
    """
    return f"[{phase}] Step {step}: Allocated: {allocated / GB:.2f}GB, Reserved: {reserved / GB:.2f}GB"


class MemoryLog:
    """Writes a memory line for each phase of every `log_every`-th step.

    Args:
        device: whose memory is reported.
        log_every: steps between reports, at least 1.
        enabled: False writes nothing.
        sink: takes each line.
        watcher: told of every phase of every step, reported or not.

    Raises:
        ValueError: `log_every` below 1.
    """

    def __init__(
        self,
        device: torch.device | str,
        log_every: int,
        enabled: bool,
        sink: Callable[[str], None],
        watcher: Callable[[str], None] | None = None,
    ):
        if log_every < 1:
            raise ValueError(
                f"coat.memory.log_every={log_every}: must be at least 1; log_memory_stats: false turns the lines off"
            )
        self.device = torch.device(device)
        self.log_every = log_every
        self.enabled = enabled
        self._sink = sink
        self._watcher = watcher
        self._noted = self.device.type == "cuda"

    def line(self, phase: str, step: int) -> None:
        """Write the line of one phase, if this step is reported.

        Args:
            phase: one of `PHASES`.
            step: the optimizer step under way, from 1.

        Raises:
            ValueError: unknown phase.
        """
        if phase not in PHASES:
            raise ValueError(f"phase={phase!r}: must be one of {', '.join(PHASES)}")
        if self._watcher is not None:
            self._watcher(phase)
        if not self.enabled or step % self.log_every != 0:
            return
        if not self._noted:
            self._sink(CPU_NOTE)
            self._noted = True
        self._sink(memory_line(phase, step, *used_bytes(self.device)))
