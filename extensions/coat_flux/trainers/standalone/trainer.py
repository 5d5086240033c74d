"""The stand-alone trainer: the same YAML, the same LoRA file and the same output folder as ai-toolkit.

One optimizer step: `gradient_accumulation` micro-batches per process, gradients averaged over micro-batches and
processes, clipped to `max_grad_norm`, AdamW, EMA, schedule. Steps are counted as optimizer steps: the save named 500
holds what 500 steps made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file

from ...base.files import write_file
from ...blocks.models.check import require_here
from ...config.findings import ConfigError
from ...config.job import JobConfig
from ...config.job_file import load_job_yaml
from ...config.launch import joint_job
from ...data.hold_out import describe_lowest
from ...export.check import check_export
from ...mini_flux.folder import provide_embedded
from ...plan.job import check_trained
from ...plan.space import save_space
from ...saves.commit import newest_set, require_room, set_step
from ...saves.errors import save_errors
from ...saves.interrupts import Interrupts
from ...saves.lock import run_lock
from ...saves.repair import go_back, repair, way_back
from ...saves.state import execution_changes, execution_of
from ...watch.guard import WINDOW, DeadRunError
from ...watch.live import LiveRun
from ...watch.memory_report import finish
from ...watch.oom import OutOfMemory, explain_oom, is_oom
from ...watch.phases import MEMORY_FILE, PhaseTracker
from ..full import ModelFiles, check_model
from ..processes import EXIT_OTHER, first_to_fail
from .flow_matching import bypassed_guidance
from .loading import base_weights
from .progress import RunLog
from .resume import check_same_run, find_resume_point, identity_of
from .saving import lora_metadata, rotate_saves, save_checkpoint, save_dtype, save_name, whole_parts
from .session import Session, open_session
from .steps import settle, train_step
from .workers import Workers

__all__ = ["COATTrainer"]


class COATTrainer:
    """Trains a FLUX LoRA as a config says, or without `network` the transformer itself.

    Args:
        config: path of a YAML, its content as a dictionary, or a `JobConfig`.
        observer: called before the first step and after each one, before a save. It may measure, and keep plain JSON in
            `session.record["observed"]`, which is saved and comes back with a resume; it must leave training as it is.

    Raises:
        ConfigError: the config cannot be run.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | JobConfig,
        *,
        observer: Callable[[Session], None] | None = None,
    ):
        self._observer = observer
        if isinstance(config, JobConfig):
            self.job = config
        else:
            self.job = JobConfig.from_dict(config) if isinstance(config, Mapping) else JobConfig.from_file(config)

    def train(self, *, from_step: int | None = None) -> Path:
        """Run, or continue, the training.

        Args:
            from_step: resume from this kept state; newer ones are moved aside.

        Returns:
            The final LoRA, `<training_folder>/<name>/<name>.safetensors`; or the model, a folder `<name>` there.

        Raises:
            ConfigError: a package, the device or the model that the config needs is not here.
            DatasetError: the data cannot be used.
            ModelLoadError: the model cannot be loaded.
            ResumeError: the run folder holds a save that cannot be continued, or one of another run, or another process
                trains in it.
            SaveError: the run folder cannot be written; the newest save is as it was.
            DeadRunError: the run can no longer succeed; the saves are as they were, and the message names the step to
                go back to.
            OutOfMemory: with what holds the memory, and what to change.
            ExportError: a LoRA to be saved cannot be read back; the newest save is as it was.
            KeyboardInterrupt: it was interrupted, and the step under way was saved.
        """
        job = self.job
        require_here(job)
        check_trained(job)
        workers = Workers(job.device)
        if workers.size > 1:
            job = self.job = joint_job(job, shares=workers.shares_weights)
        log = RunLog(job, workers.device, active=workers.is_main)
        phases = PhaseTracker(workers.device, None)
        try:
            with run_lock(job.folder) if workers.is_main else nullcontext():
                return self._train(workers, log, phases, from_step)
        except DeadRunError as error:
            if not first_to_fail():
                raise SystemExit(EXIT_OTHER) from error
            if error.since is None:
                raise
            raise DeadRunError(f"{error}; {self._way_back(error.since)}", error.since) from error
        except Exception as error:
            log.record(f"Ended by {type(error).__name__}: {error}")
            if not first_to_fail():
                raise SystemExit(EXIT_OTHER) from error  # the first one says why
            if not is_oom(error):
                raise
            raise OutOfMemory(explain_oom(error, phases, lambda: job)) from error
        finally:
            phases.close()
            log.close()
            workers.close()

    def _way_back(self, since: int) -> str:
        """What to start after the config was corrected."""
        job, name = self.job, self.job.raw["config"]["name"]
        try:
            given = "" if load_job_yaml(job.file)["config"]["name"] == name else f' --name "{name}"'
        except ConfigError:
            given = f' --name "{name}"'
        return way_back(
            job.folder,
            since,
            _apart(job),
            lambda step: f'resume from step {step}: coat-flux train "{job.file}"{given} --from-step {step}',
            "start the same config again",
        )

    def _train(self, workers: Workers, log: RunLog, phases: PhaseTracker, from_step: int | None) -> Path:
        job = self.job
        for note in job.notes:
            log.info(f"Note: {note}")
        if workers.is_main:
            provide_embedded(job.model.name_or_path)
            back = [] if from_step is None else go_back(job.folder, from_step)
            for line in (*back, *repair(job.folder)):
                log.info(line)
            require_room(job.folder)
        workers.wait()
        point = find_resume_point(job.folder, job.name)
        identity = identity_of(job, workers.size)
        samples = bool(job.sample.items()) and not job.train.disable_sampling
        first = 0 if point is None else point.step
        live = LiveRun(job.folder, first, job.train.steps, samples=samples, active=workers.is_main)
        if point is None:
            if workers.is_main:  # a run that cannot be continued is left as it is
                phases.path = job.folder / MEMORY_FILE
            with live:
                return _run(open_session(job, workers, log, phases, None, identity, live), self._observer)
        for note in check_same_run(job, point, identity):
            log.info(f"Resume: {note}")
        final = job.folder / save_name(job.name, None, full=job.full)
        if point.step == job.train.steps and point.path == final:
            log.info(f"{final} has {point.step} of {job.train.steps} steps: nothing is left to train")
            return final
        log.info(f"#### IMPORTANT RESUMING FROM {point.path} ####")
        session = open_session(job, workers, log, phases, point, identity, live)  # before `live`: it may refuse
        with live:
            return _run(session, self._observer, point.record)


