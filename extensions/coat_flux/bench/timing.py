"""Time a call on a CPU or a GPU, and the memory it needs; where and how often.

On a GPU each call is timed by two events and nothing waits for the device until all calls are queued, so launches may
run ahead as they do in training. Before each call a buffer larger than the second-level cache may be written, so that
weights come from memory, as they do when other layers ran in between.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .configurations import Configuration
from .limits import Geometry

SEED = 0
CALLS = {  # (warm-up, timed) by level
    "cuda": dict.fromkeys(("op", "rates"), (10, 50))
    | dict.fromkeys(("block", "engine", "optimizer"), (5, 20))
    | {"step": (3, 10)},
    "cpu": dict.fromkeys(("op", "rates", "block", "engine", "optimizer", "step"), (1, 3)),
}
FLUSHED_BYTES = 1 << 28
RESIDENT, ALLOCATED = "resident set of the process", "allocated on the device"


@dataclass(frozen=True)
class Timing:
    """What was measured.

    Attributes:
        samples_ms: of each timed call.
        peak_bytes: GPU: most memory allocated while they ran; CPU: most the process has ever held.
        first_ms: the first warm-up call, with compilation and memory allocation.
        host_ms: the shortest time after which a call returned, on a GPU with its work still queued.
    """

    samples_ms: list[float]
    peak_bytes: int
    first_ms: float
    host_ms: float


def time_calls(
    call: Callable[[], object], device: torch.device, warmup: int, repeats: int, *, cold: bool = False
) -> Timing:
    """Time `repeats` calls after `warmup` others.

    Args:
        call: what is timed; it must not wait for the device.
        device: where it runs.
        warmup: calls before, at least 1.
        repeats: calls that count.
        cold: write a large buffer before each call (GPU only).
    """
    started = time.perf_counter()
    call()
    wait(device)
    first_ms = 1e3 * (time.perf_counter() - started)
    for _ in range(warmup - 1):
        call()
    wait(device)
    samples, host = [], []
    if device.type != "cuda":
        for _ in range(repeats):
            started = time.perf_counter()
            call()
            samples.append(1e3 * (time.perf_counter() - started))
        return Timing(samples, peak_bytes(device), first_ms, min(samples))
    flushed = torch.empty(FLUSHED_BYTES if cold else 0, dtype=torch.uint8, device=device)
    torch.cuda.reset_peak_memory_stats(device)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, stop in pairs:
        flushed.fill_(1)
        start.record()
        started = time.perf_counter()
        call()
        host.append(1e3 * (time.perf_counter() - started))
        stop.record()
    wait(device)
    samples = [start.elapsed_time(stop) for start, stop in pairs]
    return Timing(samples, peak_bytes(device) - flushed.numel(), first_ms, min(host))


def wait(device: torch.device) -> None:
    """Return when all work queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(device: torch.device) -> int:
    """The most memory so far: allocated since the last reset (GPU), or of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True)
class Measurement:
    """One thing that was timed.

    Attributes:
        what: in words.
        resolution: pixels along a side; 0 where there is no image.
        batch: images; 0 where there is none.
        timing: the times and the memory.
        figures: others, by name: m, k, n of a product; loss; parameters and state_bytes of an optimizer.
    """

    what: str
    resolution: int
    batch: int
    timing: Timing
    figures: dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """Where and at which sizes.

    Attributes:
        geometry: of the transformer.
        sizes: (resolution, batch) pairs.
        device: CPU or a GPU.
        repeats: timed calls; None takes `CALLS`.
        training_only: leave out blocks and models without gradients, which are compiled another time.
        kept: between the rows that one process measures; see `models.model_of`.
    """

    geometry: Geometry
    sizes: tuple[tuple[int, int], ...]
    device: torch.device
    repeats: int | None
    training_only: bool = False
    kept: dict[str, Any] = field(default_factory=dict)

    def calls(self, level: str) -> tuple[int, int]:
        """Calls of this level for warm-up, and timed ones."""
        warmup, repeats = CALLS[self.device.type][level]
        return warmup, self.repeats or repeats

    def timed(self, level: str, call: Callable[[], object], *, cold: bool = False) -> Timing:
        """Time `call` as often as this level asks."""
        return time_calls(call, self.device, *self.calls(level), cold=cold)

    def autocast(self, row: Configuration) -> torch.autocast:
        """Bf16 autocast as accelerate's mixed precision has it, for a row that is run so; and its start of a pass."""
        if row.replays:
            torch.compiler.cudagraph_mark_step_begin()
        return torch.autocast(self.device.type, torch.bfloat16, enabled=row.autocast)
