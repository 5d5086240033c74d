"""Which settings of a sweep are best, and by how much more than luck; pure.

A run's loss is its last on the photos held out of training, with the noise that is the same for all runs. The loss of
settings is the mean over their seeds. How far luck moves a run, s, is

- with several seeds, the pooled standard deviation of runs that differ in the seed alone:
  s² = sum over settings of sum_i (loss_i - mean)² / sum of (n - 1);
- with one seed, how much a run's loss jumps from one measurement to the next: of a curve y with equal steps,
  E (y_{i-1} - 2 y_i + y_{i+1})² = 6 s² where noise lies on a straight line, over the last half of all runs. That is a
  lower bound, and often a small part of it: another seed ends elsewhere.

Settings are as good as the best where their gap to it is at most 2 s · sqrt(1 / n + 1 / n_best); that others are worse
by more than luck only several seeds can say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

from .grid import Trial

__all__ = ["FAILED", "FINISHED", "OPEN", "Noise", "Place", "Result", "rank", "spread_of"]

FINISHED, FAILED, OPEN = "finished", "failed", "not finished"
SIGMAS = 2.0
Curve: TypeAlias = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Result:
    """What one trial came to.

    Attributes:
        trial: the run.
        state: finished, failed or not finished.
        curve: (step, held-out loss).
        seconds: per step, the median; None before the first.
        message: why it failed.
    """

    trial: Trial
    state: str
    curve: Curve = ()
    seconds: float | None = None
    message: str = ""

    @property
    def loss(self) -> float:
        """The last one; NaN before the end."""
        return self.curve[-1][1] if self.state == FINISHED and self.curve else math.nan


@dataclass(frozen=True)
class Noise:
    """How far luck moves the loss of one run: `spread`, None where that is not known, and whether seeds show it."""

    spread: float | None
    by_seeds: bool


@dataclass(frozen=True)
class Place:
    """One combination of settings.

    Attributes:
        settings: key → value.
        results: of its seeds.
        loss: mean over finished seeds; NaN without one.
        gap: to the best; NaN without a loss.
        tied: luck alone could make the gap.
    """

    settings: Mapping[str, Any]
    results: tuple[Result, ...]
    loss: float
    gap: float = math.nan
    tied: bool = False

    @property
    def finished(self) -> list[Result]:
        """Seeds with a loss."""
        return [result for result in self.results if math.isfinite(result.loss)]

    @property
    def lowest(self) -> tuple[float, float] | None:
        """(step, loss) where the mean curve of finished seeds is lowest."""
        curves = [result.curve for result in self.finished]
        mean = [(points[0][0], fmean(loss for _, loss in points)) for points in zip(*curves, strict=False)]
        return min(mean, key=lambda point: point[1], default=None)


def spread_of(results: Sequence[Result]) -> Noise:
    """How far luck moves a run, from all finished ones."""
    finished = [result for result in results if math.isfinite(result.loss)]
    by_settings: dict[str, list[float]] = {}
    for result in finished:
        by_settings.setdefault(repr(dict(result.trial.settings)), []).append(result.loss)
    freedom = sum(len(losses) - 1 for losses in by_settings.values())
    if freedom:
        squares = sum((loss - fmean(losses)) ** 2 for losses in by_settings.values() for loss in losses)
        return Noise(math.sqrt(squares / freedom), by_seeds=True)
    jumps = []
    for result in finished:
        losses = [loss for _, loss in result.curve[len(result.curve) // 2 :]]
        jumps += [
            (before - 2 * here + after) ** 2
            for before, here, after in zip(losses, losses[1:], losses[2:], strict=False)
        ]
    return Noise(math.sqrt(fmean(jumps) / 6) if jumps else None, by_seeds=False)


def rank(results: Sequence[Result]) -> tuple[list[Place], Noise]:
    """All settings, the best first, those without a loss at the end in their order; and the noise."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(repr(dict(result.trial.settings)), []).append(result)
    places = []
    for found in groups.values():
        losses = [result.loss for result in found if math.isfinite(result.loss)]
        places.append(Place(found[0].trial.settings, tuple(found), fmean(losses) if losses else math.nan))
    places.sort(key=lambda place: place.loss if math.isfinite(place.loss) else math.inf)
    noise, best = spread_of(results), places[0]
    ranked = []
    for place in places:
        gap = place.loss - best.loss
        tied = noise.spread is not None and math.isfinite(gap)
        if tied:
            room = SIGMAS * noise.spread * math.sqrt(1 / len(place.finished) + 1 / len(best.finished))
            tied = gap <= room
        ranked.append(Place(place.settings, place.results, place.loss, gap, tied))
    return ranked, noise
