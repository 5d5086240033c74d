"""Stops a run that can no longer succeed, and skips single updates that would kill it; the same in both trainers.

    when                what is checked                                                       cost
    before an update    loss and gradient norm finite, gradient not zero, loss not constant   nothing
    after it            parameters finite, growth bounded, some lora_B not zero               a read-back, rarely
    over many steps     loss with the LoRA not above the loss without it                      a forward pass, rarely

A single update from NaN or inf is skipped and counted; ten in a row end the run. With `guard.enabled: false` that
is the only check. From the second in a row, and while the run seems to diverge, trainers save nothing.

A LoRA has diverged when the loss is lower without it, on the same photos and noise. On some steps trainers compare:
they run one more forward pass, with every lora_B at zero. The verdict is the mean ratio of the last 8 comparisons, at
the end also of 16. On the mini-FLUX it is below 1 at 3 times the good rate, above 1.02 at 10 times. Compared are

    the 1st, 4th, 8th, 16th, 32nd and every 50th step of a process
    the last 8 steps before a save, the last 16 before the end
    the step after a save
    every step while in doubt

That is 40 of the first 1000 with `save_every: 1000`, about 1 % of the time. In a LoKr, W2 (or w2_b) is what lora_B is
in a LoRA. Without either (a whole model) only the growth of the weights' norm is limited, to 1.1 times.
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
# the matrices that are zero at the start, by PEFT's and ai-toolkit's names
UP_MATRICES = re.compile(r"\.lora_B\.|lora_up|\.lokr_w2(_b)?$")
FIRST_LIVING_UPDATE = 2  # a warm-up begins with lr 0
DOUBTED_STREAK = 2  # nonfinite steps in a row; a single one is harmless
COUNTERS = ("skipped", "updates", "nonfinite", "_zero_gradients", "_same_losses", "_last_loss")
WINDOW = 16  # steps between the two states kept, unless saves are more frequent
FIRST_COMPARISONS, COMPARE_EVERY = (1, 4, 8, 16, 32), 50
COMPARED, COMPARED_AT_END = 8, 16  # with 4, a healthy run of one photo a step is in doubt 1 % of the time
LIMIT = 1.02  # of a verdict; also validation loss at the end, relative to the start
FEW_LIMIT = 1.1  # of a verdict by fewer than 8 comparisons, or of a single one: one photo's loss varies
LOWER_RATE = "lower train.lr, or set coat.activation.linear_granularity: per_row and grad_format: e5m2"
NOT_THE_RATE = "nothing was trained yet: check the files and the dtype of the model, and the photos"
BROKEN_LORA, BROKEN_MODEL = 100.0, 1.1  # growth of the weights' norm


class DeadRunError(UserError, RuntimeError):
    """A run that cannot recover; `since`: the first doubtful step, None if going back is no help."""

    def __init__(self, message: str, since: int | None = None):
        super().__init__(message)
        self.since = since


Norms = Callable[..., Tensor]  # `tensor_norms`, or the same over all processes


@torch.no_grad()
def tensor_norms(tensors: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """The norm of each tensor, of order 2 or infinity, computed in fp32: [n], 0 for empty tensors."""
    if not tensors:
        return torch.zeros(0)
    filled = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    return torch.stack(torch._foreach_norm(filled, order, dtype=torch.float32))


class RunGuard:
    """Watches the adapters of one run: `lora`, name → parameter, may be set later."""

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
        self._start_norm: float | None = None  # of all weights before the first step
        self._first_step: int | None = None  # of this process
        self._last_save: int | None = None  # of this process
        self._ratios: list[tuple[int, float]] = []  # (step, ratio), those of a verdict and one more
        self._baseline: float | None = None  # first ratio, at least 1; the unit of all, as a LoRA may have been loaded
        self._mean = 1.0  # ratio of the last verdict
        self._doubt_began: int | None = None  # step of the first bad verdict
        self._doubtful_since = 0  # step after which weights may be bad, while in doubt
        self._living_update = max(options.dead_lora_steps, FIRST_LIVING_UPDATE)

    def compares(self, step: int, until_save: int, until_end: int) -> bool:
        """Whether step `step` (from 1) is compared; `until_…`: steps from it to the next save, to the last step."""
        if not self._options.enabled:
            return False
        has_ups = bool(self._ups())
        if self._first_step is None:
            self._first_step = step
            if not has_ups:
                self._log("guard: no lora_B to switch off: only growth is limited")
        if not has_ups:
            return False
        age = step - self._first_step + 1
        if age in FIRST_COMPARISONS or age % COMPARE_EVERY == 0:
            return True
        if until_save < COMPARED or until_end < COMPARED_AT_END:
            return True
        return step - 1 == self._last_save or self._doubt_began is not None

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
        before clipping, `without` the loss without the LoRA, NaN if the step is not compared.

        Raises:
            DeadRunError: too many nonfinite steps in a row, divergence, no gradient, or a constant loss.
        """
        options = self._options
        if options.enabled and self._start_norm is None:
            self._start_norm = self._norm()
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
        if grad_norm or self._doubt_began is not None:  # a diverged LoRA may have no gradient
            self._zero_gradients = 0
        else:
            self._zero_gradients += 1
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
        ratio = loss / without
        if self._baseline is None:
            self._baseline = max(ratio, 1.0)
        self._ratios = [*self._ratios, (step, ratio / self._baseline)][-COMPARED_AT_END - 1 :]
        self._judge(step, COMPARED)
        if self._doubt_began is not None and step - self._doubt_began >= options.diverging_steps:
            raise DeadRunError(f"step {step}: {self.doubt}: the run diverged; lower train.lr", self._doubtful_since)
        return True

    def _judge(self, step: int, count: int) -> None:
        """Decide by the last `count` comparisons whether the run is in doubt."""
        last = [ratio for _, ratio in self._ratios[-count:]]
        self._mean = sum(last) / len(last)
        if self._mean <= (LIMIT if len(last) >= COMPARED else FEW_LIMIT):
            self._doubt_began = None
        elif self._doubt_began is None:
            self._doubtful_since = self._first_doubt(step, count)
            self._doubt_began = step

    def _first_doubt(self, step: int, count: int = COMPARED) -> int:
        """The last comparison before the first bad one of `count`; `step` if nothing is compared."""
        if self._doubt_began is not None:
            return self._doubtful_since
        if not self._ratios:
            return step
        ratios = self._ratios[-count - 1 :]
        last_good = ratios[0][0]
        for compared, ratio in ratios:
            if ratio > FEW_LIMIT:
                break
            last_good = compared
        return min(step, last_good)

    def apart(self, step: int) -> int | None:
        """Steps from `step` back to weights that were surely good, if anything is compared."""
        if not self._ratios:
            return None
        return step - self._first_doubt(step) + 1

    @property
    def doubt(self) -> str | None:
        """Why nothing may be saved now, or None."""
        if not self._options.enabled:
            return None
        if self.nonfinite >= DOUBTED_STREAK:
            return f"the last {self.nonfinite} steps were not finite"
        if self._doubt_began is None:
            return None
        return f"with the LoRA the loss is {self._mean:.3g} times that without it"

    def after_update(self, step: int) -> None:
        """Count an update and, when due, check the parameters; raises DeadRunError as `check_save`."""
        self.updates += 1
        if self._options.enabled and self._is_checked(self.updates):
            self._check(step, needs_effect=self.updates == self._living_update)

    @property
    def checks_soon(self) -> bool:
        """Whether one of the next two updates checks the parameters; one may be in flight."""
        return self._options.enabled and any(self._is_checked(self.updates + ahead) for ahead in (1, 2))

    def _is_checked(self, update: int) -> bool:
        return update == self._living_update or update % self._options.health_every == 0

    def check_save(self, step: int, *, final: bool = False) -> None:
        """Check every parameter before a save; DeadRunError if one is not finite.

        The `final` save is checked even with `guard.enabled: false`, and refused in doubt or if every lora_B is zero.
        """
        if final or self._options.enabled:
            self._check(step, needs_effect=final)
        self._last_save = step
        if final and self._ratios and self._doubt_began is None:
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
            1 if since == step else since,  # without a doubtful comparison, the whole run
        )

    @torch.no_grad()
    def _check(self, step: int, *, needs_effect: bool) -> None:
        """DeadRunError if the weights are broken, or have no effect yet if they need one."""
        if not self.lora:
            return
        largest = self._norms(list(self.lora.values()), math.inf).tolist()  # absolute value of each tensor
        amax = dict(zip(self.lora, largest, strict=True))
        broken = [name for name, value in amax.items() if not math.isfinite(value)]
        if broken:
            raise DeadRunError(
                f"step {step}: {len(broken)} of {len(amax)} trained tensors are not finite ({broken[0]}): the last "
                f"updates overflowed; lower train.lr, or use lr_scheduler: constant_with_warmup; {KEPT}",
                self._first_doubt(step),
            )
        growth = self._growth() if self._options.enabled else 1.0
        if growth > self._broken_growth:
            raise DeadRunError(
                f"step {step}: the trained weights have grown {growth:.3g}-fold since the start (largest now "
                f"{max(largest):.3g}): the run diverged; lower train.lr",
                self._first_doubt(step),
            )
        ups = [value for name, value in amax.items() if UP_MATRICES.search(name)]
        if needs_effect and ups and not any(ups):
            if self.updates == 0:
                raise DeadRunError(f"step {step}: not finite in each of {self.skipped} steps; {NOT_THE_RATE}")
            raise DeadRunError(
                f"step {step}: every lora_B is still zero after {self.updates} updates, so the LoRA has no effect; "
                f"raise train.lr, shorten its warm-up, and check that network trains layers of the transformer; {KEPT}"
            )

    def _growth(self) -> float:
        """Norm of the weights relative to the start; 1 if that was zero. Reads back one number."""
        return self._norm() / self._start_norm if self._start_norm else 1.0

    def _norm(self) -> float:
        return float(torch.linalg.vector_norm(self._norms(list(self.lora.values()))))

    def state_dict(self) -> dict[str, Any]:
        """The counters; plain JSON."""
        counters = {name.strip("_"): getattr(self, name) for name in COUNTERS}
        growth = self._growth() if self.lora else 1.0
        ratios = [list(pair) for pair in self._ratios]
        return counters | {"growth": growth, "start": self._start_norm, "ratios": ratios, "baseline": self._baseline}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved run's counters; missing ones stay."""
        for name in COUNTERS:
            setattr(self, name, state.get(name.strip("_"), getattr(self, name)))
        self._start_norm = state.get("start", self._start_norm)
        self._ratios = [(step, ratio) for step, ratio in state.get("ratios", [])]
        self._baseline = state.get("baseline")
