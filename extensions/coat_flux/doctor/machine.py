"""Memory, disk and the model: what a run needs besides the GPU."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from .lines import Line, absent, bad, good

MODEL = "black-forest-labs/FLUX.1-dev"
MODEL_BYTES = 33.8e9  # transformer 23.8, T5-XXL 9.5, CLIP-L and VAE 0.5
RAM_BYTES, RUN_BYTES = 27e9, 3e9  # `coat-flux plan configs/flux_clothing_coat.yaml`: host memory; saves and caches
CGROUP = Path("/sys/fs/cgroup")


def memory() -> Iterator[Line]:
    """Free RAM, of the container where there is one."""
    import psutil

    now = psutil.virtual_memory()
    available, total, limited = float(now.available), float(now.total), container_memory()
    place = ""
    if limited is not None and limited[1] < total:
        available, total, place = min(available, limited[0]), limited[1], " (the container's limit)"
    text = f"{available / 1e9:.1f} of {total / 1e9:.1f} GB RAM free{place}"
    if available < RAM_BYTES:
        needs = f"FLUX.1 takes about {RAM_BYTES / 1e9:.0f} GB (`coat-flux plan CONFIG` has your job's figure)"
        yield bad("memory", text, f"{needs}: end other programs, or add swap")
    else:
        yield good("memory", text)


def container_memory() -> tuple[float, float] | None:
    """Free and total bytes that cgroup v2 allows this process; None without a limit."""
    try:
        limit, used = ((CGROUP / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        rows = dict(row.split() for row in (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
    except OSError:
        return None
    if limit == "max":
        return None
    cached_files = float(rows.get("inactive_file", 0))  # given back when asked for
    return float(limit) - float(used) + cached_files, float(limit)


def disk() -> Iterator[Line]:
    """Free space and the right to write, here and in the model cache."""
    for name, folder in (("disk here", Path.cwd()), ("disk of the model cache", _cache_folder())):
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free
        text = f"{free / 1e9:.1f} GB free in {folder}"
        here = folder == Path.cwd()
        if not os.access(there, os.W_OK):
            remedy = "train in another folder" if here else "set HF_HOME to another folder"
            yield bad(name, f"{text}, which this user may not write", remedy)
        elif here and free < RUN_BYTES:
            yield bad(name, text, f"a run writes about {RUN_BYTES / 1e9:.0f} GB: free that, or train in another folder")
        elif not here and free < MODEL_BYTES and missing_files(_snapshot()) != []:
            yield bad(name, text, f"FLUX.1-dev takes {MODEL_BYTES / 1e9:.0f} GB: free that, or set HF_HOME elsewhere")
        else:
            yield good(name, text)


def model() -> Iterator[Line]:
    """Whether FLUX.1-dev is in the cache, whole, and else whether it could be downloaded."""
    snapshot = _snapshot()
    missing = missing_files(snapshot)
    if missing == []:
        yield good("FLUX.1-dev", f"in the cache: {snapshot}")
        return
    if missing:
        yield bad("FLUX.1-dev", f"torn download, {missing[0]} is missing", f"hf download {MODEL}")
        return
    size = f"not in the cache, the first run downloads {MODEL_BYTES / 1e9:.0f} GB"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        yield bad("FLUX.1-dev", "not in the cache, and HF_HUB_OFFLINE forbids downloads", "unset it, or give a folder")
    elif not _has_token():
        yield bad(
            "FLUX.1-dev",
            f"{size}, and there is no Hugging Face token",
            f"accept the licence at https://huggingface.co/{MODEL}, then `hf auth login`; a local folder needs neither",
        )
    else:
        yield absent("FLUX.1-dev", f"{size}; a token is set, the licence must have been accepted with it")


def missing_files(snapshot: Path | None) -> list[str] | None:
    """Files of the model that the snapshot lacks; None where there is no snapshot."""
    if snapshot is None:
        return None
    index = snapshot / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    wanted = [snapshot / "model_index.json", snapshot / "vae" / "config.json", index]
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        wanted += [index.parent / name for name in sorted(set(names))]
    return [path.relative_to(snapshot).as_posix() for path in wanted if not path.is_file()]


def _snapshot() -> Path | None:
    """The newest snapshot of the model in the cache."""
    folder = _cache_folder() / f"models--{MODEL.replace('/', '--')}" / "snapshots"
    found = [path for path in folder.glob("*") if path.is_dir()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None
