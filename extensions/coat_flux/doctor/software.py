"""Python, torch and the packages the engine needs."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from . import gpu
from .lines import Line, bad, good

if TYPE_CHECKING:
    from packaging.requirements import Requirement

FIRST_PYTHON = (3, 10)
TORCH_WHEELS = "https://download.pytorch.org/whl/cu130"
DISTRIBUTION = "coat-flux"
SHOWN = ("diffusers", "transformers", "peft", "accelerate", "safetensors")
REQUIRED = (*SHOWN, "numpy", "pillow", "psutil", "pyyaml", "tqdm")  # asked for where the bounds are not known


def python() -> Iterator[Line]:
    """Version and place of the interpreter."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < FIRST_PYTHON:
        yield bad("Python", version, f"use {'.'.join(map(str, FIRST_PYTHON))} or newer", stops=True)
    else:
        yield good("Python", f"{version}, {sys.executable}")


def torch_build() -> Iterator[Line]:
    """Version of torch, and whether it was built for the GPU that is here."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: one of its libraries does not load
        yield bad("torch", f"cannot be imported ({error})", f"pip install torch --index-url {TORCH_WHEELS}", stops=True)
        return
    version, cuda = torch.__version__, torch.version.cuda
    if cuda:
        yield good("torch", f"{version}, built for CUDA {cuda}")
    elif getattr(torch.version, "hip", None):
        yield bad("torch", f"{version}, built for AMD's ROCm", "COAT-FLUX is tested on NVIDIA only; FP8 may not work")
    elif names := gpu.driver_names():
        yield bad(
            "torch",
            f"{version} is built without CUDA, but this machine has {names[0]}",
            f"pip install --force-reinstall torch=={version.split('+')[0]} --index-url {TORCH_WHEELS}",
            stops=True,
        )
    else:
        yield good("torch", f"{version}, built for the CPU")


def packages() -> Iterator[Line]:
    """Installed versions against the bounds of setup.py."""
    wanted = requirements()
    found = {one.name: _version(one.name) for one in wanted}
    for one in wanted:
        version = found[one.name]
        if version is None:
            yield bad(one.name, "not installed", f"pip install '{one.name}{one.specifier}'", stops=True)
        elif not one.specifier.contains(version, prereleases=True):
            remedy = f"pip install '{one.name}{one.specifier}'"
            yield bad(one.name, f"{version}: must be {one.specifier}", remedy, stops=True)
    shown = ", ".join(f"{name} {found[name]}" for name in SHOWN if found.get(name))
    if shown:
        yield good("packages", f"{shown}; {len(wanted)} looked at")


def requirements() -> list[Requirement]:
    """What the engine needs besides torch: setup.py's bounds, or bare names where the folder is linked without pip."""
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return [Requirement(name) for name in REQUIRED]
    given = [Requirement(line) for line in lines]
    return [one for one in given if one.name != "torch" and (one.marker is None or one.marker.evaluate({"extra": ""}))]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