def _run(
    session: Session, observer: Callable[[Session], None] | None, resumed: Mapping[str, Any] | None = None
) -> Path:
    """Train to the end, from a session that may go on from a save with the record `resumed`."""
    job, log = session.job, session.log
    _open_files(session)
    if "validation_loss" not in session.record:
        session.record["validation_loss"] = _validate(session)
    if session.step == 0 and not job.train.skip_first_sample:
        _draw_samples(session)
    with Interrupts(log.info) as interrupts:
        _train_steps(session, interrupts, resumed or {}, observer)
        session.watch.guard.check_end(session.step)
        path = _save(session, final=True)
    _draw_samples(session)
    if session.validation.held_out:
        log.info(describe_lowest(session.record["held_out_loss"], job.folder, job.name))
    else:
        log.info(f"validation loss {session.record['validation_loss']:.6f} -> {_validate(session):.6f}")
    table = log.detail if job.coat.memory.log_memory_stats else None
    finish(session.watch.phases, lambda: job, log.info, table)
    log.info(f"Saved the {'model' if job.full else 'LoRA'} to {path}")
    return path


def _open_files(session: Session) -> None:
    job = session.job
    with save_errors(job.folder, "the run cannot write its files", "its checkpoints are as they were"):
        if session.workers.is_main:
            text = yaml.safe_dump(job.written, sort_keys=False, allow_unicode=True)
            write_file(job.folder / "config.yaml", text)
            session.watch.phases.path = job.folder / MEMORY_FILE
            space = save_space(job, [p.numel() for p in session.lora.values()])
            require_room(job.folder, space, lambda line: session.log.info(f"Warning: {line}"))
        session.log.open(session.step)


def _train_steps(
    session: Session,
    interrupts: Interrupts,
    resumed: Mapping[str, Any],
    observer: Callable[[Session], None] | None,
) -> None:
    """All steps that are left, with saves and samples between them.

    Raises:
        KeyboardInterrupt: after the save of an interrupted run.
    """
    job, batches, first = session.job, iter(session.sampler), session.step + 1
    session.log.start(session.step)
    session.watch.phases.enter("step")
    if observer is not None:
        observer(session)
    while session.step < job.train.steps:
        asked = train_step(session, batches, interrupts)
        if asked or observer is not None or _anything_is_due(session):
            settle(session)
        if session.step == first:
            for line in execution_changes(resumed.get("path", {}), execution_of(session.transformer, recomputed=True)):
                session.log.info(line)
        if observer is not None:
            observer(session)
        last = session.step == job.train.steps
        if session.validation.held_out and (last or _is_due(session, job.validation.every)):
            _validate(session)
        if last:
            return
        if "stop" in asked:
            _stop(session)
        _save_and_sample(session, asked)


def _stop(session: Session) -> None:
    doubt, where = session.watch.guard.doubt, f"Stopped after step {session.step} of {session.job.train.steps}"
    if doubt is None:
        session.log.info(f"{where}, saved as {_save(session, final=False)}")
    else:
        newest = newest_set(session.job.folder)
        kept = "there is no earlier save" if newest is None else f"the newest save is of step {set_step(newest)}"
        session.log.info(f"{where}, without a save: {doubt}; {kept}")
    session.log.info("To resume, start the same config again")
    raise KeyboardInterrupt


def _anything_is_due(session: Session) -> bool:
    job = session.job
    every = (job.save.save_every, job.sample.sample_every, job.validation.every)
    return session.owes_save or session.step == job.train.steps or any(_is_due(session, n) for n in every)


