"""Finds where a run stopped, and checks that this is the same run.

Like ai-toolkit, a run continues from the newest save in its folder, bit-exactly if our state is next to it: random
draws and the position in the data follow from the step (see `seeding`). A resume that cannot be done right is an error;
a run never starts over by itself.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.optim import Optimizer

from ...base.names import COAT_OPTIMIZER
from ...config.job import JobConfig
from ...saves.commit import damage, newest_set, published_names, state_folder
from ...saves.errors import ResumeError
from ...saves.identity import require_same_run, run_identity
from ...saves.repair import MODEL_META
from ...saves.state import OPTIMIZER_FILE, REMEDY, STANDALONE, RunState, load_tensors, restore_tensors
from ..full import PART, restore_model
from ..optimizer import restore_optimizer
from .seeding import seed_of
from .validation import held_out_of

__all__ = ["ResumePoint", "check_same_run", "find_resume_point", "identity_of"]

DATA_SETTINGS = ("folder_path", "caption_ext", "default_caption", "resolution", "num_repeats", "flip_x", "buckets")
CAPTION_SETTINGS = ("caption_dropout_rate", "shuffle_tokens")
NOT_TRAINING = ("batch_size", "gradient_accumulation", "gradient_accumulation_steps", "disable_sampling")


@dataclass(frozen=True)
class ResumePoint:
    """The newest save of a run: LoRA file or model folder, steps done, our state (None in ai-toolkit's)."""

    path: Path
    step: int
    state: RunState | None = None

    @property
    def record(self) -> Mapping[str, Any]:
        """The contents of `state.json`, or {}."""
        return {} if self.state is None else self.state.record

    def restore(self, trained: Mapping[str, Tensor]) -> None:
        """Copy the raw parameters of our state, or else of the save, into a run's; ResumeError if they do not fit."""
        raw = None if self.state is None else self.state.lora()
        if raw is not None:
            restore_tensors(trained, raw, self.path)
        elif self.path.is_dir():
            restore_model(trained, self.path)
        else:
            restore_tensors(trained, {name: x.float() for name, x in load_tensors(self.path).items()}, self.path)

    def restore_optimizer(self, optimizer: Optimizer, name: str, log: Callable[[str], None]) -> None:
        """Load the optimizer's state, converting changed formats, with the config's hyper-parameters.

        Raises:
            ResumeError: the state is missing or damaged, another optimizer wrote it, or it does not fit.
        """
        folder = self.path.parent if self.state is None else self.state.folder
        path, saved_with = folder / OPTIMIZER_FILE, self.record.get("optimizer", name)
        if saved_with != name and not (name == COAT_OPTIMIZER and saved_with in ("adamw", "adam")):
            raise ResumeError(
                f"{path}: was written by {saved_with}, which train.optimizer={name} cannot read; "
                f"go back to {saved_with}, or choose another config.name to start over"
            )
        if not path.exists():
            raise ResumeError(f"{path}: is missing, but the run folder holds a save to continue from; {REMEDY}")
        try:
            # read while being copied, after `damage` has checked it: a whole model's takes 26 GB
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=self.state is not None)
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            raise ResumeError(f"{path}: cannot be read ({error}); {REMEDY}") from error
        try:
            changes = restore_optimizer(optimizer, saved)
        except (ValueError, KeyError, TypeError) as error:
            raise ResumeError(f"{path}: does not fit this run's LoRA ({error})") from error
        for change in changes:
            log(f"Resume: the config's optimizer settings replace the saved ones: {change}")


def find_resume_point(run_dir: Path, name: str) -> ResumePoint | None:
    """The newest save of a run that `saves.repair` has repaired, or None.

    Newest by steps in the metadata, then without a step in its name. An unreadable LoRA is skipped if another is there.
    ResumeError if no save is readable, the newest state is damaged and no other is whole, or a save is ai-toolkit's
    whole model.
    """
    other = next(run_dir.glob(f"{glob.escape(name)}*/{MODEL_META}"), None)
    if other is not None:
        raise ResumeError(
            f"{other.parent}: is ai-toolkit's, and full fine-tuning resumes in the trainer that saved it; run this "
            "config there, or choose another config.name to start over (all that is in this folder stays)"
        )
    points, unreadable = _models(run_dir), []
    pattern = re.compile(re.escape(name) + r"(_\d{9})?\.safetensors")
    for path in (path for path in run_dir.glob("*.safetensors") if pattern.fullmatch(path.name)):
        try:
            with safe_open(path, framework="pt") as file:
                step = json.loads((file.metadata() or {})["training_info"])["step"]
            points.append(ResumePoint(path, int(step)))
        except (OSError, SafetensorError) as error:
            unreadable.append(f"{path}: cannot be read ({error}); {REMEDY}")
        except (KeyError, ValueError, TypeError):
            unreadable.append(f"{path}: its metadata does not say the training step; {REMEDY}")
    if not points and unreadable:
        raise ResumeError(unreadable[0])
    if not points:
        return None
    newest = max(points, key=lambda point: (point.step, point.path.stem == name))
    folder = state_folder(run_dir, newest.step)
    if not folder.exists():
        return newest
    problem = damage(folder)
    if problem is not None:
        raise ResumeError(f"{problem}; {REMEDY}")
    state = RunState.read(folder, STANDALONE)
    if state is None and not (folder / OPTIMIZER_FILE).exists():
        raise ResumeError(f"{folder}: holds no state; {REMEDY}")
    return replace(newest, state=state)  # None in a set of our ai-toolkit process, whose state differs


def _models(run_dir: Path) -> list[ResumePoint]:
    newest = newest_set(run_dir)
    state = None if newest is None else RunState.read(newest, STANDALONE)
    if newest is None or state is None:
        return []
    published = [run_dir / name for name in published_names(newest)]
    return [ResumePoint(path, state.step) for path in published if (path / PART).is_dir()]


def identity_of(job: JobConfig, world_size: int) -> dict[str, Any]:
    """The identity of a run, from its config and the files it names."""
    network, train, photos = job.network, job.train, job.coat.data
    shared = {"trigger_word": job.trigger_word, "background": photos.background, "transparency": photos.transparency}
    captions = {key: [getattr(dataset, key) for dataset in job.datasets] for key in CAPTION_SETTINGS}
    settings = {key: value for key, value in asdict(train).items() if key not in NOT_TRAINING}
    datasets = []
    for dataset, paths in zip(job.datasets, held_out_of(job), strict=True):
        held_out = [path.relative_to(dataset.folder_path).as_posix() for path in paths]
        datasets.append({key: getattr(dataset, key) for key in DATA_SETTINGS} | shared | {"held_out": held_out})
    targets = {
        "linear": network.linear,
        "transformer_only": network.transformer_only,
        "only_if_contains": network.network_kwargs.only_if_contains,
        "ignore_if_contains": network.network_kwargs.ignore_if_contains,
    }
    if job.full:
        targets = {"linear": None, "include": list(job.coat.include), "exclude": list(job.coat.exclude)}
    return run_identity(
        job.model.name_or_path,
        datasets,
        network=targets,
        seed=seed_of(job),
        world_size=world_size,
        batch={"batch_size": train.batch_size, "gradient_accumulation": train.gradient_accumulation},
        coat={key: value for key, value in job.coat.to_dict().items() if key != "resume"},
        train={**settings, **captions, "dropout": network.dropout},
    )


def check_same_run(job: JobConfig, point: ResumePoint, identity: Mapping[str, Any]) -> list[str]:
    """Return permitted changes of the config since the save, a line each.

    Raises:
        ResumeError: model, data, network, seed, number of processes or batch differ, or the run is past its steps.
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
