"""Every probe of `coat-flux doctor`, in the order of its lines; a failing probe does not stop the others.

Torch and other packages are imported where they are probed: they may be missing or broken.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from packaging.requirements import Requirement

    from ..config.findings import Finding

GOOD, BAD, ABSENT = "✓", "✗", "-"
NEEDED = ("Python", "torch", "packages", "GPU")  # training cannot work if these probes fail
FIRST_PYTHON = (3, 10)
TORCH_WHEELS = "https://download.pytorch.org/whl/cu130"
SHOWN = ("diffusers", "transformers", "peft", "accelerate", "safetensors")
REQUIRED = (*SHOWN, "numpy", "pillow", "psutil", "pyyaml", "tqdm")  # if the bounds are unknown
MODEL = "black-forest-labs/FLUX.1-dev"
MODEL_BYTES = 33.7e9  # transformer 23.8, T5-XXL 9.5, CLIP-L and VAE 0.4
RAM_BYTES, RUN_BYTES = 13e9, 3e9  # `coat-flux plan configs/flux_clothing_coat.yaml`: CPU memory; saves, caches
CGROUP = Path("/sys/fs/cgroup")
FIRST_FP8_GEMM = (8, 9)
WITHOUT_FP8 = "products run in INT8 (from 7.5 on), or in bf16 with coat.fallback: bf16"
SIDE = 4096  # of the square matrices
ATTENTION_SHAPE = (1, 512, 4, 128)  # images, tokens, heads, width of a head
NO_GPU = "no NVIDIA GPU here"


@dataclass(frozen=True)
class Line:
    """The result of one probe; `stops`: training cannot work here without the remedy."""

    mark: str
    subject: str
    text: str
    remedy: str = ""
    stops: bool = False

    def __str__(self) -> str:
        return f"{self.mark} {self.subject}: {self.text}" + (f" -> {self.remedy}" if self.remedy else "")


def judged(fine: bool, subject: str, text: str, remedy: str, stops: bool = False) -> Line:
    """A good line, or a bad one with its remedy."""
    return Line(GOOD, subject, text) if fine else Line(BAD, subject, text, remedy, stops)


def diagnose(toolkit_dir: Path | None = None) -> Iterator[Line]:
    """Yield the lines, each as soon as it is known; a probe's exception becomes a line, too."""
    for subject, probe in (*PROBES, ("ai-toolkit", partial(ai_toolkit, toolkit_dir))):
        try:
            yield from probe()
        except Exception as error:  # a broken driver or package can raise anything
            reason = " ".join(str(error).split())[:300] or "no message"
            text = f"could not be checked ({type(error).__name__}: {reason})"
            yield Line(BAD, subject, text, "fix that, and ask again", stops=subject in NEEDED)


def verdict(lines: Sequence[Line]) -> tuple[bool, str]:
    """Whether training can work here, and a sentence that says so."""
    stopping = dict.fromkeys(line.subject for line in lines if line.stops)
    if stopping:
        return False, f"training cannot work here yet: see {', '.join(stopping)}"
    if not any(line.mark != ABSENT and line.subject.startswith("GPU ") for line in lines):
        return True, "training works here on the CPU only: the embedded tiny model in minutes, FLUX.1 in no useful time"
    return True, "training works here"


def python() -> Iterator[Line]:
    """Version and path of the interpreter."""
    version, fine = ".".join(map(str, sys.version_info[:3])), sys.version_info[:2] >= FIRST_PYTHON
    oldest = ".".join(map(str, FIRST_PYTHON))
    yield judged(fine, "Python", f"{version}, {sys.executable}", f"use {oldest} or newer", stops=True)


