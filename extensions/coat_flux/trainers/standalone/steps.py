"""One optimizer step: gradients of all micro-batches, the guard's verdict, the update.

Where memory runs out in forward or backward, `StepWatch.retry` tries the same micro-batches again with more
recomputation: every draw follows from the number of the batch, so it is the same step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from ...data.dataset import Batch
from ...saves.interrupts import Interrupts
from ...watch.live import COMMANDS
from ...watch.run_tables import StepStats
from .optim import advance, learning_rate
from .seeding import Stream, seed_global, seed_of
from .session import Session

__all__ = ["train_step"]


def train_step(session: Session, batches: Iterator[Batch], interrupts: Interrupts) -> tuple[StepStats, frozenset[str]]:
    """Do one optimizer step; `session.step` counts it, also where the guard lets no update happen.

    Args:
        session: of the run.
        batches: of this process.
        interrupts: of this process.

    Returns:
        The step's numbers, and what was asked meanwhile, of `watch.live.COMMANDS`; an interrupt asks for a stop.

    Raises:
        DeadRunError: by the guard.
        OutOfMemory: and nothing is left to recompute.
    """
    started = time.perf_counter()
    job, watch, params = session.job, session.watch, list(session.lora.values())
    number = session.step + 1
    lr = learning_rate(session.optimizer)

    def drop_gradients() -> None:
        session.optimizer.zero_grad(set_to_none=True)

    with watch.casts(number):
        drop_gradients()
        micro_batches = [next(batches) for _ in range(job.train.gradient_accumulation)]
        loss = watch.retry(number, lambda: _accumulate(session, micro_batches), drop_gradients)
        session.workers.average_gradients(params)
        norm = clip_grad_norm_(params, job.train.max_grad_norm).item()
        given = session.live.poll() | ({"stop"} if interrupts.asked else frozenset())
        asked = torch.tensor([name in given for name in COMMANDS]).to(loss)
        mean_loss, *shares = session.workers.mean(torch.cat([loss[None], asked])).tolist()
        if watch.allows_update(number, mean_loss, norm):
            seed_global(seed_of(job), Stream.OPTIMIZER, session.step)
            session.optimizer.step()
            if session.ema is not None:
                session.ema.update()
    watch.mark("after_optimizer_step", number)
    advance(session.lr_scheduler, 1)
    session.step = number
    seconds = time.perf_counter() - started
    watch.end_step(number, seconds)
    commands = frozenset(name for name, share in zip(COMMANDS, shares, strict=True) if share > 0)
    return StepStats(number, session.epoch, mean_loss, lr, norm, seconds, watch.guard.skipped), commands


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
