"""Time and memory of a call on a CPU or a GPU.

GPU calls are timed by two events each without synchronizing until all are queued, so launches may run ahead as in
training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ..watch.phases import peak_bytes

SEED = 0
CALLS = {"step": (3, 10), "trainer": (5, 20), "optimizer": (5, 20)}  # (warm-up, timed) by level, on a GPU
CPU_CALLS = (1, 3)
FLUSHED_BYTES = 1 << 28  # more than an L2 cache


def time_calls(
    call: Callable[[], object], device: torch.device, warmup: int, repeats: int, *, cold: bool = False
) -> dict[str, Any]:
    """Time `repeats` calls after `warmup` others.

    With `cold` a GPU's cache is overwritten before each call, so that weights come from memory, as after other layers.

    Returns:
        `samples_ms`; `peak_bytes`, of the allocator on a GPU, of the process on a CPU; `first_ms`, the first warm-up
            call with compilation and allocation; `host_ms`, the shortest time until a call returned, GPU work still
            queued.
    """
    started = time.perf_counter()
    call()
    wait(device)
    first_ms = 1e3 * (time.perf_counter() - started)
    for _ in range(warmup - 1):
        call()
    wait(device)
    host, flushed, events = [], torch.empty(0), []
    if device.type == "cuda":
        flushed = torch.empty(FLUSHED_BYTES if cold else 0, dtype=torch.uint8, device=device)
        torch.cuda.reset_peak_memory_stats(device)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for number in range(repeats):
        if events:
            flushed.fill_(1)
            events[number][0].record()
        started = time.perf_counter()
        call()
        host.append(1e3 * (time.perf_counter() - started))
        if events:
            events[number][1].record()
    wait(device)
    samples = [start.elapsed_time(stop) for start, stop in events] or host
    peak = peak_bytes(device) - flushed.nbytes
    return {"samples_ms": samples, "peak_bytes": peak, "first_ms": first_ms, "host_ms": min(host)}


def wait(device: torch.device) -> None:
    """Synchronize with the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
