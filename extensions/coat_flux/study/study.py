"""A comparison in progress: runs of several arms and seeds on the same photos, in one folder.

    <training_folder>/<name>_verify/
        study.json                what is compared; another comparison is refused here
        photos/train, held_out    links to the user's photos and captions
        bf16_seed42/, coat_seed42/ …   ordinary run folders

When restarted, finished runs are reused and others resume from their newest save, which holds their losses so far.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..base.files import write_file
from ..base.names import COAT_TYPE
from ..blocks.held import USABLE_FRACTION
from ..config.check import require_packages
from ..config.findings import ConfigError
from ..config.job import JobConfig
from ..mini_flux import provide_embedded
from ..plan.report import make_plan
from ..saves.identity import data_identity, model_identity
from ..trainers.standalone.trainer import COATTrainer
from ..trainers.standalone.workers import Workers
from .held_out import HeldOut, Split, encode_held_out, split_photos, validation_entry
from .runs import (
    BF16,
    Arm,
    ArmResult,
    VerifyError,
    prepare_job,
    read_result,
    require_same,
    require_same_job,
    run_name,
)

if TYPE_CHECKING:
    from ..trainers.standalone.session import Session

__all__ = ["Settings", "Study", "open_study", "require_room"]

POINTS_OF_CURVE = 20
LEAN = "train.gradient_checkpointing: true and train.cache_text_embeddings: true"


@dataclass(frozen=True)
class Settings:
    """How to run a comparison; `every` are steps between points of the loss curves (None: a twentieth of the run).

    `validation` is a folder that replaces held-out photos; `…_sigmas` are noise levels per photo.
    """

    steps: int | None = None
    hold_out: int | None = None
    validation: str | Path | None = None
    every: int | None = None
    curve_sigmas: int = 2
    final_sigmas: int = 8


@dataclass(frozen=True)
class Study:
    """An open comparison, made by `open_study`, with every default of the settings filled in."""

    job: JobConfig
    folder: Path
    settings: Settings
    split: Split
    held_out: HeldOut
    device: torch.device

    @property
    def steps(self) -> int:
        """Steps of each run."""
        assert self.settings.steps is not None
        return self.settings.steps

    def prepare(self, arm_name: str, arm: Arm, seed: int) -> dict[str, Any]:
        """The job of one run."""
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
        """Run or resume one run, or reuse it if finished; VerifyError if its folder has a run of other settings."""
        raw = self.prepare(arm_name, arm, seed)
        run = self.folder / run_name(arm_name, seed)
        require_same_job(run, raw)

        def observe(session: Session) -> None:
            """Record the held-out loss: the curve at intervals and, at the end, the final loss."""
            step, settings = session.step, self.settings
            if on_step is not None:
                on_step(step)
            observed = session.record.setdefault("observed", {"curve": []})
            if (step % settings.every == 0 or step == self.steps) and all(at != step for at, _ in observed["curve"]):
                observed["curve"].append([step, self._loss(session, settings.curve_sigmas)])
            if step == self.steps:
                observed["final"] = self._loss(session, settings.final_sigmas)

        with _restored():
            COATTrainer(raw, observer=observe).train()
        if on_step is not None:
            on_step(self.steps)
        return read_result(run, arm_name, seed, self.steps)

    def _loss(self, session: Session, sigmas: int) -> float:
        device = session.workers.device
        with session.watch.phases.during("validate"), session.averaged():
            return self.held_out.loss(session.transformer, sigmas, dtype=session.dtype, device=device)


@contextmanager
def _restored() -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# -- opening a comparison ----------------------------------------------------------------------------------------------


def open_study(
    config: str | os.PathLike[str] | Mapping[str, Any] | JobConfig,
    settings: Settings | None = None,
    *,
    folder: str | Path | None = None,
) -> Study:
    """Check a config, split its photos and encode those held out.

    Raises:
        UserError: the config has no COAT to compare, the photos cannot be split or encoded, the bf16 run does not fit
            the GPU, or the folder has another comparison.
    """
    job = config if isinstance(config, JobConfig) else JobConfig.load(config)
    require_packages(job)
    if not job.coat.enabled:
        raise ConfigError(
            f"{job.file}: config.process[0].coat.enabled=false: verify compares COAT with bf16; "
            f"give the config you mean to train with, with type: {COAT_TYPE} and coat.enabled: true"
        )
    device = _device_of(job)
    provide_embedded(job.model.name_or_path)
    folder = Path(folder) if folder is not None else job.folder.with_name(f"{job.folder.name}_verify")
    settings = settings or Settings()
    steps = settings.steps or job.train.steps
    settings = replace(settings, steps=steps, every=settings.every or max(1, steps // POINTS_OF_CURVE))
    bf16 = prepare_job(job, BF16, name="bf16", folder=folder, seed=0)
    require_room(JobConfig.from_dict(bf16, file=job.file), device)
    split = _split(job, settings, folder)
    raw = prepare_job(job, BF16, name="held_out", folder=folder, seed=0, datasets=split.held_out)
    with _restored():
        held_out = encode_held_out(JobConfig.from_dict(raw, file=job.file), device)
    return Study(job, folder, settings, split, held_out, device)


def _device_of(job: JobConfig) -> torch.device:
    workers = Workers(job.device)
    try:
        if workers.size > 1:
            raise VerifyError(f"{workers.size} processes: verify runs in one; start it without accelerate launch")
        return workers.device
    finally:
        workers.close()


def require_room(bf16: JobConfig, device: torch.device, memory_bytes: float | None = None) -> None:
    """VerifyError, with the memory needed and remedies, if the plan finds the bf16 run too large for the GPU."""
    if device.type != "cuda":
        return
    if memory_bytes is None:
        memory_bytes = float(torch.cuda.get_device_properties(device).total_memory)
    verdict = make_plan(bf16, memory_bytes / 1e9).verdicts[0]
    if verdict.fits:
        return
    weights = verdict.prediction.phases[0].parts["transformer"] / 1e9
    train = replace(bf16.train, gradient_checkpointing=True)
    entries = tuple(replace(entry, cache_text_embeddings=True, shuffle_tokens=False) for entry in bf16.datasets)
    lean = make_plan(replace(bf16, train=train, datasets=entries), memory_bytes / 1e9).verdicts[0]
    needed, lean_needed = (one.prediction.peak / USABLE_FRACTION / 1e9 for one in (verdict, lean))
    remedy = f"write {LEAN}: with both it fits"
    if not lean.fits:
        remedy = (
            f"run verify once on a larger card, {lean_needed:.0f} GB are enough with {LEAN}; the COAT runs alone do "
            "not need one"
        )
    raise VerifyError(
        f"{bf16.file}: verify compares with a bf16 run, which needs a GPU of about {needed:.0f} GB (its weights alone "
        f"{weights:.1f} GB); this one has {memory_bytes / 1e9:.0f} GB\n{remedy}"
    )


def _split(job: JobConfig, settings: Settings, folder: Path) -> Split:
    """The split saved in `folder`, which must be of the same comparison, or a new one."""
    entries = [dict(entry) for entry in job.raw["config"]["process"][0]["datasets"]]
    asked, folders = asdict(settings), list(entries)
    if settings.validation is not None:
        asked["validation"] = str(settings.validation)
        folders.append({**entries[0], "folder_path": asked["validation"]})
    model = model_identity(job.model.name_or_path)
    identity = {"model": model, "trigger_word": job.trigger_word, "settings": asked, "data": data_identity(folders)}
    path = folder / "study.json"
    if path.exists():
        saved = json.loads(path.read_text(encoding="utf-8"))
        require_same(saved["study"], identity, path, "is of another comparison", folder)
        return Split(**{name: tuple(values) for name, values in saved["split"].items()})
    if settings.validation is not None:
        split = validation_entry(entries, Path(settings.validation))
    else:
        split = split_photos(entries, folder / "photos", settings.hold_out)
    write_file(path, json.dumps({"study": identity, "split": asdict(split)}, indent=1) + "\n")
    return split
