"""What the casts to FP8 of one step lost, by kind of tensor, and what to change where it is too much."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..config.coat import GuardOptions

__all__ = ["EXP_AVG", "EXP_AVG_SQ", "GRADIENTS", "INPUTS", "SAVED", "CastHealth", "KindHealth", "Loss"]

INPUTS, GRADIENTS, SAVED = "linear inputs", "gradients", "saved activations"
EXP_AVG, EXP_AVG_SQ = "exp_avg", "exp_avg_sq"
SMALLEST_SHOWN = 1e-4
KINDS = (INPUTS, GRADIENTS, SAVED, EXP_AVG, EXP_AVG_SQ)

_EXPANSION = "set coat.optimizer.use_dynamic_range_expansion: true, or {key}: e5m2"
REMEDIES = {
    INPUTS: "set coat.activation.linear_granularity: per_row, or where it is so already coat.activation.format: e5m2",
    GRADIENTS: "set coat.activation.grad_format: e5m2 or bf16, or coat.activation.linear_granularity: per_row",
    SAVED: "set coat.activation.format: e5m2, or nonlinear_granularity: per_group with a smaller group_size",
    EXP_AVG: _EXPANSION.format(key="coat.optimizer.m1_format"),
    EXP_AVG_SQ: _EXPANSION.format(key="coat.optimizer.m2_format"),
}


class Loss(NamedTuple):
    """What one cast lost.

    Attributes:
        kind: of the tensor, one of `KINDS`.
        where: the layer or parameter, or "" where it is not known.
        saturation: share of elements beyond the largest code, 0 to 1.
        underflow: share of nonzero elements cast to zero, 0 to 1.
    """

    kind: str
    where: str
    saturation: float
    underflow: float


@dataclass(frozen=True)
class KindHealth:
    """All casts of one kind in one step.

    Attributes:
        casts: how many.
        mean_saturation: over the casts; each counts the same.
        mean_underflow: likewise.
        most_saturated: the worst cast.
        most_underflown: the worst cast.
    """

    casts: int
    mean_saturation: float
    mean_underflow: float
    most_saturated: Loss
    most_underflown: Loss


class CastHealth:
    """The casts of one step.

    Args:
        losses: one for each cast.

    Attributes:
        kinds: kind → its summary, of the kinds that were cast, in the order of `KINDS`.
    """

    def __init__(self, losses: Iterable[Loss]) -> None:
        found = list(losses)
        self.kinds: dict[str, KindHealth] = {}
        for kind in KINDS:
            casts = [loss for loss in found if loss.kind == kind]
            if casts:
                self.kinds[kind] = KindHealth(
                    casts=len(casts),
                    mean_saturation=sum(loss.saturation for loss in casts) / len(casts),
                    mean_underflow=sum(loss.underflow for loss in casts) / len(casts),
                    most_saturated=max(casts, key=lambda loss: loss.saturation),
                    most_underflown=max(casts, key=lambda loss: loss.underflow),
                )

    def line(self) -> str:
        """One line: per kind the share cast to zero, on average and in the worst cast, and what saturated, if any."""
        found = []
        for kind, health in self.kinds.items():
            lost, beyond = health.most_underflown, health.most_saturated
            text = f"{kind} {_percent(health.mean_underflow)}"
            if lost.underflow:
                text += f" ({_percent(lost.underflow)}{_in(lost)})"
            if beyond.saturation:
                text += f", {_percent(health.mean_saturation)} saturated ({_percent(beyond.saturation)}{_in(beyond)})"
            found.append(text)
        return "FP8 casts, mean share cast to zero (worst): " + ", ".join(found)

    def verdict(self, options: GuardOptions) -> str | None:
        """What is worst and what to change where a share is above its threshold, else None."""
        saturated = max((kind.most_saturated for kind in self.kinds.values()), key=lambda loss: loss.saturation)
        if saturated.saturation > options.max_saturation:
            return (
                f"{saturated.saturation:.1%} of {_name(saturated)} lie beyond the largest FP8 code "
                f"(coat.guard.max_saturation={options.max_saturation}): they overflowed before the cast; "
                f"lower train.lr and check that train.dtype is bf16{_leave_out(saturated)}"
            )
        lost = max((kind.most_underflown for kind in self.kinds.values()), key=lambda loss: loss.underflow)
        if lost.underflow > options.max_underflow:
            return (
                f"{lost.underflow:.1%} of {_name(lost)} that are not zero became zero in FP8 "
                f"(coat.guard.max_underflow={options.max_underflow}): a few large values set the scale of all; "
                f"{REMEDIES[lost.kind]}{_leave_out(lost)}"
            )
        return None


def _percent(share: float) -> str:
    return "<0.01%" if 0 < share < SMALLEST_SHOWN else f"{share:.2%}" if share else "0%"


def _in(loss: Loss) -> str:
    return f" in {loss.where}" if loss.where else ""


def _name(loss: Loss) -> str:
    return f"the {loss.kind} of {loss.where}" if loss.where else f"the {loss.kind}"


def _leave_out(loss: Loss) -> str:
    layer = loss.where and loss.kind in (INPUTS, GRADIENTS)
    return f", or take the layer out of FP8 with coat.activation.exclude: [{loss.where}]" if layer else ""
