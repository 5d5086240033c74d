"""What makes a run this run, and not another one that a resume would mix with it.

An identity is plain JSON:

    model        path, and a fingerprint of its files
    data         settings of each folder, and a short digest of each image and caption
    network      rank and targets
    seed, world_size, batch
    coat, train  everything else that shapes a run: may change, and the change is said

The digest of a large file is that of its size and of evenly spaced pieces: quick for 24 GB, and enough to tell files
apart that a person or a program has changed.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..base.files import write_file
from .errors import ResumeError

__all__ = [
    "VERSIONS_FILE",
    "compare",
    "data_identity",
    "model_identity",
    "require_same_run",
    "run_identity",
    "write_versions",
]

STRICT = ("model", "data", "network", "seed", "world_size", "batch")
FREE = ("coat", "train")
ALLOWABLE = ("data", "seed", "world_size")
SHARED = ("world_size", "batch")  # who does what of a step; harmless as long as the step is the same
PIECES, PIECE_BYTES = 16, 1 << 16
MODEL_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json")
VERSIONS_FILE = Path("coat") / "versions.json"
PACKAGES = ("coat-flux", "torch", "triton", "diffusers", "transformers", "peft", "accelerate", "safetensors")
NOT_A_RUN = "restore it, or choose another config.name to start a new run"


def run_identity(
    *,
    model: str,
    datasets: Sequence[Mapping[str, Any]],
    network: Mapping[str, Any],
    seed: int | None,
    world_size: int,
    batch: Mapping[str, Any],
    coat: Mapping[str, Any],
    train: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The identity of a run.

    Args:
        model: folder, file or hub id.
        datasets: one mapping for each folder: `folder_path`, `caption_ext`, and settings that decide what is trained
            on (resolution, num_repeats, flip_x, ...).
        network: rank, targets.
        seed: of the run.
        world_size: number of processes.
        batch: batch size, accumulation.
        coat: the `coat:` block.
        train: further settings that may change.

    Returns:
        Plain JSON.
    """
    found = {
        "model": model_identity(model),
        "data": data_identity(datasets),
        "network": dict(network),
        "seed": seed,
        "world_size": world_size,
        "batch": dict(batch),
        "coat": dict(coat),
        "train": dict(train or {}),
    }
    return json.loads(json.dumps(found, default=list))


def model_identity(model: str) -> dict[str, Any]:
    """Path and fingerprint of a model's config and weights; the fingerprint is None where it is not on this machine.

    Args:
        model: a diffusers folder, a safetensors file, or a hub id, which is looked up in the hub's cache.
    """
    root = _local(model)
    files = [] if root is None else sorted(_model_files(root))
    parts = [[path.relative_to(root).as_posix() if root != path else "", file_digest(path)] for path in files]
    fingerprint = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32] if files else None
    return {"path": str(model), "fingerprint": fingerprint}


def _local(model: str) -> Path | None:
    if Path(model).exists():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        index = try_to_load_from_cache(model, "model_index.json")
    except HFValidationError:
        return None
    return Path(index).parent if isinstance(index, str) else None


