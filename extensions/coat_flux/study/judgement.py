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
from statistics import NormalDist, fmean, stdev

__all__ = ["LOSSLESS", "NOT_LOSSLESS", "UNDECIDED", "Judgement", "broken", "judge", "student_quantile"]

LOSSLESS, NOT_LOSSLESS, UNDECIDED = "lossless", "not lossless", "undecided"
PLACES = {LOSSLESS: "within", NOT_LOSSLESS: "outside", UNDECIDED: "partly outside"}
PROBABILITY = 0.975  # below the upper end of the two-sided 95% interval
QUANTILES = (  # of Student's distribution, from one degree of freedom on
    12.7062047, 4.30265273, 3.18244631, 2.77644511, 2.57058184, 2.44691185, 2.36462425,
    2.30600414, 2.26215716, 2.22813885, 2.20098516, 2.17881283, 2.16036866, 2.14478669,
)  # fmt: skip
MAX_SEEDS = 50  # beyond this, more seeds are no advice


@dataclass(frozen=True)
class Judgement:
    """The verdict on the losses, which are mean squared errors.

    `gap` is the mean of COAT's loss less bf16's; `low` to `high` its 95% confidence interval; `spread` is s;
    `more_seeds` would decide at the same gaps (None if decided, or too many).
    """

    outcome: str
    reason: str
    seeds: int
    gap: float
    low: float
    high: float
    spread: float
    more_seeds: int | None = None

    @property
    def sentence(self) -> str:
        """The verdict in a sentence."""
        return f"{self.outcome}{'' if self.outcome == UNDECIDED else ' here'}: {self.reason}"


def judge(bf16: Sequence[float], coat: Sequence[float], base: float | None = None, *, where: str = "") -> Judgement:
    """Compare paired final losses; `base` is the loss before training.

    - *lossless*: the confidence interval of the mean gap is inside [-s, s];
    - *not lossless*: it is wholly outside. On the lower side too: a run that learns less overfits less, so a held-out
      loss below bf16's is a difference, not a merit;
    - *undecided*: it crosses an end of the band; or bf16 gives no measure: its seeds end equal (s = 0), or one of
      its runs did not improve on `base`.

    Raises:
        ValueError: fewer than two pairs, unequal numbers, or a bf16 loss that is not finite.
    """
    if len(bf16) != len(coat) or len(bf16) < 2:
        raise ValueError(f"bf16, coat: {len(bf16)} and {len(coat)} losses, must be as many, at least 2; run more seeds")
    if not all(map(math.isfinite, bf16)):
        raise ValueError(f"bf16={list(bf16)}: must be finite; without that there is nothing to compare with")
    count = len(bf16)
    if not all(map(math.isfinite, coat)):
        return broken(f"COAT's held-out loss{where} is not finite", count)
    gaps = [ours - theirs for ours, theirs in zip(coat, bf16, strict=True)]
    gap, scatter, spread = fmean(gaps), stdev(gaps), stdev(bf16)
    half = _half_width(scatter, count)
    low, high = gap - half, gap + half
    idle = [number for number, loss in enumerate(bf16, 1) if base is not None and loss >= base]
    outcome, more = UNDECIDED, None
    if idle:
        reason = (
            f"{len(idle)} of {count} bf16 runs (first: number {idle[0]}, loss {bf16[idle[0] - 1]:.6f}) did not bring "
            f"the held-out loss below that of the model before training, {base:.6f}, so there is nothing that could be "
            "lost; train longer or with a higher lr, or where the training loss falls all the same (overfitting), "
            "take fewer steps or more photos"
        )
    elif spread == 0:
        reason = "the bf16 runs of all seeds end at exactly the same loss, so there is no spread to compare with"
    else:
        outcome = _outcome(gap, half, spread)
        reason = (
            f"over {count} seeds, COAT's held-out loss{where} is on average {abs(gap):.2g} "
            f"{'above' if gap >= 0 else 'below'} bf16's (95% confidence interval {low:+.2g} to {high:+.2g}), "
            f"{PLACES[outcome]} the spread of bf16 runs that differ only in the seed (±{spread:.2g})"
        )
        if outcome == UNDECIDED:
            widths = ((n, _half_width(scatter, n)) for n in range(count + 1, MAX_SEEDS + 1))
            more = next((n for n, half in widths if _outcome(gap, half, spread) != UNDECIDED), None)
            too_many = f"it would take more than {MAX_SEEDS} seeds to decide"
            reason = f"{reason}; {too_many if more is None else f'run with --seeds {more}'}"
    return Judgement(outcome, reason, count, gap, low, high, spread, more)


def broken(reason: str, seeds: int) -> Judgement:
    """COAT reached no end that could be compared."""
    return Judgement(NOT_LOSSLESS, reason, seeds, math.nan, math.nan, math.nan, math.nan)


def _outcome(gap: float, half: float, spread: float) -> str:
    if abs(gap) + half <= spread:
        return LOSSLESS
    return NOT_LOSSLESS if abs(gap) - half > spread else UNDECIDED


def _half_width(scatter: float, count: int) -> float:
    return student_quantile(count - 1) * scatter / math.sqrt(count)


def student_quantile(freedom: int) -> float:
    """Return t of Student's distribution: P(T <= t) = 0.975.

    From a table up to 14 degrees of freedom, then by its expansion around the normal quantile; relative error below
    1e-6. Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    if freedom <= len(QUANTILES):
        return QUANTILES[freedom - 1]
    x = NormalDist().inv_cdf(PROBABILITY)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return x + sum(term / freedom**power for power, term in enumerate(terms, 1))
