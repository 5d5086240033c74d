"""What keeps a GPU from its full speed or memory here, and what to do: for `doctor` and the start of a run."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

TRITON_PACKAGES = ("triton", "triton-windows", "pytorch-triton")
COMPILERS = ("cc", "gcc", "clang")  # Triton takes the first of CC and these
CONTEXT_BYTES = 0.6e9  # of a process on a GPU, before its first tensor
WINDOWS = os.name == "nt"


class Problem(NamedTuple):
    """What is wrong, and its remedy."""

    text: str
    remedy: str


def triton_version() -> str | None:
    """Version of the installed triton, by whatever name."""
    for package in TRITON_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return None


def triton_problem() -> Problem | None:
    """Why Triton's kernels would not compile here, or compile with a triton that torch was not tested with."""
    from packaging.requirements import Requirement

    version, name = triton_version(), "triton-windows" if WINDOWS else "triton"
    wanted = [line for line in map(Requirement, importlib.metadata.requires("torch") or []) if line.name == "triton"]
    pinned = next((str(bound.version) for line in wanted for bound in line.specifier), "")
    series = ".".join(pinned.split(".")[:2])
    install = f"pip install '{name}=={series}.*'" if series else f"pip install {name}"
    if version is None:
        return Problem("triton is not installed", install)
    if series and version.split(".")[:2] != series.split("."):
        return Problem(f"triton {version} is not the one of torch {torch.__version__}, {pinned}", install)
    if WINDOWS:  # triton-windows brings a compiler and headers
        return None
    if not any(map(shutil.which, (os.environ.get("CC") or COMPILERS[0], *COMPILERS))):
        return Problem("no C compiler, with which Triton builds a launcher for each kernel", "install gcc, or set CC")
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        return Problem(f"no Python.h in {headers}, which Triton's launchers need", "install python3-dev or its like")
    return None


def driver_problem() -> Problem | None:
    """Why a torch that is built for CUDA cannot use the GPU, by its own words."""
    if torch.version.cuda is None or torch.cuda.is_available():
        return None
    reason = "no reason given"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:200]
    remedy = f"install a driver for CUDA {torch.version.cuda}, or torch for the CUDA that nvidia-smi names"
    return Problem(f"torch cannot use it ({reason})", remedy)


def display_problem(device: torch.device) -> Problem | None:
    """That other programs hold memory of this GPU, as a display does, about 1 GB."""
    free, total = torch.cuda.mem_get_info(device)
    held = total - free - torch.cuda.memory_reserved(device) - CONTEXT_BYTES
    if held < CONTEXT_BYTES:
        return None
    text = f"a display or other programs hold about {held / 1e9:.1f} of its {total / 1e9:.1f} GB"
    return Problem(text, "end them (nvidia-smi lists them), or attach the display to another card")


def gpu_notes(device: torch.device) -> list[str]:
    """Lines for the start of a run."""
    if device.type != "cuda":
        return []
    found = (triton_problem(), display_problem(device))
    return [f"{device}: {problem.text}; {problem.remedy}" for problem in found if problem is not None]
