"""Stops a run that can no longer succeed, and skips single updates that would kill it; the same in both trainers.

    before an update    loss and gradient norm finite, gradient not zero, loss not constant   floats the caller has
    after it            parameters finite, growth bounded, some lora_B not zero               one read-back, rarely
    over many steps     loss and weights together far beyond their usual size                 floats the caller has

A single update from NaN or inf is skipped and counted; ten in a row end the run. With `guard.enabled: false` that
is the only check. From the second in a row, and while the run seems to diverge, trainers save nothing.

Divergence is two signs that no healthy run shows together:

    loss      high, i.e. above 1.75 times the usual one: 5 of the last 8 for a doubt, 12 of the last 16 to end the run
    weights   L2 norm of all trained parameters above twice that before the first step (1.1 times of a whole model)

The usual loss is a mean over at most the last 200 steps, the first being that before any update. No loss in a doubt
counts, and a high one only where most are high while the weights have not grown (another expert's turn).

FLUX's last layer normalizes its input, so a diverged loss levels off at a few times its usual value (0.64 -> 2.0 on the
mini-FLUX, where noise levels alone move it from 0.15 to 1.1); and a healthy LoRA's B grows from zero. At 100 times
their norm, weights are broken whatever the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.errors import UserError
from ..config.coat import GuardOptions

KEPT = "the last good save is kept"
UP_MATRICES = (".lora_B.", "lora_up")  # names of PEFT and ai-toolkit
FIRST_LIVING_UPDATE = 2  # a warm-up begins with lr 0
DOUBTED_STREAK = 2  # nonfinite steps in a row; a single one is harmless
COUNTERS = ("skipped", "updates", "nonfinite", "_zero_gradients", "_same_losses", "_last_loss")
WINDOW, HIGH = 16, 12  # steps, and how many of them
DOUBT_WINDOW, DOUBT_HIGH = 8, 5
UNSEEN = 3  # bad updates before a loss is high
SPIKES = 3  # high losses in a window of fewer are luck
WORSE = 1.05  # validation loss at the end, relative to the start
MEMORY = 200  # steps of the usual loss
LOSS_FACTOR = 1.75
LORA_GROWTH, MODEL_GROWTH = 2.0, 1.1
BROKEN_GROWTH = 100.0


class DeadRunError(UserError, RuntimeError):
    """A run that cannot recover; `since`: the first doubtful step, None if going back is no help."""

    def __init__(self, message: str, since: int | None = None):
        super().__init__(message)
        self.since = since


Norms = Callable[..., Tensor]  # `tensor_norms`, or one that knows of other processes


@torch.no_grad()
def tensor_norms(tensors: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """The norm of each tensor, of order 2 or infinity, computed in fp32: [n], 0 for empty tensors."""
    if not tensors:
        return torch.zeros(0)
    filled = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    return torch.stack(torch._foreach_norm(filled, order, dtype=torch.float32))


class RunGuard:
    """Watches the adapters of one run (name → parameter, may be set later); `norms` are over all processes."""

    def __init__(
        self,
        options: GuardOptions,
        lora: Mapping[str, Tensor],
        log: Callable[[str], None],
        norms: Norms = tensor_norms,
    ) -> None:
        self.lora = lora
        self.skipped = self.updates = self.nonfinite = 0
        self._options, self._log, self._norms = options, log, norms
        self._zero_gradients = self._same_losses = 0
        self._last_loss: float | None = None
        self._start: float | None = None  # norm of all weights before the first step
        self._recent: list[tuple[int, float]] = []  # step and loss of the last finite steps
        self._usual: float | None = None
        self._usual_steps = 0
        self._diverging_since: int | None = None
        self._living_update = max(options.dead_lora_steps, FIRST_LIVING_UPDATE)

    def allows_update(self, step: int, loss: float, grad_norm: float) -> bool:
        """Whether the optimizer may use the gradients of step `step` (from 1); False skips a nonfinite step.

        `loss` is the mean over micro-batches and processes as computed (ai-toolkit logs 0 for NaN), `grad_norm` that
        before clipping.

        Raises:
            DeadRunError: too many nonfinite steps in a row, divergence, no gradient, or a constant loss.
        """
        options = self._options
        if options.enabled and self._start is None:
            self._start = self._norm()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self.skipped += 1
            self.nonfinite += 1
            numbers = f"step {step}: loss={loss}, gradient norm {grad_norm}"
            if options.enabled and self.nonfinite >= options.nonfinite_steps:
                raise DeadRunError(
                    f"{numbers}, not finite for {self.nonfinite} steps in a row; lower train.lr, or set "
                    f"coat.activation.linear_granularity: per_row and grad_format: e5m2; {KEPT}",
                    self._first_doubt(step - self.nonfinite + 1),
                )
            self._log(f"{numbers}: not finite, the update is skipped ({self.skipped} so far)")
            return False
        self.nonfinite = 0
        if not options.enabled:
            return True
        self._zero_gradients = 0 if grad_norm else self._zero_gradients + 1
        if self._zero_gradients >= options.zero_gradient_steps:
            raise DeadRunError(
                f"step {step}: gradient norm 0 for {self._zero_gradients} steps in a row; check that network, or "
                "coat.include, chooses layers of the transformer, and set coat.activation.grad_format: e5m2 or bf16; "
                f"{KEPT}"
            )
        self._same_losses = self._same_losses + 1 if loss == self._last_loss else 1
        self._last_loss = loss
        if self._same_losses >= options.pinned_loss_steps:
            raise DeadRunError(
                f"step {step}: loss={loss} for {self._same_losses} steps in a row, to the last bit: the model's output "
                f"no longer depends on its input; lower train.lr and check the dataset's images; {KEPT}"
            )
        self._check_divergence(step, loss)
        return True

    def _check_divergence(self, step: int, loss: float) -> None:
        """Record the loss of a finite step; the growth is read only where most losses are high."""
        self._recent = [*self._recent, (step, loss)][-WINDOW:]
        if self._usual is None:
            self._usual = loss
        high = self._high_steps(DOUBT_WINDOW)
        often = len(high) >= DOUBT_HIGH
        if not (often and self._growth() > self._healthy_growth()):
            self._diverging_since = None
            if often or step not in high:
                self._usual_steps += 1
                self._usual += (loss - self._usual) / min(self._usual_steps, MEMORY)
            return
        if self._diverging_since is None:
            self._diverging_since = self._first_doubt(step)
        since = self._diverging_since
        is_high = len(self._high_steps(WINDOW)) >= HIGH
        if is_high and step - since >= self._options.diverging_steps:
            grown = f"the trained weights have grown {self._growth():.1f}-fold"
            raise DeadRunError(
                f"step {step}: {self._loss_text()}, and {grown}: the run diverged; lower train.lr",
                since,
            )

    def _high_steps(self, window: int) -> list[int]:
        limit = math.inf if self._usual is None else LOSS_FACTOR * self._usual
        return [step for step, loss in self._recent[-window:] if loss > limit]

    def _first_doubt(self, step: int) -> int:
        """The first step whose update may be bad: that before the first high loss, or else `step`."""
        if self._diverging_since is not None:
            return self._diverging_since
        high = self._high_steps(DOUBT_WINDOW)
        if not high:
            return step
        return max(min(step, high[0] - 1), 1)

    def apart(self, step: int) -> int:
        """Steps from `step` back to weights that were surely good."""
        since = self._first_doubt(step)
        return 1 if since == step else step - since + UNSEEN

    def _loss_text(self) -> str:
        mean = sum(loss for _, loss in self._recent) / len(self._recent)
        return (
            f"the loss of the last {len(self._recent)} steps is {mean:.3g} on average, the usual one {self._usual:.3g}"
        )

    def _norm(self) -> float:
        return float(torch.linalg.vector_norm(self._norms(list(self.lora.values()))))

    def _growth(self) -> float:
        """Norm of the weights relative to the start; 1 where that was zero. Reads back one number."""
        return self._norm() / self._start if self._start else 1.0

    def _healthy_growth(self) -> float:
        for name in self.lora:
            if any(mark in name for mark in UP_MATRICES):
                return LORA_GROWTH
        return MODEL_GROWTH

    @property
    def doubt(self) -> str | None:
        """Why nothing may be saved now, or None."""
        if not self._options.enabled:
            return None
        if self.nonfinite >= DOUBTED_STREAK:
            return f"the last {self.nonfinite} steps were not finite"
        return None if self._diverging_since is None else f"{self._loss_text()}: it may be diverging"

    def after_update(self, step: int) -> None:
        """Count an update and, when due, check the parameters; raises DeadRunError as `check_save`."""
        self.updates += 1
        if self._options.enabled and self._is_checked(self.updates):
            self._check(step, dead=self.updates == self._living_update)

    @property
    def checks_soon(self) -> bool:
        """Whether one of the next two updates checks the parameters; one may be in flight."""
        return self._options.enabled and any(self._is_checked(self.updates + ahead) for ahead in (1, 2))

    def _is_checked(self, update: int) -> bool:
        return update == self._living_update or update % self._options.health_every == 0

    def check_save(self, step: int, *, final: bool = False) -> None:
        """Check every parameter before a save; DeadRunError if one is not finite.

        The `final` save is checked even with `guard.enabled: false`, and not made if every lora_B is zero, or in doubt.
        """
        if final or self._options.enabled:
            self._check(step, dead=final)
        if final and self.doubt is not None:
            since = self._first_doubt(step - self.nonfinite + 1 if self.nonfinite else step)
            raise DeadRunError(f"step {step}: the run ends in doubt: {self.doubt}; lower train.lr", since)

    def check_end(self, step: int, start: float, end: float) -> None:
        """Compare validation losses of trained photos; DeadRunError if the run made it worse."""
        if not self._options.enabled or end <= WORSE * start:
            return
        since = 1
        if len(self._high_steps(DOUBT_WINDOW)) >= SPIKES:
            since = self._first_doubt(step)
        raise DeadRunError(
            f"step {step}: the validation loss is {end:.3g}, "
            f"at the start it was {start:.3g}: "
            "the run diverged; lower train.lr",
            since,
        )

    @torch.no_grad()
    def _check(self, step: int, *, dead: bool) -> None:
        if not self.lora:
            return
        norms = self._norms(list(self.lora.values()), math.inf).tolist()
        largest = dict(zip(self.lora, norms, strict=True))
        broken = [name for name, value in largest.items() if not math.isfinite(value)]
        if broken:
            raise DeadRunError(
                f"step {step}: {len(broken)} of {len(largest)} trained tensors are not finite ({broken[0]}): the last "
                f"updates overflowed; lower train.lr, or use lr_scheduler: constant_with_warmup; {KEPT}",
                self._first_doubt(step),
            )
        growth = self._growth() if self._options.enabled else 1.0
        if growth > BROKEN_GROWTH:
            raise DeadRunError(
                f"step {step}: the trained weights have grown {growth:,.0f}-fold since the start (largest now "
                f"{max(norms):.3g}): the run diverged; lower train.lr",
                self._first_doubt(step),
            )
        ups = [value for name, value in largest.items() if any(mark in name for mark in UP_MATRICES)]
        if dead and ups and not any(ups):
            raise DeadRunError(
                f"step {step}: every lora_B is still zero after {self.updates} updates, so the LoRA has no effect; "
                f"raise train.lr, shorten its warm-up, and check that network trains layers of the transformer; {KEPT}"
            )

    def state_dict(self) -> dict[str, Any]:
        """The counters; plain JSON."""
        counters = {name.strip("_"): getattr(self, name) for name in COUNTERS}
        growth = self._growth() if self.lora else 1.0
        recent = [list(pair) for pair in self._recent]
        losses = {"losses": recent, "usual": self._usual, "steps": self._usual_steps, "start": self._start}
        return counters | {"growth": growth, "divergence": losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved run's counters; missing ones stay."""
        for name in COUNTERS:
            setattr(self, name, state.get(name.strip("_"), getattr(self, name)))
        losses = state.get("divergence", {})  # of a run that was not in doubt
        self._start = losses.get("start", self._start)
        self._recent = [(step, loss) for step, loss in losses.get("losses", [])]
        self._usual = losses.get("usual")
        self._usual_steps = int(losses.get("steps", 0))
