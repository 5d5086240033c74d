"""The training loop of a job: each step watched and guarded, each save a whole set, an interrupt a clean end.

A step of ai-toolkit runs inside `TrainingLoop.step`. On the guard's verdict its update is left out; where memory runs
out the cause is explained, and the step is tried again as long as `memory.checkpointing: auto` can recompute more
blocks. ai-toolkit itself would turn a NaN loss into 0, and leave out the batch that ran out of memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .common import ai_toolkit_version, detail, info
from .data_order import draw_from
from .patched_step import StepFacts, patched_step
from .resume import Continuation
from .saves import read_back

if TYPE_CHECKING:
    from ...watch.live import LiveRun

__all__ = ["TrainingLoop", "end_with", "live_run"]

EXIT_CODE = 130  # of a process that was interrupted; run.py itself ends with 0


class TrainingLoop:
    """The loop of one job, from `hook_before_train_loop` on.

    Args:
        process: the running process.
        continuation: what it resumes from; None where ai-toolkit saves by itself.
        job: makes the JobConfig, for the plan's figures when memory runs out.

    Attributes:
        done: steps done.
        watch: `StepWatch` of the run.
    """

    def __init__(self, process: Any, continuation: Continuation | None, job: Callable[[], Any]):
        from ...saves.interrupts import Interrupts
        from ...watch.step_watch import watch_steps

        self._process, self._continuation = process, continuation
        self._team = process._team
        self._given: tuple[str, ...] | None = None  # what all processes agreed on in this step
        self._micro_batches = 0  # begun in this step
        self._log = _JobLog(process)
        self._stop = Interrupts(self._log.info)
        self.facts = StepFacts()
        self.done = process.step_num
        self._full = process._full
        self._saved = self.done  # what the newest save holds, or nothing was trained
        self._asked = False  # to stop, by the web UI
        self._owes_save = False
        self._held_out = process._held_out
        self.watch = watch_steps(
            process.coat,
            process.sd.unet,
            process.network,
            _trained_of(process),
            process.optimizer,
            self._log,
            process._phases,
            job,
            report=process._report,
            mean=self._team.mean,
        )
        if getattr(process, "ema", None) is not None:
            process._phases.hold("ema", process.ema, lambda average: average.shadow_params)
        if continuation is not None and continuation.state is not None:
            self.watch.load_state_dict(continuation.state.record["guard"])
            if self._held_out is not None:
                self._held_out.curve = list(continuation.state.record.get("held_out_loss", []))
        self._stop.listen()

    @property
    def stops(self) -> bool:
        """Whether this process is asked to end the run with the step under way; others may not know yet."""
        return self._asked or self._stop.asked

    def begin_micro_batch(self) -> None:
        """Where a step has several micro-batches, in this process or in all, draw for the next one by its number."""
        process, team = self._process, self._team
        count = process.train_config.gradient_accumulation
        if self._continuation is not None and count * team.size > 1:
            number = (process.step_num * count + self._micro_batches) * team.size + team.rank
            draw_from(self._continuation.seed, number)
        self._micro_batches += 1

    def ask_to_stop(self, who: str) -> None:
        """Let the run end with the step under way, as Ctrl+C does."""
        self._asked = True
        self._log.info(f"{who} asks to stop: this step is finished and saved")

    def close(self) -> None:
        """Give back what was taken over."""
        self._stop.close()
        self._log.close()

    # -- a step ----------------------------------------------------------------------------------------------------

    def step(self, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run a step of ai-toolkit.

        Args:
            run: the step, forward pass to update.

        Returns:
            What ai-toolkit shows of it.

        Raises:
            DeadRunError: the run has died.
            OutOfMemory: and nothing is left to recompute.
        """
        from ...base.streams import quiet_dead_outputs
        from ...saves.rng import rng_state, set_rng_state
        from ...watch.oom import OutOfMemory

        quiet_dead_outputs()
        number, draws = self._process.step_num + 1, rng_state()

        def reset() -> None:
            self._process.optimizer.zero_grad(set_to_none=True)
            set_rng_state(draws)

        try:
            losses = self.watch.retry(number, lambda: self._attempt(number, run), reset)
        except OutOfMemory as error:
            explanation = str(error)
        else:
            self.done = number
            return losses | self._validated()
        self._log.info(explanation)
        # in these words: ai-toolkit leaves out the batch of an error that names CUDA
        raise OutOfMemory(f"step {number}: out of memory, see above")

    def _validated(self) -> dict[str, float]:
        """The newest loss on photos held out, measured now where it is due; for ai-toolkit's bar and logs."""
        if self._held_out is None:
            return {}
        if self._held_out.is_due(self._process.step_num, self._process.train_config.steps):
            self.validate()
        return {"held_out": self._held_out.curve[-1][1]} if self._held_out.curve else {}

    def validate(self) -> None:
        """Measure the loss on photos held out, after the steps done."""
        with self.watch.phases.during("validate"):
            loss = self._held_out.measure(self.done)
        if self._log.tables is not None:
            self._log.tables.validation(self.done, loss)

    def _attempt(self, number: int, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        from ...watch.run_tables import StepStats

        process, watch = self._process, self.watch
        self.facts = facts = StepFacts()
        self._micro_batches, self._given = 0, None
        began, groups = time.monotonic(), process.optimizer.param_groups

        def may_update() -> bool:
            parameters = [p for group in groups for p in group["params"]]
            loss, norm = self._agreed(facts.loss()), facts.grad_norm(parameters)
            if self._full is not None:
                norm = self._full.grad_norm(norm)
            facts.measured = loss, float(groups[0]["lr"]), norm
            return watch.allows_update(number, loss, norm)

        around = (lambda: watch.mark("after_forward", number), lambda: watch.mark("after_backward", number))
        with (
            watch.casts(number),
            patched_step(
                process.accelerator,
                process.optimizer,
                facts,
                around_backward=around,
                in_backward=self._in_backward,
                complete_gradients=lambda: self._team.sum_gradients(groups),
                may_update=may_update,
            ),
        ):
            # inside: on a CPU the memory report observes operators too, and such modes must be left in their order
            watch.mark("before_forward", number)
            losses = run()
        watch.mark("after_optimizer_step", number)
        seconds = time.monotonic() - began
        if self._log.tables is not None and facts.measured is not None:
            stats = StepStats(number, process.epoch_num, *facts.measured, seconds, watch.guard.skipped)
            self._log.tables.step(stats)
        watch.end_step(number, seconds)
        return losses if self._team.size == 1 or facts.measured is None else losses | {"loss": facts.measured[0]}

    def _in_backward(self) -> AbstractContextManager[None]:
        """Around a backward pass; with `train.fused_backward` the last one of a step updates."""
        last = self._micro_batches == self._process.train_config.gradient_accumulation
        return self._full.updating(self.facts.losses) if self._full is not None and last else nullcontext()

    def _agreed(self, loss: float) -> float:
        """The mean loss of all processes; what one of them was asked, all do after this step."""
        if self._team.size == 1:
            return loss
        from ...watch.live import COMMANDS

        asked = self._process._live.poll() | ({"stop"} if self.stops else frozenset())
        loss, flags = self._team.agree(loss, [name in asked for name in COMMANDS])
        self._given = tuple(name for name, wanted in zip(COMMANDS, flags, strict=True) if wanted)
        return loss

    # -- a save ----------------------------------------------------------------------------------------------------

    def check_lora(self, *, last: bool) -> None:
        """Check the LoRA before it is saved.

        Args:
            last: no step comes after this save.

        Raises:
            DeadRunError: it is not worth saving; the previous save stays.
        """
        guard = self.watch.guard
        (guard.check_end if last else guard.check_now)(self.done)

    def puts_off_save(self) -> bool:
        """Whether the guard is in doubt: then what was due is saved when that is over."""
        doubt = self.watch.guard.doubt
        if doubt is not None:
            self._owes_save = True
            self._log.info(f"step {self.done}: not saved, {doubt}; it is saved when that is over")
        return doubt is not None

    def save(self, write_host: Callable[[Path], None]) -> None:
        """Save as a whole set.

        Args:
            write_host: lets ai-toolkit save into the folder given.

        Raises:
            ExportError: the LoRA cannot be loaded elsewhere; the previous save stays.
            ResumeError: the model that was written is not the one that was trained; the previous save stays.
            SaveError: it could not be written; the previous save stays.
        """
        lines: list[str] = []

        def write(folder: Path) -> None:
            write_host(folder)
            lines.extend(read_back(self._process, folder))

        def write_state(folder: Path) -> None:
            self._continuation.write_state(
                folder, self.done, self.watch.state_dict(), [] if self._held_out is None else self._held_out.curve
            )

        if not self._team.is_main:
            self._saved, self._owes_save = self.done, False
            return
        path = self._continuation.saves.commit(self.done, write, write_state)
        self._saved, self._owes_save = self.done, False
        self._log.info(f"saved {path} after {self.done} steps; {'; '.join(lines)}")

    def end_step(self) -> None:
        """Save what was put off; end the run here where it was asked to stop.

        Raises:
            SystemExit: after saving, with the exit code of an interrupted process.
        """
        process, several = self._process, self._team.size > 1
        given = frozenset(self._given or ()) if several else process._live.poll()
        self._obey(given)
        stops = "stop" in given if several else self.stops
        if self._owes_save and self.watch.guard.doubt is None and not stops:
            process.save(self.done)
        if not stops:
            return
        if self._saved != self.done:
            process.save(self.done)
        saved = f"after {self.done} steps, saved in {process.save_root}" if self.done else "before the first step"
        if self._saved != self.done and self._continuation is not None:
            saved = f"after {self.done} steps; those after step {self._saved} are not saved"
        self._log.info(f"stopped {saved}; the same command resumes from here")
        reason: BaseException = KeyboardInterrupt()
        try:
            process.stop_as_asked()
        except Exception as error:  # ai-toolkit's way to stop, once the web UI shows "stopped" or "queued"
            reason = error
        process.on_error(reason)
        raise SystemExit(EXIT_CODE)

    def _obey(self, asked: frozenset[str]) -> None:
        """Do what the live page asks for."""
        process = self._process
        if "stop" in asked and not self.stops:
            self.ask_to_stop("the live page" if self._team.size == 1 else "the live page, or another process,")
        if "stop" in asked or not asked or (self.stops and self._team.size == 1):
            return
        if process.progress_bar is not None:
            process.progress_bar.pause()
        if "save" in asked and self._saved != self.done:
            process.save(self.done)
        if "sample" in asked:
            process.sample(self.done)
            if process.train_config.unload_text_encoder:
                process.sd.text_encoder_to("cpu")
        process.ensure_params_requires_grad()
        if process.progress_bar is not None:
            process.progress_bar.unpause()


def _trained_of(process: Any) -> dict[str, torch.Tensor]:
    """What is trained, of a network under the names of its layers: `transformer$$block$$to_q.lora_up.weight`."""
    network = process.network
    if network is None:
        return {} if process._full is None else process._full.trained
    names = {id(param): name for name, param in network.named_parameters()}
    for module in network.modules():
        if hasattr(module, "lora_name"):
            names.update((id(param), f"{module.lora_name}.{name}") for name, param in module.named_parameters())
    return {names[id(param)]: param for param in network.parameters()}


def live_run(process: Any) -> LiveRun:
    """What `coat-flux watch` shows of a run whose continuation was found, and requests from it."""
    from ...watch.live import LiveRun

    state = None if process._continuation is None else process._continuation.state
    sample = process.get_conf("sample", None) or {}
    prompts = sample.get("samples") or sample.get("prompts")
    return LiveRun(
        Path(process.save_root),
        0 if state is None else state.step,
        process.train_config.steps,
        samples=bool(prompts) and not (process.get_conf("train", None) or {}).get("disable_sampling"),
        active=process.accelerator.is_main_process,
    )


class _JobLog:
    """Where the run reports: ai-toolkit's output, `coat/log.txt`, and on the main process the tables.

    Attributes:
        tables: `RunTables`; None on other processes.
    """

    def __init__(self, process: Any):
        from ...watch.run_tables import RunTables

        self.tables: Any = None
        if process.accelerator.is_main_process:
            self.tables = RunTables(
                Path(process.save_root),
                process.step_num,
                process.device_torch,
                f"ai-toolkit {ai_toolkit_version()}",
                self.info,
                validates=process._held_out is not None,
            )

    def info(self, line: str) -> None:
        info(f"[coat] {line}")

    def detail(self, line: str) -> None:
        detail(line if line.startswith("[") else f"[coat] {line}")  # memory lines are the stand-alone trainer's

    def precision(self, rows: Sequence[Any]) -> None:
        if self.tables is not None:
            self.tables.precision(rows)

    def close(self) -> None:
        if self.tables is not None:
            self.tables.close()


def end_with(error: BaseException, process: Any, job: Callable[[], Any]) -> None:
    """Report what a user needs to know of a run that ends.

    Args:
        error: that ends it.
        process: the running process.
        job: makes the JobConfig, for the plan's figures.

    Raises:
        SystemExit: instead of a KeyboardInterrupt, for which run.py's exit code would be 0.
    """
    from ...watch.oom import explain_oom, is_oom

    if isinstance(error, KeyboardInterrupt):
        info(f"[coat] interrupted; what was saved before is whole in {process.save_root}")
        process.on_error(error)
        raise SystemExit(EXIT_CODE) from None
    since, continuation = getattr(error, "since", None), process._continuation
    if since is not None and continuation is not None:  # a DeadRunError, which ai-toolkit shows
        error.args = (f"{error}; {continuation.saves.way_back(since)}",)
    if is_oom(error):
        info(f"[coat] {explain_oom(error, process._phases, job)}")
