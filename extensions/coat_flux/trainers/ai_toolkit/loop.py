"""The training loop of a job: each step watched and guarded, each save a whole set, an interrupt a clean end.

A step of ai-toolkit runs inside `TrainingLoop.step`. Where the guard says so its update is left out; where memory did
not suffice the cause is said, and the step is tried again as long as `memory.checkpointing: auto` can recompute more
blocks. ai-toolkit itself would turn a NaN loss into 0, and leave out the batch that ran out of memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .host import detail, say
from .resume import Continuation
from .watch import StepFacts, watched

__all__ = ["TrainingLoop"]

EXIT_CODE = 130  # of a process that was interrupted; run.py itself ends with 0


class TrainingLoop:
    """The loop of one job, from `hook_before_train_loop` on.

    Args:
        process: the running process.
        continuation: where it goes on from; None where ai-toolkit saves by itself.
        job: makes the JobConfig, for the plan's figures when memory runs out.

    Attributes:
        done: steps done.
    """

    def __init__(self, process: Any, continuation: Continuation | None, job: Callable[[], Any]):
        from ...saves.interrupts import Interrupts
        from ...watch.memory_stats import MemoryLog
        from ...watch.precision import PrecisionWatch
        from ...watch.run_guard import RunGuard
        from ...watch.spill import SpillWatch
        from .records import RunRecords

        asked, phases = process.coat.memory, process._phases
        self._process, self._continuation, self._job = process, continuation, job
        self._memory = MemoryLog(process.device_torch, asked.log_every, asked.log_memory_stats, detail, phases.see)
        self._spill = SpillWatch()
        self._stop = Interrupts(_say)
        self.facts = StepFacts()
        self.done = process.step_num
        self._saved = self.done  # what the newest save holds, or nothing was trained
        self._asked = False  # to stop, by the web UI
        self._owes_save = False
        lora = {} if process.network is None else _by_layer(process.network)
        self._records = RunRecords(process)
        self._held_out = process._held_out
        precision = PrecisionWatch(
            process.sd.unet, process.coat.activation.min_sqnr_db, process._report, _say, self._records.precision
        )
        self.guard = RunGuard(process.coat.guard, lora, _say, _detail, model=process.sd.unet, precision=precision)
        if continuation is not None and continuation.state is not None:
            self.guard.load_state_dict(continuation.state.record["guard"])
            if self._held_out is not None:
                self._held_out.curve = list(continuation.state.record.get("held_out_loss", []))
        self._stop.listen()

    @property
    def stops(self) -> bool:
        """Whether the run ends with the step under way."""
        return self._asked or self._stop.asked

    def ask_to_stop(self, who: str) -> None:
        """Let the run end with the step under way, as Ctrl+C does."""
        self._asked = True
        _say(f"{who} asks to stop: this step is finished and saved")

    def close(self) -> None:
        """Give back what was taken over."""
        self._stop.close()
        self._records.close()

    # -- a step ----------------------------------------------------------------------------------------------------

    def step(self, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run a step of ai-toolkit.

        Args:
            run: the step, forward pass to update.

        Returns:
            What ai-toolkit shows of it.

        Raises:
            DeadRunError: the run has died.
            OutOfMemory: the device's memory did not suffice.
        """
        from ...saves.interrupts import quiet_dead_outputs
        from ...saves.rng import rng_state, set_rng_state

        quiet_dead_outputs()
        draws = rng_state()
        losses, remedy = self._try(run)
        while losses is None:
            say(f"[coat] {remedy}; this step is tried again")
            self._process.optimizer.zero_grad(set_to_none=True)
            set_rng_state(draws)
            losses, remedy = self._try(run)
        self.done = self._process.step_num + 1
        return losses | self._validated()

    def _validated(self) -> dict[str, float]:
        """The newest loss on photos held out, measured now where it is due; for ai-toolkit's bar and logs."""
        if self._held_out is None:
            return {}
        if self._held_out.is_due(self._process.step_num, self._process.train_config.steps):
            self.validate()
        return {"held_out": self._held_out.curve[-1][1]} if self._held_out.curve else {}

    def validate(self) -> None:
        """Measure the loss on photos held out, after the steps done."""
        with self._process._phases.during("validate"):
            loss = self._held_out.measure(self.done)
        self._records.held_out(self.done, loss)

    def _try(self, run: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any] | None, str | None]:
        """Run a step; (None, what was changed) where it ran out of memory and may be tried again."""
        from ...watch.oom import OutOfMemory, is_oom, recompute_more

        try:
            return self._watched(run), None
        except (RuntimeError, MemoryError) as error:
            if not is_oom(error):
                raise
            _explain(error, "step", self._process, self._job)
        remedy = None if self.facts.updating else recompute_more(self._process.sd.unet)
        if remedy is None:
            # in these words: ai-toolkit leaves out the batch of an error that names CUDA
            raise OutOfMemory(f"step {self._process.step_num + 1}: the device's memory did not suffice, see above")
        return None, remedy

    def _watched(self, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        process, number = self._process, self._process.step_num + 1
        self.facts = facts = StepFacts()
        began = time.monotonic()
        with (
            self.guard.watch_casts(number),
            watched(
                process.accelerator,
                process.optimizer,
                facts,
                around_backward=(
                    lambda: self._memory.line("after_forward", number),
                    lambda: self._memory.line("after_backward", number),
                ),
                may_update=lambda: self._may_update(number),
            ),
        ):
            # inside: on a CPU the memory report observes operators too, and such modes must be left in their order
            self._memory.line("before_forward", number)
            losses = run()
        self._memory.line("after_optimizer_step", number)
        seconds = time.monotonic() - began
        self._records.step(number, facts, seconds, self.guard.skipped)
        if facts.updated:
            self.guard.after_update(number)
        self._see_spill(seconds)
        return losses

    def _may_update(self, number: int) -> bool:
        groups = self._process.optimizer.param_groups
        facts, parameters = self.facts, [p for group in groups for p in group["params"]]
        facts.measured = facts.loss(), float(groups[0]["lr"]), facts.grad_norm(parameters)
        loss, _, norm = facts.measured
        return self.guard.allows_update(number, loss, norm)

    def _see_spill(self, seconds: float) -> None:
        device = self._process.device_torch
        if device.type == "cuda":
            reserved = torch.cuda.memory_reserved(device)
            line = self._spill.see(seconds, reserved, torch.cuda.get_device_properties(device).total_memory)
            if line is not None:
                say(f"[coat] WARNING: {line}")

    # -- a save ----------------------------------------------------------------------------------------------------

    def check_lora(self, *, last: bool) -> None:
        """Look at the LoRA before it is saved.

        Args:
            last: no step comes after this save.

        Raises:
            DeadRunError: it is not worth saving; the previous save stays.
        """
        (self.guard.check_end if last else self.guard.check_now)(self.done)

    def puts_off_save(self) -> bool:
        """Whether the guard is in doubt: then what was due is saved when that is over."""
        doubt = self.guard.doubt
        if doubt is not None:
            self._owes_save = True
            say(f"[coat] step {self.done}: not saved, {doubt}; it is saved when that is over")
        return doubt is not None

    def save(self, write_host: Callable[[Path], None]) -> None:
        """Save as a whole set.

        Args:
            write_host: lets ai-toolkit save into the folder given.

        Raises:
            ExportError: the LoRA cannot be loaded elsewhere; the previous save stays.
            SaveError: it could not be written; the previous save stays.
        """
        lines: list[str] = []

        def write(folder: Path) -> None:
            write_host(folder)
            lines.extend(self._check_export(path) for path in sorted(folder.glob("*.safetensors")))

        def write_state(folder: Path) -> None:
            self._continuation.write_state(
                folder, self.done, self.guard.state_dict(), [] if self._held_out is None else self._held_out.curve
            )

        path = self._continuation.saves.commit(self.done, write, write_state)
        self._saved, self._owes_save = self.done, False
        say(f"[coat] saved {path} after {self.done} steps; {'; '.join(lines)}")

    def _check_export(self, path: Path) -> str:
        """Read a LoRA back; one that is still zero (a warm-up) is the guard's to judge."""
        from ...export.check import check_export

        process = self._process
        if not process.model_config.is_flux or process.network_config.type.lower() != "lora":
            return "not read back, which is for LoRAs of FLUX"
        ups = [value for name, value in process.network.named_parameters() if "lora_up" in name]
        if not any(value.any() for value in ups):
            return "the LoRA is still zero"
        return check_export(path).line()

    def end_step(self) -> None:
        """Save what was put off; end the run here where it was asked to stop.

        Raises:
            SystemExit: after saving, with the exit code of an interrupted process.
        """
        process = self._process
        self._obey(process._live.poll())
        if self._owes_save and self.guard.doubt is None and not self.stops:
            process.save(self.done)
        if not self.stops:
            return
        if self._saved != self.done:
            process.save(self.done)
        saved = f"after {self.done} steps, saved in {process.save_root}" if self.done else "before the first step"
        if self._saved != self.done and self._continuation is not None:
            saved = f"after {self.done} steps; those after step {self._saved} are not saved"
        _say(f"stopped {saved}; the same command goes on from here")
        reason: BaseException = KeyboardInterrupt()
        try:
            process.stop_as_asked()
        except Exception as error:  # ai-toolkit's way to stop, once it has told the web UI "stopped" or "queued"
            reason = error
        process.on_error(reason)
        raise SystemExit(EXIT_CODE)

    def _obey(self, asked: frozenset[str]) -> None:
        """Do what the live page asks for."""
        process = self._process
        if "stop" in asked:
            self.ask_to_stop("the live page")
        if self.stops or not asked:
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


def _by_layer(network: Any) -> dict[str, torch.Tensor]:
    """Parameters of a network under the names of their layers, `transformer$$block$$to_q.lora_up.weight`."""
    names = {id(param): name for name, param in network.named_parameters()}
    for module in network.modules():
        if hasattr(module, "lora_name"):
            names.update((id(param), f"{module.lora_name}.{name}") for name, param in module.named_parameters())
    return {names[id(param)]: param for param in network.parameters()}


def _say(line: str) -> None:
    say(f"[coat] {line}")


def _detail(line: str) -> None:
    detail(f"[coat] {line}")


def end_with(error: BaseException, process: Any, job: Callable[[], Any]) -> None:
    """Say what a run that ends needs to have said.

    Args:
        error: that ends it.
        process: the running process.
        job: makes the JobConfig, for the plan's figures.

    Raises:
        SystemExit: instead of a KeyboardInterrupt, for which run.py's exit code would be 0.
    """
    from ...watch.oom import is_oom

    if isinstance(error, KeyboardInterrupt):
        say(f"[coat] interrupted; what was saved before is whole in {process.save_root}")
        process.on_error(error)
        raise SystemExit(EXIT_CODE) from None
    since, continuation = getattr(error, "since", None), process._continuation
    if since is not None and continuation is not None:  # a DeadRunError, which ai-toolkit shows
        error.args = (f"{error}; {continuation.saves.way_back(since)}",)
    if is_oom(error):
        _explain(error, None, process, job)


def _explain(error: BaseException, phase: str | None, process: Any, job: Callable[[], Any]) -> None:
    from ...watch.oom import explain_oom

    say(explain_oom(error, phase=phase, phases=process._phases, job=job, device=process.device_torch))
