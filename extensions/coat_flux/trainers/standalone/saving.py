"""Saves of the stand-alone trainer, and resumes from them; `saves.commit` makes saves atomic.

    <run>/coat/state-000000500/   the set of 500 optimizer steps:
        published.safetensors     the LoRA (the EMA, if any) in save.dtype; of full fine-tuning a folder published/
                                  with the whole model, see `full`
        optimizer.pt              optimizer.state_dict()
        ...                       the rest of a resume's state, see `saves.state`
    <run>/<name>_000000500.safetensors, <run>/optimizer.pt   the first two, published: hard links where possible

LoRA keys are ai-toolkit's, `transformer.<module>.lora_A.weight`, which `FluxPipeline.load_lora_weights` reads.

Like ai-toolkit, a run continues from the newest save in its folder, bit-exactly if our state is next to it: random
draws and the position in the data follow from the step (see `base.rng`). A resume that cannot be done right is an
error; a run never starts over by itself.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import Optimizer

from coat_core.optim.sharded import ShardedFP8AdamW, gather

from ...base.environment import version_of
from ...base.files import discard
from ...base.rng import rng_state
from ...config.job import JobConfig
from ...export.lora_files import check_export
from ...saves.commit import commit, damage, newest_set, published_names, state_folder
from ...saves.errors import ResumeError
from ...saves.repair import MODEL_META, saves_of
from ...saves.state import (
    OPTIMIZER_FILE,
    REMEDY,
    STANDALONE,
    RunState,
    execution_of,
    load_tensors,
    require_readable,
    require_same_optimizer,
    require_same_run,
    restore_tensors,
    run_identity,
    save_tensors,
)
from ...watch.guard import UP_MATRICES, WINDOW
from ..full import PART, check_model, restore_model, write_model
from ..optimizer import restore_optimizer
from ..processes import exchange
from .loading import TORCH_DTYPES, base_weights
from .validation import held_out_of

if TYPE_CHECKING:
    from .session import Session

PUBLISHED_FILE = "published.safetensors"
MODEL_FOLDER = "published"
DATA_SETTINGS = ("folder_path", "caption_ext", "default_caption", "resolution", "num_repeats", "flip_x", "buckets")
MASK_SETTINGS = ("mask_path", "mask_min_value", "invert_mask", "alpha_mask", "is_reg")
CAPTION_SETTINGS = ("caption_dropout_rate", "shuffle_tokens")
NOT_TRAINING = ("batch_size", "gradient_accumulation", "gradient_accumulation_steps", "disable_sampling")


def save_name(name: str, step: int | None, *, full: bool = False) -> str:
    """Name of a save: `<name>_000000500.safetensors`, `<name>.safetensors` without a step; `full`: a folder's name."""
    ending = "" if full else ".safetensors"
    return f"{name}{ending}" if step is None else f"{name}_{step:09d}{ending}"


def save(session: Session, *, final: bool) -> Path:
    """Write and commit a set, publish its LoRA or model and `optimizer.pt`; returns the published path.

    All processes call it together, to exchange shards; the main process writes. DeadRunError,
    ExportError (the LoRA cannot be read back) and SaveError leave the previous checkpoint intact.
    """
    job = session.job
    optimizer = session.optimizer
    is_main = session.workers.is_main
    path = job.folder / save_name(job.name, None if final else session.step, full=job.full)
    session.watch.guard.check_save(session.step, final=final)
    with session.watch.phases.during("save"):
        record = {
            **session.record,
            "optimizer": job.train.optimizer,
            "sampler": session.sampler.state_dict(),
            "guard": session.watch.state_dict(),  # its norms are over all processes
            "path": execution_of(session.transformer),
            **({} if session.reg_sampler is None else {"reg_sampler": session.reg_sampler.state_dict()}),
            "identity": session.identity,
            "step": session.step,
        }
        trained: Mapping[str, Tensor] = session.lora
        average: Mapping[str, Tensor] = {} if session.ema is None else session.ema.shadow
        if isinstance(optimizer, ShardedFP8AdamW):
            with exchange():
                trained = gather(trained, is_main)
                average = gather(average, is_main)
                states = optimizer.whole_state_dict(is_main)
        else:
            states = optimizer.state_dict()
        if is_main:
            _write(session, path, record, trained, average, states, final=final)
    session.workers.wait()
    return path


