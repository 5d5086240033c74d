"""One optimizer step: gradients of all micro-batches, the guard's word, the update.

Where memory runs out in forward or backward, the same micro-batches are tried again with more recomputation, as far as
`memory.checkpointing: auto` has more: every draw follows from the number of the batch, so it is the same step.
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
from ...watch.oom import OutOfMemory, explain_oom, is_oom, recompute_more
from .optim import advance, learning_rate
from .progress import StepStats
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
        The step's numbers, and what was asked meanwhile, of `checkpoint.live.COMMANDS`; an interrupt asks for a stop.

    Raises:
        DeadRunError: by the guard.
        OutOfMemory: and nothing is left to recompute.
    """
    started = time.perf_counter()
    job, guard, params = session.job, session.guard, list(session.lora.values())
    number = session.step + 1
    lr = learning_rate(session.optimizer)
    with guard.watch_casts(number):
        loss = _gradients(session, [next(batches) for _ in range(job.train.gradient_accumulation)])
        session.workers.average_gradients(params)
        norm = clip_grad_norm_(params, job.train.max_grad_norm).item()
        given = session.live.poll() | ({"stop"} if interrupts.asked else frozenset())
        asked = torch.tensor([name in given for name in COMMANDS]).to(loss)
        mean_loss, *shares = session.workers.mean(torch.cat([loss[None], asked])).tolist()
        updates = guard.allows_update(number, mean_loss, norm)
        if updates:
            _update(session)
    session.memory.line("after_optimizer_step", number)
    advance(session.lr_scheduler, 1)
    session.step = number
    if updates:
        guard.after_update(number)
    seconds = time.perf_counter() - started
    _watch_spill(session, seconds)
    commands = frozenset(name for name, share in zip(COMMANDS, shares, strict=True) if share > 0)
    return StepStats(number, session.epoch, mean_loss, lr, norm, seconds, guard.skipped), commands


def _update(session: Session) -> None:
    seed_global(seed_of(session.job), Stream.OPTIMIZER, session.step)
    session.optimizer.step()
    if session.ema is not None:
        session.ema.update()


def _gradients(session: Session, batches: Sequence[Batch]) -> Tensor:
    """Gradients of this process's micro-batches; returns their mean loss."""
    while True:
        explanation = None
        session.optimizer.zero_grad(set_to_none=True)
        try:
            return _accumulate(session, batches)
        except Exception as error:
            if not is_oom(error):
                raise
            explanation = _explained(session, error)
        # outside of the clause: nothing refers to the failed step any more
        session.optimizer.zero_grad(set_to_none=True)
        change = recompute_more(session.transformer)
        if change is None:
            raise OutOfMemory(explanation)
        session.log.say(explanation)
        session.log.say(f"Step {session.step + 1} is tried again: {change}")


def _explained(session: Session, error: Exception) -> str:
    return explain_oom(error, phase="step", phases=session.phases, job=session.job, device=session.workers.device)


def _accumulate(session: Session, batches: Sequence[Batch]) -> Tensor:
    """Forward and backward of each micro-batch; returns their mean loss."""
    total = torch.zeros((), device=session.workers.device)
    for micro_step, batch in enumerate(batches):
        tensors = session.dataset.batch(batch)
        shown = micro_step == 0
        if shown:
            session.memory.line("before_forward", session.step + 1)
        loss = session.objective(tensors, batch.draw)
        if shown:
            session.memory.line("after_forward", session.step + 1)
        (loss / len(batches)).backward()
        if shown:
            session.memory.line("after_backward", session.step + 1)
        total += loss.detach() / len(batches)
    return total


def _watch_spill(session: Session, seconds: float) -> None:
    device = session.workers.device
    if device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    line = session.spill.see(seconds, torch.cuda.memory_reserved(device), total)
    if line is not None:
        session.log.say(line)
