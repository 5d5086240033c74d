"""Find where a run stopped, and whether this is the same run.

Like ai-toolkit, a run whose folder holds saves continues by itself from the newest. With our own state beside the save
the continuation is bit-exact: raw fp32 LoRA and EMA come back, and every random draw and the place in the data follow
from the step (see `seeding`). A save written by ai-toolkit has no such state: then the LoRA comes from the file itself.
A resume that cannot be done right is an error; a run never starts over by itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from ...base.files import file_sha256
from ...config.job import JobConfig
from ...saves.commit import damage, state_folder
from ...saves.errors import ResumeError
from ...saves.identity import require_same_run, run_identity
from .saving import EMA_FILE, LORA_FILE, OPTIMIZER_FILE, RNG_FILE, STATE_FILE
from .seeding import seed_of
from .validation import held_out_of

__all__ = ["ResumeError", "ResumePoint", "check_same_run", "find_resume_point", "identity_of", "load_lora_file"]

REMEDY = "restore it from a backup, or choose another config.name to start over (all that is in this folder stays)"
DATA_SETTINGS = ("folder_path", "caption_ext", "default_caption", "resolution", "num_repeats", "flip_x", "buckets")
CAPTION_SETTINGS = ("caption_dropout_rate", "shuffle_tokens")
NOT_TRAINING = ("batch_size", "gradient_accumulation", "gradient_accumulation_steps", "disable_sampling")


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
        return load_lora_file(self.path if self.state_dir is None else self.state_dir / LORA_FILE)

    def ema(self) -> dict[str, Tensor] | None:
        """The saved average, where one was kept."""
        if self.state_dir is None or not (self.state_dir / EMA_FILE).exists():
            return None
        return load_lora_file(self.state_dir / EMA_FILE)

    def rng(self) -> dict[str, Tensor] | None:
        """The saved states of the random generators; earlier versions did not keep them."""
        if self.state_dir is None or not (self.state_dir / RNG_FILE).exists():
            return None
        return load_file(self.state_dir / RNG_FILE)

    @property
    def optimizer_file(self) -> Path:
        """The optimizer's state of this save; in the run's folder where the set does not hold it."""
        own = None if self.state_dir is None else self.state_dir / OPTIMIZER_FILE
        return own if own is not None and own.exists() else self.path.parent / OPTIMIZER_FILE

    def optimizer(self) -> dict[str, Any]:
        """Read the optimizer's state.

        Raises:
            ResumeError: missing or damaged.
        """
        path = self.optimizer_file
        if not path.exists():
            raise ResumeError(f"{path}: is missing, but the run folder holds a save to continue from; {REMEDY}")
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            raise ResumeError(f"{path}: cannot be read ({error}); {REMEDY}") from error


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
    """The newest save of a run that `checkpoint.repair` has put right, or None where there is none.

    Newest is the one with the most steps in its metadata; of equal ones the one without a step in its name. A LoRA that
    cannot be read does not count as long as another one can.

    Raises:
        ResumeError: no save can be read, or the state of the newest is damaged, and no other one is whole.
    """
    pattern = re.compile(re.escape(name) + r"(_\d{9})?\.safetensors")
    found, unreadable = [], []
    for path in (path for path in run_dir.glob("*.safetensors") if pattern.fullmatch(path.name)):
        try:
            found.append(_point(path))
        except ResumeError as error:
            unreadable.append(error)
    if not found and unreadable:
        raise unreadable[0]
    if not found:
        return None
    newest = max(found, key=lambda point: (point.step, point.path.stem == name))
    folder = state_folder(run_dir, newest.step)
    if not folder.exists():
        return newest
    problem = damage(folder)
    if problem is not None:
        raise ResumeError(f"{problem}; {REMEDY}")
    if not (folder / STATE_FILE).exists() and (folder / OPTIMIZER_FILE).exists():
        return newest  # a set of our process inside ai-toolkit, which keeps its own kind of state
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
    optimizer = run_dir / OPTIMIZER_FILE
    wanted = record.get("optimizer_sha256")  # of earlier versions, whose sets did not hold the file
    if wanted is not None and optimizer.exists() and file_sha256(optimizer) != wanted:
        raise ResumeError(f"{optimizer}: is not the file written with {folder.name} (damaged or exchanged); {REMEDY}")
    return record


def identity_of(job: JobConfig, world_size: int) -> dict[str, Any]:
    """What makes a run this run, from its config and the files it names."""
    network, train, photos = job.network, job.train, job.coat.data
    shared = {"trigger_word": job.trigger_word, "background": photos.background, "transparency": photos.transparency}
    captions = {key: [getattr(dataset, key) for dataset in job.datasets] for key in CAPTION_SETTINGS}
    settings = {key: value for key, value in asdict(train).items() if key not in NOT_TRAINING}
    held_out = [
        [path.relative_to(dataset.folder_path).as_posix() for path in paths]
        for dataset, paths in zip(job.datasets, held_out_of(job), strict=True)
    ]
    return run_identity(
        model=job.model.name_or_path,
        datasets=[
            {key: getattr(dataset, key) for key in DATA_SETTINGS} | shared | {"held_out": names}
            for dataset, names in zip(job.datasets, held_out, strict=True)
        ],
        network={
            "linear": network.linear,
            "transformer_only": network.transformer_only,
            "only_if_contains": network.network_kwargs.only_if_contains,
            "ignore_if_contains": network.network_kwargs.ignore_if_contains,
        },
        seed=seed_of(job),
        world_size=world_size,
        batch={"batch_size": train.batch_size, "gradient_accumulation": train.gradient_accumulation},
        coat={key: value for key, value in job.coat.to_dict().items() if key != "resume"},
        train={**settings, **captions, "dropout": network.dropout},
    )


def check_same_run(job: JobConfig, point: ResumePoint, identity: Mapping[str, Any]) -> list[str]:
    """Refuse to go on with another run.

    Args:
        job: of this run.
        point: what it would go on from.
        identity: of this run.

    Returns:
        Lines to say: what changed and may.

    Raises:
        ResumeError: model, data, network, seed, number of processes or batch differ, or fewer steps are asked for than
            are done.
    """
    if point.step > job.train.steps:
        raise ResumeError(
            f"train.steps={job.train.steps}: {point.path} has {point.step} steps already; raise train.steps to go on, "
            "or choose another config.name to start a new run"
        )
    saved = point.record.get("identity")
    if saved is None:
        return [f"{point.path}: this save does not say which model, data and settings it is of; not compared"]
    return require_same_run(saved, identity, job.coat.resume.allow, point.path)
