"""The training loop of a job: each step of ai-toolkit runs inside `TrainingLoop.step`, each save is a whole set.

ai-toolkit itself turns a NaN loss into 0, and drops a batch that ran out of memory; here both are handled first.

Nor does it combine processes (`accelerate launch run.py`), as `Team` does: each takes every N-th batch of one order,
gradients are combined before clipping, and all agree on one loss and on what follows the step. Each samples every N-th
prompt; one saves.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...base.errors import UserError
from ...base.interrupts import Interrupts, quiet_dead_outputs
from ...base.rng import kept_draws, mixed_seed, rng_state, set_rng_state
from ...watch.live import COMMANDS, LiveRun
from ...watch.oom import OutOfMemory, explain_oom, is_oom
from ...watch.run_tables import RunTables, StepStats
from ...watch.step_watch import StepWatch
from ..processes import STEP_LIMIT, WAIT_LIMIT, Processes
from .data_order import DRAWS, draw_from
from .host import ai_toolkit_version, detail, info, patched
from .resume import read_back

EXIT_CODE = 130  # of an interrupted process
LOSSES = ("calculate_loss", "get_guided_loss", "get_mean_flow_loss")  # methods that return a micro-batch's loss


class TrainingLoop:
    """The loop of one job, from `hook_before_train_loop` on; `done` counts steps."""

    def __init__(self, process: Any):
        self._process = process
        self._continuation = process._continuation
        self._team = process._team
        self._full = process._full
        self._held_out = process._held_out
        phases = process._phases
        self.done = self._saved = process.step_num
        self._stop_requested = False  # by the web UI or the live page
        self._owes_save = self._warned_of_loss = False
        self._begin_step()
        self._tables: RunTables | None = None
        if self._team.is_main:
            folder, trainer = Path(process.save_root), f"ai-toolkit {ai_toolkit_version()}"
            validates = self._held_out is not None
            self._tables = RunTables(folder, self.done, process.device_torch, trainer, info, validates=validates)
            process._held.callback(self._tables.close)
        write_precision = (lambda rows: None) if self._tables is None else self._tables.precision
        log = SimpleNamespace(info=info, detail=detail, precision=write_precision)
        self.watch = StepWatch(
            process.coat,
            process.sd.unet,
            process.network,
            _trained_of(process),
            process.optimizer,
            log,
            phases,
            process._job_config,
            report=process._report,
            mean=self._team.mean,
        )
        if process.ema is not None:
            phases.held.add("ema", process.ema)
        state = None if self._continuation is None else self._continuation.state
        if state is not None:
            self.watch.load_state_dict(state.record["guard"])
            if self._held_out is not None:
                self._held_out.curve = list(state.record["held_out_loss"])
                if self._held_out.redrawn is not None and state.record.get("fidelity"):
                    self._held_out.redrawn.record = dict(state.record["fidelity"])
        self._interrupts = process._held.enter_context(Interrupts(info))

    @property
    def stops(self) -> bool:
        """Whether this process has been asked to stop."""
        return self._stop_requested or self._interrupts.asked

    def ask_to_stop(self, who: str) -> None:
        """Stop after the current step."""
        self._stop_requested = True
        info(f"{who} asks to stop: after this step the run is saved")

    # -- a step

    def _begin_step(self) -> None:
        self._losses: list[Tensor] = []  # fp32 [], by micro-batch
        self._losses_without: list[Tensor] = []  # the same without the LoRA
        self._norms: list[Tensor] = []  # before clipping, by parameter group
        self._stats: StepStats | None = None
        self._micro_batches = 0
        self._commands: frozenset[str] = frozenset()  # agreed on by all processes

    def step(self, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Do a step by ai-toolkit's `run`; returns the numbers that it displays."""
        quiet_dead_outputs()
        process = self._process
        number = process.step_num + 1
        draws = rng_state()

        def attempt() -> dict[str, Any]:
            self._begin_step()
            began = time.monotonic()
            with self.watch.casts(number), self._observed(number):
                # inside `casts`: on a CPU the memory report is a dispatch mode too, and modes must nest
                self.watch.mark("before_forward", number)
                shown = run()
            self.watch.mark("after_optimizer_step", number)
            seconds = time.monotonic() - began
            stats = self._stats
            if self._tables is not None and stats is not None:
                stats.seconds, stats.skipped = seconds, self.watch.guard.skipped
                self._tables.step(stats)
            self.watch.end_step(number, seconds)
            if self._team.size > 1 and stats is not None:
                shown = shown | {"loss": stats.loss}
            return shown

        def reset() -> None:
            process.optimizer.zero_grad(set_to_none=True)
            set_rng_state(draws)

        try:
            shown = self.watch.retry(number, attempt, reset)
        except OutOfMemory as error:
            info(str(error))
            # without "CUDA": ai-toolkit drops the batch of errors that name it
            raise OutOfMemory(f"step {number}: out of memory, see above") from None
        self.done = number
        if self._held_out is None:
            return shown
        counted = process.step_num  # number - 1, by which ai-toolkit saves
        if number == process.train_config.steps or (counted > 0 and counted % self._held_out.every == 0):
            self.validate()
        if self._held_out.curve:
            shown = shown | {"held_out": self._held_out.curve[-1][1]}
        return shown

    def validate(self) -> None:
        """Measure the loss on held-out photos."""
        with self.watch.phases.during("validate"):
            loss = self._held_out.measure(self.done)
        if self._tables is not None:
            self._tables.validation(self.done, loss)

    def redraw(self) -> None:
        """Redraw held-out photos at a save or at a start, if not yet done at this step."""
        redrawn = None if self._held_out is None else self._held_out.redrawn
        if redrawn is None or not redrawn.lacks(self.done):
            return
        with self.watch.phases.during("validate"):
            self._held_out.redraw(self.done)
        info(f"{redrawn.describe()} ({redrawn.seconds:.1f} s)")
        if self._tables is not None:
            self._tables.fidelity(redrawn.rows())

    def begin_micro_batch(self) -> None:
        """Seed by the micro-batch's number if a step has several."""
        process, team = self._process, self._team
        count = process.train_config.gradient_accumulation
        if self._continuation is not None and count * team.size > 1:
            number = (process.step_num * count + self._micro_batches) * team.size + team.rank
            seeds = (self._continuation.seed, DRAWS, number)
            draw_from(*seeds)  # the CPU's
            torch.manual_seed(mixed_seed(*seeds))  # all devices'
        self._micro_batches += 1

    @contextmanager
    def _observed(self, number: int) -> Iterator[None]:
        """Replace the methods that ai-toolkit's step calls, in this block only: all jobs share one accelerator."""
        process, watch = self._process, self.watch
        accelerator, optimizer = process.accelerator, process.optimizer
        own_backward, own_clip = accelerator.backward, accelerator.clip_grad_norm_
        own_predict, own_step = process.predict_noise, optimizer.step
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        fused = None if self._full is None else self._full.fused
        is_complete = False  # gradients are combined over processes

        steps = process.train_config.steps
        save_every = process.save_config.save_every or steps
        until_save = (1 - number) % save_every  # ai-toolkit saves after steps 1 + k * save_every
        compares = watch.guard.compares(number, until_save, steps - number)
        pair: list[Tensor] = []  # a micro-batch's predictions without and with the LoRA

        def predict_noise(*args: Any, **kwargs: Any) -> Any:
            if not (compares and kwargs.get("is_primary_pred")):
                return own_predict(*args, **kwargs)
            with watch.guard.without_lora():
                pair.append(own_predict(*args, **kwargs))
            pair.append(own_predict(*args, **kwargs))
            return pair[1]

        def recorded(compute: Callable[..., Any]) -> Callable[..., Any]:
            """The loss method `compute`, recorded before ai-toolkit turns NaN into 0."""

            def compute_loss(*args: Any, **kwargs: Any) -> Any:
                if pair and kwargs.get("noise_pred") is pair[1] and kwargs.get("prior_pred") is None:
                    with torch.no_grad(), kept_draws():
                        without = compute(*args, **kwargs | {"noise_pred": pair[0]})
                    self._losses_without.append(without.float().mean())
                pair.clear()
                loss = compute(*args, **kwargs)
                if isinstance(loss, Tensor):
                    self._losses.append(loss.detach().float().mean())
                return loss

            return compute_loss

        def complete_gradients() -> None:
            nonlocal is_complete
            if not is_complete:
                self._team.sum_gradients(parameters)
            is_complete = True

        def backward(*args: Any, **kwargs: Any) -> None:
            watch.mark("after_forward", number)
            is_last = self._micro_batches == process.train_config.gradient_accumulation
            update: Any = nullcontext()
            if fused is not None and is_last:
                update = fused.updating(1.0 - sum(self._losses).isfinite().float())
            with update:
                own_backward(*args, **kwargs)
            watch.mark("after_backward", number)

        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            complete_gradients()
            norm = own_clip(*args, **kwargs)
            self._norms.append(torch.as_tensor(norm))
            return norm

        def step(*args: Any, **kwargs: Any) -> Any:
            complete_gradients()
            loss, norm, without = self._measure(parameters)
            lr = float(optimizer.param_groups[0]["lr"])
            self._stats = StepStats(number, process.epoch_num, lr, loss, norm)
            if compares and math.isnan(without) and not self._warned_of_loss:
                info("guard: this job's loss cannot be computed without the LoRA, only growth is limited")
                self._warned_of_loss = True
            if not watch.allows_update(number, loss, norm, without):
                return None
            return own_step(*args, **kwargs)

        losses = {name: recorded(getattr(process, name)) for name in LOSSES}
        with (
            patched(process, predict_noise=predict_noise, **losses),
            patched(accelerator, backward=backward, clip_grad_norm_=clip_grad_norm_),
            patched(optimizer, step=step),
        ):
            yield

    def _measure(self, parameters: list[Tensor]) -> tuple[float, float, float]:
        """The step's loss, its gradient norm, and its loss without the LoRA or NaN; processes agree here."""
        loss = float(torch.stack(self._losses).mean()) if self._losses else 0.0
        without = math.nan
        if self._losses_without and len(self._losses_without) == len(self._losses):
            without = float(torch.stack(self._losses_without).mean())
        norms = self._norms or [p.grad.norm() for p in parameters if p.grad is not None]
        norm = 0.0
        if self._full is not None and self._full.fused is not None:
            norm = float(self._full.fused.norm)
        elif norms:
            norm = float(torch.stack([part.float() for part in norms]).square().sum().sqrt())
        if self._team.size > 1:
            requested = self._process._live.poll()
            if self.stops:
                requested |= {"stop"}
            device = self._team.device
            dtype = torch.float64 if device.type == "cpu" else torch.float32
            own = torch.tensor([loss, without], dtype=dtype, device=device)
            mean, flags = self._team.agree(own, [name in requested for name in COMMANDS])
            loss, without = mean.tolist()
            self._commands = frozenset(itertools.compress(COMMANDS, flags))
        return loss, norm, without

    # -- between two steps

    def save(self, step: int | None, host_save: Callable[[int | None], None]) -> None:
        """Save a set by ai-toolkit's `host_save`, later if the guard is in doubt; the last (None) fails if it is."""
        process, guard = self._process, self.watch.guard
        is_set = self._continuation is not None  # else saves are ai-toolkit's own
        if is_set and step is not None and guard.doubt is not None:
            self._owes_save = True
            info(f"step {self.done}: the save is postponed, {guard.doubt}")
            return
        guard.check_save(self.done, final=step is None)
        if not is_set:
            host_save(step)
            self.redraw()
            return

        lines: list[str] = []  # of the log, on what was read back
        measured: dict[str, Any] = {"held_out_loss": []}
        if self._held_out is not None:
            redrawn = self._held_out.redrawn
            measured["held_out_loss"] = self._held_out.curve
            measured["fidelity"] = None if redrawn is None else redrawn.record

        def write(folder: Path) -> None:
            postponed = dict.fromkeys(("clean_up_saves", "post_save_hook"), lambda *args: None)  # until the commit
            with patched(process, save_root=str(folder), **postponed):
                host_save(step)
            lines.extend(read_back(process, folder))
            self._continuation.write_state(folder, self.done, self.watch.state_dict(), measured)

        if self._team.is_main:
            path = self._continuation.saves.commit(self.done, write, guard.apart(self.done))
            info(f"saved {path} after {self.done} steps; {'; '.join(lines)}")
        self._saved, self._owes_save = self.done, False
        process.clean_up_saves()
        if self._team.is_main:
            process.post_save_hook(os.path.join(process.save_root, "optimizer.pt"))
        if step is not None:  # ai-toolkit calls the final save in the main process only
            self._team.wait()
        process.last_save_step = self.done  # for the web UI
        self.redraw()

    def end_step(self) -> None:
        """Save, sample or stop between two steps, as requested."""
        process, alone = self._process, self._team.size == 1
        commands = process._live.poll() if alone else self._commands
        if "stop" in commands and not self.stops:
            self.ask_to_stop("the live page" if alone else "the live page, or another process,")
        stops = "stop" in commands or (alone and self.stops)  # several processes stop together
        if commands and not stops:
            if "save" in commands and self._saved != self.done:
                process.save(self.done)
            if "sample" in commands:
                process.sample(self.done)
                if process.train_config.unload_text_encoder:
                    process.sd.text_encoder_to("cpu")
            process.ensure_params_requires_grad()
        if stops or (alone and self.stops):  # perhaps asked while sampling
            self._stop()
        if self._owes_save and self.watch.guard.doubt is None:
            process.save(self.done)

    def _stop(self) -> None:
        process = self._process
        if self._saved != self.done:
            process.save(self.done)
        place = "before the first step"
        if self.done:
            place = f"after {self.done} steps, saved in {process.save_root}"
        if self._saved != self.done and self._continuation is not None:  # postponed by the guard
            place = f"after {self.done} steps; those after step {self._saved} are not saved"
        info(f"stopped {place}; the same command resumes it")
        reason: BaseException = KeyboardInterrupt()
        try:
            super(type(process), process).maybe_stop()
        except Exception as error:  # ai-toolkit's way to stop
            reason = error
        process.on_error(reason)
        raise SystemExit(EXIT_CODE)


