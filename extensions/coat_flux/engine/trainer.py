"""The stand-alone trainer: the same YAML, the same LoRA file and the same output folder as ai-toolkit.

One optimizer step: `gradient_accumulation` micro-batches per process, gradients averaged over micro-batches and
processes, clipped to `max_grad_norm`, AdamW, EMA, schedule. Steps are counted as optimizer steps: the save named 500
holds what 500 steps made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from ..config.job_config import JobConfig
from ..config.job_rules import require_packages
from ..data.dataset import Batch
from ..memory.phases import PhaseTracker
from ..memory.report import finish
from ..tiny_flux import provide_embedded
from .progress import RunLog, StepStats
from .resume import find_resume_point
from .saving import Checkpoint, lora_metadata, remove_leftovers, rotate_saves, save_checkpoint, save_dtype, save_name
from .seeding import Stream, seed_global
from .session import Session, open_session, seed_of
from .validation import fixed_noise_loss
from .workers import Workers

__all__ = ["COATTrainer", "TrainingError"]

MEMORY_FILE = Path("coat") / "memory.json"


class TrainingError(RuntimeError):
    """Training went wrong in a way that further steps cannot mend."""


class COATTrainer:
    """Trains a FLUX LoRA as a config says.

    Args:
        config: path of a YAML, its content as a dictionary, or a `JobConfig`.

    Raises:
        ConfigError: the config cannot be run.
    """

    def __init__(self, config: str | Path | Mapping[str, Any] | JobConfig):
        if isinstance(config, JobConfig):
            self.job = config
        else:
            self.job = JobConfig.from_dict(config) if isinstance(config, Mapping) else JobConfig.from_file(config)

    def train(self) -> Path:
        """Run, or continue, the training.

        Returns:
            The final LoRA, `<training_folder>/<name>/<name>.safetensors`.

        Raises:
            ConfigError: a package the config needs is not installed.
            DatasetError: the data cannot be used.
            ModelLoadError: the model cannot be loaded.
            ResumeError: the run folder holds a save that cannot be continued.
            TrainingError: the loss became NaN or inf, or the LoRA is still zero at the end.
        """
        job = self.job
        require_packages(job)
        workers = Workers(job.device)
        log = RunLog(job, workers.device, active=workers.is_main)
        phases = PhaseTracker(workers.device, None)
        try:
            return self._train(workers, log, phases)
        finally:
            phases.close()
            log.close()
            workers.close()

    def _train(self, workers: Workers, log: RunLog, phases: PhaseTracker) -> Path:
        job = self.job
        for note in job.notes:
            log.say(f"Note: {note}")
        if workers.is_main:
            provide_embedded(job.model.name_or_path)
        point = find_resume_point(job.folder, job.name)
        workers.wait()
        final = job.folder / save_name(job.name, None)
        if point is not None and point.step >= job.train.steps and point.path == final:
            log.say(f"{final} has {point.step} of {job.train.steps} steps: nothing is left to train")
            return final
        if point is not None:
            log.say(f"#### IMPORTANT RESUMING FROM {point.path} ####")
        elif workers.is_main:  # a run that cannot be continued is left as it is
            phases.path = job.folder / MEMORY_FILE
        return _run(open_session(job, workers, log, phases, point))


def _run(session: Session) -> Path:
    job, log, workers = session.job, session.log, session.workers
    if workers.is_main:
        job.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(job.folder)
        session.phases.path = job.folder / MEMORY_FILE
        text = yaml.safe_dump(job.raw, sort_keys=False, allow_unicode=True)
        (job.folder / "config.yaml").write_text(text, encoding="utf-8")
    log.open(session.step)
    if "validation_loss" not in session.record:
        session.record["validation_loss"] = _validate(session)
    if session.step == 0 and not job.train.skip_first_sample:
        _draw_samples(session)
    log.start(session.step)
    batches = iter(session.sampler)
    session.phases.enter("step")
    while session.step < job.train.steps:
        log.step(_train_step(session, batches))
        if session.step < job.train.steps:
            _save_and_sample(session)
    _check_alive(session)
    path = _save(session, final=True)
    _draw_samples(session)
    log.say(f"validation loss {session.record['validation_loss']:.6f} -> {_validate(session):.6f}")
    finish(session.phases, lambda: job, log.say, table=job.coat.memory.log_memory_stats)
    log.say(f"Saved the LoRA to {path}")
    return path


def _train_step(session: Session, batches: Iterator[Batch]) -> StepStats:
    """One optimizer step; `session.step` counts it."""
    started = time.perf_counter()
    job, params = session.job, list(session.lora.values())
    lr = session.optimizer.param_groups[0]["lr"]
    session.optimizer.zero_grad(set_to_none=True)
    loss = _accumulate(session, batches)
    session.workers.average_gradients(params)
    norm = clip_grad_norm_(params, job.train.max_grad_norm)
    seed_global(seed_of(job), Stream.OPTIMIZER, session.step)
    session.optimizer.step()
    session.memory.line("after_optimizer_step", session.step + 1)
    session.lr_scheduler.step()
    if session.ema is not None:
        session.ema.update()
    session.step += 1
    mean_loss, grad_norm = session.workers.mean(loss).item(), norm.item()
    if not (math.isfinite(mean_loss) and math.isfinite(grad_norm)):
        raise TrainingError(
            f"step {session.step}: loss {mean_loss}, gradient norm {grad_norm}: must be finite; saves hold earlier "
            "steps; lower train.lr, or set coat.activation.linear_granularity: per_row"
        )
    return StepStats(session.step, session.epoch, mean_loss, float(lr), grad_norm, time.perf_counter() - started)


def _accumulate(session: Session, batches: Iterator[Batch]) -> Tensor:
    """Forward and backward of this process's micro-batches; returns their mean loss."""
    count = session.job.train.gradient_accumulation
    total = torch.zeros((), device=session.workers.device)
    for micro_step in range(count):
        batch = next(batches)
        tensors = session.dataset.batch(batch)
        shown = micro_step == 0
        if shown:
            session.memory.line("before_forward", session.step + 1)
        loss = session.objective(tensors, batch.draw)
        if shown:
            session.memory.line("after_forward", session.step + 1)
        (loss / count).backward()
        if shown:
            session.memory.line("after_backward", session.step + 1)
        total += loss.detach() / count
    return total


