"""Whether a run is diverging, by two signs that no healthy run shows together: its loss and the size of its weights.

    loss      12 of the last 16 above 2.5 times the usual one (a mean over the run, of the last 200 steps at most)
    weights   L2 norm of all trained parameters above 3 times that before the first step

A FLUX whose adapters explode cannot show it by the loss alone: its last layer reads a normalized input, so the loss
stops at a few times the usual one (0.35 -> 2.0 on the mini-FLUX, where the loss of healthy steps varies from 0.15 to
1.1 with the noise level; that of other models varies more, which is why steps are counted and not averaged). And a
healthy LoRA grows too, B from zero. Weights of 100 times their norm are broken whatever the loss says: at A's usual
start that is a change larger than the frozen weights themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["BROKEN_GROWTH", "WINDOW", "Divergence"]

WINDOW, HIGH = 16, 12  # steps, and how many of them
MEMORY = 200  # steps of the usual loss
LOSS_FACTOR = 2.5
GROWTH = 3.0
BROKEN_GROWTH = 100.0


class Divergence:
    """Follows loss and norm of a run.

    Attributes:
        since: the step from which on the run is diverging; None where it is not.
    """

    def __init__(self) -> None:
        self.since: int | None = None
        self._recent: list[float] = []
        self._usual: float | None = None
        self._steps = 0
        self._start: float | None = None

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Take the norm before the first step, unless a resumed state has brought it."""
        if self._start is None:
            self._start = _norm(parameters)

    def growth(self, parameters: Iterable[Tensor]) -> float:
        """Norm now by the norm at the start; 1 where that was zero. Reads back one number."""
        return _norm(parameters) / self._start if self._start else 1.0

    def see(self, step: int, loss: float, parameters: Iterable[Tensor]) -> None:
        """Take in the loss of a finite step; the norm is read only where the loss is far beyond the usual one."""
        self._recent = [*self._recent, loss][-WINDOW:]
        usual = self._usual
        high = usual is not None and usual > 0 and sum(one > LOSS_FACTOR * usual for one in self._recent) >= HIGH
        if high and (self.since is not None or self.growth(parameters) > GROWTH):
            self.since = self.since or step - WINDOW + 1
            return  # what is seen now is not usual
        self.since = None
        self._steps += 1
        share = 1 / min(self._steps, MEMORY)
        self._usual = loss if usual is None else usual + share * (loss - usual)

    def describe(self) -> str:
        """Say what is seen, with both losses."""
        mean = sum(self._recent) / max(len(self._recent), 1)
        return f"the loss of the last {WINDOW} steps is {mean:.3g} on average, the usual one {self._usual:.3g}"

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"recent": self._recent, "usual": self._usual, "steps": self._steps, "start": self._start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, which was not in doubt."""
        self._recent = [float(loss) for loss in state.get("recent", [])]
        self._usual, self._start = state.get("usual"), state.get("start", self._start)
        self._steps = int(state.get("steps", 0))


@torch.no_grad()
def _norm(parameters: Iterable[Tensor]) -> float:
    found = list(parameters)
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(found)).float())) if found else 0.0
