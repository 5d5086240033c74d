"""One configuration in its own process: `python -m coat_flux.bench.worker SPEC RESULT`, both JSON files.

SPEC: {"level", "configuration", "sizes": [[resolution, batch], ...], "geometry": {...}, "device", "repeats"}, or
{"level": "machine", "device"}. RESULT: {"status", ...}. Status is

    ok              "measurements"
    cannot          "reason": a baseline that does not run on this machine
    out of memory   "reason"
    failed          "reason", "traceback": an error of ours
"""

from __future__ import annotations

import json
import platform
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from coat_core.ops.dispatch import triton_obstacle

from ..base.environment import version_of
from ..base.names import COAT_OPTIMIZER
from ..config.check import is_installed
from ..plan.speed import DEVICES
from .configurations import CALLS, CANNOT, CPU_CALLS, FAILED, OK, OPTIMIZER, OUT_OF_MEMORY, named
from .limits import Geometry

Measure = Callable[..., Iterable[dict[str, Any]]]

REASON_LENGTH = 300
PACKAGES = (
    *("torch", "triton", "coat-flux", "diffusers", "transformers", "peft", "accelerate", "bitsandbytes"),
    *("optimum-quanto", "torchao"),
)


class MissingError(Exception):
    """The GPU, or a package that a baseline needs, is missing."""


def run(spec: dict[str, Any], measure: Measure | None = None) -> dict[str, Any]:
    """Execute a specification, with `measure` in place of its level's function; errors become results."""
    row = None if spec["level"] == "machine" else named(spec["level"])[spec["configuration"]]
    try:
        device = torch.device(spec["device"])
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)
        if row is None:
            return {"status": OK, "machine": _machine(device)}
        records_graphs = row.captures or row.compile_mode not in ("", "default")
        if records_graphs and device.type != "cuda":
            raise MissingError("needs a GPU")
        for package in row.needs:
            if not is_installed(package):
                raise MissingError(f"needs the package {package}, which is not installed")
        ours = row.coat is not None or row.name == COAT_OPTIMIZER
        if ours and device.type == "cuda":
            obstacle = triton_obstacle(torch.device("cuda", torch.cuda.current_device()))
            if obstacle is not None:
                raise RuntimeError(f"{obstacle}; the references of our kernels would be timed as COAT")
        torch.manual_seed(0)
        warmup, repeats = CALLS[spec["level"]] if device.type == "cuda" else CPU_CALLS
        if measure is None:
            from .measure import measure_optimizer, measure_steps

            measure = measure_optimizer if spec["level"] == OPTIMIZER else measure_steps
        calls = warmup, spec["repeats"] or repeats
        measured = measure(row, Geometry(**spec["geometry"]), spec["sizes"], device, calls)
        return {"status": OK, "measurements": list(measured)}
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        status = FAILED
        if isinstance(error, MissingError):
            status, reason = CANNOT, str(error)
        elif "out of memory" in str(error).lower():  # of any allocator
            status = OUT_OF_MEMORY
        elif row is not None and row.coat is None and (row.needs or row.compile_mode):
            status = CANNOT  # a baseline of others, which need not run on every machine
        return {"status": status, "reason": reason[:REASON_LENGTH], "traceback": traceback.format_exc()}


def _machine(device: torch.device) -> dict[str, Any]:
    about: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "device_type": device.type,
        "memory": "resident set of the process",
        "limit": None,
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {package: version_of(package) for package in PACKAGES},
    }
    if device.type != "cuda":
        return about
    properties = torch.cuda.get_device_properties(device)
    card = DEVICES.get(properties.name)
    return about | {
        "device": properties.name,
        "memory": "allocated on the device",
        "limit": card and [card.bf16_tflops, card.fp8_tflops, card.gb_per_second],
        "device_memory_bytes": properties.total_memory,
        "capability": f"sm_{properties.major}{properties.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "kernels_refused": triton_obstacle(torch.device("cuda", torch.cuda.current_device())),
    }


def main(run: Callable[[dict[str, Any]], dict[str, Any]] = run) -> None:
    """Read the specification, run it, write the result."""
    spec_file, result_file = map(Path, sys.argv[1:3])
    result = run(json.loads(spec_file.read_text(encoding="utf-8")))
    result_file.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
