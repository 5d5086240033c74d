"""Stops a run that can no longer succeed, and skips single updates that would kill it; the same in both trainers.

    before an update    loss and gradient norm finite, gradient not zero, loss not pinned     floats the caller has
    after it            parameters finite and not grown without bound, some lora_B not zero   one read-back, rarely
    over many steps     loss and weights together far beyond what they were (`Divergence`)    floats the caller has

A single update from NaN or inf is skipped and counted; ten of them in a row end the run. With
`guard.enabled: false` such updates are still skipped and counted, and nothing else is checked.

From the second step in a row that is not finite, and while the run seems to diverge, the guard is in doubt: the
trainers save nothing until the doubt is over, so that the saves that are there stay good.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.errors import UserError
from ..config.coat import GuardOptions

__all__ = ["KEPT", "WINDOW", "DeadRunError", "Divergence", "Norms", "RunGuard", "tensor_norms"]

KEPT = "the last good save is kept"
UP_MATRICES = (".lora_B.", "lora_up")  # PEFT's name, ai-toolkit's
FIRST_LIVING_UPDATE = 2  # a warm-up begins with lr 0
DOUBTED_STREAK = 2  # steps in a row; a single one that is not finite changes nothing
COUNTERS = ("skipped", "updates", "nonfinite", "_zero_gradients", "_same_losses", "_last_loss")
WINDOW, HIGH = 16, 12  # steps, and how many of them
MEMORY = 200  # steps of the usual loss
LOSS_FACTOR = 2.5
GROWTH = 3.0
BROKEN_GROWTH = 100.0


class DeadRunError(UserError, RuntimeError):
    """A run that further steps cannot save; the message names the step, the sign, the cause, and what to change.

    Attributes:
        since: the first step that is in doubt, where the run diverged; None where going back would not help.
    """

    def __init__(self, message: str, since: int | None = None):
        super().__init__(message)
        self.since = since


Norms = Callable[..., Tensor]  # `tensor_norms`, or one that knows of other processes


@torch.no_grad()
def tensor_norms(tensors: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """The norm of each tensor, of order 2 or infinity, computed in fp32 [n]; of an empty one 0."""
    if not tensors:
        return torch.zeros(0)
    filled = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    return torch.stack(torch._foreach_norm(filled, order, dtype=torch.float32))


class RunGuard:
    """Watches one run: its adapters (name → parameter, which may be set later), through norms that know all processes.

    Attributes:
        skipped, updates: updates that were skipped, and those that were done.
        nonfinite: steps in a row, up to the last one, that were not finite.
    """

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
        self._divergence = Divergence(norms)
        self._living_update = max(options.dead_lora_steps, FIRST_LIVING_UPDATE)

    def allows_update(self, step: int, loss: float, grad_norm: float) -> bool:
        """The guard's verdict on a step: whether the optimizer may use its gradients.

        False is a step that is not finite: skip the update, continue with the next batch.

        Args:
            step: the number the step gets when done, from 1.
            loss: of the step, mean over micro-batches and processes, as computed (ai-toolkit puts 0 in place of NaN).
            grad_norm: of all trained parameters, before clipping.

        Raises:
            DeadRunError: too many steps in a row that were not finite, diverging, had no gradient, or one and the same
                loss.
        """
        options = self._options
        if options.enabled:
            self._divergence.begin(self.lora.values())
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._skip(step, f"loss={loss}, gradient norm {grad_norm}")
            return False
        self.nonfinite = 0
        if not options.enabled:
            return True
        self._zero_gradients = 0 if grad_norm else self._zero_gradients + 1
        if self._zero_gradients >= options.zero_gradient_steps:
            raise DeadRunError(
                f"step {step}: gradient norm 0 for {self._zero_gradients} steps in a row: no "
                "gradient reaches what is trained; check that network, or "
                "coat.include, chooses layers of the transformer, and set coat.activation.grad_format: e5m2 (its "
                f"smallest values reach further down) or bf16; {KEPT}"
            )
        self._same_losses = self._same_losses + 1 if loss == self._last_loss else 1
        self._last_loss = loss
        if self._same_losses >= options.pinned_loss_steps:
            raise DeadRunError(
                f"step {step}: loss={loss} for {self._same_losses} steps in a row, to "
                "the last bit, though noise and timesteps change: the model's output no longer depends on its input; "
                f"lower train.lr and check the dataset's images; {KEPT}"
            )
        self._divergence.on_step(step, loss, self.lora.values())
        since, limit = self._divergence.since, options.diverging_steps
        if since is not None and step - since >= limit:
            raise DeadRunError(
                f"step {step}: {self._divergence.describe()}, and the trained weights have grown "
                f"{self._divergence.growth(self.lora.values()):.1f}-fold: the run "
                f"diverged; lower train.lr; {KEPT}",
                since,
            )
        return True

    def _skip(self, step: int, found: str) -> None:
        self.skipped += 1
        self.nonfinite += 1
        limit = self._options.nonfinite_steps
        if self._options.enabled and self.nonfinite >= limit:
            raise DeadRunError(
                f"step {step}: {found}, not finite for {limit} steps in a row: the run "
                "diverged, or values overflow; lower train.lr, or set coat.activation.linear_granularity: per_row and "
                f"grad_format: e5m2 where they are not; {KEPT}",
                step - limit + 1,
            )
        self._log(f"step {step}: {found}: not finite, the update is skipped ({self.skipped} so far)")

    @property
    def doubt(self) -> str | None:
        """Why nothing may be saved now; None where all is well. The trainers save when it is over."""
        if not self._options.enabled:
            return None
        if self.nonfinite >= DOUBTED_STREAK:
            return f"the last {self.nonfinite} steps were not finite"
        return None if self._divergence.since is None else f"{self._divergence.describe()}: it may be diverging"

    def after_update(self, step: int) -> None:
        """Count an update that was done; check the parameters where it is time to.

        Raises:
            DeadRunError: a parameter is not finite, or every lora_B still zero.
        """
        self.updates += 1
        if self._options.enabled and self._is_checked(self.updates):
            self._check(step, dead=self.updates == self._living_update)

    @property
    def checks_soon(self) -> bool:
        """Whether `after_update` checks the parameters in one of the next two updates; one may be under way."""
        return self._options.enabled and any(self._is_checked(self.updates + ahead) for ahead in (1, 2))

    def _is_checked(self, update: int) -> bool:
        return update == self._living_update or update % self._options.health_every == 0

    def check_now(self, step: int) -> None:
        """Check every parameter, before a save: it does not happen where this raises DeadRunError."""
        if self._options.enabled:
            self._check(step, dead=False)

    def check_end(self, step: int) -> None:
        """Check every parameter after the last step, before the final save, also with `guard.enabled: false`.

        Raises:
            DeadRunError: a parameter is not finite, every lora_B still zero after so few steps, or the run is in doubt.
        """
        self._check(step, dead=True)
        if self.doubt is not None:
            since = step - self.nonfinite + 1 if self.nonfinite else self._divergence.since
            raise DeadRunError(f"step {step}: the run ends in doubt: {self.doubt}; lower train.lr; {KEPT}", since)

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
                step,
            )
        growth = self._divergence.growth(self.lora.values()) if self._options.enabled else 1.0
        if growth > BROKEN_GROWTH:
            raise DeadRunError(
                f"step {step}: the trained weights have grown {growth:,.0f}-fold since the start (largest now "
                f"{max(norms):.3g}): the run diverged; lower train.lr; {KEPT}",
                step,
            )
        ups = [value for name, value in largest.items() if any(mark in name for mark in UP_MATRICES)]
        if dead and ups and not any(ups):
            raise DeadRunError(
                f"step {step}: every lora_B is still zero after {self.updates} updates, "
                "so the LoRA has no effect: nothing updates it; raise train.lr, shorten "
                f"its warm-up, and check that network trains layers of the transformer; {KEPT}"
            )

    def state_dict(self) -> dict[str, Any]:
        """The counters; plain JSON."""
        counters = {name.strip("_"): getattr(self, name) for name in COUNTERS}
        growth = self._divergence.growth(self.lora.values()) if self.lora else 1.0
        return counters | {"growth": growth, "divergence": self._divergence.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue counting where a saved run stopped; counters it does not have stay."""
        for name in COUNTERS:
            setattr(self, name, state.get(name.strip("_"), getattr(self, name)))
        self._divergence.load_state_dict(state.get("divergence", {}))