def _write(
    session: Session,
    path: Path,
    record: Mapping[str, Any],
    trained: Mapping[str, Tensor],
    average: Mapping[str, Tensor],
    states: Mapping[str, Any],
    *,
    final: bool,
) -> None:
    job = session.job
    dtype = TORCH_DTYPES[job.save.dtype]
    published = average or trained
    metadata = _metadata(session)
    base = base_weights(job.model.name_or_path) if job.full else None
    raw = trained
    if base is not None and not average and all(tensor.dtype == dtype for tensor in trained.values()):
        raw = {}  # the model is saved as it is trained
    inside = PUBLISHED_FILE if base is None else MODEL_FOLDER

    def write(folder: Path) -> None:
        if base is None:
            tensors = {name: value.to(dtype) for name, value in published.items()}
            for name in published if job.network.type == "lokr" else ():
                alpha = torch.tensor(float(job.network.linear), dtype=dtype)
                tensors.setdefault(f"{name.rpartition('.')[0]}.alpha", alpha)
            save_tensors(folder / inside, tensors, metadata)
        else:
            write_model(folder / inside, session.transformer, base, published, dtype, metadata)
        with (folder / OPTIMIZER_FILE).open("wb") as file:
            torch.save(dict(states), file)
        RunState.write(folder, STANDALONE, record, raw, average, rng_state())
        session.log.info(f"{path.name}: {read_back(folder / inside)}")

    def read_back(file: Path) -> str:
        if base is not None:
            return check_model(file, session.lora)
        ups = [up for name, up in load_file(file).items() if UP_MATRICES.search(name)]
        if not final and not any(up.any() for up in ups):
            return f"every lora_B is still zero in {job.save.dtype}, this LoRA has no effect yet"
        if job.network.type == "lokr":
            return f"LoKr of {len(ups)} linears, {job.save.dtype}"
        shapes = {name: tuple(param.shape) for name, param in session.lora.items()}
        return check_export(file, expected=shapes).line()

    publish = {path.name: inside, OPTIMIZER_FILE: OPTIMIZER_FILE}
    apart = session.watch.guard.apart(session.step) or min(job.save.save_every, WINDOW)
    commit(job.folder, session.step, write, publish, apart=apart)
    steps = [save for save in saves_of(job.folder, job.name) if save.name.removesuffix(".safetensors") != job.name]
    for old in steps[: -job.save.max_step_saves_to_keep]:
        discard(old)
        session.log.detail(f"Removing old save: {old}")


def _metadata(session: Session) -> dict[str, str]:
    """Metadata of a saved LoRA, keys and form as ai-toolkit's; `[name]` in the config's `meta` is replaced."""
    job, report = session.job, session.report
    meta = json.dumps(job.written.get("meta") or {})
    fields: dict[str, Any] = json.loads(meta.replace("[name]", job.name))
    fields["training_info"] = {"step": session.step, "epoch": session.epoch}
    fields["ss_base_model_version"] = "flux.1"
    fields["ss_output_name"] = job.name
    if job.trigger_word:
        fields["ss_tag_frequency"] = {f"1_{job.trigger_word}": {job.trigger_word: 1}}
    fields["software"] = {"name": "coat-flux", "version": version_of("coat-flux") or "not installed as a package"}
    fields["coat"] = job.coat.to_dict()
    text = {key: value if isinstance(value, str) else json.dumps(value) for key, value in fields.items()}
    return text | ({} if report is None else report.metadata()) | {"format": "pt"}


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
        raw = None if self.state is None else self.state.tensors("lora")
        if raw is None and self.path.is_dir():
            restore_model(trained, self.path)
            return
        if raw is None:
            raw = {name: x.float() for name, x in load_tensors(self.path).items()}
        restore_tensors(trained, raw, self.path)

    def optimizer_file(self, name: str) -> Path:
        """The saved state; raises ResumeError if the optimizer `name` cannot read it."""
        path = (self.path.parent if self.state is None else self.state.folder) / OPTIMIZER_FILE
        require_same_optimizer(path, self.record.get("optimizer", name), name)
        require_readable(path.parent, name)  # ai-toolkit's saves have no record
        return path

    def restore_optimizer(self, optimizer: Optimizer, name: str) -> list[str]:
        """Load the state of the optimizer `name`, but keep the config's settings; a line for each change."""
        path = self.optimizer_file(name)
        try:
            # read while being copied, after `damage` has checked it: a whole model's takes 26 GB
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=self.state is not None)
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            raise ResumeError(f"{path}: cannot be read ({error}); {REMEDY}") from error
        try:
            return restore_optimizer(optimizer, saved)
        except (ValueError, KeyError, TypeError) as error:
            raise ResumeError(f"{path}: does not fit this run's LoRA ({error})") from error


