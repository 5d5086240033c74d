"""One optimizer step: gradients of all micro-batches, the guard's verdict, the update.

Where the optimizer can skip a step on the device (`FP8AdamW.found_inf`), the CPU does not wait for the loss: whether
the update happens is decided there, and loss and norm are read while the next step is under way. The guard judges
them then, under their own step's number. Steps that something reads (`StepWatch.reads_at_once`) wait as before, and
`settle` brings in what is outstanding before anything is saved, measured or shown.

Where memory runs out in forward or backward, `StepWatch.retry` tries the same micro-batches again with more
recomputation: every draw follows from the number of the batch, so it is the same step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from coat_core.optim import FP8AdamW

from ...data.dataset import Batch
from ...saves.interrupts import Interrupts
from ...watch.live import COMMANDS
from ...watch.run_tables import StepStats
from .optim import advance, learning_rate
from .seeding import Stream, seed_global, seed_of
from .session import Session
from .workers import Reading

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
    """Do one optimizer step; `session.step` counts it, also where the guard lets no update happen.

    Its numbers go to `session.log`, now or, where the device decides alone, in the next step or `settle`.

    Args:
        session: of the run.
        batches: of this process.
        interrupts: of this process.

    Returns:
        What was asked meanwhile, of `watch.live.COMMANDS`; an interrupt asks for a stop.

    Raises:
        DeadRunError: by the guard.
        OutOfMemory: and nothing is left to recompute.
    """
    started = time.perf_counter()
    job, watch, params = session.job, session.watch, list(session.lora.values())
    number = session.step + 1
    late = _skips_on_device(session) and not watch.reads_at_once(number)
    if not late:
        settle(session)
    lr = learning_rate(session.optimizer)

    def drop_gradients() -> None:
        session.optimizer.zero_grad(set_to_none=True)

    with watch.casts(number):
        drop_gradients()
        micro_batches = [next(batches) for _ in range(job.train.gradient_accumulation)]
        loss = watch.retry(number, lambda: _accumulate(session, micro_batches), drop_gradients)
        session.workers.average_gradients(params)
        norm = clip_grad_norm_(params, job.train.max_grad_norm)
        given = session.live.poll() | ({"stop"} if interrupts.asked else frozenset())
        loss, asked = session.workers.agree(loss, [name in given for name in COMMANDS])
        numbers = Reading(torch.stack([loss, norm.to(loss)]))
        if late:
            _update(session, numbers.not_finite())
        elif watch.allows_update(number, *numbers.read()):
            _update(session, None)
    watch.mark("after_optimizer_step", number)
    advance(session.lr_scheduler, 1)
    session.step = number
    before, session.outstanding = session.outstanding, Outstanding(number, session.epoch, lr, numbers)
    if before is not None:
        _judge(session, before)
    session.outstanding.seconds = time.perf_counter() - started
    if not late:
        _end(session, session.outstanding)
    return frozenset(name for name, wanted in zip(COMMANDS, asked, strict=True) if wanted)


def settle(session: Session) -> None:
    """Wait for the step that is outstanding, if one is, and let the guard judge it.

    Raises:
        DeadRunError: by the guard.
    """
    if session.outstanding is not None:
        _judge(session, session.outstanding)


def _skips_on_device(session: Session) -> bool:
    return isinstance(session.optimizer, FP8AdamW) and session.optimizer.defaults["capturable"]


def _update(session: Session, found_inf: Tensor | None) -> None:
    """Update parameters and average; where `found_inf` is 1 on the device, nothing changes."""
    seed_global(seed_of(session.job), Stream.OPTIMIZER, session.step)
    if isinstance(session.optimizer, FP8AdamW):
        session.optimizer.found_inf = found_inf
    session.optimizer.step()
    if session.ema is not None:
        session.ema.update(found_inf)


def _judge(session: Session, done: Outstanding) -> None:
    session.watch.allows_update(done.step, *done.numbers.read())
    _end(session, done)


def _end(session: Session, done: Outstanding) -> None:
    """Report a step that was judged."""
    if session.outstanding is done:
        session.outstanding = None
    session.watch.end_step(done.step, done.seconds)
    loss, norm = done.numbers.read()
    skipped = session.watch.guard.skipped
    session.log.step(StepStats(done.step, done.epoch, loss, done.lr, norm, done.seconds, skipped))


def _accumulate(session: Session, batches: Sequence[Batch]) -> Tensor:
    """Forward and backward of each micro-batch; returns their mean loss."""
    total = torch.zeros((), device=session.workers.device)
    for micro_step, batch in enumerate(batches):
        tensors = session.dataset.batch(batch)
        first = micro_step == 0
        if first:
            session.watch.mark("before_forward", session.step + 1)
        loss = session.objective(tensors, batch.draw)
        if first:
            session.watch.mark("after_forward", session.step + 1)
        (loss / len(batches)).backward()
        if first:
            session.watch.mark("after_backward", session.step + 1)
        total += loss.detach() / len(batches)
    return total