def _model_files(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    for folder in (root, *(path for path in root.iterdir() if path.is_dir())):
        for pattern in MODEL_FILES:
            yield from (path for path in folder.glob(pattern) if path.is_file())


def data_identity(datasets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Settings of the folders, and digests of their images and captions by `<number of the folder>/<path in it>`."""
    from ..data.files import find_images

    files: dict[str, str] = {}
    settings = []
    for number, dataset in enumerate(datasets):
        root = Path(dataset["folder_path"])
        settings.append({key: value for key, value in dataset.items() if key != "folder_path"})
        for image in find_images(root):
            for path in (image, image.with_suffix(_extension(dataset.get("caption_ext", "txt")))):
                if path.is_file():
                    files[f"{number}/{path.relative_to(root).as_posix()}"] = file_digest(path)
    return {"settings": settings, "files": files}


def _extension(name: str) -> str:
    return name if name.startswith(".") else f".{name}"


def file_digest(path: Path) -> str:
    """A short hash of a file's size and of up to 16 evenly spaced pieces; of all of it up to 1 MB."""
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


def compare(
    saved: Mapping[str, Any], now: Mapping[str, Any], allow: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """What differs between the run that was saved and the one that wants to go on with it.

    A part that one of the two does not know is not compared.

    Args:
        saved: identity of the save.
        now: identity of this run.
        allow: `coat.resume.allow`: parts that may differ.

    Returns:
        (refusals, notes): differences that make it another run, with what to do; those that do not.
    """
    refusals, notes = [], []
    for part in (*STRICT, *FREE):
        if part not in saved or part not in now:
            continue
        found, harmless = DIFFERENCES.get(part, _plain_differences)(part, saved[part], now[part])
        notes += harmless
        if part in FREE or part in allow or (part in SHARED and _step_of(saved) == _step_of(now)):
            notes += found
        else:
            way_out = f", or set coat.resume.allow: [{part}]" if part in ALLOWABLE else ""
            refusals += [f"{line}; {NOT_A_RUN}{way_out}" for line in found]
    return refusals, notes


def _step_of(identity: Mapping[str, Any]) -> tuple[Any, int]:
    """Batch size, and batches of an optimizer step in all processes together."""
    batch = identity.get("batch", {})
    return batch.get("batch_size"), batch.get("gradient_accumulation", 1) * identity.get("world_size", 1)


def require_same_run(
    saved: Mapping[str, Any], now: Mapping[str, Any], allow: Collection[str], where: Path | str
) -> list[str]:
    """`compare`, with an error where the runs differ.

    Args:
        saved: identity of the save.
        now: identity of this run.
        allow: `coat.resume.allow`.
        where: the save, for the error.

    Returns:
        Lines to say.

    Raises:
        ResumeError: it would be another run; names all that differs, with both values and the remedy.
    """
    refusals, notes = compare(saved, now, allow)
    if refusals:
        lines = "\n".join(f"  {line}" for line in refusals)
        raise ResumeError(f"{where}: is a save of another run:\n{lines}")
    return notes


Found = tuple[list[str], list[str]]


def _plain_differences(name: str, saved: Any, now: Any) -> Found:
    return [f"{path} {_show(old)} -> {_show(new)}" for path, old, new in _walk(name, saved, now)], []


def _walk(path: str, saved: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """Each value that differs; keys that only one side has are options that another version had not."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in saved:
            if key in now:
                yield from _walk(f"{path}.{key}", saved[key], now[key])
    elif saved != now:
        yield path, saved, now


def _show(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _model_differences(name: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> Found:
    paths = f"{saved['path']} -> {now['path']}"
    prints = saved["fingerprint"], now["fingerprint"]
    if None in prints:
        return ([f"{name} {paths}"] if saved["path"] != now["path"] else []), []
    if prints[0] != prints[1]:
        same_path = saved["path"] == now["path"]
        return [f"{name} {now['path']}: its files were changed" if same_path else f"{name} {paths}"], []
    return [], ([f"{name} {paths}, the same files"] if saved["path"] != now["path"] else [])


def _data_differences(name: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> Found:
    folders = len(saved["settings"]), len(now["settings"])
    if folders[0] != folders[1]:
        return [f"{name}: {folders[0]} -> {folders[1]} datasets"], []
    lines = []
    for number, (old, new) in enumerate(zip(saved["settings"], now["settings"], strict=True)):
        lines += _plain_differences(f"datasets[{number}]", old, new)[0]
    before, after = saved["files"], now["files"]
    changed = sorted(path for path in {**before, **after} if before.get(path) != after.get(path))
    if changed:
        first = changed[0]
        how = "new" if first not in before else "missing" if first not in after else "changed"
        lines.append(
            f"{name}: {len(changed)} of {len(before)} images and captions differ, {len(after)} are there now; "
            f"first: datasets[{first.partition('/')[0]}] {first.partition('/')[2]} ({how})"
        )
    return lines, []


DIFFERENCES = {"model": _model_differences, "data": _data_differences}


# -- what a run was made with, for its report -------------------------------------------------------------------------


def write_versions(run_dir: Path, host: str, device: torch.device) -> None:
    """Write versions of host, packages, Python, and the device's name.

    Args:
        run_dir: of the run.
        host: "stand-alone", or ai-toolkit with its version.
        device: of the run.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    found = {"trained by": host, "device": f"{device.type}: {name}", "system": platform.platform(terse=True)}
    found["python"] = platform.python_version()
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a package"
    write_file(run_dir / VERSIONS_FILE, json.dumps(found, indent=1))
