"""One configuration in a process of its own: `python -m coat_flux.bench.worker SPEC RESULT`, both JSON files.

SPEC: {"level", "configuration", "sizes": [[resolution, batch], ...], "geometry": {...}, "device", "repeats"}, or
{"level": "machine", "device"}; and "training_only" as in `Setting`. RESULT: {"status", ...}. With "configurations",
several by name, RESULT is {name: result}, written after each; those with the same weights share a model, and on a GPU
the process ends with the first that fails, since nothing after it could be trusted. Status is

    ok              "measurements", and "said": what the libraries logged
    cannot          "reason": a baseline that does not run on this machine
    out of memory   "reason"
    failed          "reason", "traceback": an error of ours
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from coat_core.ops.attention import chosen_kernel
from coat_core.ops.attention_trial import kernel_obstacles
from coat_core.ops.dispatch import triton_obstacle
from coat_core.ops.scaled_mm import unsupported_reason

from ..base.files import write_file
from .configurations import CANNOT, FAILED, OK, OUT_OF_MEMORY, named
from .limits import HEAD_DIM, Geometry, Limit, known_limit, token_count
from .timing import ALLOCATED, RESIDENT, Setting, time_calls

REASON_LENGTH = 300
PACKAGES = (
    *("torch", "triton", "coat-flux", "diffusers", "transformers", "peft", "accelerate", "bitsandbytes"),
    *("optimum-quanto", "torchao"),
)
GEMM_SIDE = {"cuda": 8192, "cpu": 1024}
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
REPEATS = 5


class _LogLines(logging.Handler):
    """Collects log lines, each once."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line."""
        line = record.getMessage()
        if line not in self.lines:
            self.lines.append(line)


class _Missing(Exception):
    """A package that a baseline needs is not installed, or the GPU."""


class KernelsRefused(Exception):
    """Our kernels failed their self-test here: their references would be timed in their place."""


def run(spec: dict[str, Any], kept: dict[str, Any] | None = None) -> dict[str, Any]:
    """Do what the specification asks for; every error becomes a result.

    Args:
        spec: of one configuration, or of the machine.
        kept: what configurations of one process share; see `models.model_of`.
    """
    log = _LogLines()
    for package in ("coat_core", __package__.rsplit(".", 1)[0]):
        logging.getLogger(package).addHandler(log)
        logging.getLogger(package).setLevel(logging.INFO)
    try:
        device = torch.device(spec["device"])
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)
        if spec["level"] == "machine":
            return {"status": OK, "machine": _machine(device)}
        return {"status": OK, "measurements": _measured(spec, device, kept), "said": log.lines}
    except Exception as error:
        kind, reason = type(error).__name__, str(error).strip().partition("\n")[0]
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():  # other allocators' too
            status = OUT_OF_MEMORY
        elif isinstance(error, _Missing) or _may_be_missing(spec):
            status = CANNOT
        else:
            status = FAILED
        text = reason if isinstance(error, _Missing) else f"{kind}: {reason}"
        tail = "" if isinstance(error, _Missing) else traceback.format_exc()
        text = text if len(text) <= REASON_LENGTH else text[: REASON_LENGTH - 1] + "…"
        return {"status": status, "reason": text, "traceback": tail, "said": log.lines}


def run_together(spec: dict[str, Any], result_file: Path) -> None:
    """Measure "configurations" one after the other, and write what is known after each."""
    kept: dict[str, Any] = {}
    results: dict[str, Any] = {}
    for name in spec["configurations"]:
        found = results[name] = run({**spec, "configuration": name}, kept)
        write_file(result_file, json.dumps(results))
        broken = found["status"] == FAILED or (found["status"] == CANNOT and found["traceback"])
        if broken and torch.device(spec["device"]).type == "cuda":
            return


def _may_be_missing(spec: dict[str, Any]) -> bool:
    return spec["level"] != "machine" and named(spec["level"])[spec["configuration"]].may_be_missing