def _trained_of(process: Any) -> dict[str, Tensor]:
    """The trained parameters by name, a LoRA's as `transformer$$block$$to_q.lora_up.weight`."""
    network = process.network
    if network is None:
        return {} if process._full is None else process._full.trained
    names = {id(param): name for name, param in network.named_parameters()}
    for module in network.modules():
        if hasattr(module, "lora_name"):
            for name, param in module.named_parameters():
                names[id(param)] = f"{module.lora_name}.{name}"
    return {names[id(param)]: param for param in network.parameters()}


def live_run(process: Any) -> LiveRun:
    """The run's side of `coat-flux watch`."""
    state = None if process._continuation is None else process._continuation.state
    first = 0 if state is None else state.step
    sample = process.get_conf("sample", None) or {}
    train = process.get_conf("train", None) or {}
    samples = bool(sample.get("samples") or sample.get("prompts")) and not train.get("disable_sampling")
    folder = Path(process.save_root)
    return LiveRun(folder, first, process.train_config.steps, samples=samples, active=process._team.is_main)


def explain_end(error: BaseException, process: Any) -> None:
    """Report what ends a run; Ctrl+C exits with `EXIT_CODE`."""
    if isinstance(error, KeyboardInterrupt):
        info(f"interrupted; earlier saves are whole in {process.save_root}")
        process.on_error(error)
        raise SystemExit(EXIT_CODE) from None
    since = getattr(error, "since", None)  # of a DeadRunError
    continuation = process._continuation
    if since is not None and continuation is not None:
        error.args = (f"{error}; {continuation.saves.way_back(since)}",)
    if is_oom(error):
        info(explain_oom(error, process._phases, process._job_config))


