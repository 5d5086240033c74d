"""The NVIDIA GPUs: driver, memory, FP8 products and their speed, Triton's kernels, attention kernels."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from statistics import fmean
from typing import TYPE_CHECKING

from . import Line, absent, bad, good

if TYPE_CHECKING:
    import torch

FIRST_FP8_GEMM = (8, 9)
WITHOUT_FP8 = "weights and products are INT8 (coat.fallback; from 7.5 on), with fallback: bf16 products run in bf16"
SIDE = {"cuda": 4096, "cpu": 64}  # of the square matrices
ATTENTION_TOKENS, ATTENTION_HEADS, HEAD_DIM = 512, 4, 128
SECONDS_EACH = 0.25  # of multiplying, for each of three kinds
NO_GPU = "no NVIDIA GPU here"
TRITON_PACKAGES = ("triton", "triton-windows", "pytorch-triton")


def driver_names() -> list[str]:
    """`<name>, driver <version>` of the GPUs that the driver sees; empty without a driver."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rsplit(",", 1) for line in answer.stdout.splitlines() if "," in line]
    return [f"{name.strip()}, driver {version.strip()}" for name, version in rows]


def cards() -> Iterator[Line]:
    """Name, compute capability and memory of every GPU, or why torch can use none."""
    import torch

    names = driver_names()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    if not torch.cuda.is_available():
        if not (names and torch.version.cuda):
            yield absent("GPU", NO_GPU)
        elif hidden:
            yield bad("GPU", f"{names[0]}, hidden by CUDA_VISIBLE_DEVICES", "unset it to train there")
        else:
            why = "no reason given"
            try:
                torch.cuda.init()
            except (RuntimeError, AssertionError) as error:
                why = " ".join(str(error).split())[:200]
            remedy = f"install a driver for CUDA {torch.version.cuda}, or torch for the CUDA that nvidia-smi names"
            yield bad("GPU", f"{names[0]}, but torch cannot use it ({why})", remedy, stops=True)
        return
    for index in range(torch.cuda.device_count()):
        name, (major, minor) = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        driver = f", {names[index].rsplit(', ', 1)[1]}" if index < len(names) else ""
        text = f"{name}, compute capability {major}.{minor}{driver}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        if free < total / 2:
            yield bad(f"GPU {index}", text, "end what else uses it: nvidia-smi lists it")
        else:
            yield good(f"GPU {index}", text)


def fp8_gemms() -> Iterator[Line]:
    """A second of matrix products on every GPU: FP8 with both scalings, and bf16 to compare with."""
    import torch

    if not torch.cuda.is_available():
        yield absent("FP8", f"{NO_GPU}; on a CPU FP8 GEMMs are computed in fp32, which is slow")
        return
    for index in range(torch.cuda.device_count()):
        subject, capability = f"FP8 on GPU {index}", torch.cuda.get_device_capability(index)
        if capability < FIRST_FP8_GEMM:
            version = f"{capability[0]}.{capability[1]}"
            yield absent(subject, f"compute capability {version} has no FP8 tensor cores (8.9 has): {WITHOUT_FP8}")
            continue
        texts = []
        for name, rate in rates(torch.device("cuda", index)).items():
            if isinstance(rate, float):
                texts.append(f"{name} {rate:,.1f} TFLOP/s")
            else:
                remedy = "update torch and the driver; until then such layers run in bf16"
                yield bad(subject, f"{name} GEMM does not run: {rate}", remedy, stops=name == "bf16")
        if texts:
            yield good(subject, ", ".join(texts))


def rates(device: torch.device) -> dict[str, float | str]:
    """TFLOP/s of square matrix products by kind, or why a kind does not run."""
    import torch

    from coat_core.ops.scaled_mm import scaled_mm, unsupported_reason

    side = SIDE[device.type]
    x = torch.randn(side, side, device=device)
    half, codes = x.to(torch.bfloat16), x.to(torch.float8_e4m3fn)
    one, ones = torch.ones((), device=device), torch.ones(side, 1, device=device)
    kinds = {
        "per_tensor": (codes, one),
        "per_row": (codes, ones),
        "per_tensor e5m2 x e4m3": (x.to(torch.float8_e5m2), one),
    }
    result: dict[str, float | str] = {}
    for name, (first, scale) in kinds.items():

        def multiply(first: torch.Tensor = first, scale: torch.Tensor = scale) -> torch.Tensor:
            return scaled_mm(first, scale, codes, scale, None, torch.bfloat16, True)

        reason = unsupported_reason(device, first.dtype, codes.dtype, name == "per_row")
        result[name] = reason or _tflops(multiply, side, device)
    try:
        result["bf16"] = _tflops(lambda: half @ half.t(), side, device)
    except RuntimeError as error:  # such as a torch that was not built for this card
        result["bf16"] = str(error).splitlines()[0]
    return result


def _tflops(call: Callable[[], object], side: int, device: torch.device) -> float:
    from ..bench.timing import time_calls

    once_ms = fmean(time_calls(call, device, 3, 3).samples_ms)
    repeats = max(1, min(10_000, int(1e3 * SECONDS_EACH / max(once_ms, 1e-6))))
    return 2.0 * side**3 / fmean(time_calls(call, device, 1, repeats).samples_ms) / 1e9


def triton() -> Iterator[Line]:
    """Whether a Triton kernel compiles, runs and agrees with its reference."""
    import torch

    from coat_core.ops.dispatch import triton_obstacle

    version = _triton_version()
    if not torch.cuda.is_available():
        yield absent("Triton", f"{version or 'not installed'}; {NO_GPU}, the reference in PyTorch runs")
        return
    if os.environ.get("TRITON_INTERPRET") == "1":
        yield bad("Triton", "TRITON_INTERPRET=1: kernels run in Python, thousands of times slower", "unset it")
        return
    for index in range(torch.cuda.device_count()):
        reason = triton_obstacle(torch.device("cuda", index))
        if reason is None:
            yield good(f"Triton on GPU {index}", f"{version}, a kernel compiles, runs and agrees with its reference")
        else:
            text = f"{version or 'not installed'}, the slower reference runs: {reason}"
            name = "triton-windows" if os.name == "nt" else "triton"
            remedy = f"pip install {name}" if version is None else f"use the {name} that belongs to this torch"
            yield bad(f"Triton on GPU {index}", text, remedy)


def _triton_version() -> str | None:
    for package in TRITON_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return None


def attention() -> Iterator[Line]:
    """Which attention kernels run on every GPU, forward and backward, and agree with plain matrix products."""
    import torch

    from coat_core.ops.attention import chosen_kernel
    from coat_core.ops.attention_trial import kernel_obstacles

    if not torch.cuda.is_available():
        yield absent("attention", f"{NO_GPU}; torch's kernel for a CPU runs")
        return
    for index in range(torch.cuda.device_count()):
        shape = 1, ATTENTION_TOKENS, ATTENTION_HEADS, HEAD_DIM
        q = torch.empty(shape, dtype=torch.bfloat16, device=torch.device("cuda", index)).transpose(1, 2)
        with torch.cuda.device(index):
            own, obstacles = chosen_kernel(q, q, q), kernel_obstacles(q)
        run = ", ".join(kernel for kernel, reason in obstacles.items() if reason is None)
        others = "".join(f"; {kernel}: {reason}" for kernel, reason in obstacles.items() if reason is not None)
        yield good(f"attention on GPU {index}", f"{run or 'plain matrix products'}, torch chooses {own}{others}")
