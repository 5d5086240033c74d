"""The stand-alone trainer: the same YAML, the same LoRA file and the same output folder as ai-toolkit.

One optimizer step: `gradient_accumulation` micro-batches per process, gradients averaged over micro-batches and
processes, clipped to `max_grad_norm`, AdamW, EMA, schedule. The save named 500 follows 500 optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import yaml

from ...base.files import write_file
from ...blocks.models.check import require_here
from ...config.findings import ConfigError
from ...config.job import JobConfig
from ...config.job_file import load_job_yaml
from ...config.launch import joint_job
from ...data.hold_out import describe_lowest
from ...mini_flux import provide_embedded
from ...plan.job import check_trained, save_space
from ...saves.commit import newest_set, require_room, set_step
from ...saves.errors import save_errors
from ...saves.interrupts import Interrupts
from ...saves.lock import run_lock
from ...saves.repair import go_back, repair, way_back
from ...saves.state import execution_changes, execution_of
from ...watch.guard import DeadRunError
from ...watch.live import LiveRun
from ...watch.memory_report import finish
from ...watch.oom import OutOfMemory, explain_oom, is_oom
from ...watch.phases import MEMORY_FILE, PhaseTracker
from ..processes import EXIT_OTHER, first_to_fail
from .flow_matching import bypassed_guidance
from .progress import RunLog
from .resume import check_same_run, find_resume_point, identity_of
from .saving import save, save_name, trusted_after
from .session import Session, open_session
from .steps import settle, train_step
from .workers import Workers

__all__ = ["COATTrainer"]

Observer = Callable[[Session], None]


class COATTrainer:
    """Trains a FLUX LoRA, or without `network` the transformer itself, by a YAML's path, its content, or a `JobConfig`.

    `observer` is called before the first step and after each, before a save. It may keep plain JSON in
    `session.record["observed"]`, which a resume restores; it must not affect training.

    Raises:
        ConfigError: the config cannot be run.
    """

    def __init__(self, config: str | Path | Mapping[str, Any] | JobConfig, *, observer: Observer | None = None):
        self._observer = observer
        if isinstance(config, JobConfig):
            self.job = config
        else:
            self.job = JobConfig.from_dict(config) if isinstance(config, Mapping) else JobConfig.from_file(config)

    def train(self, *, from_step: int | None = None) -> Path:
        """Run or resume the training, `from_step` a kept state, if given, moving newer ones aside.

        Returns:
            The final LoRA, `<training_folder>/<name>/<name>.safetensors`; or the model, a folder `<name>` there.

        Raises:
            ConfigError: a package, the device or the model that the config needs is missing.
            DatasetError: the data cannot be used.
            ModelLoadError: the model cannot be loaded.
            ResumeError: the run folder has a save that cannot be continued, or is another run's, or is in use.
            SaveError: the run folder cannot be written; earlier saves are intact, as after the errors below.
            DeadRunError: the run can no longer succeed; the message names the step to go back to.
            OutOfMemory: with the parts in memory, and remedies.
            ExportError: a LoRA to be saved cannot be read back.
            KeyboardInterrupt: interrupted, after a save of the current step.
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
        except Exception as error:
            if not isinstance(error, DeadRunError):
                log.record(f"Ended by {type(error).__name__}: {error}")
            if not first_to_fail():
                raise SystemExit(EXIT_OTHER) from error  # the first one says why
            if isinstance(error, DeadRunError) and error.since is not None:
                raise DeadRunError(f"{error}; {self._way_back(error.since)}", error.since) from error
            if is_oom(error):
                raise OutOfMemory(explain_oom(error, phases, lambda: job)) from error
            raise
        finally:
            phases.close()
            log.close()
            workers.close()

    def _way_back(self, since: int) -> str:
        job, name = self.job, self.job.raw["config"]["name"]
        option = f' --name "{name}"'
        with suppress(ConfigError):
            if load_job_yaml(job.file)["config"]["name"] == name:
                option = ""
        return way_back(
            job.folder,
            since,
            trusted_after(job),
            lambda step: f'resume from step {step}: coat-flux train "{job.file}"{option} --from-step {step}',
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
            if workers.is_main:  # a run that cannot be resumed stays unchanged
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
            return _run(session, self._observer)


def _run(session: Session, observer: Observer | None) -> Path:
    job, log = session.job, session.log
    with save_errors(job.folder, "the run cannot write its files", "its checkpoints are as they were"):
        if session.workers.is_main:
            text = yaml.safe_dump(job.written, sort_keys=False, allow_unicode=True)
            write_file(job.folder / "config.yaml", text)
            session.watch.phases.path = job.folder / MEMORY_FILE
            space = save_space(job, [p.numel() for p in session.lora.values()])
            require_room(job.folder, space, lambda line: log.info(f"Warning: {line}"))
        log.open(session.step)
    if "validation_loss" not in session.record:
        session.record["validation_loss"] = _validate(session)
    if session.step == 0 and not job.train.skip_first_sample:
        _draw_samples(session)
    with Interrupts(log.info) as interrupts:
        _train_steps(session, interrupts, observer)
        session.watch.guard.check_end(session.step)
        path = save(session, final=True)
    _draw_samples(session)
    if session.validation.held_out:
        log.info(describe_lowest(session.record["held_out_loss"], job.folder, job.name))
    else:
        log.info(f"validation loss {session.record['validation_loss']:.6f} -> {_validate(session):.6f}")
    table = log.detail if job.coat.memory.log_memory_stats else None
    finish(session.watch.phases, lambda: job, log.info, table)
    log.info(f"Saved the {'model' if job.full else 'LoRA'} to {path}")
    return path


def _train_steps(session: Session, interrupts: Interrupts, observer: Observer | None) -> None:
    """All remaining steps, with saves and samples between them; KeyboardInterrupt after an interrupted run's save."""
    job, log, guard = session.job, session.log, session.watch.guard
    batches, first = iter(session.sampler), session.step + 1
    log.start(session.step)
    session.watch.phases.enter("step")
    if observer is not None:
        observer(session)
    while session.step < job.train.steps:
        asked, step = train_step(session, batches, interrupts), session.step
        last = step == job.train.steps
        validates, saves, samples = (
            step % every == 0 for every in (job.validation.every, job.save.save_every, job.sample.sample_every)
        )
        if asked or observer is not None or session.owes_save or last or validates or saves or samples:
            settle(session)
        if step == first:
            for line in execution_changes(session.saved_path, execution_of(session.transformer, recomputed=True)):
                log.info(line)
        if observer is not None:
            observer(session)
        if session.validation.held_out and (last or validates):
            _validate(session)
        if last:
            return
        if "stop" in asked:
            _stop(session)
        due = saves or "save" in asked
        if due and guard.doubt is not None:
            log.info(f"Step {step}: not saved, {guard.doubt}; it is saved when that is over")
            session.owes_save = True
        elif due or (session.owes_save and guard.doubt is None):
            log.detail(f"Saving at step {step}")
            log.info(f"Saved checkpoint to {save(session, final=False)}")
            session.owes_save = False
        if "sample" in asked or (samples and step >= job.sample.sample_start_step):
            _draw_samples(session)


def _stop(session: Session) -> None:
    doubt, where = session.watch.guard.doubt, f"Stopped after step {session.step} of {session.job.train.steps}"
    if doubt is None:
        session.log.info(f"{where}, saved as {save(session, final=False)}")
    else:
        newest = newest_set(session.job.folder)
        earlier = "there is no earlier save" if newest is None else f"the newest save is of step {set_step(newest)}"
        session.log.info(f"{where}, without a save: {doubt}; {earlier}")
    session.log.info("To resume, start the same config again")
    raise KeyboardInterrupt


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


def _drop_graphs(session: Session) -> None:
    if session.graphs is not None:
        session.graphs.drop()
