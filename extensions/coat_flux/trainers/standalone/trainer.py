"""The stand-alone trainer: the same YAML, the same LoRA file and the same output folder as ai-toolkit.

One optimizer step: `gradient_accumulation` micro-batches per process, gradients averaged over micro-batches and
processes, clipped to `max_grad_norm`, AdamW, EMA, schedule. The save named 500 follows 500 optimizer steps.

Where the optimizer can skip a step on the device (`FP8AdamW.found_inf`), the device decides on the update, and loss and
norm are read and judged during the next step. Steps that read something anyway (`StepWatch.reads_at_once`) wait, and
`settle` reads the outstanding numbers before anything is saved, measured or shown. With `speed.cuda_graphs`, the other
steps are replayed (`step_graph`) from captures of `_whole_step`.

Out of memory in forward or backward, `StepWatch.retry` repeats the micro-batches with more recomputation; their draws
depend on the batch's number, so it is the same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from coat_core.optim import FP8AdamW
from coat_core.optim.sharded import local_values

from ...base.environment import gpu_notes
from ...base.files import write_file
from ...base.interrupts import Interrupts
from ...base.rng import Stream, mixed_seed
from ...blocks.models.check import require_here
from ...config.findings import ConfigError
from ...config.job import JobConfig
from ...config.job_file import load_job_yaml
from ...data.loader import Batch
from ...mini_flux import provide_embedded
from ...plan.job import check_trained, save_space
from ...saves.commit import newest_set, require_room, set_step
from ...saves.errors import save_errors
from ...saves.repair import describe_lowest, go_back, repair, run_lock, way_back
from ...saves.state import execution_changes, execution_of
from ...watch.guard import WINDOW, DeadRunError
from ...watch.live import COMMANDS, LiveRun
from ...watch.oom import OutOfMemory, explain_oom, is_oom
from ...watch.phases import MEMORY_FILE, PhaseTracker, finish
from ...watch.run_tables import StepStats
from ..full import CLIP_EPS
from ..optimizer import advance
from ..processes import EXIT_OTHER, first_to_fail, joint_job
from .progress import RunLog
from .saving import check_same_run, find_resume_point, identity_of, save, save_name
from .session import Session
from .step_graph import Drawn, StepGraphs
from .validation import loss_of, redraw
from .workers import Workers, not_finite, start_reading, whole_norms

Observer = Callable[[Session], None]


class COATTrainer:
    """Trains a FLUX LoRA, or without `network` the transformer itself, by a YAML's path, its content, or a `JobConfig`.

    `observer` is called before the first step and after each, before a save; it must not affect training.
    """

    def __init__(self, config: str | Path | Mapping[str, Any] | JobConfig, *, observer: Observer | None = None):
        self._observer = observer
        self.job = config if isinstance(config, JobConfig) else JobConfig.load(config)

    def train(self, *, from_step: int | None = None) -> Path:
        """Run the training, or resume it from the newest save, or from that of `from_step`: newer ones are moved aside.

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
                raise SystemExit(EXIT_OTHER) from error  # another process reports the cause
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
        command = f'coat-flux train "{job.file}" --name "{name}"'
        with suppress(ConfigError):
            if load_job_yaml(job.file)["config"]["name"] == name:  # not set on the command line
                command = f'coat-flux train "{job.file}"'
        apart = min(job.save.save_every, WINDOW)
        return way_back(job.folder, since, apart, lambda step: f"resume from step {step}: {command} --from-step {step}")

    def _train(self, workers: Workers, log: RunLog, phases: PhaseTracker, from_step: int | None) -> Path:
        job, is_main = self.job, workers.is_main
        for note in (*job.notes, *gpu_notes(workers.device)):
            log.info(f"Note: {note}")
        if is_main:
            provide_embedded(job.model.name_or_path)
            moves = [] if from_step is None else go_back(job.folder, from_step)
            for line in moves + repair(job.folder):
                log.info(line)
            require_room(job.folder)
        workers.wait()

        point = find_resume_point(job.folder, job.name)
        identity = identity_of(job, workers.size)
        if point is not None:
            for note in check_same_run(job, point, identity):
                log.info(f"Resume: {note}")
            final = job.folder / save_name(job.name, None, full=job.full)
            if point.step == job.train.steps and point.path == final:
                log.info(f"{final} has {point.step} of {job.train.steps} steps: nothing is left to train")
                return final
            point.optimizer_file(job.train.optimizer)
            log.info(f"#### IMPORTANT RESUMING FROM {point.path} ####")
        elif is_main:
            phases.path = job.folder / MEMORY_FILE
        samples = bool(job.sample.items()) and not job.train.disable_sampling
        first = 0 if point is None else point.step
        live = LiveRun(job.folder, first, job.train.steps, samples=samples, active=is_main)
        with ExitStack() as stack:
            if point is None:
                stack.enter_context(live)
            session = Session(job, workers, log, phases, point, identity, live)
            if point is not None:  # a run that cannot be resumed stays unchanged
                stack.enter_context(live)
            return _run(session, self._observer)