class Divergence:
    """Whether a run is diverging, by two signs that no healthy run shows together: loss and size of the weights.

        loss      12 of the last 16 above 2.5 times the usual one (a mean over the run, of the last 200 steps at most)
        weights   L2 norm of all trained parameters above 3 times that before the first step

    A FLUX whose adapters explode cannot show it by the loss alone: its last layer reads a normalized input, so the loss
    stops at a few times the usual one (0.35 -> 2.0 on the mini-FLUX, where the loss of healthy steps varies from 0.15
    to 1.1 with the noise level; that of other models varies more, which is why steps are counted and not averaged). And
    a healthy LoRA grows too, B from zero. Weights of 100 times their norm are broken whatever the loss is: at A's usual
    start that is a change larger than the frozen weights themselves.

    Args:
        norms: as `RunGuard` takes it.

    Attributes:
        since: the step from which on the run is diverging; None where it is not.
    """

    def __init__(self, norms: Norms = tensor_norms) -> None:
        self.since: int | None = None
        self._norms = norms
        self._recent: list[float] = []
        self._usual: float | None = None
        self._steps = 0
        self._start: float | None = None

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Take the norm before the first step, unless a resumed state has brought it."""
        if self._start is None:
            self._start = self._norm(parameters)

    def growth(self, parameters: Iterable[Tensor]) -> float:
        """Norm now by the norm at the start; 1 where that was zero. Reads back one number."""
        return self._norm(parameters) / self._start if self._start else 1.0

    def _norm(self, parameters: Iterable[Tensor]) -> float:
        return float(torch.linalg.vector_norm(self._norms(list(parameters))))

    def on_step(self, step: int, loss: float, parameters: Iterable[Tensor]) -> None:
        """Take in the loss of a finite step; the norm is read only where the loss is far beyond the usual one."""
        self._recent = [*self._recent, loss][-WINDOW:]
        usual = self._usual
        high = usual is not None and usual > 0 and sum(one > LOSS_FACTOR * usual for one in self._recent) >= HIGH
        if high and (self.since is not None or self.growth(parameters) > GROWTH):
            self.since = self.since or step - WINDOW + 1
            return  # the loss of such a step is not a usual one
        self.since = None
        self._steps += 1
        share = 1 / min(self._steps, MEMORY)
        self._usual = loss if usual is None else usual + share * (loss - usual)

    def describe(self) -> str:
        """The recent loss and the usual one, in words."""
        mean = sum(self._recent) / max(len(self._recent), 1)
        return f"the loss of the last {WINDOW} steps is {mean:.3g} on average, the usual one {self._usual:.3g}"

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"recent": self._recent, "usual": self._usual, "steps": self._steps, "start": self._start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state, which was not in doubt."""
        self._recent = [float(loss) for loss in state.get("recent", [])]
        self._usual, self._start = state.get("usual"), state.get("start", self._start)
        self._steps = int(state.get("steps", 0))