def _measured(spec: dict[str, Any], device: torch.device, kept: dict[str, Any] | None) -> list[dict[str, Any]]:
    row = named(spec["level"])[spec["configuration"]]
    if row.gpu_only and device.type != "cuda":
        raise _Missing("needs a GPU")
    for package in row.needs:
        if not _is_installed(package):
            raise _Missing(f"needs the package {package}, which is not installed")
    if row.runs_our_kernels and device.type == "cuda":
        reason = triton_obstacle(current(device))
        if reason is not None:
            raise KernelsRefused(f"{reason}; their references would be timed as COAT")
    if spec["level"] == "optimizer":
        from .optimizers import measure_optimizer as measure
    else:
        from .levels import MEASURE

        measure = MEASURE[spec["level"]]
    torch.manual_seed(0)
    sizes = tuple((resolution, batch) for resolution, batch in spec["sizes"])
    setting = Setting(
        Geometry(**spec["geometry"]),
        sizes,
        device,
        spec["repeats"],
        spec.get("training_only", False),
        {} if kept is None else kept,
    )
    plain = [asdict(found) for found in measure(row, setting)]
    return [{**found.pop("timing"), **found} for found in plain]


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the parent, optimum
        return False


def _machine(device: torch.device) -> dict[str, Any]:
    """Versions, the device, and how fast it could be."""
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine()
    limit = (known_limit(name) if on_gpu else None) or _measured_limit(device)
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    about: dict[str, Any] = {
        "device": name,
        "device_type": device.type,
        "memory": ALLOCATED if on_gpu else RESIDENT,
        "limit": asdict(limit),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
    }
    if on_gpu:
        properties = torch.cuda.get_device_properties(device)
        about["device_memory_bytes"] = properties.total_memory
        about["capability"] = f"sm_{properties.major}{properties.minor}"
        about["cuda"] = torch.version.cuda
        about["cudnn"] = torch.backends.cudnn.version()
        about |= _choices(current(device))
    return about


def _choices(device: torch.device) -> dict[str, Any]:
    """What is decided on this GPU: whether our kernels and FP8 products run, which kernel attention takes."""
    shapes = {str(resolution): (1, token_count(resolution), Geometry().heads, HEAD_DIM) for resolution in (512, 1024)}
    heads = {
        name: torch.empty(shape, device=device, dtype=torch.bfloat16).transpose(1, 2) for name, shape in shapes.items()
    }
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    products = {
        f"{a} x {b}, {'per_row' if rows else 'per_tensor'}": unsupported_reason(device, a, b, rows)
        for a, b in ((e4m3, e4m3), (e5m2, e4m3))
        for rows in (False, True)
    }
    refused = triton_obstacle(device)
    return {
        "attention": {name: chosen_kernel(x, x, x) for name, x in heads.items()},
        "attention_kernels": kernel_obstacles(heads["1024"]),
        "fp8_products": {name.replace("torch.", ""): reason or "ok" for name, reason in products.items()},
        "kernels_refused": refused,
        "self_test": "" if refused is None else _self_test(device),
    }


def _self_test(device: torch.device) -> str:
    """The whole of the self-test's error, of which `triton_obstacle` keeps a line."""
    try:
        from coat_core.ops.quantize_kernel import agrees_with_reference

        return f"agrees with the reference: {agrees_with_reference(device)}"
    except Exception:  # as `triton_obstacle`
        return traceback.format_exc()


def current(device: torch.device) -> torch.device:
    """The device with its index."""
    return torch.device(device.type, torch.cuda.current_device()) if device.index is None else device


def _measured_limit(device: torch.device) -> Limit:
    """The rate of a large bf16 matrix product, and of a large copy, on this device: the best of a few."""

    def seconds(call: Callable[[], object]) -> float:
        return min(time_calls(call, device, 1, REPEATS).samples_ms) / 1e3

    side, copied = GEMM_SIDE[device.type], COPY_BYTES[device.type]
    draw = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, device=device, generator=draw).to(torch.bfloat16) for _ in range(2))
    product = 2.0 * side**3 / seconds(lambda: a @ b) / 1e12
    source = torch.randn(copied // 4, device=device, generator=draw)
    target = torch.empty_like(source)
    copy = 2.0 * copied / seconds(lambda: target.copy_(source)) / 1e9
    return Limit(product, product, copy, f"measured: a {side}³ bf16 matrix product and a copy; its peak is not known")


def main() -> None:
    """Read the specification, run it, write the result."""
    spec_file, result_file = (Path(argument) for argument in sys.argv[1:3])
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    if "configurations" in spec:
        run_together(spec, result_file)
        return
    result = run(spec)
    result_file.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