def _run(session: Session, observer: Observer | None) -> Path:
    job, log, phases = session.job, session.log, session.watch.phases
    with save_errors(job.folder, "the run cannot write its files", "its checkpoints are as they were"):
        if session.workers.is_main:
            text = yaml.safe_dump(job.written, sort_keys=False, allow_unicode=True)
            write_file(job.folder / "config.yaml", text)
            phases.path = job.folder / MEMORY_FILE
            model_size = session.transformer.num_parameters()  # those in codes included
            space = save_space(job, [param.numel() for param in session.lora.values()], model_size)
            for line in require_room(job.folder, space):
                log.info(f"Warning: {line}")
        log.open(session.step)
    if "validation_loss" not in session.record:
        session.record["validation_loss"] = _validate(session)
    _redraw(session)
    if session.step == 0 and not job.train.skip_first_sample:
        _draw_samples(session)
    with Interrupts(log.info) as interrupts:
        _train_steps(session, interrupts, observer)
        if not session.holds_out:  # the loss on held-out photos may rise in a good run
            start, end = session.record["validation_loss"], _validate(session)
            session.watch.guard.check_end(session.step, start, end)
        path = save(session, final=True)
    _redraw(session)
    _draw_samples(session)
    if session.holds_out:
        log.info(describe_lowest(session.record["held_out_loss"], job.folder, job.name))
        if session.redrawn is not None:
            for line in session.redrawn.best():
                log.info(line)
    else:
        log.info(f"validation loss {start:.6f} -> {end:.6f}")
    finish(phases, lambda: job, log.detail if job.coat.memory.log_memory_stats else None)
    log.info(f"Saved the {'model' if job.full else 'LoRA'} to {path}")
    return path


def _train_steps(session: Session, interrupts: Interrupts, observer: Observer | None) -> None:
    """Do all remaining steps, with saves and samples between them; KeyboardInterrupt after a stop's save."""
    job, log, guard = session.job, session.log, session.watch.guard
    batches = session.batches()
    first = session.step + 1
    owes_save = False
    log.start(session.step)
    session.watch.phases.enter("step")
    if observer is not None:
        observer(session)
    while session.step < job.train.steps:
        commands = train_step(session, batches, interrupts)
        step = session.step
        last = step == job.train.steps
        validates = step % job.validation.every == 0
        saves = step % job.save.save_every == 0
        samples = step % job.sample.sample_every == 0
        if commands or observer is not None or owes_save or last or validates or saves or samples:
            settle(session)
        if step == first:
            saved_execution = session.saved.get("path", {})
            for line in execution_changes(saved_execution, execution_of(session.transformer)):
                log.info(line)
        if observer is not None:
            observer(session)
        if session.holds_out and (last or validates):
            _validate(session)
        if last:
            return
        if "stop" in commands:
            _stop(session)
        due = saves or "save" in commands
        if due and guard.doubt is not None:
            log.info(f"Step {step}: not saved, {guard.doubt}; it is saved when that is over")
            owes_save = True
        elif due or (owes_save and guard.doubt is None):
            log.detail(f"Saving at step {step}")
            log.info(f"Saved checkpoint to {save(session, final=False)}")
            owes_save = False
            _redraw(session)
        if "sample" in commands or (samples and step >= job.sample.sample_start_step):
            _draw_samples(session)


def _stop(session: Session) -> None:
    doubt = session.watch.guard.doubt
    where = f"Stopped after step {session.step} of {session.job.train.steps}"
    if doubt is None:
        session.log.info(f"{where}, saved as {save(session, final=False)}")
    else:
        newest = newest_set(session.job.folder)
        earlier = "no earlier save was made"
        if newest is not None:
            earlier = f"the newest save is of step {set_step(newest)}"
        session.log.info(f"{where}, without a save: {doubt}; {earlier}")
    session.log.info("To resume, start the same config again")
    raise KeyboardInterrupt


