"""What this GPU does with our products and operators: `coat-flux doctor --gpu`, and what gpu_check.py does first.

A product is y = x Wᵀ of random values at FLUX.1-dev's shapes, quantized with real scales, compared with the fp32
product of the same codes, and timed with a cold cache. Operators are those of a step of one block of each kind, each
compared with its reference (`coat_core.ops.proof`). Each kind of product has a process of its own (`python -m <this
module> SPEC RESULT`), and the operators have one, since a refused product may leave CUDA unusable.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor

from coat_core.formats import E4M3
from coat_core.granularity import PER_ROW, PER_TENSOR
from coat_core.int8 import quantize_int8
from coat_core.ops.dispatch import first_line
from coat_core.ops.proof import prove, recorded_calls
from coat_core.ops.scaled_mm import int8_mm, scaled_mm
from coat_core.quantize import quantize, sqnr_db

from ..bench import worker
from ..bench.limits import HEAD_DIM, Geometry, token_count
from ..bench.runner import CPU_CALLS, FAILED, OK, STEP, named, start_worker
from ..bench.worker import SEED, measure_steps, time_calls
from ..watch.oom import release_memory

RESOLUTION, KIND_SECONDS, OPERATORS_SECONDS = 1024, 90.0, 180.0
CALL_SECONDS, START_SECONDS = 20.0, 15.0  # for one call of an operator; until a process runs
# in and out features over d: output; q k v in one; MLP in, out; single block: q k v and MLP in, output
SHAPES = ((1, 1), (1, 3), (1, 4), (4, 1), (1, 7), (5, 1))
PRODUCT_CALLS = (5, 20)  # for warm-up, and timed
# Codes multiply exactly and sums round to 2^-13 or better, so results have 40 dB and more; rounding to e4m3 costs
# about 30, and a product below that is worse than its inputs.
PRODUCT_FLOOR_DB = 30.0
MACHINE, OPERATORS = "machine", "operators"
PROVED = ("coat", "coat_per_tensor", "coat_int8")  # rows of the benchmark
KINDS = {  # format of x (or dy) and granularity; products of gradients sum in full fp32
    "bf16": (None, PER_TENSOR),
    "per_tensor": (E4M3.name, PER_TENSOR),
    "per_tensor, gradients": ("e5m2", PER_TENSOR),
    "per_row": (E4M3.name, PER_ROW),
    "per_row, gradients": ("e5m2", PER_ROW),
    "int8": ("int8", PER_ROW),
}


def try_product(kind: str, m: int, n: int, k: int, device: torch.device, calls: tuple[int, int]) -> dict[str, Any]:
    """Compare a product of `KINDS`, [M, K] by [N, K], with fp32 and time it.

    Returns:
        `us`, `tflops` and `db`, and "error" where its values are wrong; "refused" alone where it does not run, of bf16
        an error.
    """
    form, granularity = KINDS[kind]
    draw = torch.Generator(device).manual_seed(SEED)
    x, w = (torch.randn(rows, k, device=device, generator=draw).to(torch.bfloat16) for rows in (m, n))
    if form is None:
        call: Callable[[], Tensor] = functools.partial(torch.nn.functional.linear, x, w)
        exact = x.float() @ w.float().t()
    else:
        gemm, forward = scaled_mm, not kind.endswith("gradients")
        if form == "int8":
            gemm, a, b = int8_mm, quantize_int8(x, 1), quantize_int8(w, 1)
        else:
            a, b = quantize(x, form, granularity), quantize(w, E4M3.name, granularity)
        call = functools.partial(gemm, a.codes, a.scale, b.codes, b.scale, None, torch.bfloat16, forward)
        exact = (a.codes.float() @ b.codes.float().t()) * a.scale * b.scale.reshape(-1)
    try:
        decibels = sqnr_db(exact, call())
    except (RuntimeError, ValueError) as error:  # such as a torch that was not built for this card
        return {"error" if form is None else "refused": first_line(error)}
    del exact
    ms = median(time_calls(call, device, *calls, cold=True)["samples_ms"])
    figures = {"us": 1e3 * ms, "tflops": 2.0 * m * n * k / ms / 1e9, "db": decibels}
    if not decibels >= PRODUCT_FLOOR_DB:
        figures["error"] = f"wrong values: {decibels:.1f} dB, must be {PRODUCT_FLOOR_DB:g} or more"
    return figures


def prove_operators(geometry: Geometry, size: tuple[int, int], device: torch.device, until: float) -> dict[str, Any]:
    """Compare the kernels that steps of `PROVED` launch with their references, until this time of `time.monotonic`.

    Returns:
        By operator {"kernel"}, or {"error"} with what is wrong; by row {"refused"} where it does not run on this card.
    """
    found: dict[str, Any] = {}
    geometry = geometry._replace(double=1, single=1)
    with recorded_calls() as calls:
        for name in PROVED:
            try:
                list(measure_steps(named(STEP)[name], geometry, [size], device, (1, 1)))
            except RuntimeError as error:  # such as FP8 products on a card without them
                found[name] = {"refused": first_line(error)}
    release_memory()  # the process that compares needs it
    found |= {call.operator: {"kernel": "not compared: no time or memory"} for call in calls}
    budget_s = until - time.monotonic() - CALL_SECONDS
    for operator, why in prove(calls, device, CALL_SECONDS, budget_s).items():
        found[operator] = {"error": why} if why else {"kernel": "agrees with its reference"}
    return found


def run(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Execute a specification as `bench.worker` has them: `MACHINE`, `OPERATORS` or one of `KINDS`.

    Returns:
        "status", "reason" and "items": name → figures, with "error" in those that failed.
    """
    until = time.monotonic() + spec["seconds"] - START_SECONDS
    kind, device = spec["configuration"], torch.device(spec["device"])
    geometry, size = Geometry(**spec["geometry"]), spec["sizes"][0]
    items: dict[str, dict[str, Any]] = {}
    if kind == MACHINE:
        result = worker.run({"level": MACHINE, "device": spec["device"]})
        items[MACHINE] = {"error": result["reason"]} if result["status"] != OK else result["machine"]
        if items[MACHINE].get("kernels_refused"):
            items[MACHINE]["error"] = f"our kernels do not run here: {items[MACHINE]['kernels_refused']}"
    elif kind == OPERATORS:
        items = prove_operators(geometry, size, device, until)
    else:
        hidden, tokens = geometry.heads * HEAD_DIM, token_count(size[0])
        calls = CPU_CALLS if device.type == "cpu" else PRODUCT_CALLS
        for k, n in ((hidden * wide_in, hidden * wide_out) for wide_in, wide_out in SHAPES):
            items[f"{k} -> {n}"] = try_product(kind, tokens, n, k, device, calls)
    wrong = [f"{name}: {figures['error']}" for name, figures in items.items() if "error" in figures]
    return {"status": FAILED if wrong else OK, "reason": "; ".join(wrong), "items": items}


def report(device: str = "cuda") -> Iterator[str]:
    """The lines of a report of a problem, each as soon as it is known: versions, card, driver, refusals and times."""
    spec = {"device": device, "geometry": Geometry()._asdict(), "sizes": [[RESOLUTION, 1]]}
    for kind in (MACHINE, *KINDS, OPERATORS):
        seconds = OPERATORS_SECONDS if kind == OPERATORS else KIND_SECONDS
        result = start_worker({**spec, "configuration": kind, "seconds": seconds}, seconds, __name__)
        if "items" not in result:
            yield f"{kind}: {result['reason']}"
        for name, figures in result.get("items", {}).items():
            texts = [f"{key} {x:.4g}" if isinstance(x, float) else f"{key} {x}" for key, x in figures.items()]
            yield f"{kind}, {name}: {', '.join(texts)}"


if __name__ == "__main__":
    worker.main(run)
