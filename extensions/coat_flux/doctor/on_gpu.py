"""What this GPU does with our products and operators: `coat-flux doctor --gpu`, and what gpu_check.py does first.

A product is y = x Wᵀ of random values at FLUX.1-dev's shapes, quantized with real scales, compared with the fp32
product of the same codes, and timed with a cold cache. Operators are those of a step of one block of each kind, each
compared with its reference (`coat_core.ops.proof`). Each kind of product, and each configuration, has a process of its
own (`python -m <this module> SPEC RESULT`), since a refused product may leave CUDA unusable.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from coat_core.formats import E4M3
from coat_core.granularity import PER_ROW, PER_TENSOR
from coat_core.int8 import quantize_int8
from coat_core.ops.proof import prove, recorded_calls
from coat_core.ops.scaled_mm import int8_mm, scaled_mm
from coat_core.quantize import quantize, sqnr_db

from ..bench import worker
from ..bench.configurations import CPU_CALLS, FAILED, OK, STEP, named
from ..bench.limits import Geometry, token_count
from ..bench.measure import SEED, make_model, make_optimizer, model_inputs, time_calls
from ..bench.runner import start_worker

RESOLUTION, KIND_SECONDS = 1024, 90.0
# in and out features over d: output; q k v in one; MLP in, out; single block: q k v and MLP in, output
SHAPES = ((1, 1), (1, 3), (1, 4), (4, 1), (1, 7), (5, 1))
PRODUCT_CALLS = (5, 20)  # for warm-up, and timed
# Codes multiply exactly and sums round to 2^-13 or better, so results have 40 dB and more; rounding to e4m3 costs
# about 30, and a product below that is worse than its inputs.
PRODUCT_FLOOR_DB = 30.0
MACHINE, PROVED = "machine", ("coat", "coat_per_tensor", "coat_int8")
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
        reason = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
        return {"error" if form is None else "refused": reason}
    del exact
    ms = median(time_calls(call, device, *calls, cold=True)["samples_ms"])
    figures = {"us": 1e3 * ms, "tflops": 2.0 * m * n * k / ms / 1e9, "db": decibels}
    if not decibels >= PRODUCT_FLOOR_DB:
        figures["error"] = f"wrong values: {decibels:.1f} dB, must be {PRODUCT_FLOOR_DB:g} or more"
    return figures


def prove_operators(name: str, geometry: Geometry, resolution: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """Compare the kernels that a step of a row of the benchmark launches with their references.

    Returns:
        By operator "kernel", or "error" with what is wrong.
    """
    row = named(STEP)[name]
    inputs, target = model_inputs(resolution, 1, device)
    with recorded_calls() as calls:
        model, trained = make_model(row, geometry._replace(double=1, single=1), device)
        optimizer = make_optimizer(row.optimizer, trained)
        output = model(**inputs, return_dict=False)[0]
        torch.nn.functional.mse_loss(output.float(), target).backward()
        optimizer.step()
    found: dict[str, dict[str, Any]] = {call.operator: {"kernel": "not compared: no time or memory"} for call in calls}
    for operator, why in prove(calls, device).items():
        found[operator] = {"error": why} if why else {"kernel": "agrees with its reference"}
    return found


def run(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Execute a specification as `bench.worker` has them: `MACHINE`, one of `KINDS`, or one of `PROVED`.

    Returns:
        "status", "reason" and "items": name → figures, with "error" in those that failed.
    """
    kind, device = spec["configuration"], torch.device(spec["device"])
    geometry, resolution = Geometry(**spec["geometry"]), spec["sizes"][0][0]
    items: dict[str, dict[str, Any]] = {}
    if kind == MACHINE:
        result = worker.run({"level": MACHINE, "device": spec["device"]})
        items[MACHINE] = {"error": result["reason"]} if result["status"] != OK else result["machine"]
        if items[MACHINE].get("kernels_refused"):
            items[MACHINE]["error"] = f"our kernels do not run here: {items[MACHINE]['kernels_refused']}"
    elif kind in PROVED:
        items = prove_operators(kind, geometry, resolution, device)
    else:
        hidden, tokens = geometry.hidden, token_count(resolution)
        calls = CPU_CALLS if device.type == "cpu" else PRODUCT_CALLS
        for k, n in ((hidden * wide_in, hidden * wide_out) for wide_in, wide_out in SHAPES):
            items[f"{k} -> {n}"] = try_product(kind, tokens, n, k, device, calls)
    wrong = [f"{name}: {figures['error']}" for name, figures in items.items() if "error" in figures]
    return {"status": FAILED if wrong else OK, "reason": "; ".join(wrong), "items": items}


def report(device: str = "cuda") -> Iterator[str]:
    """The lines of a report of a problem, each as soon as it is known: versions, card, driver, refusals and times."""
    spec = {"device": device, "geometry": Geometry()._asdict(), "sizes": [[RESOLUTION, 1]]}
    for kind in (MACHINE, *KINDS, *PROVED):
        result = start_worker({**spec, "configuration": kind}, KIND_SECONDS, __name__)
        if "items" not in result:
            yield f"{kind}: {result['reason']}"
        for name, figures in result.get("items", {}).items():
            texts = [f"{key} {x:.4g}" if isinstance(x, float) else f"{key} {x}" for key, x in figures.items()]
            yield f"{kind}, {name}: {', '.join(texts)}"


def main() -> None:
    """The process of a kind."""
    spec_file, result_file = map(Path, sys.argv[1:3])
    result_file.write_text(json.dumps(run(json.loads(spec_file.read_text(encoding="utf-8")))), encoding="utf-8")


if __name__ == "__main__":
    main()
