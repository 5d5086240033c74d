"""What this GPU does with FLUX.1's matrix products: `coat-flux doctor --gpu`, and the first stage of gpu_check.py.

A product is y = x Wᵀ of random values at FLUX.1-dev's shapes, quantized with real scales, compared with the fp32
product of the same codes, and timed with a cold cache. Each kind has a process of its own (`python -m <this module>
SPEC RESULT`), since a refused product may leave CUDA unusable.
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
from coat_core.ops.scaled_mm import int8_mm, scaled_mm
from coat_core.quantize import quantize, sqnr_db

from ..bench import worker
from ..bench.configurations import CPU_CALLS, FAILED, OK
from ..bench.limits import Geometry, token_count
from ..bench.measure import SEED, time_calls
from ..bench.runner import start_worker
from .probes import driver_names

RESOLUTION, KIND_SECONDS = 1024, 60.0
# in and out features over d: output; q k v in one; MLP in, out; single block: q k v and MLP in, output
SHAPES = ((1, 1), (1, 3), (1, 4), (4, 1), (1, 7), (5, 1))
PRODUCT_CALLS = (5, 20)  # for warm-up, and timed
# Codes multiply exactly and sums round to 2^-13 or better, so results have 40 dB and more; rounding to e4m3 costs
# about 30, and a product below that is worse than its inputs.
PRODUCT_FLOOR_DB = 30.0
MACHINE = "machine"
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
        `us`, `tflops` and `db`, and "error" where its values are wrong; "refused" alone where it does not run.
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
        return {"refused": f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"}
    del exact
    ms = median(time_calls(call, device, *calls, cold=True)["samples_ms"])
    figures = {"us": 1e3 * ms, "tflops": 2.0 * m * n * k / ms / 1e9, "db": decibels}
    if not decibels >= PRODUCT_FLOOR_DB:
        figures["error"] = f"wrong values: {decibels:.1f} dB, must be {PRODUCT_FLOOR_DB:g} or more"
    return figures


def run(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Execute a specification as `bench.worker` has them: `MACHINE`, or all shapes of one of `KINDS`.

    Returns:
        "status" and "reason", and "machine", or "products" by shape.
    """
    kind, device = spec["configuration"], torch.device(spec["device"])
    if kind == MACHINE:
        result = worker.run({"level": MACHINE, "device": spec["device"]})
        if result["status"] == OK and (refused := result["machine"].get("kernels_refused")):
            result |= {"status": FAILED, "reason": f"our kernels do not run here: {refused}"}
        return result | {"drivers": driver_names()}
    geometry, tokens = Geometry(**spec["geometry"]), token_count(spec["sizes"][0][0])
    calls = CPU_CALLS if device.type == "cpu" else PRODUCT_CALLS
    products = {}
    for wide_in, wide_out in SHAPES:
        k, n = wide_in * geometry.hidden, wide_out * geometry.hidden
        products[f"{k} -> {n}"] = try_product(kind, tokens, n, k, device, calls)
    wrong = [f"{name}: {figures['error']}" for name, figures in products.items() if "error" in figures]
    if kind == "bf16":
        wrong += [f"{name}: {figures['refused']}" for name, figures in products.items() if "refused" in figures]
    return {"status": FAILED if wrong else OK, "reason": "; ".join(wrong), "products": products}


def report(device: str = "cuda") -> Iterator[str]:
    """The lines of a report of a problem, each as soon as it is known: versions, card, driver, refusals and times."""
    spec = {"device": device, "geometry": Geometry()._asdict(), "sizes": [[RESOLUTION, 1]]}
    for kind in (MACHINE, *KINDS):
        result = start_worker({**spec, "configuration": kind}, KIND_SECONDS, __name__)
        for key, value in {**result.get("machine", {}), "drivers": result.get("drivers")}.items():
            if value:
                yield f"{key}: {value}"
        for shape, figures in result.get("products", {}).items():
            yield f"product {shape}, {kind}: {describe(figures)}"
        if result["status"] != OK:
            yield f"{kind}: {result['reason']}"


def describe(figures: Mapping[str, Any]) -> str:
    """The figures of a product as text."""
    if "refused" in figures:
        return f"refused: {figures['refused']}"
    return f"{figures['us']:.0f} us, {figures['tflops']:.0f} TFLOP/s, {figures['db']:.1f} dB"


def main() -> None:
    """The process of a kind."""
    spec_file, result_file = map(Path, sys.argv[1:3])
    result_file.write_text(json.dumps(run(json.loads(spec_file.read_text(encoding="utf-8")))), encoding="utf-8")


if __name__ == "__main__":
    main()
