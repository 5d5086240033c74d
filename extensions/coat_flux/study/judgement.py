"""Is a difference larger than luck? Paired runs, judged against the effect of the seed alone on bf16.

Run i of both arms has the same seed, so gap_i = loss_COAT,i - loss_bf16,i is free of most of the seed's effect. The
mean gap has the confidence interval mean ± t · sd(gap) / sqrt(n), t the two-sided 95% quantile of Student's
distribution with n - 1 degrees of freedom. It is compared with s, the standard deviation (n - 1) of bf16's losses over
its seeds: nobody could notice a change that is certainly smaller than that of another seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

LOSSLESS, NOT_LOSSLESS, UNDECIDED = "lossless", "not lossless", "undecided"
PLACES = {LOSSLESS: "within", NOT_LOSSLESS: "outside", UNDECIDED: "partly outside"}
QUANTILES = (  # of Student's distribution, from one degree of freedom on; more than 30 are judged as 30
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip
MAX_SEEDS = len(QUANTILES) + 1  # beyond this, more seeds are no advice


@dataclass(frozen=True)
class Judgement:
    """The mean `gap`, its interval from `low` to `high`, and s (`spread`); NaN if there is nothing to compare.

    `more_seeds` would decide at the same gaps (None if decided, or too many).
    """

    outcome: str
    reason: str
    seeds: int
    gap: float = math.nan
    low: float = math.nan
    high: float = math.nan
    spread: float = math.nan
    more_seeds: int | None = None

    @property
    def sentence(self) -> str:
        """The verdict in a sentence."""
        return f"{self.outcome}{'' if self.outcome == UNDECIDED else ' here'}: {self.reason}"


def judge(bf16: Sequence[float], coat: Sequence[float], base: float | None = None, *, where: str = "") -> Judgement:
    """Compare paired final losses; `base` is the loss before training.

    - *lossless*: the interval of the mean gap is inside [-s, s];
    - *not lossless*: it is wholly outside. On the lower side too: a run that learns less overfits less, so a lower
      held-out loss is a difference, not a merit;
    - *undecided*: it crosses an end of the band; or bf16's seeds end equal (s = 0), or one of its runs did not improve
      on `base`.
    """
    if not all(map(math.isfinite, bf16)) or len(bf16) < 2:
        raise ValueError(f"bf16={list(bf16)}: must be at least 2 finite losses; run more seeds")
    count = len(bf16)
    if not all(map(math.isfinite, coat)):
        return Judgement(NOT_LOSSLESS, f"COAT's held-out loss{where} is not finite", count)
    gaps = [ours - theirs for ours, theirs in zip(coat, bf16, strict=True)]
    gap, spread, scatter = fmean(gaps), stdev(bf16), stdev(gaps)
    outcome, half = _outcome(gap, scatter, count, spread)
    idle = [number for number, loss in enumerate(bf16, 1) if base is not None and loss >= base]
    more = None
    if idle:
        outcome = UNDECIDED
        reason = (
            f"{len(idle)} of {count} bf16 runs (first: number {idle[0]}, loss {bf16[idle[0] - 1]:.6f}) did not bring "
            f"the held-out loss below that before training, {base:.6f}; train longer or with a higher lr, or, if the "
            "training loss fell (overfitting), shorter or on more photos"
        )
    elif spread == 0:
        outcome = UNDECIDED
        reason = "the bf16 runs of all seeds end at exactly the same loss, so the spread over seeds is zero"
    else:
        reason = (
            f"over {count} seeds, COAT's held-out loss{where} is on average {abs(gap):.2g} "
            f"{'above' if gap >= 0 else 'below'} bf16's (95% confidence interval {gap - half:+.2g} to "
            f"{gap + half:+.2g}), {PLACES[outcome]} the spread of bf16 runs that differ only in the seed "
            f"(±{spread:.2g})"
        )
        if outcome == UNDECIDED:
            counts = range(count + 1, MAX_SEEDS + 1)
            more = next((n for n in counts if _outcome(gap, scatter, n, spread)[0] != UNDECIDED), None)
            too_many = f"it would take more than {MAX_SEEDS} seeds to decide"
            reason += f"; {too_many if more is None else f'run with --seeds {more}'}"
    return Judgement(outcome, reason, count, gap, gap - half, gap + half, spread, more)


def _outcome(gap: float, scatter: float, count: int, spread: float) -> tuple[str, float]:
    """The outcome of so many pairs, and half the width of the interval."""
    half = QUANTILES[min(count, MAX_SEEDS) - 2] * scatter / math.sqrt(count)
    if abs(gap) + half <= spread:
        return LOSSLESS, half
    return (NOT_LOSSLESS if abs(gap) - half > spread else UNDECIDED), half