def torch_build() -> Iterator[Line]:
    """Version of torch, and whether it was built for this GPU."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: one of its libraries does not load
        remedy = f"pip install torch --index-url {TORCH_WHEELS}"
        yield Line(BAD, "torch", f"cannot be imported ({error})", remedy, stops=True)
        return
    version, names = torch.__version__, driver_names()
    if torch.version.cuda:
        yield Line(GOOD, "torch", f"{version}, built for CUDA {torch.version.cuda}")
    elif torch.version.hip:
        yield Line(BAD, "torch", f"{version}, built for AMD's ROCm", "use an NVIDIA GPU: FP8 is tested on those only")
    elif names:
        remedy = f"pip install --force-reinstall torch=={version.split('+')[0]} --index-url {TORCH_WHEELS}"
        yield Line(BAD, "torch", f"{version} is built without CUDA, but there is {names[0]}", remedy, stops=True)
    else:
        yield Line(GOOD, "torch", f"{version}, built for the CPU")


def packages() -> Iterator[Line]:
    """Installed versions against the bounds of setup.py."""
    installed = {}
    wanted = requirements()
    for requirement in wanted:
        name, bounds = requirement.name, requirement.specifier
        problem = "not installed"
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
            problem = f"{installed[name]}: must be {bounds}"
        if name not in installed or not bounds.contains(installed[name], prereleases=True):
            yield Line(BAD, name, problem, f"pip install '{name}{bounds}'", stops=True)
    shown = ", ".join(f"{name} {installed[name]}" for name in SHOWN if name in installed)
    if shown:
        yield Line(GOOD, "packages", f"{shown}; {len(wanted)} checked")


def requirements() -> list[Requirement]:
    """setup.py's bounds besides torch's, or bare names if the folder is linked without pip."""
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires("coat-flux") or []
    except importlib.metadata.PackageNotFoundError:
        return [Requirement(name) for name in REQUIRED]
    bounds = []
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if requirement.name != "torch" and (marker is None or marker.evaluate({"extra": ""})):
            bounds.append(requirement)
    return bounds


def driver_names() -> list[str]:
    """`<name>, driver <version>` of the GPUs that the driver sees; empty without a driver."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rsplit(",", 1) for line in answer.stdout.splitlines() if "," in line]
    return [f"{name.strip()}, driver {version.strip()}" for name, version in rows]


def _gpus() -> list[torch.device]:
    """The GPUs that torch can use."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", index) for index in range(count)]


def cards() -> Iterator[Line]:
    """Name, compute capability and memory of every GPU, or why torch can use none."""
    import torch

    from ..base.environment import display_problem, driver_problem

    names = driver_names()
    for device in _gpus():
        name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        free, total = torch.cuda.mem_get_info(device)
        driver = f", {names[device.index].rsplit(', ', 1)[1]}" if device.index < len(names) else ""
        room = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        text = f"{name}, compute capability {major}.{minor}{driver}, {room}"
        problem, remedy = display_problem(device) or ("", "")
        yield judged(not problem, f"GPU {device.index}", f"{text}: {problem}" if problem else text, remedy)
    if torch.cuda.is_available():
        return
    if not (names and torch.version.cuda):
        yield Line(ABSENT, "GPU", NO_GPU)
    elif os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        yield Line(BAD, "GPU", f"{names[0]}, hidden by CUDA_VISIBLE_DEVICES", "unset it to train there")
    else:
        reason, remedy = driver_problem()
        yield Line(BAD, "GPU", f"{names[0]}, but {reason}", remedy, stops=True)


def fp8_gemms() -> Iterator[Line]:
    """Matrix products of every kind on every GPU: how fast, and whether their values are right."""
    import torch

    from .on_gpu import KINDS, PRODUCT_CALLS, try_product

    if not _gpus():
        yield Line(ABSENT, "FP8", f"{NO_GPU}; on a CPU FP8 GEMMs are computed in fp32, which is slow")
    for device in _gpus():
        subject = f"FP8 on GPU {device.index}"
        capability = torch.cuda.get_device_capability(device)
        if capability < FIRST_FP8_GEMM:
            text = f"compute capability {capability[0]}.{capability[1]} has no FP8 tensor cores"
            yield Line(ABSENT, subject, f"{text}: {WITHOUT_FP8}")
            continue
        speeds = []
        for name in KINDS:
            figures = try_product(name, SIDE, SIDE, SIDE, device, PRODUCT_CALLS)
            problem = figures.get("error") or figures.get("refused")
            if problem is None:
                speeds.append(f"{name} {figures['tflops']:,.1f} TFLOP/s")
            else:
                remedy = "update torch and the driver; until then such layers run in bf16"
                yield Line(BAD, subject, f"{name} GEMM does not run: {problem}", remedy, stops=name == "bf16")
        if speeds:
            yield Line(GOOD, subject, ", ".join(speeds))


def weight_format() -> Iterator[Line]:
    """What `weight.format: auto` takes on every GPU, by the products of FLUX.1's widest linear."""
    from ..blocks.formats import FLUX_SIZES, config_for
    from ..config.coat import AUTO, COATConfig

    config = COATConfig.from_dict({"weight": {"format": AUTO}})
    if not _gpus():
        yield Line(ABSENT, "weight.format", f"{NO_GPU}; {AUTO} is e4m3 on a CPU")
    for device in _gpus():
        picked = config_for(device, config, FLUX_SIZES).chosen
        yield Line(GOOD, f"weight.format on GPU {device.index}", picked.describe(f"{AUTO} is {picked.name}", digits=2))


