"""Find where a run stopped, and put everything back.

Like ai-toolkit, a run whose folder holds saves continues by itself from the newest. With our own state beside the save
the continuation is bit-exact: raw fp32 LoRA and EMA come back, and every random draw and the place in the data follow
from the step (see `seeding`). A save written by ai-toolkit has no such state: then the LoRA comes from the file itself.
A resume that cannot be done right is an error; a run never starts over by itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from .saving import STATE_FILE, file_sha256, state_folder

__all__ = ["ResumeError", "ResumePoint", "find_resume_point", "load_lora_file", "load_optimizer_state"]

REMEDY = "restore it from a backup, or delete the run folder (or choose another config.name) to start anew"


class ResumeError(RuntimeError):
    """A run folder holds saves that cannot be continued."""


@dataclass(frozen=True)
class ResumePoint:
    """The newest save of a run.

    Attributes:
        path: the LoRA file.
        step: optimizer steps done.
        epoch: passes over the data done.
        state_dir: our own state for this step; None where the save is ai-toolkit's.
        record: the contents of `state.json`, empty without it.
    """

    path: Path
    step: int
    epoch: int
    state_dir: Path | None = None
    record: Mapping[str, Any] = field(default_factory=dict)

    def lora(self) -> dict[str, Tensor]:
        """The raw LoRA: fp32 from our state, or what the save holds."""
        return load_lora_file(self.path if self.state_dir is None else self.state_dir / "lora.safetensors")

    def ema(self) -> dict[str, Tensor] | None:
        """The saved average, where one was kept."""
        if self.state_dir is None or not (self.state_dir / "ema.safetensors").exists():
            return None
        return load_lora_file(self.state_dir / "ema.safetensors")


def load_lora_file(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file, in fp32.

    Raises:
        ResumeError: the file is missing or cannot be read.
    """
    try:
        return {name: tensor.float() for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise ResumeError(f"{path}: cannot be read ({error}); {REMEDY}") from error


def find_resume_point(run_dir: Path, name: str) -> ResumePoint | None:
    """The newest save of a run, or None where there is none.

    Newest is the one with the most steps in its metadata; of equal ones the one without a step in its name.

    Raises:
        ResumeError: a save cannot be read or does not say its step, or our state for it is damaged.
    """
    pattern = re.compile(re.escape(name) + r"(_\d{9})?\.safetensors")
    found = [_point(path) for path in run_dir.glob("*.safetensors") if pattern.fullmatch(path.name)]
    if not found:
        return None
    newest = max(found, key=lambda point: (point.step, point.path.stem == name))
    folder = state_folder(run_dir, newest.step)
    if not folder.exists():
        return newest
    return ResumePoint(newest.path, newest.step, newest.epoch, folder, _record(folder, run_dir))


def _point(path: Path) -> ResumePoint:
    try:
        with safe_open(path, framework="pt") as file:
            info = json.loads((file.metadata() or {})["training_info"])
        return ResumePoint(path, int(info["step"]), int(info.get("epoch", 0)))
    except (OSError, SafetensorError) as error:
        raise ResumeError(f"{path}: cannot be read ({error}); {REMEDY}") from error
    except (KeyError, ValueError, TypeError) as error:
        raise ResumeError(f"{path}: its metadata does not say the training step; {REMEDY}") from error


def _record(folder: Path, run_dir: Path) -> dict[str, Any]:
    try:
        record = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResumeError(f"{folder / STATE_FILE}: cannot be read ({error}); {REMEDY}") from error
    optimizer = run_dir / "optimizer.pt"
    if optimizer.exists() and file_sha256(optimizer) != record.get("optimizer_sha256"):
        raise ResumeError(f"{optimizer}: is not the file written with {folder.name} (damaged or exchanged); {REMEDY}")
    return record


def load_optimizer_state(run_dir: Path) -> dict[str, Any]:
    """Read `optimizer.pt`.

    Raises:
        ResumeError: missing or damaged.
    """
    path = run_dir / "optimizer.pt"
    if not path.exists():
        raise ResumeError(f"{path}: is missing, but the run folder holds a save to continue from; {REMEDY}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        raise ResumeError(f"{path}: cannot be read ({error}); {REMEDY}") from error
