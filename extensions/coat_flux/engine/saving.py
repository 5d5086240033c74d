"""Files of a run: the LoRA, the optimizer state, our own state, written so that a crash leaves the old or the new one.

    <run>/<name>_000000500.safetensors   LoRA after 500 optimizer steps (the EMA where one is kept), in save.dtype
    <run>/optimizer.pt                   optimizer.state_dict() of the newest save; loads with weights_only=True
    <run>/coat/state-000000500/          what a bit-exact resume needs beside it: raw LoRA and EMA in fp32, state.json

LoRA keys are ai-toolkit's, `transformer.<module>.lora_A.weight`, which `FluxPipeline.load_lora_weights` reads.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

__all__ = [
    "STATE_FILE",
    "Checkpoint",
    "file_sha256",
    "lora_metadata",
    "remove_leftovers",
    "replacing",
    "rotate_saves",
    "save_checkpoint",
    "save_dtype",
    "save_name",
    "state_folder",
    "step_saves",
]

STATE_FILE = "state.json"
TEMP_PREFIX = ".writing-"
SAVE_DTYPES = {"float16": torch.float16, "fp16": torch.float16, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}
SAVE_DTYPES |= {"float32": torch.float32, "fp32": torch.float32, "float": torch.float32}


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends well, and is removed when it does not.

    Works for a file and for a folder (an existing folder is replaced).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.parent / f"{TEMP_PREFIX}{os.getpid()}-{path.name}"
    try:
        yield temp
        if temp.is_dir() and path.is_dir():
            shutil.rmtree(path)
        os.replace(temp, path)
    finally:
        if temp.is_dir():
            shutil.rmtree(temp)
        else:
            temp.unlink(missing_ok=True)


def remove_leftovers(run_dir: Path) -> None:
    """Remove the temporary files of a process that was killed while it wrote."""
    for path in [*run_dir.glob(f"{TEMP_PREFIX}*"), *run_dir.glob(f"coat/{TEMP_PREFIX}*")]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def save_name(name: str, step: int | None) -> str:
    """File name of a LoRA: `<name>_000000500.safetensors`, or `<name>.safetensors` without a step."""
    return f"{name}.safetensors" if step is None else f"{name}_{step:09d}.safetensors"


def state_folder(run_dir: Path, step: int) -> Path:
    """Where our own state after `step` optimizer steps lies."""
    return run_dir / "coat" / f"state-{step:09d}"


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def lora_metadata(
    name: str,
    *,
    step: int,
    epoch: int,
    trigger_word: str | None = None,
    meta: Mapping[str, Any] | None = None,
    coat: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Metadata of a saved LoRA, keys and form as ai-toolkit's; every value a string, JSON where it is not plain text.

    Args:
        name: the job's name.
        step: optimizer steps done.
        epoch: passes over the data done.
        trigger_word: goes into `ss_tag_frequency` where given.
        meta: the config's own `meta` block; `[name]` in it is replaced.
        coat: what was in FP8, under our own key `coat`.
    """
    fields: dict[str, Any] = json.loads(json.dumps(dict(meta or {})).replace("[name]", name))
    fields["training_info"] = {"step": step, "epoch": epoch}
    fields["ss_base_model_version"] = "flux.1"
    fields["ss_output_name"] = name
    if trigger_word:
        fields["ss_tag_frequency"] = {f"1_{trigger_word}": {trigger_word: 1}}
    fields["software"] = {"name": "coat-flux", "version": _package_version()}
    if coat is not None:
        fields["coat"] = dict(coat)
    text = {key: value if isinstance(value, str) else json.dumps(value) for key, value in fields.items()}
    return text | {"format": "pt"}


def _package_version() -> str:
    try:
        return version("coat-flux")
    except PackageNotFoundError:
        return "unknown"


def write_lora(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype, metadata: Mapping[str, str]) -> None:
    """Write tensors to a safetensors file, cast to `dtype`."""
    cast = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    save_file(cast, path, dict(metadata))


def save_dtype(name: str) -> torch.dtype:
    """The torch dtype of `save.dtype`.

    Raises:
        ValueError: unknown name.
    """
    if name not in SAVE_DTYPES:
        raise ValueError(f"save.dtype={name!r}: must be one of {', '.join(SAVE_DTYPES)}")
    return SAVE_DTYPES[name]


@dataclass(frozen=True)
class Checkpoint:
    """Everything one save holds.

    Attributes:
        step: optimizer steps done.
        lora: raw LoRA parameters by saved name.
        ema: their average, where one is kept; it is what the LoRA file then holds.
        optimizer: `optimizer.state_dict()`: tensors, numbers, strings.
        metadata: of the LoRA file, from `lora_metadata`.
        record: further JSON values for `state.json`.
    """

    step: int
    lora: Mapping[str, Tensor]
    ema: Mapping[str, Tensor] | None
    optimizer: Mapping[str, Any]
    metadata: Mapping[str, str]
    record: Mapping[str, Any]


def save_checkpoint(run_dir: Path, file_name: str, point: Checkpoint, dtype: torch.dtype) -> Path:
    """Write LoRA, `optimizer.pt` and our state; all three are complete before the first takes its place.

    Older state folders are removed: only the newest belongs to `optimizer.pt`.

    Args:
        run_dir: the run's folder.
        file_name: of the LoRA, from `save_name`.
        point: what to write.
        dtype: of the LoRA file.

    Returns:
        The LoRA file.
    """
    path, folder = run_dir / file_name, state_folder(run_dir, point.step)
    with (
        replacing(path) as lora_temp,
        replacing(folder) as state_temp,
        replacing(run_dir / "optimizer.pt") as optimizer_temp,
    ):
        write_lora(lora_temp, point.lora if point.ema is None else point.ema, dtype, point.metadata)
        torch.save(dict(point.optimizer), optimizer_temp)
        state_temp.mkdir()
        write_lora(state_temp / "lora.safetensors", point.lora, torch.float32, {})
        if point.ema is not None:
            write_lora(state_temp / "ema.safetensors", point.ema, torch.float32, {})
        record = {**point.record, "step": point.step, "optimizer_sha256": file_sha256(optimizer_temp)}
        (state_temp / STATE_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for old in folder.parent.glob("state-*"):
        if old != folder:
            shutil.rmtree(old)
    return path


def step_saves(run_dir: Path, name: str) -> list[Path]:
    """The `<name>_<step>.safetensors` files of a run, oldest step first."""
    pattern = re.compile(re.escape(name) + r"_\d{9}\.safetensors")
    return sorted(path for path in run_dir.glob("*.safetensors") if pattern.fullmatch(path.name))


def rotate_saves(run_dir: Path, name: str, keep: int) -> list[Path]:
    """Remove all but the newest `keep` step saves; the final LoRA is never touched.

    Returns:
        The files removed.
    """
    saves = step_saves(run_dir, name)
    old = saves[: max(len(saves) - keep, 0)]
    for path in old:
        path.unlink()
    return old
