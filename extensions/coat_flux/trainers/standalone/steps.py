"""One optimizer step: gradients of all micro-batches, the guard's verdict, the update.

Where the optimizer can skip a step on the device (`FP8AdamW.found_inf`), the device decides on the update, and loss and
norm are read and judged during the next step. Steps that read something anyway (`StepWatch.reads_at_once`) wait, and
`settle` reads the outstanding numbers before anything is saved, measured or shown.

With `speed.cuda_graphs`, the other steps are replayed (`step_graph`) from captures of `_whole_step`.

Out of memory in forward or backward, `StepWatch.retry` repeats the micro-batches with more recomputation; their draws
depend on the batch's number, so it is the same step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coat_core.optim import FP8AdamW
from coat_core.optim.sharded import local_values

from ...blocks.runner import BlockRunner
from ...data.dataset import Batch
from ...saves.interrupts import Interrupts
from ...watch.live import COMMANDS
from ...watch.run_tables import StepStats
from ..full import CLIP_EPS
from ..optimizer import advance, learning_rate
from .seeding import Stream, seed_global, seed_of
from .session import Session
from .step_graph import Drawn, StepGraphs
from .workers import Reading, not_finite, whole_norms

__all__ = ["settle", "train_step"]


@dataclass
class Outstanding:
    """A step whose loss and gradient norm are still on the device."""

    step: int
    epoch: int
    lr: float
    numbers: Reading
    seconds: float = 0.0


def train_step(session: Session, batches: Iterator[Batch], interrupts: Interrupts) -> frozenset[str]:
    """Do one optimizer step, counted even if the guard skips its update; returns requested `watch.live.COMMANDS`.

    Its numbers go to `session.log`, now or in the next step or `settle`.

    Raises:
        DeadRunError: by the guard.
        OutOfMemory: nothing is left to recompute.
    """
    started = time.perf_counter()
    watch, number = session.watch, session.step + 1
    late = _skips_on_device(session) and not watch.reads_at_once(number)
    if not late:
        settle(session)
    lr = learning_rate(session.optimizer)
    with watch.casts(number):
        micro_batches = [next(batches) for _ in range(session.job.train.gradient_accumulation)]
        replayed = _replay(session, number, micro_batches) if late else None
        numbers = _gradients(session, number, micro_batches) if replayed is None else replayed
        commands = session.live.poll() | ({"stop"} if interrupts.asked else frozenset())
        numbers, asked = session.workers.agree(numbers, [name in commands for name in COMMANDS])
        reading = Reading(numbers)
        if not late:
            if watch.allows_update(number, *reading.read()):
                _update(session, None)
        elif replayed is None:
            _update(session, not_finite(numbers))
    watch.mark("after_optimizer_step", number)
    advance(session.lr_scheduler, 1)
    session.step = number
    before, session.outstanding = session.outstanding, Outstanding(number, session.epoch, lr, reading)
    if before is not None:
        _finish(session, before, judge=True)
    session.outstanding.seconds = time.perf_counter() - started
    if not late:
        _finish(session, session.outstanding, judge=False)
    return frozenset(name for name, wanted in zip(COMMANDS, asked, strict=True) if wanted)


def settle(session: Session) -> None:
    """Wait for the outstanding step, if any, and judge it; DeadRunError by the guard."""
    if session.outstanding is not None:
        _finish(session, session.outstanding, judge=True)


def _finish(session: Session, done: Outstanding, *, judge: bool) -> None:
    """Report a step; `judge` it first unless done before its update."""
    loss, norm = done.numbers.read()
    if judge:
        session.watch.allows_update(done.step, loss, norm)
    if session.outstanding is done:
        session.outstanding = None
    session.watch.end_step(done.step, done.seconds)
    skipped = session.watch.guard.skipped
    session.log.step(StepStats(done.step, done.epoch, loss, done.lr, norm, done.seconds, skipped))


def _skips_on_device(session: Session) -> bool:
    return isinstance(session.optimizer, FP8AdamW) and session.optimizer.defaults["capturable"]


# -- an eager step -----------------------------------------------------------------------------------------------------


def _gradients(session: Session, number: int, batches: Sequence[Batch]) -> Tensor:
    """Compute clipped gradients (fused: and apply them); returns fp32 [2]: loss and norm."""
    if session.graphs is not None:
        session.graphs.make_room()

    def drop() -> str | None:
        session.optimizer.zero_grad(set_to_none=True)
        dropped = session.graphs is not None and session.graphs.drop()
        return "CUDA graphs: their memory was given back" if dropped else None

    session.optimizer.zero_grad(set_to_none=True)
    if session.workers.shares_weights:  # a process that retries alone would wait for the others' weights
        loss = _accumulate(session, batches)
    else:
        loss = session.watch.retry(number, lambda: _accumulate(session, batches), drop)
    if session.fused is not None:
        return torch.stack([loss, session.fused.norm().to(loss)])
    session.workers.sum_gradients(list(session.lora.values()))
    return _clipped(session, loss)


def _accumulate(session: Session, batches: Sequence[Batch]) -> Tensor:
    total = torch.zeros((), device=session.workers.device)
    together = len(batches) * session.workers.size  # gradients are summed over processes
    for batch in batches:
        tensors = session.dataset.batch(batch)
        if batch is batches[0]:
            session.watch.mark("before_forward", session.step + 1)
        loss = session.objective(tensors, batch.draw)
        if batch is batches[0]:
            session.watch.mark("after_forward", session.step + 1)
        total += loss.detach() / len(batches)
        fused = session.fused if batch is batches[-1] else None
        with nullcontext() if fused is None else fused.updating(not_finite(total)):
            (loss / together).backward()
        if batch is batches[0]:
            session.watch.mark("after_backward", session.step + 1)
    return total


def _clipped(session: Session, loss: Tensor) -> Tensor:
    grads = [param.grad for param in session.lora.values() if param.grad is not None]
    norm = torch.linalg.vector_norm(whole_norms(grads))
    if grads:
        scale = (session.job.train.max_grad_norm / (norm + CLIP_EPS)).clamp(max=1.0)
        torch._foreach_mul_([local_values(grad) for grad in grads], scale)
    return torch.stack([loss, norm.to(loss)])


def _update(session: Session, found_inf: Tensor | None) -> None:
    """Update parameters, unless backward did, and the average; a no-op where `found_inf` is 1."""
    if session.fused is None:
        seed_global(seed_of(session.job), Stream.OPTIMIZER, session.step)
        if isinstance(session.optimizer, FP8AdamW):
            session.optimizer.found_inf = found_inf
        session.optimizer.step()
    if session.ema is not None:
        session.ema.update(found_inf)


# -- a replayed step ---------------------------------------------------------------------------------------------------


def _replay(session: Session, number: int, batches: Sequence[Batch]) -> Tensor | None:
    if not session.captures or session.watch.measures_memory(number):
        return None
    if session.graphs is None:
        runner = BlockRunner.of(session.transformer)
        session.graphs = StepGraphs(
            lambda drawn, rates: _whole_step(session, drawn, rates),
            lambda: _state(session),
            lambda: None if runner is None else runner.generation,
            session.log.info,
            strict=session.job.coat.fallback == "error",
        )
    if session.graphs.failed:
        return None
    drawn = [session.objective.draw(session.dataset.batch(batch), batch.draw) for batch in batches]

    def eager() -> Tensor:
        numbers = _gradients(session, number, batches)
        _update(session, not_finite(numbers))
        return numbers

    rates = [float(group["lr"]) for group in session.optimizer.param_groups]
    return session.graphs.run(drawn, rates, eager)


def _whole_step(session: Session, drawn: Drawn, rates: Tensor) -> Tensor:
    """A step with all that varies in tensors (`rates` fp64 [groups]); returns fp32 [2]: loss and gradient norm."""
    optimizer: Any = session.optimizer
    groups, plain_rates = optimizer.param_groups, [group["lr"] for group in optimizer.param_groups]
    optimizer.zero_grad(set_to_none=True)
    try:
        total = torch.zeros((), device=session.workers.device)
        for each in drawn:
            loss = session.objective.loss(each)
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


def _state(session: Session) -> dict[str, list[Tensor]]:
    entries = [session.optimizer.state[parameter] for parameter in session.lora.values()]
    return {
        "parameters": list(session.lora.values()),
        "average": [] if session.ema is None else list(session.ema.shadow.values()),
        "counters": [entry["step"] for entry in entries],
        "others": [x for entry in entries for name, x in entry.items() if name != "step"],
    }
