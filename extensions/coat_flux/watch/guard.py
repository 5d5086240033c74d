"""Stops a run that can no longer succeed, and skips single updates that would kill it; the same in both trainers.

    before an update    loss and gradient norm finite, gradient not zero, loss not constant   floats the caller has
    after it            parameters finite, growth bounded, some lora_B not zero               one read-back, rarely
    over many steps     loss with the LoRA not above the loss without it                      floats the caller has

A single update from NaN or inf is skipped and counted; ten in a row end the run. With `guard.enabled: false` that
is the only check. From the second in a row, and while the run seems to diverge, trainers save nothing.

A LoRA has diverged when the loss is lower without it, on the same photos and noise. On some steps trainers run one
more forward pass, with every lora_B at zero; the verdict is the mean ratio of the last 8, at the end also of 16. On
the mini-FLUX it is below 1 at 3 times the good rate, above 1.02 at 10 times. The steps are

    1, 4, 8, 16, 32 of a process
    every 50th
    the last 8 before a save, the last 16 before the end
    the one after a save
    all in doubt

40 of the first 1000 with `save_every: 1000`, about 1 % of the time. Of a LoKr W2 (or w2_b) stands for lora_B. Without
either (a whole model) only the growth of the weights' norm is limited, to 1.1 times.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..base.errors import UserError
from ..base.rng import kept_draws
from ..config.coat import GuardOptions

KEPT = "the last good save is kept"
# names of PEFT and ai-toolkit; of a LoKr the matrix, or the factor of it, that is zero at the start
UP_MATRICES = re.compile(r"\.lora_B\.|lora_up|\.lokr_w2(_b)?$")
FIRST_LIVING_UPDATE = 2  # a warm-up begins with lr 0
DOUBTED_STREAK = 2  # nonfinite steps in a row; a single one is harmless
COUNTERS = ("skipped", "updates", "nonfinite", "_zero_gradients", "_same_losses", "_last_loss")
WINDOW = 16  # steps between the two states kept, unless saves are more frequent
FIRST_COMPARISONS, COMPARE_EVERY = (1, 4, 8, 16, 32), 50
COMPARED, COMPARED_AT_END = 8, 16  # with 4, a healthy run of one photo a step is in doubt 1 % of the time
LIMIT = 1.02  # loss with the LoRA relative to that without it; validation loss at the end, to the start
FEW_LIMIT = 1.1  # the same of fewer than 8 comparisons, as one photo's loss varies
LOWER_RATE = "lower train.lr, or set coat.activation.linear_granularity: per_row and grad_format: e5m2"
NOT_THE_RATE = "nothing was trained yet: check the files and the dtype of the model, and the photos"
BROKEN_LORA, BROKEN_MODEL = 100.0, 1.1  # growth of the weights' norm


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
        broken_growth: float = BROKEN_LORA,
    ) -> None:
        self.lora, self._broken_growth = lora, broken_growth
        self.skipped = self.updates = self.nonfinite = 0
        self._options, self._log, self._norms = options, log, norms
        self._zero_gradients = self._same_losses = 0
        self._last_loss: float | None = None
        self._start: float | None = None  # norm of all weights before the first step
        self._first: int | None = None  # step of this process
        self._saved: int | None = None  # step of this process's last save
        self._ratios: list[tuple[int, float]] = []  # by step, those of a verdict and one more
        self._baseline: float | None = None  # above 1 if a LoRA was loaded
        self._mean = 1.0  # ratio of the last verdict
        self._in_doubt: tuple[int, int] | None = None  # first step in doubt, first bad update
        self._living_update = max(options.dead_lora_steps, FIRST_LIVING_UPDATE)

    def compares(self, step: int, until_save: int, until_end: int) -> bool:
        """Whether step `step` (from 1) is compared; `until_…`: steps from it to the next save, to the last step."""
        if not self._options.enabled:
            return False
        begins = self._first is None
        if self._first is None:
            self._first = step
        if not self._ups():
            if begins:
                self._log("guard: no lora_B to switch off: only growth is limited")
            return False
        age = step - self._first + 1
        if age in FIRST_COMPARISONS or age % COMPARE_EVERY == 0:
            return True
        if until_save < COMPARED or until_end < COMPARED_AT_END:
            return True
        return step - 1 == self._saved or self._in_doubt is not None

    def _ups(self) -> list[Tensor]:
        return [param for name, param in self.lora.items() if UP_MATRICES.search(name)]

    @contextmanager
    def without_lora(self) -> Iterator[None]:
        """Set every lora_B to zero; their bits and the generators' states are restored at the end."""
        ups = self._ups()
        with torch.no_grad(), kept_draws():
            values = [up.detach().clone() for up in ups]
            try:
                torch._foreach_zero_(ups)
                yield
            finally:
                torch._foreach_copy_(ups, values)

    def allows_update(self, step: int, loss: float, grad_norm: float, without: float = math.nan) -> bool:
        """Whether the optimizer may use the gradients of step `step` (from 1); False skips a nonfinite step.

        `loss` is the mean over micro-batches and processes as computed (ai-toolkit logs 0 for NaN), `grad_norm` that
        before clipping, `without` the loss without the LoRA.

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
                remedy = f"{LOWER_RATE}; {KEPT}" if self.updates else NOT_THE_RATE
                raise DeadRunError(
                    f"{numbers}, not finite for {self.nonfinite} steps in a row; {remedy}",
                    self._first_doubt(step - self.nonfinite + 1),
                )
            self._log(f"{numbers}: not finite, the update is skipped ({self.skipped} so far)")
            return False
        self.nonfinite = 0
        if not options.enabled:
            return True
        excused = grad_norm or self._in_doubt is not None  # a diverged LoRA may have no gradient
        self._zero_gradients = 0 if excused else self._zero_gradients + 1
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
        if not 0 < without < math.inf:
            return True
        if self._baseline is None:
            self._baseline = max(loss / without, 1.0)
        self._ratios = [*self._ratios, (step, loss / without / self._baseline)][-COMPARED_AT_END - 1 :]
        self._judge(step, COMPARED)
        if self._in_doubt is not None and step - self._in_doubt[0] >= options.diverging_steps:
            raise DeadRunError(f"step {step}: {self.doubt}: the run diverged; lower train.lr", self._in_doubt[1])
        return True

    def _judge(self, step: int, count: int) -> None:
        """Decide by the last `count` comparisons whether the run is in doubt."""
        last = [ratio for _, ratio in self._ratios[-count:]]
        self._mean = sum(last) / len(last)
        if self._mean <= (LIMIT if len(last) >= COMPARED else FEW_LIMIT):
            self._in_doubt = None
        elif self._in_doubt is None:
            self._in_doubt = step, self._first_doubt(step, count)

    def _first_doubt(self, step: int, count: int = COMPARED) -> int:
        """The last comparison before the first bad one of `count`; `step` if nothing is compared."""
        if self._in_doubt is not None:
            return self._in_doubt[1]
        if not self._ratios:
            return step
        ratios = self._ratios[-count - 1 :]
        bad = [place for place, (_, ratio) in enumerate(ratios) if ratio > FEW_LIMIT]
        good = max(bad[0] - 1, 0) if bad else -1
        return min(step, ratios[good][0])

    def apart(self, step: int) -> int | None:
        """Steps from `step` back to weights that were surely good, if anything is compared."""
        if not self._ratios:
            return None
        return step - self._first_doubt(step) + 1

    def _norm(self) -> float:
        return float(torch.linalg.vector_norm(self._norms(list(self.lora.values()))))

    def _growth(self) -> float:
        """Norm of the weights relative to the start; 1 where that was zero. Reads back one number."""
        return self._norm() / self._start if self._start else 1.0

    @property
    def doubt(self) -> str | None:
        """Why nothing may be saved now, or None."""
        if not self._options.enabled:
            return None
        if self.nonfinite >= DOUBTED_STREAK:
            return f"the last {self.nonfinite} steps were not finite"
        if self._in_doubt is None:
            return None
        return f"with the LoRA the loss is {self._mean:.3g} times that without it"

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
        self._saved = step
        if final and self._ratios and self._in_doubt is None:
            self._judge(step, COMPARED_AT_END)
        if final and self.doubt is not None:
            since = self._first_doubt(step - self.nonfinite + 1 if self.nonfinite else step)
            raise DeadRunError(f"step {step}: the run ends in doubt: {self.doubt}; lower train.lr", since)

    def check_end(self, step: int, start: float, end: float) -> None:
        """Compare validation losses of trained photos; DeadRunError if the run made it worse."""
        if not self._options.enabled or end <= LIMIT * start:
            return
        since = self._first_doubt(step)
        raise DeadRunError(
            f"step {step}: the validation loss is {end:.3g}, at the start it was {start:.3g}: the run diverged; "
            "lower train.lr",
            1 if since == step else since,
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
        if growth > self._broken_growth:
            raise DeadRunError(
                f"step {step}: the trained weights have grown {growth:.3g}-fold since the start (largest now "
                f"{max(norms):.3g}): the run diverged; lower train.lr",
                self._first_doubt(step),
            )
        ups = [value for name, value in largest.items() if UP_MATRICES.search(name)]
        if dead and ups and not any(ups):
            if self.updates == 0:
                raise DeadRunError(f"step {step}: not finite in each of {self.skipped} steps; {NOT_THE_RATE}")
            raise DeadRunError(
                f"step {step}: every lora_B is still zero after {self.updates} updates, so the LoRA has no effect; "
                f"raise train.lr, shorten its warm-up, and check that network trains layers of the transformer; {KEPT}"
            )

    def state_dict(self) -> dict[str, Any]:
        """The counters; plain JSON."""
        counters = {name.strip("_"): getattr(self, name) for name in COUNTERS}
        growth = self._growth() if self.lora else 1.0
        ratios = [list(pair) for pair in self._ratios]
        return counters | {"growth": growth, "start": self._start, "ratios": ratios, "baseline": self._baseline}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved run's counters; missing ones stay."""
        for name in COUNTERS:
            setattr(self, name, state.get(name.strip("_"), getattr(self, name)))
        self._start = state.get("start", self._start)
        self._ratios = [(step, ratio) for step, ratio in state.get("ratios", [])]
        self._baseline = state.get("baseline")