# -- several processes


class Team(Processes):
    """The processes of a job; UserError if several were started and accelerate counts one."""

    averages = False  # of gradients, else their sums

    def __init__(self, accelerator: Any):
        size = accelerator.num_processes
        if size == 1:
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise UserError(
                    f"{os.environ['WORLD_SIZE']} processes were started, and each takes itself for the only one; start "
                    "one process, or without a GPU set ACCELERATE_USE_CPU=true"
                )
            super().__init__(1, 0, torch.device("cpu"))
            return
        super().__init__(size, accelerator.process_index, accelerator.device)
        _limit_waits(WAIT_LIMIT)  # while the main process fills the caches
        self.wait()

    def sum_gradients(self, params: Iterable[nn.Parameter]) -> None:
        """Combine gradients as ai-toolkit does those of accumulated batches: their mean from 0.13 on."""
        params = list(params)
        super().sum_gradients(params)
        if self.averages and self.size > 1:
            for param in params:
                param.grad.div_(self.size)

    @contextmanager
    def unwrapped(self, process: Any) -> Iterator[None]:
        """Let ai-toolkit prepare the run as for one process: nothing calls the forward in which DDP would reduce."""
        if self.size == 1:
            yield
            return
        from accelerate import DistributedType

        with patched(process.accelerator.state, distributed_type=DistributedType.NO):
            yield
        if hasattr(process.lr_scheduler, "split_batches"):
            process.lr_scheduler.split_batches = True  # else a step would be one for each process
        counters = (process.step_num, process.start_step, process.epoch_num)
        process.step_num, process.start_step, process.epoch_num = self.from_main(counters)
        _limit_waits(STEP_LIMIT)

    def share_of(self, images: list[Any]) -> list[Any]:
        """This process's images, each with its number among all."""
        if self.size == 1:
            return images
        for number, image in enumerate(images):
            count = str(number).zfill(len(str(len(images))))
            image.output_filename_no_ext = image.output_filename_no_ext.replace("[count]", count)
            image.save_image_atomic = image.save_image  # it would move the other processes' images too
        return images[self.rank :: self.size]


def _limit_waits(limit: timedelta) -> None:
    setter = getattr(dist.distributed_c10d, "_set_pg_timeout", None)  # torch has no public setter
    if setter is not None:
        setter(limit)