def _is_due(session: Session, every: int) -> bool:
    return session.step % every == 0


def _save_and_sample(session: Session) -> None:
    job = session.job
    saves = _is_due(session, job.save.save_every)
    samples = _is_due(session, job.sample.sample_every) and session.step >= job.sample.sample_start_step
    if saves:
        session.log.say(f"Saving at step {session.step}")
        session.log.say(f"Saved checkpoint to {_save(session, final=False)}")
    if samples:
        _draw_samples(session)


def _save(session: Session, *, final: bool) -> Path:
    job, workers = session.job, session.workers
    file_name = save_name(job.name, None if final else session.step)
    if workers.is_main:
        with session.phases.during("save"):
            _write_save(session, file_name)
    workers.wait()
    return session.job.folder / file_name


def _write_save(session: Session, file_name: str) -> None:
    job = session.job
    record = {**session.record, "sampler": session.sampler.state_dict(), "optimizer": job.train.optimizer}
    point = Checkpoint(
        step=session.step,
        lora=session.lora,
        ema=None if session.ema is None else session.ema.shadow,
        optimizer=session.optimizer.state_dict(),
        metadata=_metadata(session),
        record=record,
    )
    save_checkpoint(session.job.folder, file_name, point, save_dtype(job.save.dtype))
    for old in rotate_saves(session.job.folder, job.name, job.save.max_step_saves_to_keep):
        session.log.say(f"Removing old save: {old}")


def _metadata(session: Session) -> dict[str, str]:
    job = session.job
    return lora_metadata(
        job.name,
        step=session.step,
        epoch=session.epoch,
        trigger_word=job.trigger_word,
        meta=job.meta,
        coat=job.coat.to_dict(),
    )


def _draw_samples(session: Session) -> None:
    if session.images is not None:
        with session.phases.during("sample"), session.averaged():
            session.images.draw(session.transformer, session.step, session.job.folder / "samples")
    session.workers.wait()


def _validate(session: Session) -> float:
    with session.phases.during("validate"), session.averaged():
        loss = fixed_noise_loss(session.transformer, session.dataset, dtype=session.dtype)
    session.log.validation(session.step, loss)
    return loss


def _check_alive(session: Session) -> None:
    if all(param.count_nonzero() == 0 for name, param in session.lora.items() if ".lora_B." in name):
        raise TrainingError(
            f"after {session.step} steps every lora_B is still zero, so the LoRA has no effect; raise train.lr "
            f"({session.job.train.lr}) or train longer than the warm-up"
        )
