"""How much memory a run may use, and how much it holds now, in bytes."""

from __future__ import annotations

import psutil
import torch

# of a GPU's memory, what is left to the driver, CUDA's context and fragmentation
USABLE_FRACTION = 0.92


def budget_bytes(device: torch.device, budget_gb: float | None) -> float:
    """Return the peak the run must stay under: `budget_gb` (1e9 bytes), or what the device has."""
    if budget_gb is not None:
        return budget_gb * 1e9
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1] * USABLE_FRACTION
    return float(psutil.virtual_memory().available + psutil.Process().memory_info().rss)


def held_bytes(device: torch.device) -> float:
    """Return what this process holds now: CUDA tensors, or resident memory on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.memory_allocated(device))
    return float(psutil.Process().memory_info().rss)
