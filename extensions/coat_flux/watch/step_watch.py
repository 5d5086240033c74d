"""Watches a run from its first step to its last; both trainers build one `StepWatch` and call it at the same moments.

    with watch.casts(n):                        losses of casts to FP8, in the steps where that is due
        watch.retry(n, attempt, reset)          forward and backward, again with more recomputation if out of memory
            watch.mark("before_forward", n)     memory lines and the memory report, at each of `phases.STEP_MOMENTS`
        watch.allows_update(n, loss, norm, …)   the guard's verdict
    watch.end_step(n, seconds)                  the parameters, and whether the driver has spilled memory
    with watch.phases.during("sample"):         everything that is not a step
    watch.guard                                 what may be saved, and what was skipped

Memory lines are in GB of 1e9 bytes; on a CPU they are the process's resident set and its peak so far.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from coat_core.casts import INPUT

from ..base.text import GB
from ..blocks.held import used_bytes
from ..blocks.report import CoatReport
from ..blocks.runner import BlockRunner
from ..config.coat import COATConfig
from ..config.job import JobConfig
from .casts import CastPrecision, CastProbe, health_line, health_verdict, weight_rows
from .guard import BROKEN_LORA, BROKEN_MODEL, KEPT, DeadRunError, Norms, RunGuard, tensor_norms
from .oom import OutOfMemory, explain_oom, is_oom, recompute_more
from .phases import PhaseTracker

FIRST_OBSERVED = 2  # the first observed step, where most initial faults show
CPU_NOTE = "Memory lines on a CPU: Allocated is the process's resident memory, Reserved its peak so far."
WARM_UP = 3  # first steps: measurement of execution modes, allocator
BASELINE = 10  # later steps, whose median is the normal duration
SLOWER = 3.0  # times the normal duration
IN_A_ROW = 5  # slow steps
NEAR_LIMIT = 0.90  # of the card's memory, reserved
KEY = "coat.activation.min_sqnr_db"
EXACT_DB = 999.0
T = TypeVar("T")


class StepWatch:
    """The watch of one run; `mean` and `norms` are over all processes, full fine-tuning has no `network`."""

    def __init__(
        self,
        config: COATConfig,
        transformer: nn.Module,
        network: nn.Module | None,
        lora: Mapping[str, Tensor],
        optimizer: Any,
        log: Any,
        phases: PhaseTracker,
        job: Callable[[], JobConfig],
        *,
        report: CoatReport | None = None,
        mean: Callable[[Tensor], Tensor] = lambda value: value,
        norms: Norms = tensor_norms,
    ) -> None:
        if network is not None:
            phases.held.add("lora", network)
        phases.held.add("gradients", transformer if network is None else network)
        if optimizer is not None:
            phases.held.add("optimizer", optimizer)
        self.phases = phases
        growth = BROKEN_MODEL if network is None else BROKEN_LORA
        self.guard = RunGuard(config.guard, lora, log.info, norms, growth)
        self._options, self._memory, self._report = config.guard, config.memory, report
        self._transformer, self._log, self._job = transformer, log, job
        self._minimum = config.activation.min_sqnr_db if config.enabled else None
        self._mean = mean
        self._left_out: list[str] = []  # layers below it
        self.pending = self._minimum is not None  # until they are chosen
        self._spill = SpillWatch()
        self._writes_lines = config.enabled and config.memory.log_memory_stats
        self._explained_lines = phases.device.type == "cuda"
        self._began = self._updating = self._reported = False

    def reads_at_once(self, step: int) -> bool:
        """Whether this step reads something back; after others `allows_update` may be called one step later."""
        return not self._began or self._is_health_step(step) or self.pending or self.guard.checks_soon

    def _is_health_step(self, step: int) -> bool:
        return step == FIRST_OBSERVED or step % self._options.health_every == 0

    @contextmanager
    def casts(self, step: int) -> Iterator[None]:
        """Observe the losses of casts to FP8 in the block, at health steps or while layers are to be chosen.

        A process's first step is left out: it measures execution modes. Nonfinite steps are not judged: infinities
        saturate. DeadRunError beyond `max_saturation` or `max_underflow`.
        """
        first, self._began = not self._began, True
        if first:
            self._log.precision(weight_rows(self._transformer))
        due = self._is_health_step(step) and not first and self._options.enabled
        # a run stopped before its first observed step catches up where the whole run observed
        chooses = self.pending and step >= FIRST_OBSERVED and (not first or step == FIRST_OBSERVED)
        if not (due or chooses):
            yield
            return
        with CastProbe(self._transformer, self.guard.lora) as probe:
            yield
        rows = probe.rows(step)
        if rows:
            self._log.detail(f"step {step}: {health_line(rows)}")
        if self.guard.nonfinite:
            return
        self._log.precision(rows)
        if self.pending:
            self.choose_layers(rows)
        verdict = health_verdict(rows, self._options) if rows and self._options.enabled else None
        if verdict is not None:
            raise DeadRunError(f"step {step}: {verdict}; {KEPT}")

    def choose_layers(self, rows: Sequence[CastPrecision]) -> None:
        """Leave the layers below `activation.min_sqnr_db` in bf16, by the rows of a finished step.

        The choice is made once, by the mean over batches and processes. Gradients do not count: tokens far from the
        loss have small ones, which a scale for all of them loses without harm.
        """
        measured = {row.layer: row.sqnr_db for row in rows if row.kind == INPUT and row.layer}
        names = sorted(measured)
        # means need finite values: exact casts count as very good
        local = torch.tensor([measured[name] for name in names]).nan_to_num(nan=EXACT_DB, posinf=EXACT_DB)
        values = dict(zip(names, self._mean(local).tolist() if names else [], strict=True))
        below = [name for name, value in values.items() if value < self._minimum]
        if below:
            listed = ", ".join(f"{name} ({values[name]:.1f} dB)" for name in below)
            text = f"{len(below)} of {len(names)} layers multiply in bf16 from here on: {listed}"
        elif names:
            text = f"the lowest of {len(names)} layers has {min(values.values()):.1f} dB, none is left out"
        else:
            text = "no layer multiplies in FP8 here, none is left out"
        self._leave_out(below)
        self._log.info(f"{KEY}={self._minimum:g}: {text}")

    def _leave_out(self, layers: list[str]) -> None:
        self.pending, self._left_out = False, layers
        if not layers:
            return
        modules = dict(self._transformer.named_modules())
        linears = [modules.get(f"{name}.base_layer", modules.get(name)) for name in layers]
        BlockRunner.of(self._transformer).multiply_in_bf16(linears)
        if self._report is not None:
            reason = f"input below activation.min_sqnr_db: {self._minimum:g}"
            self._report.why.update(dict.fromkeys(layers, reason))

    def retry(self, step: int, attempt: Callable[[], T], reset: Callable[[], str | None]) -> T:
        """Run `attempt`; if it runs out of memory, again with more recomputation, unless its update has begun.

        `reset` undoes a failed attempt and names the memory it freed. OutOfMemory explains a final failure.
        """
        while True:
            self._updating = False
            try:
                return attempt()
            except Exception as error:
                if not is_oom(error):
                    raise
                explanation = explain_oom(error, self.phases, self._job)
            # outside the clause, where nothing refers to the failed step
            freed = reset()
            change = None if self._updating else freed or recompute_more(self._transformer)
            if change is None:
                raise OutOfMemory(explanation)
            self._log.info(explanation)
            self._log.info(f"Step {step} is tried again: {change}")

    def measures_memory(self, step: int) -> bool:
        """Whether memory lines are due in this step, which then cannot be replayed."""
        return self._writes_lines and step % self._memory.log_every == 0

    def mark(self, moment: str, step: int) -> None:
        """Measure memory at a moment of a step, and log a line when due."""
        self.phases.mark(moment)
        if not self.measures_memory(step):
            return
        if not self._explained_lines:
            self._log.detail(CPU_NOTE)
            self._explained_lines = True
        allocated, reserved = (size / GB for size in used_bytes(self.phases.device))
        self._log.detail(f"[{moment}] Step {step}: Allocated: {allocated:.2f}GB, Reserved: {reserved:.2f}GB")

    def begin_update(self) -> None:
        """Rule out a retry of the current attempt: its update begins before `allows_update` is called."""
        self._updating = True

    def allows_update(self, step: int, loss: float, grad_norm: float, without: float = math.nan) -> bool:
        """The guard's verdict: `RunGuard.allows_update`."""
        self._updating = self.guard.allows_update(step, loss, grad_norm, without)
        return self._updating

    def end_step(self, step: int, seconds: float) -> None:
        """Check updated parameters, warn of steps slowed by lack of memory, and report after the first step.

        DeadRunError by `RunGuard.after_update`, RuntimeError by `BlockRunner.check_step`.
        """
        runner = None if self._reported else BlockRunner.of(self._transformer)
        self._reported = True
        if runner is not None:
            runner.check_step()
            if self._report is not None:
                self._log.info(f"As the first step ran:\n{self._report.table(shared=True)}")
        if self._updating:
            self.guard.after_update(step)
        device = self.phases.device
        if device.type == "cuda":
            reserved = torch.cuda.memory_reserved(device)
            warning = self._spill.on_step(seconds, reserved, torch.cuda.get_device_properties(device).total_memory)
            if warning is not None:
                self._log.info(f"WARNING: {warning}")

    def state_dict(self) -> dict[str, Any]:
        """The guard's counters and the layers that `activation.min_sqnr_db` left out; plain JSON."""
        chosen = {"minimum": self._minimum, "left_out": None if self.pending else self._left_out}
        return self.guard.state_dict() | ({} if self._minimum is None else {"precision": chosen})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; missing entries stay, and with another threshold layers are chosen again."""
        self.guard.load_state_dict(state)
        saved = state.get("precision", {})
        left_out = saved.get("left_out")
        if left_out is None or not self.pending:
            return
        if saved["minimum"] != self._minimum:
            self._log.info(f"{KEY}: {saved['minimum']:g} -> {self._minimum:g}, layers are chosen again")
            return
        names = {name.removesuffix(".base_layer") for name, _ in self._transformer.named_modules()}
        layers = [name for name in left_out if name in names]
        self._leave_out(layers)
        if layers:
            self._log.info(f"{KEY}: {len(layers)} layers multiply in bf16 as before: {', '.join(layers)}")


class SpillWatch:
    """Warns once that Windows' driver has spilled GPU memory to system memory, which slows steps.

    The signs: torch holds more than the card has; or nearly all of it, and several steps in a row are much slower than
    the median of the run's first steps.
    """

    def __init__(self, platform: str = sys.platform) -> None:
        self._active = platform == "win32"
        self._seconds: list[float] = []

    def on_step(self, seconds: float, reserved: int, total: int) -> str | None:
        """The warning after a step of so many seconds, with `reserved` bytes of the card's `total` held by torch."""
        if not self._active or total <= 0:
            return None
        sign = f"torch holds {reserved / GB:.1f} GB"
        if reserved <= total:
            self._seconds.append(seconds)
            first = self._seconds[WARM_UP:][:BASELINE]
            later = self._seconds[WARM_UP + BASELINE :]
            last = later[-IN_A_ROW:]
            if len(last) < IN_A_ROW or reserved < NEAR_LIMIT * total:
                return None
            usual = statistics.median(first)
            if min(last) < SLOWER * usual:
                return None
            sign = f"steps take {statistics.median(last):.1f} s instead of {usual:.1f} s, and {sign}"
        self._active = False
        return (
            f"{sign} of a card of {total / GB:.1f} GB: the Windows driver has moved memory of this run to slow system "
            "memory. Set coat.memory.checkpointing: all or a smaller coat.memory.budget_gb, or close other programs on "
            "this card. For an error instead: NVIDIA Control Panel, Manage 3D settings, CUDA - Sysmem Fallback Policy, "
            "Prefer No Sysmem Fallback"
        )
