"""The part of a save beyond the published LoRA, so that a resumed run ends as if it had never stopped.

    coat/state-000000500/      the stand-alone trainer's; inside ai-toolkit the same files are in the set's folder aitk/
        lora.safetensors       the raw LoRA in fp32 (the published one may be its average, in save.dtype)
        ema.safetensors        its average in fp32, if any
        rng.safetensors        states of the random generators (of the main process)
        state.json             steps done, position in the data, guard, execution mode of the blocks, identity

`optimizer.pt` is in the set's own folder in both. Saves come between optimizer steps, so there are never
half-accumulated gradients. Everything loads without pickle, `optimizer.pt` with weights_only=True.

The identity of a run, plain JSON, is what a resume must match. The digest of a large file covers its size and evenly
spaced pieces, which is quick.

    model        path, and a fingerprint of its files
    data         settings of each folder, and a short digest of each image and caption
    network      rank and targets
    seed, world_size, batch
    coat, train  everything else that shapes a run: may change, and the change is logged
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from coat_core.optim.sharded import local_values, rows_like

from ..base.environment import version_of
from ..base.files import write_file
from ..base.names import COAT_OPTIMIZER
from ..blocks.models.checkpoint import cached_folder
from ..blocks.runner import BlockRunner
from ..data.files import MEDIA_EXTENSIONS, find_images
from .errors import ResumeError

STANDALONE, AI_TOOLKIT = "", "aitk"  # folder of a trainer's state in a set
RECORD_FILE = "state.json"
OPTIMIZER_FILE = "optimizer.pt"
SHARD_BYTES = 5 * 10**9  # of a file of a whole model, made in CPU memory one at a time
REMEDY = "restore it from a backup, or choose another config.name to start over (all that is in this folder stays)"
EXECUTION_WORDS = {
    "weight_format": "format of the weights",
    "gemm": "GEMMs of the blocks",
    "recomputed": "blocks that recompute",
}


@dataclass(frozen=True)
class RunState:
    """The state in a committed set: its folder, trainer (`STANDALONE` or `AI_TOOLKIT`) and `state.json` as `record`."""

    folder: Path
    trainer: str
    record: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path, trainer: str) -> RunState | None:
        """The state of a set, without reading tensors, or None if it has none of this trainer; raises ResumeError."""
        path = folder / trainer / RECORD_FILE
        if not path.exists():
            return None
        try:
            return cls(folder, trainer, json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ResumeError(f"{path}: cannot be read ({error}); {REMEDY}") from error

    @staticmethod
    def write(
        folder: Path,
        trainer: str,
        record: Mapping[str, Any],
        lora: Mapping[str, Tensor],
        ema: Mapping[str, Tensor] | None,
        rng: Mapping[str, Tensor],
    ) -> None:
        """Write a state into a set's folder before its commit; `lora` is empty if the raw parameters are published."""
        target = folder / trainer
        target.mkdir(exist_ok=True)
        for part, tensors in (("lora", lora), ("ema", ema), ("rng", rng)):
            if tensors:
                save_tensors(target / f"{part}.safetensors", tensors)
        (target / RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.record["step"])

    def tensors(self, part: str) -> dict[str, Tensor] | None:
        """The raw parameters ("lora"), their average ("ema") or states of generators ("rng"), or None without such."""
        path = self.folder / self.trainer / f"{part}.safetensors"
        return load_tensors(path) if path.exists() or part == "rng" else None


def require_same_optimizer(path: Path, saved_with: str, optimizer: str) -> None:
    """Raise ResumeError if `optimizer` cannot read the state of another one."""
    readable = {optimizer.lower()}
    if optimizer.lower() == COAT_OPTIMIZER:
        readable |= {"adamw", "adam"}
    if saved_with.lower() not in readable:
        raise ResumeError(
            f"{path}: was written by {saved_with}, which train.optimizer={optimizer} cannot read; "
            f"go back to {saved_with}, or choose another config.name to start over"
        )


