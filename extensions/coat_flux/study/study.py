"""A comparison under way: runs of several arms and seeds on the same photos, in one folder.

    <training_folder>/<name>_verify/
        study.json                what the comparison is of; another one is refused here
        photos/train, held_out    links to the user's photos and captions
        held_out.safetensors      the held-out photos, encoded once
        bf16_seed42/, coat_seed42/ …   ordinary run folders

A study that is opened again goes on: finished runs are taken as they are, others resume from their newest save. The
losses of a run are part of its saves, so they are as exact as the resume.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..base.files import replacing
from ..config.job import JobConfig
from ..config.job_rules import require_packages
from ..mini_flux.folder import provide_embedded
from ..saves.identity import data_identity, model_identity
from ..trainers.standalone.trainer import COATTrainer
from ..trainers.standalone.workers import Workers
from .errors import VerifyError
from .held_out import HeldOut, encode_held_out
from .paired import BF16, Arm, prepare_job, require_coat, run_name
from .photos import Split, split_photos, validation_entry
from .results import ArmResult, read_result
from .room import require_room
from .same import require_same, require_same_job

if TYPE_CHECKING:
    from ..trainers.standalone.session import Session

__all__ = ["Settings", "Study", "open_study"]

STUDY_FILE, HELD_OUT_FILE = "study.json", "held_out.safetensors"
POINTS_OF_CURVE = 20


@dataclass(frozen=True)
class Settings:
    """How a comparison is made.

    Attributes:
        steps: optimizer steps of each run; None: the config's.
        hold_out: photos kept out of training; None: a tenth.
        validation: a folder of other photos instead; then none is held out.
        every: steps from one point of the loss curves to the next; None: a twentieth of the run.
        curve_sigmas: noise levels per photo of a point of the curve.
        final_sigmas: of the final losses.
    """

    steps: int | None = None
    hold_out: int | None = None
    validation: str | Path | None = None
    every: int | None = None
    curve_sigmas: int = 2
    final_sigmas: int = 8


@dataclass(frozen=True)
class Study:
    """A comparison that is open; made by `open_study`.

    Attributes:
        job: the user's.
        folder: of all its runs.
        settings: with every default filled in.
        split: photos trained on and held out.
        held_out: the latter, encoded.
        device: where runs train.
    """

    job: JobConfig
    folder: Path
    settings: Settings
    split: Split
    held_out: HeldOut
    device: torch.device

    @property
    def steps(self) -> int:
        """Of each run."""
        assert self.settings.steps is not None
        return self.settings.steps

    def prepare(self, arm_name: str, arm: Arm, seed: int) -> dict[str, Any]:
        """The job of one run.

        Raises:
            ConfigError: the arm's options contradict each other or the config.
        """
        return prepare_job(
            self.job,
            arm,
            name=run_name(arm_name, seed),
            folder=self.folder,
            seed=seed,
            steps=self.steps,
            datasets=self.split.train,
        )

    def train_arm(
        self, arm_name: str, arm: Arm, seed: int, *, on_step: Callable[[int], None] | None = None
    ) -> ArmResult:
        """Run, continue, or take as it is, one run.

        Args:
            arm_name: a name for the folder, such as `bf16`.
            arm: laid over the config's `coat:` block; see `paired`.
            seed: of the run.
            on_step: is told the number of steps done, also that of a run that is done.

        Raises:
            VerifyError: the run's folder holds a run of other settings.
            UserError: whatever `COATTrainer.train` raises.
        """
        raw = self.prepare(arm_name, arm, seed)
        run = self.folder / run_name(arm_name, seed)
        require_same_job(run, raw)
        observer = _Observer(self.held_out, self.settings, self.steps, on_step)
        with _as_it_was():
            COATTrainer(raw, observer=observer).train()
        if on_step is not None:
            on_step(self.steps)
        return read_result(run, arm_name, seed, self.steps)


class _Observer:
    """Measures the held-out loss at intervals, into `session.record["observed"]`: curve and, at the end, final."""

    def __init__(self, held_out: HeldOut, settings: Settings, steps: int, on_step: Callable[[int], None] | None):
        self._held_out, self._settings, self._steps, self._on_step = held_out, settings, steps, on_step

    def __call__(self, session: Session) -> None:
        step, settings = session.step, self._settings
        if self._on_step is not None:
            self._on_step(step)
        seen = session.record.setdefault("observed", {"curve": []})
        if (step % settings.every == 0 or step == self._steps) and all(at != step for at, _ in seen["curve"]):
            seen["curve"].append([step, self._loss(session, settings.curve_sigmas)])
        if step == self._steps:
            seen["final"] = self._loss(session, settings.final_sigmas)

    def _loss(self, session: Session, sigmas: int) -> float:
        device = session.workers.device
        with session.phases.during("validate"), session.averaged():
            return self._held_out.loss(session.transformer, sigmas, dtype=session.dtype, device=device)


@contextmanager
def _as_it_was() -> Iterator[None]:
    """What a run sets for the whole process is set back, and its memory given back, before the next one."""
    precision = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def open_study(
    config: str | os.PathLike[str] | Mapping[str, Any] | JobConfig,
    settings: Settings | None = None,
    *,
    folder: str | Path | None = None,
) -> Study:
    """Check a config, split its photos and encode those held out.

    Args:
        config: path, dictionary or job.
        settings: of the comparison.
        folder: of its runs; None is `<training_folder>/<name>_verify`.

    Raises:
        UserError: the config has no COAT to compare, the photos cannot be split, the bf16 run does not fit the GPU, the
            folder holds another comparison, or the photos cannot be encoded.
    """
    job = config if isinstance(config, JobConfig) else JobConfig.load(config)
    require_packages(job)
    require_coat(job)
    device = _device_of(job)
    provide_embedded(job.model.name_or_path)
    folder = Path(folder) if folder is not None else job.folder.with_name(f"{job.folder.name}_verify")
    settings = _filled_in(settings or Settings(), job)
    bf16 = prepare_job(job, BF16, name="bf16", folder=folder, seed=0)
    require_room(JobConfig.from_dict(bf16, file=job.file), device)
    known = _identity(job, settings)
    split = _split(job, settings, folder, known)
    held_out = _held_out(job, split, folder, known, device)
    return Study(job, folder, settings, split, held_out, device)


def _device_of(job: JobConfig) -> torch.device:
    workers = Workers(job.device)
    try:
        if workers.world_size > 1:
            raise VerifyError(f"{workers.world_size} processes: verify runs in one; start it without accelerate launch")
        return workers.device
    finally:
        workers.close()


def _filled_in(settings: Settings, job: JobConfig) -> Settings:
    steps = settings.steps or job.train.steps
    every = settings.every or max(1, steps // POINTS_OF_CURVE)
    return Settings(**{**asdict(settings), "steps": steps, "every": every})


def _entries(job: JobConfig) -> list[dict[str, Any]]:
    return [dict(entry) for entry in job.raw["config"]["process"][0]["datasets"]]


def _identity(job: JobConfig, settings: Settings) -> dict[str, Any]:
    """What a comparison is of; plain JSON."""
    asked = asdict(settings) | {"validation": None if settings.validation is None else str(settings.validation)}
    entries = _entries(job)
    if settings.validation is not None:
        entries.append({**entries[0], "folder_path": str(settings.validation)})
    model = model_identity(job.model.name_or_path)
    return {"model": model, "trigger_word": job.trigger_word, "settings": asked, "data": data_identity(entries)}


def _split(job: JobConfig, settings: Settings, folder: Path, known: Mapping[str, Any]) -> Split:
    """The split of the study in `folder`, or a new one."""
    path = folder / STUDY_FILE
    if path.exists():
        saved = json.loads(path.read_text(encoding="utf-8"))
        require_same(saved["study"], known, path, "is of another comparison", folder)
        split = saved["split"]
        return Split(tuple(split["train"]), tuple(split["held_out"]), tuple(split["names"]))
    entries = _entries(job)
    if settings.validation is not None:
        split = validation_entry(entries, Path(settings.validation))
    else:
        split = split_photos(entries, folder / "photos", settings.hold_out)
    with replacing(path) as temp:
        temp.write_text(json.dumps({"study": known, "split": asdict(split)}, indent=1) + "\n", encoding="utf-8")
    return split


def _held_out(job: JobConfig, split: Split, folder: Path, known: Mapping[str, Any], device: torch.device) -> HeldOut:
    key = hashlib.sha256(json.dumps([known, split.held_out, asdict(job.coat.data)]).encode()).hexdigest()
    path = folder / HELD_OUT_FILE
    found = HeldOut.load(path, key)
    if found is None:
        raw = prepare_job(job, BF16, name="held_out", folder=folder, seed=0, datasets=split.held_out)
        with _as_it_was():
            found = encode_held_out(JobConfig.from_dict(raw, file=job.file), device)
        found.save(path, key)
    return found
