"""Ends a run that has died, and skips single updates that would kill it; the same for both hosts.

    before an update    loss and gradient norm finite, gradient not zero, loss not pinned     floats the caller has
    after it            parameters finite and not grown without bound, some lora_B not zero   one read-back, rarely
    over many steps     loss and weights together far beyond what they were (`divergence.py`)  floats the caller has
    around a step       what the casts to FP8 lose (`casts.py`)                               one read-back, rarely

A single update from NaN or inf is skipped and counted; options.nonfinite_steps of them in a row end the run. With
`guard.enabled: false` such updates are still skipped and counted, and nothing else is looked at.

From the second step in a row that is not finite, and while the run seems to diverge, the guard is in doubt: the
trainers save nothing until the doubt is over, so that the saves that are there stay good.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.runner import BlockPolicy
from ..config.coat import GuardOptions
from .casts import CastProbe
from .divergence import BROKEN_GROWTH, Divergence
from .errors import DeadRunError
from .precision import PrecisionWatch

__all__ = ["RunGuard"]

KEPT = "the last good save is kept"
UP_MATRICES = (".lora_B.", "lora_up")  # PEFT's name, ai-toolkit's
FIRST_LIVING_UPDATE = 2  # a warm-up begins with lr 0
FIRST_LOOK = 2  # step; most of what is wrong from the start shows here
DOUBTED_STREAK = 2  # steps in a row; a single one that is not finite changes nothing
COUNTERS = ("skipped", "updates", "_nonfinite", "_zero_gradients", "_same_losses", "_last_loss")


class RunGuard:
    """Watches one run.

    Args:
        options: `coat.guard`.
        lora: name → parameter of every adapter matrix; may be set later as the attribute of this name.
        say: takes one line for the user.
        detail: takes what only a log needs; None gives it to `say`.
        model: the transformer, for the names of layers in messages about FP8.
        precision: takes what is measured at health steps.

    Attributes:
        lora: as given.
        skipped: updates that were skipped.
        updates: updates that were done.
    """

    def __init__(
        self,
        options: GuardOptions,
        lora: Mapping[str, Tensor],
        say: Callable[[str], None],
        detail: Callable[[str], None] | None = None,
        *,
        model: nn.Module | None = None,
        precision: PrecisionWatch | None = None,
    ) -> None:
        self.lora = lora
        self.skipped = self.updates = 0
        self._options, self._say, self._model = options, say, model
        self._detail = detail or say
        self._nonfinite = self._zero_gradients = self._same_losses = 0
        self._last_loss: float | None = None
        self._began = self._told_of_graphs = False
        self._precision = precision
        self._divergence = Divergence()

    def allows_update(self, step: int, loss: float, grad_norm: float) -> bool:
        """Say whether the optimizer may use the gradients of this step.

        Args:
            step: the number the step gets when done, from 1.
            loss: of the step, mean over micro-batches and processes, as computed (ai-toolkit puts 0 in place of NaN).
            grad_norm: of all trained parameters, before clipping.

        Returns:
            False for a step that is not finite: skip the update, go on with the next batch.

        Raises:
            DeadRunError: too many steps in a row that were not finite, diverging, had no gradient, or one and the same
                loss.
        """
        if self._options.enabled:
            self._divergence.begin(self.lora.values())
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._skip(step, f"loss={loss}, gradient norm {grad_norm}")
            return False
        self._nonfinite = 0
        if self._options.enabled:
            self._see_gradient(step, grad_norm)
            self._see_loss(step, loss)
            self._see_divergence(step, loss)
        return True

    def _see_divergence(self, step: int, loss: float) -> None:
        self._divergence.see(step, loss, self.lora.values())
        since, limit = self._divergence.since, self._options.diverging_steps
        if since is not None and step - since >= limit:
            raise DeadRunError(
                f"step {step}: {self._divergence.describe()}, and the LoRA's weights have grown "
                f"{self._divergence.growth(self.lora.values()):.1f}-fold (coat.guard.diverging_steps={limit}): the run "
                f"diverged; lower train.lr; {KEPT}",
                since,
            )

    @property
    def doubt(self) -> str | None:
        """Why nothing may be saved now; None where all is well. The trainers save when it is over."""
        if not self._options.enabled:
            return None
        if self._nonfinite >= DOUBTED_STREAK:
            return f"the last {self._nonfinite} steps were not finite"
        return None if self._divergence.since is None else f"{self._divergence.describe()}: it may be diverging"

    def _skip(self, step: int, seen: str) -> None:
        self.skipped += 1
        self._nonfinite += 1
        limit = self._options.nonfinite_steps
        if self._options.enabled and self._nonfinite >= limit:
            raise DeadRunError(
                f"step {step}: {seen}, not finite for {limit} steps in a row (coat.guard.nonfinite_steps): the run "
                "diverged, or values overflow; lower train.lr, or set coat.activation.linear_granularity: per_row "
                f"(and coat.activation.grad_format: e5m2); {KEPT}",
                step - limit + 1,
            )
        self._say(f"step {step}: {seen}: not finite, the update is skipped ({self.skipped} so far)")

    def _see_gradient(self, step: int, grad_norm: float) -> None:
        self._zero_gradients = 0 if grad_norm else self._zero_gradients + 1
        if self._zero_gradients >= self._options.zero_gradient_steps:
            raise DeadRunError(
                f"step {step}: gradient norm 0 for {self._zero_gradients} steps in a row "
                "(coat.guard.zero_gradient_steps): no gradient reaches the LoRA; check that network trains layers of "
                "the transformer, and set coat.activation.grad_format: e5m2 (its smallest values reach further down) "
                f"or bf16; {KEPT}"
            )

    def _see_loss(self, step: int, loss: float) -> None:
        self._same_losses = self._same_losses + 1 if loss == self._last_loss else 1
        self._last_loss = loss
        if self._same_losses >= self._options.pinned_loss_steps:
            raise DeadRunError(
                f"step {step}: loss={loss} for {self._same_losses} steps in a row (coat.guard.pinned_loss_steps), to "
                "the last bit, though noise and timesteps change: the model's output no longer depends on its input; "
                f"lower train.lr and check the dataset's images; {KEPT}"
            )

    def after_update(self, step: int) -> None:
        """Count an update that was done; look at the parameters where it is time to.

        Raises:
            DeadRunError: a parameter is not finite, or every lora_B still zero.
        """
        self.updates += 1
        if not self._options.enabled:
            return
        born = self.updates == max(self._options.dead_lora_steps, FIRST_LIVING_UPDATE)
        if born or self.updates % self._options.health_every == 0:
            self._check(step, dead=born)

    def check_now(self, step: int) -> None:
        """Look at every parameter, before a save: it does not happen where this raises.

        Raises:
            DeadRunError: a parameter is not finite.
        """
        if self._options.enabled:
            self._check(step, dead=False)

    def check_end(self, step: int) -> None:
        """Look at every parameter after the last step, before the final save, also with `guard.enabled: false`.

        Raises:
            DeadRunError: a parameter is not finite, every lora_B still zero after so few steps, or the run is in doubt.
        """
        self._check(step, dead=True)
        if self.doubt is not None:
            since = step - self._nonfinite + 1 if self._nonfinite else self._divergence.since
            raise DeadRunError(f"step {step}: the run ends in doubt: {self.doubt}; lower train.lr; {KEPT}", since)

    @torch.no_grad()
    def _check(self, step: int, *, dead: bool) -> None:
        if not self.lora:
            return
        norms = torch.stack(torch._foreach_norm(list(self.lora.values()), math.inf)).tolist()
        largest = dict(zip(self.lora, norms, strict=True))
        broken = [name for name, value in largest.items() if not math.isfinite(value)]
        if broken:
            raise DeadRunError(
                f"step {step}: {len(broken)} of {len(largest)} LoRA tensors are not finite ({broken[0]}): the last "
                f"updates overflowed; lower train.lr, or use lr_scheduler: constant_with_warmup; {KEPT}",
                step,
            )
        growth = self._divergence.growth(self.lora.values()) if self._options.enabled else 1.0
        if growth > BROKEN_GROWTH:
            raise DeadRunError(
                f"step {step}: the LoRA's weights have grown {growth:,.0f}-fold since the start (largest now "
                f"{max(norms):.3g}): the run diverged; lower train.lr; {KEPT}",
                step,
            )
        ups = [value for name, value in largest.items() if any(mark in name for mark in UP_MATRICES)]
        if dead and ups and not any(ups):
            raise DeadRunError(
                f"step {step}: every lora_B is still zero after {self.updates} updates "
                "(coat.guard.dead_lora_steps), so the LoRA has no effect: nothing updates it; raise train.lr, shorten "
                f"its warm-up, and check that network trains layers of the transformer; {KEPT}"
            )

    def watch_casts(self, step: int) -> AbstractContextManager[None]:
        """Observe what casts to FP8 lose inside the block, at health steps; at others do nothing.

        Health steps are step 2 and every multiple of `guard.health_every`, except the first step of a process, which
        measures which path is fastest and how much blocks keep. With CUDA graphs there are none: an eager step needs
        the memory that the recordings hold. What `allows_update`, called inside the block, found not to be finite is
        told but not judged here: infinities saturate, and such steps are counted already.

        Where `activation.min_sqnr_db` still has to choose layers, the next step from step 2 on is looked at besides,
        also with `guard.enabled: false`, which then judges nothing.

        Args:
            step: the number the step gets when done.

        Raises:
            DeadRunError: at the block's end, a share above `guard.max_saturation` or `guard.max_underflow`.
        """
        first, self._began = not self._began, True
        if first and self._precision is not None:
            self._precision.begin()
        if not (self._is_health_step(step, first) or self._must_choose(step, first)) or self._replays():
            return nullcontext()
        return self._observe(step)

    def _is_health_step(self, step: int, first: bool) -> bool:
        due = step == FIRST_LOOK or step % self._options.health_every == 0
        return due and not first and self._options.enabled

    def _must_choose(self, step: int, first: bool) -> bool:
        """A run that was cut before its first look takes it where the whole run took it."""
        pending = self._precision is not None and self._precision.pending
        return pending and step >= FIRST_LOOK and (not first or step == FIRST_LOOK)

    def _replays(self) -> bool:
        policy = None if self._model is None else BlockPolicy.of(self._model)
        replays = policy is not None and policy.compile == "cudagraphs"
        if replays and not self._told_of_graphs:
            self._told_of_graphs = True
            self._say("FP8 casts are not observed with coat.speed.compile: cudagraphs; blocks observes them")
        return replays

    @contextmanager
    def _observe(self, step: int) -> Iterator[None]:
        probe = CastProbe(self._model, self.lora)
        with probe:
            yield
        health = probe.health()
        if self._precision is not None and not self._nonfinite:
            self._precision.see(probe.rows(step))
        if health is None:
            return
        self._detail(f"step {step}: {health.line()}")
        verdict = health.verdict(self._options)
        if verdict is not None and self._options.enabled and not self._nonfinite:
            raise DeadRunError(f"step {step}: {verdict}; {KEPT}")

    def state_dict(self) -> dict[str, Any]:
        """The counters, and the layers that `activation.min_sqnr_db` left out; plain JSON."""
        chosen = {} if self._precision is None else self._precision.state_dict()
        growth = self._divergence.growth(self.lora.values()) if self.lora else 1.0
        found = {name.strip("_"): getattr(self, name) for name in COUNTERS}
        found |= {"growth": growth, "divergence": self._divergence.state_dict()}
        return found | ({"precision": chosen} if chosen else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting where a saved run stopped; counters it does not have stay."""
        for name in COUNTERS:
            setattr(self, name, state.get(name.strip("_"), getattr(self, name)))
        self._divergence.load_state_dict(state.get("divergence", {}))
        if self._precision is not None:
            self._precision.load_state_dict(state.get("precision", {}))