def _draw_samples(session: Session) -> None:
    images, step, log = session.images, session.step, session.log
    if images is not None:
        folder = session.job.folder / "samples" if session.workers.is_main else None
        with session.between_steps("sample"):
            try:
                paths = images.draw(session.transformer, step, folder)
                if folder is not None:
                    log.samples(paths, [item.prompt for item in images.items], step)
            except OSError as error:
                log.info(f"{folder}: samples of step {step} cannot be written ({error}); the run goes on")
    session.workers.wait()


def _validate(session: Session) -> float:
    model, device = session.transformer, session.workers.device
    with session.between_steps("validate"):
        loss = loss_of(model, session.noise, session.job.train.batch_size, dtype=session.dtype, device=device)
    if session.holds_out:
        session.record["held_out_loss"] = [*session.record.get("held_out_loss", []), [session.step, loss]]
    session.log.validation(session.step, loss)
    return loss


def _redraw(session: Session) -> None:
    """Redraw held-out photos at a save or at a start, if not yet done at this step."""
    redrawn, model, device = session.redrawn, session.transformer, session.workers.device
    if redrawn is None or not redrawn.lacks(session.step):
        return
    with session.between_steps("validate"):
        redraw(redrawn, session.step, model, session.vae, dtype=session.dtype, device=device)
    session.record["fidelity"] = redrawn.record
    session.log.fidelity(session.step, redrawn)


# --- one optimizer step ---


def train_step(session: Session, batches: Iterator[Batch], interrupts: Interrupts) -> frozenset[str]:
    """Do one optimizer step, counted even if its update is skipped; returns requested `watch.live.COMMANDS`."""
    started = time.perf_counter()
    watch = session.watch
    number = session.step + 1
    late = session.skips_on_device and not watch.reads_at_once(number)  # loss and norm are read after the update
    if not late:
        settle(session)
    group = session.optimizer.param_groups[0]
    lr = float(group["lr"]) * float(group.get("d", 1.0))  # Prodigy's step size, as in ai-toolkit
    micro_batches = [next(batches) for _ in range(session.job.train.gradient_accumulation)]
    without = _without_lora(session, number, micro_batches)
    with watch.casts(number):
        replayed = _replay(session, number, micro_batches) if late else None
        results = _gradients(session, number, micro_batches) if replayed is None else replayed
        if without is not None:
            results = torch.cat([results, without])
        commands = session.live.poll()
        if interrupts.asked:
            commands |= {"stop"}
        results, flags = session.workers.agree(results, [name in commands for name in COMMANDS])
        read = start_reading(results)
        if not late:
            if watch.allows_update(number, *read()):
                _update(session, None)
        elif replayed is None:
            _update(session, not_finite(results[:2]))
    watch.mark("after_optimizer_step", number)
    advance(session.lr_scheduler, 1)
    session.step = number

    stats = StepStats(number, session.epoch, lr)
    previous = session.outstanding
    session.outstanding = stats, read
    if previous is not None:
        _finish(session, *previous)
    stats.seconds = time.perf_counter() - started
    if not late:
        _finish(session, stats, read, judge=False)
    return frozenset(compress(COMMANDS, flags))


def settle(session: Session) -> None:
    """Wait for the outstanding step, if any, and judge it; DeadRunError by the guard."""
    if session.outstanding is not None:
        _finish(session, *session.outstanding)


def _finish(session: Session, stats: StepStats, read: Callable[[], list[float]], *, judge: bool = True) -> None:
    """Read and log a step's loss and norm; `judge` them first, unless that was done before the update."""
    stats.loss, stats.grad_norm, *without = read()
    if judge:
        session.watch.allows_update(stats.step, stats.loss, stats.grad_norm, *without)
    if session.step == stats.step:  # no later step is outstanding
        session.outstanding = None
    session.watch.end_step(stats.step, stats.seconds)
    stats.skipped = session.watch.guard.skipped
    session.log.step(stats)


def _without_lora(session: Session, number: int, batches: Sequence[Batch]) -> Tensor | None:
    """The step's loss without the LoRA, fp32 [1], or None if the guard does not compare this step."""
    job, guard = session.job, session.watch.guard
    if not guard.compares(number, -number % job.save.save_every, job.train.steps - number):
        return None

    def compute() -> Tensor:
        with guard.without_lora():
            losses = [session.objective(session.dataset.batch(batch), batch.draw) for batch in batches]
        return torch.stack(losses).mean(0, keepdim=True)

    return _retried(session, number, compute)