def _is_due(session: Session, every: int) -> bool:
    return session.step % every == 0


def _save_and_sample(session: Session, asked: frozenset[str]) -> None:
    job = session.job
    due, doubt = "save" in asked or _is_due(session, job.save.save_every), session.watch.guard.doubt
    if due and doubt is not None:
        session.log.info(f"Step {session.step}: not saved, {doubt}; it is saved when that is over")
        session.owes_save = True
    elif due or (session.owes_save and doubt is None):
        session.log.detail(f"Saving at step {session.step}")
        session.log.info(f"Saved checkpoint to {_save(session, final=False)}")
        session.owes_save = False
    due = _is_due(session, job.sample.sample_every) and session.step >= job.sample.sample_start_step
    if "sample" in asked or due:
        _draw_samples(session)


def _save(session: Session, *, final: bool) -> Path:
    job, workers = session.job, session.workers
    file_name = save_name(job.name, None if final else session.step, full=job.full)
    session.watch.guard.check_now(session.step)
    with session.watch.phases.during("save"):
        record = _record(session)  # by all processes, as the next line: shards are exchanged
        average = None if session.ema is None else session.ema.shadow
        parts = whole_parts(session.lora, average, session.optimizer, workers.is_main)
        if workers.is_main:
            _write_save(session, file_name, record, parts, final=final)
    workers.wait()
    return session.job.folder / file_name


def _write_save(
    session: Session, file_name: str, record: Mapping[str, Any], parts: Mapping[str, Any], *, final: bool
) -> None:
    job = session.job

    def check(path: Path) -> None:
        found = check_model(path, session.lora) if job.full else _check_lora(session, path, final=final)
        session.log.info(f"{file_name}: {found}")

    save_checkpoint(
        job.folder,
        file_name,
        **parts,
        record=record,
        metadata=_metadata(session),
        dtype=save_dtype(job.save.dtype),
        check=check,
        apart=_apart(job),
        model=ModelFiles(session.transformer, base_weights(job.model.name_or_path)) if job.full else None,
    )
    for old in rotate_saves(job.folder, job.name, job.save.max_step_saves_to_keep):
        session.log.detail(f"Removing old save: {old}")


def _apart(job: JobConfig) -> int:
    """Steps after which a state without a doubt since is known to be good: those the guard may need to see it."""
    return min(job.save.save_every, WINDOW)


def _record(session: Session) -> dict[str, Any]:
    return {
        **session.record,
        "optimizer": session.job.train.optimizer,
        "sampler": session.sampler.state_dict(),
        "guard": session.watch.state_dict(),
        "path": execution_of(session.transformer, recomputed=True),
        "identity": session.identity,
        "step": session.step,
    }


def _check_lora(session: Session, path: Path, *, final: bool) -> str:
    """Read a LoRA back as others do. Before the end one may be all zero, which is the guard's to judge: a warm-up."""
    if not final and not any(up.any() for name, up in load_file(path).items() if ".lora_B." in name):
        return f"every lora_B is still zero in {session.job.save.dtype}, this LoRA has no effect yet"
    return check_export(path, expected={name: tuple(param.shape) for name, param in session.lora.items()}).line()


def _metadata(session: Session) -> dict[str, str]:
    job = session.job
    return lora_metadata(
        job.name,
        step=session.step,
        epoch=session.epoch,
        trigger_word=job.trigger_word,
        meta=job.meta,
        coat=job.coat.to_dict(),
        got=None if session.report is None else session.report.metadata(),
    )


def _draw_samples(session: Session) -> None:
    if session.images is not None:
        folder = session.job.folder / "samples" if session.workers.is_main else None
        _drop_graphs(session)
        with session.watch.phases.during("sample"), session.averaged():
            try:
                paths = session.images.draw(session.transformer, session.step, folder)
                if folder is not None:
                    session.log.images(paths, [item.prompt for item in session.images.items], session.step)
                    session.log.info(f"Samples of step {session.step} are in {folder}")
            except OSError as error:
                session.log.info(
                    f"{folder}: samples of step {session.step} cannot be written ({error}); the run goes on"
                )
    session.workers.wait()


def _drop_graphs(session: Session) -> None:
    """Give back the memory of captured steps to what runs between steps."""
    if session.graphs is not None:
        session.graphs.drop()


def _validate(session: Session) -> float:
    bypass = session.job.train.bypass_guidance_embedding
    guided = bypassed_guidance(session.transformer) if bypass else nullcontext()
    _drop_graphs(session)
    with session.watch.phases.during("validate"), session.averaged(), guided:
        loss = session.validation.loss(
            session.transformer,
            dtype=session.dtype,
            device=session.workers.device,
            at_once=session.job.train.batch_size,
        )
    if session.validation.held_out:
        session.record["held_out_loss"] = [*session.record.get("held_out_loss", []), [session.step, loss]]
    session.log.validation(session.step, loss)
    return loss
