"""Probes of everything but the GPU: Python, torch, packages, memory, disk and the model."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from . import Line, absent, bad, good, gpu

if TYPE_CHECKING:
    from packaging.requirements import Requirement

FIRST_PYTHON = (3, 10)
TORCH_WHEELS = "https://download.pytorch.org/whl/cu130"
DISTRIBUTION = "coat-flux"
SHOWN = ("diffusers", "transformers", "peft", "accelerate", "safetensors")
REQUIRED = (*SHOWN, "numpy", "pillow", "psutil", "pyyaml", "tqdm")  # if the bounds are unknown
MODEL = "black-forest-labs/FLUX.1-dev"
MODEL_BYTES = 33.8e9  # transformer 23.8, T5-XXL 9.5, CLIP-L and VAE 0.5
RAM_BYTES, RUN_BYTES = 13e9, 3e9  # `coat-flux plan configs/flux_clothing_coat.yaml`: CPU memory; saves, caches
CGROUP = Path("/sys/fs/cgroup")


def python() -> Iterator[Line]:
    """Version and path of the interpreter."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < FIRST_PYTHON:
        yield bad("Python", version, f"use {'.'.join(map(str, FIRST_PYTHON))} or newer", stops=True)
    else:
        yield good("Python", f"{version}, {sys.executable}")


def torch_build() -> Iterator[Line]:
    """Version of torch, and whether it was built for this GPU."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: one of its libraries does not load
        yield bad("torch", f"cannot be imported ({error})", f"pip install torch --index-url {TORCH_WHEELS}", stops=True)
        return
    version, names = torch.__version__, gpu.driver_names()
    if torch.version.cuda:
        yield good("torch", f"{version}, built for CUDA {torch.version.cuda}")
    elif getattr(torch.version, "hip", None):
        yield bad("torch", f"{version}, built for AMD's ROCm", "COAT-FLUX is tested on NVIDIA only; FP8 may not work")
    elif names:
        text = f"{version} is built without CUDA, but this machine has {names[0]}"
        wheel = f"torch=={version.split('+')[0]} --index-url {TORCH_WHEELS}"
        yield bad("torch", text, f"pip install --force-reinstall {wheel}", stops=True)
    else:
        yield good("torch", f"{version}, built for the CPU")


def packages() -> Iterator[Line]:
    """Installed versions against the bounds of setup.py."""
    installed = {}
    wanted = requirements()
    for requirement in wanted:
        name, bounds = requirement.name, requirement.specifier
        try:
            installed[name] = importlib.metadata.version(name)
            problem = (
                "" if bounds.contains(installed[name], prereleases=True) else f"{installed[name]}: must be {bounds}"
            )
        except importlib.metadata.PackageNotFoundError:
            problem = "not installed"
        if problem:
            yield bad(name, problem, f"pip install '{name}{bounds}'", stops=True)
    shown = ", ".join(f"{name} {installed[name]}" for name in SHOWN if name in installed)
    if shown:
        yield good("packages", f"{shown}; {len(wanted)} checked")


def requirements() -> list[Requirement]:
    """The engine's packages besides torch: setup.py's bounds, or bare names if the folder is linked without pip."""
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return [Requirement(name) for name in REQUIRED]
    bounds = map(Requirement, lines)
    return [one for one in bounds if one.name != "torch" and (one.marker is None or one.marker.evaluate({"extra": ""}))]


def memory() -> Iterator[Line]:
    """Free RAM, within the container's limit (cgroup v2) if any."""
    import psutil

    now, place = psutil.virtual_memory(), ""
    available, total = float(now.available), float(now.total)
    try:
        limit, used = ((CGROUP / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        rows = dict(row.split() for row in (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
    except OSError:
        limit = "max"
    if limit != "max" and float(limit) < total:
        cached_files = float(rows.get("inactive_file", 0))  # given back when asked for
        available = min(available, float(limit) - float(used) + cached_files)
        total, place = float(limit), " (the container's limit)"
    text = f"{available / 1e9:.1f} of {total / 1e9:.1f} GB RAM free{place}"
    if available < RAM_BYTES:
        needs = f"FLUX.1 takes about {RAM_BYTES / 1e9:.0f} GB (`coat-flux plan CONFIG` has your job's figure)"
        yield bad("memory", text, f"{needs}: end other programs, or add swap")
    else:
        yield good("memory", text)


def disk() -> Iterator[Line]:
    """Free space and write permission, here and in the model cache."""
    model_bytes = 0.0 if missing_files(_snapshot()) == [] else MODEL_BYTES
    places = (
        ("disk here", Path.cwd(), RUN_BYTES, "a run writes about", "train in another folder"),
        ("disk of the model cache", _cache_folder(), model_bytes, "FLUX.1-dev takes", "set HF_HOME to another folder"),
    )
    for name, folder, needed, reason, other in places:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free
        text = f"{free / 1e9:.1f} GB free in {folder}"
        if not os.access(there, os.W_OK):
            yield bad(name, f"{text}, which this user may not write", other)
        elif free < needed:
            yield bad(name, text, f"{reason} {needed / 1e9:.0f} GB: free that, or {other}")
        else:
            yield good(name, text)


def model() -> Iterator[Line]:
    """Whether FLUX.1-dev is in the cache and complete, or else could be downloaded."""
    snapshot = _snapshot()
    missing = missing_files(snapshot)
    size = f"not in the cache, the first run downloads {MODEL_BYTES / 1e9:.0f} GB"
    if missing == []:
        yield good("FLUX.1-dev", f"in the cache: {snapshot}")
    elif missing:
        yield bad("FLUX.1-dev", f"torn download, {missing[0]} is missing", f"hf download {MODEL}")
    elif os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        yield bad("FLUX.1-dev", "not in the cache, and HF_HUB_OFFLINE forbids downloads", "unset it, or give a folder")
    elif not _has_token():
        text = f"{size}, and there is no Hugging Face token"
        licence = f"accept the licence at https://huggingface.co/{MODEL}"
        yield bad("FLUX.1-dev", text, f"{licence}, then `hf auth login`; a local folder needs neither")
    else:
        yield absent("FLUX.1-dev", f"{size}; a token is set, the licence must have been accepted with it")


def missing_files(snapshot: Path | None) -> list[str] | None:
    """Files of the model that the snapshot lacks; None without a snapshot."""
    if snapshot is None:
        return None
    index = snapshot / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    wanted = [snapshot / "model_index.json", snapshot / "vae" / "config.json", index]
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        wanted += [index.parent / name for name in sorted(set(names))]
    return [path.relative_to(snapshot).as_posix() for path in wanted if not path.is_file()]


def _snapshot() -> Path | None:
    folder = _cache_folder() / f"models--{MODEL.replace('/', '--')}" / "snapshots"
    snapshots = [path for path in folder.glob("*") if path.is_dir()]
    return max(snapshots, key=lambda path: path.stat().st_mtime, default=None)


def _cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None
