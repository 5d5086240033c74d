"""Launchers of our kernels one by one: time on the device, time of the host, share of the bandwidth.

What is called comes from outside as calls on tensors without memory (`scripts/_kernel_cases.py` has them, at FLUX.1's
shapes); here they get memory. Every argument and every result counts once: what a kernel reads twice, or writes for
another of the same launcher, lowers the share. On the meta device the launchers run and their kernels do not.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from coat_core import ops
from coat_core.ops.dispatch import launchers
from coat_core.ops.launch import recorded_launches

from .limits import Limit
from .timing import time_calls

Case = functools.partial[Any]


def uncovered(cases: Mapping[str, Case]) -> list[str]:
    """Operators with a launcher that none of these calls calls."""
    for family in ops.FAMILIES:  # operators register themselves when they are imported
        importlib.import_module(f"{ops.__name__}.{family}")
    called = {f"{case.func.__module__.rpartition('.')[2]}.{case.func.__name__}" for case in cases.values()}
    return sorted(name for name, (_, launcher) in launchers.items() if launcher not in called)


def measure_operators(
    cases: Mapping[str, Case], device: torch.device, calls: tuple[int, int], limit: Limit
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Time each call; one that fails has "error" and no figures.

    Args:
        cases: name → launcher with its arguments on the meta device.
        device: where it runs.
        calls: for warm-up, and timed.
        limit: the device's.

    Yields:
        (name, {"us": median, "host_us": shortest call, "launches", "bytes", "percent_of_bandwidth"}).
    """
    for name, case in cases.items():
        try:
            yield name, _measured(case, device, calls, limit)
        except Exception as error:  # of a kernel or its compiler; the others are still worth their time
            first = (str(error).strip().splitlines() or ["no message"])[0]
            yield name, {"error": f"{type(error).__name__}: {first}"}


def _measured(case: Case, device: torch.device, calls: tuple[int, int], limit: Limit) -> dict[str, Any]:
    launched: list[Any] = []
    with recorded_launches(lambda kernel, *_: launched.append(kernel)):
        results = case()
    number, given = len(launched), (case.args, case.keywords)
    tensors = {id(x): x for x in tree_leaves((given, results)) if isinstance(x, Tensor)}
    moved = sum(x.nbytes for x in tensors.values())
    if device.type == "meta":
        with recorded_launches(lambda *_: None):
            timing = time_calls(case, device, *calls)
    else:
        args, keywords = tree_map(lambda x: _filled(x, device) if isinstance(x, Tensor) else x, given)
        timing = time_calls(functools.partial(case.func, *args, **keywords), device, *calls, cold=True)
    ms = median(timing.samples_ms)
    return {
        "us": 1e3 * ms,
        "host_us": 1e3 * timing.host_ms,
        "launches": number,
        "bytes": moved,
        "percent_of_bandwidth": 100 * moved / limit.gb_per_second / 1e6 / ms,
    }


def _filled(x: Tensor, device: torch.device) -> Tensor:
    """A tensor like `x` on the device: numbers from 0.5 to 1.5, or small integers."""
    found = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    if x.dtype.is_floating_point:
        values = torch.rand(x.shape, device=device) + 0.5
    else:
        values = torch.randint(0, 100, x.shape, device=device)
    return found.copy_(values)