def _gradients(session: Session, number: int, batches: Sequence[Batch]) -> Tensor:
    """Compute gradients, and clip or (fused) apply them; returns fp32 [2]: loss and norm before clipping."""
    count = len(batches) * session.workers.size  # of all processes, which sum their gradients

    def accumulate() -> Tensor:
        total = torch.zeros((), device=session.workers.device)
        for batch in batches:
            tensors = session.dataset.batch(batch)
            first = batch is batches[0]
            if first:
                session.watch.mark("before_forward", number)
            loss = session.objective(tensors, batch.draw)
            if first:
                session.watch.mark("after_forward", number)
            total += loss.detach() / len(batches)
            fused = session.fused if batch is batches[-1] else None
            update = nullcontext() if fused is None else fused.updating(not_finite(total))
            with update:
                (loss / count).backward()
            if first:
                session.watch.mark("after_backward", number)
        return total

    session.optimizer.zero_grad(set_to_none=True)
    loss = _retried(session, number, accumulate)
    if session.fused is not None:
        return torch.stack([loss, session.fused.norm.to(loss)])
    session.workers.sum_gradients(list(session.lora.values()))
    return _clipped(session, loss)


def _retried(session: Session, number: int, attempt: Callable[[], Tensor]) -> Tensor:
    """The result of `attempt`, repeated with less in memory if that runs out."""
    graphs = session.graphs
    if graphs is not None:
        graphs.make_room()

    def reset() -> str | None:
        session.optimizer.zero_grad(set_to_none=True)
        freed = graphs is not None and graphs.drop()
        return "CUDA graphs: their memory was given back" if freed else None

    if session.workers.shares_weights:  # a process that retries alone would wait for the others' weights
        return attempt()
    return session.watch.retry(number, attempt, reset)


def _clipped(session: Session, loss: Tensor) -> Tensor:
    """Clip the gradients in place; returns fp32 [2]: `loss` and their norm before."""
    grads = [param.grad for param in session.lora.values() if param.grad is not None]
    norm = torch.linalg.vector_norm(whole_norms(grads))
    if grads:
        scale = (session.job.train.max_grad_norm / (norm + CLIP_EPS)).clamp(max=1.0)
        torch._foreach_mul_([local_values(grad) for grad in grads], scale)
    return torch.stack([loss, norm.to(loss)])


def _update(session: Session, found_inf: Tensor | None) -> None:
    """Update parameters, unless backward did, and the average; a no-op where `found_inf` is 1."""
    if session.fused is None:
        # stochastic rounding
        torch.manual_seed(mixed_seed(session.job.seed, Stream.OPTIMIZER, session.step))
        if isinstance(session.optimizer, FP8AdamW):
            session.optimizer.found_inf = found_inf
        session.optimizer.step()
    if session.ema is not None:
        session.ema.update(found_inf)


# --- a replayed step ---


def _replay(session: Session, number: int, batches: Sequence[Batch]) -> Tensor | None:
    """Do the whole step by a CUDA graph; returns fp32 [2], loss and norm, or None if it must run eagerly."""
    if not session.captures or session.watch.measures_memory(number):
        return None
    if session.graphs is None:
        session.graphs = StepGraphs(session, partial(_whole_step, session))
    if session.graphs.failed:
        return None
    drawn = [session.objective.draw(session.dataset.batch(batch), batch.draw) for batch in batches]

    def eager() -> Tensor:
        numbers = _gradients(session, number, batches)
        _update(session, not_finite(numbers))
        return numbers

    return session.graphs.run(drawn, eager)


def _whole_step(session: Session, drawn: Drawn, rates: Tensor) -> Tensor:
    """The step to capture: its inputs are tensors, `rates` (fp64 [groups]) too; returns fp32 [2]: loss and norm."""
    optimizer: Any = session.optimizer
    groups = optimizer.param_groups
    plain_rates = [group["lr"] for group in groups]
    optimizer.zero_grad(set_to_none=True)
    try:
        total = torch.zeros((), device=session.workers.device)
        for micro_batch in drawn:
            loss = session.objective.loss(micro_batch)
            (loss / len(drawn)).backward()
            total += loss.detach() / len(drawn)
        numbers = _clipped(session, total)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        optimizer.found_inf = not_finite(numbers)
        optimizer.step()
        if session.ema is not None:
            session.ema.update(optimizer.found_inf)
    finally:
        for group, rate in zip(groups, plain_rates, strict=True):
            group["lr"] = rate
        optimizer.found_inf = None
        optimizer.zero_grad(set_to_none=True)
    return numbers
