"""What keeps a GPU from its full speed or memory here, and what to do: for `doctor` and the start of a run."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sysconfig
from contextlib import suppress
from pathlib import Path

import torch

TRITON = ("triton", "triton-windows", "pytorch-triton")
COMPILERS = ("cc", "gcc", "clang")
CONTEXT_BYTES = 0.6e9  # of a process on a GPU, before its first tensor
WINDOWS = os.name == "nt"

Problem = tuple[str, str]  # what is wrong, and its remedy


def version_of(*packages: str) -> str | None:
    """The version of the first of these packages that is installed; None without any."""
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return None


def triton_problem() -> Problem | None:
    """What Triton lacks to compile kernels, or that it is not the one which torch is tested with."""
    version, name = version_of(*TRITON), "triton-windows" if WINDOWS else "triton"
    pinned = re.search(r"^triton==(\d+\.\d+)", "\n".join(importlib.metadata.requires("torch") or []), re.MULTILINE)
    install = f"pip install '{name}=={pinned[1]}.*'" if pinned else f"pip install {name}"
    if version is None:
        return "triton is not installed", install
    if pinned and not f"{version}.".startswith(f"{pinned[1]}."):
        return f"triton {version} is not the one of torch {torch.__version__}, {pinned[1]}", install
    if WINDOWS:  # triton-windows brings a compiler and headers
        return None
    if not any(map(shutil.which, (os.environ.get("CC", ""), *COMPILERS))):
        return "no C compiler, with which Triton builds a launcher for each kernel", "install gcc, or set CC"
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        return f"no Python.h in {headers}, which Triton's launchers need", "install python3-dev or its like"
    return None


def driver_problem() -> Problem:
    """Why torch cannot use the GPU, by its own words."""
    reason = "no reason given"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:200]
    remedy = f"install a driver for CUDA {torch.version.cuda}, or torch for the CUDA that nvidia-smi names"
    return f"torch cannot use it ({reason})", remedy


def display_problem(device: torch.device) -> Problem | None:
    """That other programs hold memory of this GPU, as a display does, about 1 GB."""
    free, total = torch.cuda.mem_get_info(device)
    held = total - free - torch.cuda.memory_reserved(device) - CONTEXT_BYTES
    text = f"a display or other programs hold about {held / 1e9:.1f} of its {total / 1e9:.1f} GB"
    remedy = "end them (nvidia-smi lists them), or attach the display to another card"
    return (text, remedy) if held > CONTEXT_BYTES else None


def gpu_notes(device: torch.device) -> list[str]:
    """Lines for the start of a run."""
    problems = (triton_problem(), display_problem(device)) if device.type == "cuda" else ()
    return [f"{device}: {'; '.join(problem)}" for problem in problems if problem is not None]
