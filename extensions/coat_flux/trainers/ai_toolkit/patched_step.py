"""A training step of ai-toolkit, observed from the outside; its update may be left out.

ai-toolkit turns a loss of NaN into 0 and continues, and does not report the gradient norm. `patched_step` replaces the
three methods that a step passes through, on the instances and for the length of the step: ai-toolkit shares one
accelerator between all jobs of a command.

    accelerator.backward           marks before and after; inside a context, where backward updates
    accelerator.clip_grad_norm_    returns the norm before clipping, once for each parameter group
    optimizer.step                 left out where the guard does not allow it

Before the first of the last two the gradients of all processes are brought together.

The loss before it is replaced comes from the methods that compute it (`StepFacts.record`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["StepFacts", "patched_step"]


@dataclass
class StepFacts:
    """What is known of the step under way.

    Attributes:
        losses: one for each micro-batch, as computed; scalars on the device.
        norms: gradient norms before clipping, one for each parameter group.
        measured: loss, lr and gradient norm, once they are known.
    """

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    measured: tuple[float, float, float] | None = None

    def record(self, loss: Any) -> Any:
        """Remember a loss as computed, and return it."""
        if isinstance(loss, Tensor):
            self.losses.append(loss.detach().float().mean())
        return loss

    def loss(self) -> float:
        """Mean loss of the micro-batches; 0 where none was recorded."""
        return float(torch.stack(self.losses).mean()) if self.losses else 0.0

    def grad_norm(self, parameters: list[Tensor]) -> float:
        """Norm over all parameter groups; where ai-toolkit did not clip (Adafactor), of the gradients as they are."""
        norms = self.norms or [p.grad.norm() for p in parameters if p.grad is not None]
        return float(torch.stack([norm.float() for norm in norms]).square().sum().sqrt()) if norms else 0.0


@contextmanager
def patched_step(
    accelerator: Any,
    optimizer: Any,
    facts: StepFacts,
    *,
    around_backward: tuple[Callable[[], None], Callable[[], None]],
    in_backward: Callable[[], AbstractContextManager[None]] = nullcontext,
    complete_gradients: Callable[[], None],
    may_update: Callable[[], bool],
) -> Iterator[None]:
    """Observe the step inside the block.

    Args:
        accelerator: ai-toolkit's.
        optimizer: as the loop calls it, wrapped by the accelerator or not.
        facts: filled in.
        around_backward: called before and after each backward.
        in_backward: each backward runs inside what it returns.
        complete_gradients: called once, after the last backward.
        may_update: called before the update, with the facts complete; False leaves it out.
    """
    before, after = around_backward
    backward, step = accelerator.backward, optimizer.step
    clip = getattr(accelerator, "clip_grad_norm_", None)
    complete = functools.lru_cache(None)(complete_gradients)

    def marked_backward(*args: Any, **kwargs: Any) -> None:
        before()
        with in_backward():
            backward(*args, **kwargs)
        after()

    def recorded_clip(*args: Any, **kwargs: Any) -> Any:
        complete()
        norm = clip(*args, **kwargs)
        facts.norms.append(torch.as_tensor(norm))
        return norm

    def guarded_step(*args: Any, **kwargs: Any) -> Any:
        complete()
        return step(*args, **kwargs) if may_update() else None

    patches = [(accelerator, "backward", marked_backward), (optimizer, "step", guarded_step)]
    if clip is not None:
        patches.append((accelerator, "clip_grad_norm_", recorded_clip))
    kept = [(owner, name, vars(owner).get(name)) for owner, name, _ in patches]
    for owner, name, replacement in patches:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for owner, name, own in kept:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
