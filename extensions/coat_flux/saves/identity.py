"""The identity of a run, plain JSON, which a resume must match.

    model        path, and a fingerprint of its files
    data         settings of each folder, and a short digest of each image and caption
    network      rank and targets
    seed, world_size, batch
    coat, train  everything else that shapes a run: may change, and the change is logged

The digest of a large file covers its size and evenly spaced pieces, which is quick.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..base.environment import version_of
from ..base.files import write_file
from .errors import ResumeError

STRICT = ("model", "data", "network", "seed", "world_size", "batch")
FREE = ("coat", "train")
ALLOWABLE = ("data", "seed", "world_size")
SHARED = ("world_size", "batch")  # division of a step among processes; harmless if the step is the same
PIECES, PIECE_BYTES = 16, 1 << 16
MODEL_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json")
VERSIONS_FILE = Path("coat") / "versions.json"
PACKAGES = ("coat-flux", "torch", "triton", "diffusers", "transformers", "peft", "accelerate", "safetensors")
NOT_A_RUN = "restore it, or choose another config.name to start a new run"


def run_identity(model: str, datasets: Sequence[Mapping[str, Any]], **parts: Any) -> dict[str, Any]:
    """The identity of a run from its model (folder, file or hub id), dataset settings and other `parts`."""
    identity = {"model": model_identity(model), "data": data_identity(datasets), **parts}
    return json.loads(json.dumps(identity, default=list))


def model_identity(model: str) -> dict[str, Any]:
    """Path and fingerprint of a model's config and weights; the fingerprint is None if it is not on this machine."""
    from ..blocks.models.checkpoint import cached_folder

    root = Path(model) if Path(model).exists() else cached_folder(model)
    parts = []
    if root is not None and root.is_file():
        parts = [["", file_digest(root)]]
    elif root is not None:
        folders = (root, *(path for path in root.iterdir() if path.is_dir()))
        files = {path for folder in folders for pattern in MODEL_FILES for path in folder.glob(pattern)}
        parts = [[path.relative_to(root).as_posix(), file_digest(path)] for path in sorted(files) if path.is_file()]
    fingerprint = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32] if parts else None
    return {"path": str(model), "fingerprint": fingerprint}


def data_identity(datasets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Settings of the folders, and digests of their files, captions and masks by `<number>/<path in the folder>`."""
    from ..data.files import MEDIA_EXTENSIONS, find_images

    files: dict[str, str] = {}
    settings = []
    for number, dataset in enumerate(datasets):
        root = Path(dataset["folder_path"])
        settings.append({key: value for key, value in dataset.items() if key not in ("folder_path", "mask_path")})
        extension = "." + dataset.get("caption_ext", "txt").removeprefix(".")
        if root.is_file():  # a list for ai-toolkit
            files[f"{number}/{root.name}"] = file_digest(root)
        for found in find_images(root, MEDIA_EXTENSIONS):
            for path in (found, found.with_suffix(extension)):
                if path.is_file():
                    files[f"{number}/{path.relative_to(root).as_posix()}"] = file_digest(path)
        if dataset.get("mask_path"):
            masks = Path(dataset["mask_path"])
            for path in find_images(masks):
                files[f"{number}/mask_path/{path.relative_to(masks).as_posix()}"] = file_digest(path)
    return {"settings": settings, "files": files}


def file_digest(path: Path) -> str:
    """A short hash of a file's size and up to 16 evenly spaced pieces; of all of it up to 1 MB."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= PIECES * PIECE_BYTES:
            digest.update(file.read())
        else:
            for piece in range(PIECES):
                file.seek((size - PIECE_BYTES) * piece // (PIECES - 1))
                digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()[:16]


def require_same_run(
    saved: Mapping[str, Any], now: Mapping[str, Any], allow: Collection[str], where: Path | str
) -> list[str]:
    """Return harmless differences from the save in `where`, a line each; ResumeError if others forbid a resume.

    Parts that only one of the two identities has are skipped.
    """
    refusals, notes, steps = [], [], []
    for identity in (saved, now):
        batch = identity.get("batch", {})
        micro_batches = batch.get("gradient_accumulation", 1) * identity.get("world_size", 1)
        steps.append((batch.get("batch_size"), micro_batches))
    same_step = steps[0] == steps[1]
    for part in (*STRICT, *FREE):
        if part not in saved or part not in now:
            continue
        old, new = saved[part], now[part]
        if part == "data":
            changes = _data_differences(old, new)
        elif part == "model":
            changes = _model_differences(old, new)
        else:
            changes = list(differences(part, old, new))
        same_model = part == "model" and old["fingerprint"] == new["fingerprint"] is not None
        if part in FREE or part in allow or (part in SHARED and same_step) or same_model:
            notes += changes
        else:
            way_out = f", or set coat.resume.allow: [{part}]" if part in ALLOWABLE else ""
            refusals += [f"  {line}; {NOT_A_RUN}{way_out}" for line in changes]
    if refusals:
        raise ResumeError("\n".join([f"{where}: is a save of another run:", *refusals]))
    return notes


def _model_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    same_files = saved["fingerprint"] == now["fingerprint"]
    if saved["path"] != now["path"]:
        note = ", the same files" if same_files and now["fingerprint"] is not None else ""
        return [f"model {saved['path']} -> {now['path']}{note}"]
    if same_files or None in (saved["fingerprint"], now["fingerprint"]):
        return []
    return [f"model {now['path']}: its files were changed"]


def differences(path: str, saved: Any, now: Any, *, strict: bool = False) -> Iterator[str]:
    """Each value that differs; `strict`: also keys of one side, which another version may lack, and items of lists."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in sorted({*saved, *now}) if strict else saved:
            if strict or key in now:
                yield from differences(f"{path}.{key}", saved.get(key), now.get(key), strict=strict)
    elif strict and isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        for number, (old, new) in enumerate(zip(saved, now, strict=True)):
            yield from differences(f"{path}[{number}]", old, new, strict=True)
    elif saved != now:
        yield f"{path} {json.dumps(saved, ensure_ascii=False)} -> {json.dumps(now, ensure_ascii=False)}"


def _data_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    folders = len(saved["settings"]), len(now["settings"])
    if folders[0] != folders[1]:
        return [f"data: {folders[0]} -> {folders[1]} datasets"]
    lines = []
    for number, (old, new) in enumerate(zip(saved["settings"], now["settings"], strict=True)):
        lines += differences(f"datasets[{number}]", old, new)
    before, after = saved["files"], now["files"]
    changed = sorted(path for path in {**before, **after} if before.get(path) != after.get(path))
    if changed:
        state = "changed"
        if changed[0] not in before:
            state = "new"
        elif changed[0] not in after:
            state = "missing"
        number, _, name = changed[0].partition("/")
        lines.append(
            f"data: {len(changed)} of {len(before)} images and captions differ, {len(after)} are there now; "
            f"first: datasets[{number}] {name} ({state})"
        )
    return lines


def write_versions(run_dir: Path, trainer: str, device: torch.device) -> None:
    """Write the trainer, versions of packages and Python, and the device's name to `coat/versions.json`."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    versions = {"trained by": trainer, "device": f"{device.type}: {name}", "system": platform.platform(terse=True)}
    versions["python"] = platform.python_version()
    versions |= {package: version_of(package) or "not installed as a package" for package in PACKAGES}
    write_file(run_dir / VERSIONS_FILE, json.dumps(versions, indent=1))