def require_readable(folder: Path, optimizer: str) -> None:
    """Raise ResumeError if a folder has 8-bit moments that `optimizer` cannot read."""
    if optimizer.lower() == COAT_OPTIMIZER:
        return
    path = folder / OPTIMIZER_FILE
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        stored = saved["param_groups"][0]["fp8"]
        is_quantized = stored["use_fp8_m1"] or stored["use_fp8_m2"]
    except Exception:  # not there, another optimizer's, or damaged
        return
    if is_quantized:
        raise ResumeError(
            f"{path}: was written by {COAT_OPTIMIZER}, whose 8-bit moments train.optimizer={optimizer} cannot read; "
            f"go back to {COAT_OPTIMIZER}, or choose another config.name to start over"
        )


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file of tensors from any device."""
    save_file({name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}, path, metadata)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file; raises ResumeError if it is missing or unreadable."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ResumeError(f"{path}: cannot be read ({error}); {REMEDY}") from error


@torch.no_grad()
def restore_tensors(targets: Mapping[str, Tensor], saved: Mapping[str, Tensor], source: Path | str) -> None:
    """Copy saved values into a run's tensors (or its rows of sharded ones); raises ResumeError before any copy."""
    odd = sorted(targets.keys() ^ saved.keys())
    if odd:
        raise ResumeError(
            f"{source}: {len(odd)} LoRA names differ from this run's, first {odd[0]!r}; "
            "use the network settings it was trained with, or another config.name to start over"
        )
    for name, tensor in targets.items():
        if saved[name].shape != tensor.shape:
            raise ResumeError(
                f"{source}: {name} has shape {tuple(saved[name].shape)}, this run's is {tuple(tensor.shape)}; "
                "use the rank (network.linear) it was trained with, or another config.name to start over"
            )
    for name, tensor in targets.items():
        local_values(tensor).copy_(rows_like(tensor, saved[name]))


# --- the execution mode, measured at a run's first step; rounding depends on it ---


def execution_of(transformer: nn.Module) -> dict[str, Any]:
    """Weights' format and recomputed blocks, after the first step GEMMs and attention kernel; empty without COAT."""
    runner = BlockRunner.of(transformer)
    if runner is None:
        return {}
    config = runner.plan.config
    execution: dict[str, Any] = {"recomputed": runner.plan.recomputed}
    if config.weight.use_fp8:
        execution["weight_format"] = config.linear_config().weight_format
    if config.chosen is not None:
        execution["weight_ms"] = dict(config.chosen.milliseconds)
    if runner.picked is not None:
        execution["gemm"] = runner.picked.name
    if runner.attention.kernel is not None:
        execution["attention"] = runner.attention.kernel
    return execution


def keep_execution(transformer: nn.Module, saved: Mapping[str, Any]) -> None:
    """Use a saved mode in the first step instead of measuring, if the config still allows it."""
    runner = BlockRunner.of(transformer)
    if runner is None:
        return
    if runner.gemms is not None and "gemm" in saved:
        runner.gemms.keep(saved["gemm"])
    runner.attention.resumed = saved.get("attention")


def execution_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each difference between two modes."""
    return [
        f"Resume: {words} {saved[key]} -> {now[key]}; results differ from here on by rounding"
        for key, words in EXECUTION_WORDS.items()
        if key in saved and key in now and saved[key] != now[key]
    ]


STRICT = ("model", "data", "network", "seed", "world_size", "batch")
FREE = ("coat", "train")
ALLOWABLE = ("data", "seed", "world_size")  # by `coat.resume.allow`
SHARED = ("world_size", "batch")  # division of a step among processes; harmless if the step is the same
PIECES, PIECE_BYTES = 16, 1 << 16  # of a file, for its digest
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
    files: dict[str, str] = {}
    settings = []
    for number, dataset in enumerate(datasets):
        root = Path(dataset["folder_path"])
        settings.append({key: value for key, value in dataset.items() if key not in ("folder_path", "mask_path")})
        extension = "." + dataset.get("caption_ext", "txt").removeprefix(".")
        if root.is_file():  # ai-toolkit's list of images
            files[f"{number}/{root.name}"] = file_digest(root)
        for image in find_images(root, MEDIA_EXTENSIONS):
            for path in (image, image.with_suffix(extension)):
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
    """A line for each harmless difference from the save in `where`; ResumeError if others forbid a resume."""
    steps = []
    for identity in (saved, now):
        batch = identity.get("batch", {})
        micro_batches = batch.get("gradient_accumulation", 1) * identity.get("world_size", 1)
        steps.append((batch.get("batch_size"), micro_batches))
    saved_step, step = steps
    refusals, notes = [], []
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
        is_harmless = part in FREE or part in allow or (part in SHARED and step == saved_step)
        if part == "model" and new["fingerprint"] is not None and new["fingerprint"] == old["fingerprint"]:
            is_harmless = True
        if is_harmless:
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
    """A line for each value that differs; `strict`: also for keys of one side only, and for items of lists."""
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
    old_count, new_count = len(saved["settings"]), len(now["settings"])
    if old_count != new_count:
        return [f"data: {old_count} -> {new_count} datasets"]
    lines = []
    for number, (old, new) in enumerate(zip(saved["settings"], now["settings"], strict=True)):
        lines += differences(f"datasets[{number}]", old, new)
    before, after = saved["files"], now["files"]
    changed = sorted(path for path in {**before, **after} if before.get(path) != after.get(path))
    if changed:
        first = changed[0]
        state = "changed" if first in after else "missing"
        if first not in before:
            state = "new"
        number, _, name = first.partition("/")
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