def triton() -> Iterator[Line]:
    """Whether a Triton kernel compiles, runs and agrees with its reference."""
    from coat_core.ops.dispatch import triton_obstacle

    from ..base.environment import TRITON, triton_problem, version_of

    version = version_of(*TRITON)
    if not _gpus():
        yield Line(ABSENT, "Triton", f"{version or 'not installed'}; {NO_GPU}, the reference in PyTorch runs")
    for device in _gpus():
        subject, reason = f"Triton on GPU {device.index}", triton_obstacle(device)
        if reason is None:
            yield Line(GOOD, subject, f"{version}, a kernel compiles, runs and agrees with its reference")
            continue
        cause, remedy = triton_problem() or ("", "report it, with what `coat-flux doctor --gpu` prints")
        text = f"{version or 'not installed'}, the slower reference runs: {reason}"
        yield Line(BAD, subject, text if cause in text else f"{text}; {cause}", remedy)


def attention() -> Iterator[Line]:
    """Which attention kernels run on every GPU and agree with plain matrix products."""
    import torch

    from coat_core.ops.attention import chosen_kernel, kernel_obstacles

    if not _gpus():
        yield Line(ABSENT, "attention", f"{NO_GPU}; torch's kernel for a CPU runs")
    for device in _gpus():
        q = torch.empty(ATTENTION_SHAPE, dtype=torch.bfloat16, device=device).transpose(1, 2)
        with torch.cuda.device(device):
            own, obstacles = chosen_kernel(q, q, q), kernel_obstacles(q)
        run = ", ".join(kernel for kernel, reason in obstacles.items() if reason is None)
        others = "".join(f"; {kernel}: {reason}" for kernel, reason in obstacles.items() if reason is not None)
        text = f"{run or 'plain matrix products'}, torch chooses {own}{others}"
        yield Line(GOOD, f"attention on GPU {device.index}", text)


