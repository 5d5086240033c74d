"""Time and memory of a call on a CPU or a GPU.

GPU calls are timed by two events each without synchronizing until all are queued, so launches may run ahead as in
training. Optionally a buffer larger than the L2 cache is written before each call, so that weights come from memory,
as after other layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..watch.phases import peak_bytes
from .limits import Geometry

SEED = 0
CALLS = {"cuda": {"step": (3, 10), "trainer": (5, 20), "optimizer": (5, 20)}}  # (warm-up, timed) by level
CPU_CALLS = (1, 3)
FLUSHED_BYTES = 1 << 28


class Timing(NamedTuple):
    """Milliseconds of each timed call, and other figures.

    `peak_bytes` is the allocator's peak on a GPU, the process's on a CPU; `first_ms` the first warm-up call with
    compilation and allocation; `host_ms` the shortest time until a call returned, GPU work still queued.
    """

    samples_ms: list[float]
    peak_bytes: int
    first_ms: float
    host_ms: float

    def of(self, what: str, resolution: int = 0, batch: int = 0, **figures: Any) -> dict[str, Any]:
        """The timing as plain values, with other figures by name."""
        return {**self._asdict(), "what": what, "resolution": resolution, "batch": batch, "figures": figures}


class Setting(NamedTuple):
    """What a process measures with; repeats None takes `CALLS`."""

    geometry: Geometry
    sizes: tuple[tuple[int, int], ...]
    device: torch.device
    repeats: int | None

    def calls(self, level: str) -> tuple[int, int]:
        """Numbers of warm-up and timed calls at this level."""
        warmup, repeats = CALLS["cuda"][level] if self.device.type == "cuda" else CPU_CALLS
        return warmup, self.repeats or repeats


def time_calls(
    call: Callable[[], object], device: torch.device, warmup: int, repeats: int, *, cold: bool = False
) -> Timing:
    """Time `repeats` calls after `warmup` others; `cold`: with nothing in a GPU's cache."""
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
    """Synchronize with the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