def find_resume_point(run_dir: Path, name: str) -> ResumePoint | None:
    """The newest save of a repaired run, or None: by its steps, then without a step in its name.

    An unreadable LoRA is skipped if another is there. ResumeError if no save is intact, or
    one is ai-toolkit's whole model.
    """
    other = next(run_dir.glob(f"{glob.escape(name)}*/{MODEL_META}"), None)
    if other is not None:
        raise ResumeError(
            f"{other.parent}: is ai-toolkit's, and full fine-tuning resumes in the trainer that saved it; run this "
            "config there, or choose another config.name to start over (all that is in this folder stays)"
        )
    points: list[ResumePoint] = []
    newest_state = newest_set(run_dir)
    state = None if newest_state is None else RunState.read(newest_state, STANDALONE)
    if newest_state is not None and state is not None:  # a whole model has its step there alone
        published = [run_dir / file for file in published_names(newest_state)]
        points = [ResumePoint(path, state.step) for path in published if (path / PART).is_dir()]
    files = {path: step for path, step in saves_of(run_dir, name).items() if path.suffix}
    points += [ResumePoint(path, step) for path, step in files.items() if step >= 0]
    if files and not points:
        raise ResumeError(f"{min(files)}: cannot be read, or its metadata does not say the training step; {REMEDY}")
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


def identity_of(job: JobConfig, world_size: int) -> dict[str, Any]:
    """The identity of a run, from its config and the files it names."""
    network = job.network
    train = job.train
    captions = {key: [getattr(dataset, key) for dataset in job.datasets] for key in CAPTION_SETTINGS}
    settings = {key: value for key, value in asdict(train).items() if key not in NOT_TRAINING}
    datasets = []
    for dataset, paths in zip(job.datasets, held_out_of(job), strict=True):
        entry = {key: getattr(dataset, key) for key in DATA_SETTINGS}
        entry["trigger_word"] = job.trigger_word
        entry["background"] = job.coat.data.background
        entry["transparency"] = job.coat.data.transparency
        entry |= {key: getattr(dataset, key) for key in MASK_SETTINGS}
        entry["held_out"] = [path.relative_to(dataset.folder_path).as_posix() for path in paths]
        datasets.append(entry)
    if job.full:
        targets = {"linear": None, "include": list(job.coat.include), "exclude": list(job.coat.exclude)}
    else:
        targets = {"linear": network.linear, "transformer_only": network.transformer_only}
        if network.type == "lokr":
            targets |= {"lokr_full_rank": network.lokr_full_rank, "lokr_factor": network.lokr_factor}
        targets |= {key: getattr(network.network_kwargs, key) for key in ("only_if_contains", "ignore_if_contains")}
    return run_identity(
        job.model.name_or_path,
        datasets,
        network=targets,
        seed=job.seed,
        world_size=world_size,
        batch={"batch_size": train.batch_size, "gradient_accumulation": train.gradient_accumulation},
        coat={key: value for key, value in job.coat.to_dict().items() if key != "resume"},
        train={**settings, **captions, "dropout": network.dropout},
    )


def check_same_run(job: JobConfig, point: ResumePoint, identity: Mapping[str, Any]) -> list[str]:
    """Return permitted changes of the config since the save, a line each; ResumeError for others, or too few steps."""
    if point.step > job.train.steps:
        raise ResumeError(
            f"train.steps={job.train.steps}: {point.path} has {point.step} steps already; raise train.steps to go on, "
            "or choose another config.name to start a new run"
        )
    saved = point.record.get("identity")
    if saved is None:
        return [f"{point.path}: this save does not say which model, data and settings it is of; not compared"]
    return require_same_run(saved, identity, job.coat.resume.allow, point.path)