def memory() -> Iterator[Line]:
    """Free RAM, within the container's limit (cgroup v2) if any."""
    import psutil

    now, place = psutil.virtual_memory(), ""
    available, total = float(now.available), float(now.total)
    try:
        limit = (CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = (CGROUP / "memory.current").read_text(encoding="ascii")
        rows = dict(row.split() for row in (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
    except OSError:
        limit = "max"
    if limit != "max" and float(limit) < total:
        cached_files = float(rows.get("inactive_file", 0))  # given back when asked for
        available = min(available, float(limit) - float(used) + cached_files)
        total, place = float(limit), " (the container's limit)"
    text = f"{available / 1e9:.1f} of {total / 1e9:.1f} GB RAM free{place}"
    needs = f"FLUX.1 takes about {RAM_BYTES / 1e9:.0f} GB (`coat-flux plan CONFIG` has your job's figure)"
    yield judged(available >= RAM_BYTES, "memory", text, f"{needs}: end other programs, or add swap")


def disk() -> Iterator[Line]:
    """Free space and write permission, here and in the model cache."""
    cache, snapshot, problems = _cached_model()
    model_bytes = MODEL_BYTES if snapshot is None or problems else 0.0
    places = (
        ("disk here", Path.cwd(), RUN_BYTES, "a run writes about", "train in another folder"),
        ("disk of the model cache", cache, model_bytes, "FLUX.1-dev takes", "set HF_HOME to another folder"),
    )
    for name, folder, needed, reason, other in places:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free
        text = f"{free / 1e9:.1f} GB free in {folder}"
        if not os.access(there, os.W_OK):
            yield Line(BAD, name, f"{text}, which this user may not write", other)
        else:
            yield judged(free >= needed, name, text, f"{reason} {needed / 1e9:.0f} GB: free that, or {other}")


def model() -> Iterator[Line]:
    """Whether FLUX.1-dev is in the cache and complete, or else could be downloaded."""
    _, snapshot, problems = _cached_model()
    if problems:
        text, _, remedy = problems[0].text.partition("; ")
        yield Line(BAD, "FLUX.1-dev", text, remedy)
    elif snapshot is not None:
        yield Line(GOOD, "FLUX.1-dev", f"in the cache: {snapshot}")
    else:
        text = f"not in the cache, the first run downloads {MODEL_BYTES / 1e9:.0f} GB; a token is set"
        yield Line(ABSENT, "FLUX.1-dev", text)


def _cached_model() -> tuple[Path, Path | None, list[Finding]]:
    """The cache, its newest snapshot, and what a run would find wrong with that or with a download."""
    from huggingface_hub import constants

    from ..blocks.models.check import check_model
    from ..config.findings import Findings
    from ..config.rules import STANDALONE

    cache = Path(constants.HF_HUB_CACHE)
    snapshots = cache / f"models--{MODEL.replace('/', '--')}" / "snapshots"
    snapshot = max(snapshots.glob("*"), key=lambda path: path.stat().st_mtime, default=None)
    findings = Findings("")
    check_model({"name_or_path": str(snapshot or MODEL), "is_flux": True}, "model", findings, STANDALONE)
    return cache, snapshot, findings.all


def ai_toolkit(folder: Path | None) -> Iterator[Line]:
    """Version of a checkout (`folder`, AI_TOOLKIT_ROOT or here), and our extension in it."""
    from ..config.ai_toolkit_keys import version_of
    from ..trainers.ai_toolkit.host import TESTED_SERIES, TESTED_VERSION
    from ..trainers.ai_toolkit.install import CHECKOUT_PARTS, EXTENSION, PACKAGE

    place = folder or os.environ.get("AI_TOOLKIT_ROOT")
    root = Path(place or Path.cwd())
    missing = [part for part in CHECKOUT_PARTS if not (root / part).exists()]
    if missing and not place:
        yield Line(ABSENT, "ai-toolkit", "not here; `coat-flux train` does not need it (--ai-toolkit DIR checks one)")
        return
    if missing:
        text = f"{root} is not a checkout of it: no {', '.join(missing)}"
        yield Line(BAD, "ai-toolkit", text, "give the folder of run.py", stops=True)
        return
    version = version_of(root)
    tested, remedy = version.startswith(TESTED_SERIES), f"COAT-FLUX is tested with {TESTED_VERSION}: use that"
    yield judged(tested, "ai-toolkit", f"{version} in {root}", remedy)
    link, command = root / EXTENSION, f"coat-flux install {root}"
    if not link.exists():
        yield Line(ABSENT, "extension", f"not in that checkout; `{command}` links it")
    elif link.resolve() == PACKAGE.resolve():
        yield Line(GOOD, "extension", f"{EXTENSION} leads to {PACKAGE}")
    else:
        text = f"{EXTENSION} is a copy, or leads to another COAT-FLUX than {PACKAGE}"
        yield Line(BAD, "extension", text, f"move it away, then `{command}`")


PROBES = (
    ("Python", python),
    ("torch", torch_build),
    ("packages", packages),
    ("GPU", cards),
    ("FP8", fp8_gemms),
    ("weight.format", weight_format),
    ("Triton", triton),
    ("attention", attention),
    ("memory", memory),
    ("disk", disk),
    ("FLUX.1-dev", model),
)
