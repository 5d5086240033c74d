"""What follows from the rows of a run: the worst layers, and what to write into `activation.exclude`.

A layer stands out when its SQNR is well below the median of its kind: gradients in e5m2 have 6 dB less than inputs in
e4m3 by their format, which is not a defect. Where a whole kind is bad, no layer stands out and the kind is named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from statistics import median
from typing import NamedTuple

import yaml

from .precision import GRADIENT, INPUT, KINDS, CastPrecision

__all__ = ["LOW_DB", "OUTLIER_DB", "Summary", "exclude_yaml", "kind_medians", "standing_out", "summaries", "worst"]

OUTLIER_DB = 6.0  # below the median of its kind: a bit of the mantissa
LOW_DB = 20.0  # a tenth of the size of the values is noise
GEMM_KINDS = (INPUT, GRADIENT)  # what `activation.exclude` takes out of FP8


class Summary(NamedTuple):
    """A kind of tensor in a layer over the run.

    Attributes:
        layer: as in `CastPrecision`.
        kind: likewise.
        sqnr_db: median over the steps that were measured.
        lowest_db: of these steps.
        underflow: the highest share.
        saturation: the highest share.
        range_used: the median.
        below_median_db: how far `sqnr_db` is below the median of all layers of its kind.
    """

    layer: str
    kind: str
    sqnr_db: float
    lowest_db: float
    underflow: float
    saturation: float
    range_used: float
    below_median_db: float


def summaries(rows: Iterable[CastPrecision]) -> list[Summary]:
    """Put the steps of each (layer, kind) together, in order of appearance; what was all zeros is left out."""
    groups: dict[tuple[str, str], list[CastPrecision]] = {}
    for row in rows:
        if not math.isnan(row.sqnr_db):
            groups.setdefault((row.layer, row.kind), []).append(row)
    typical = {key: median(row.sqnr_db for row in found) for key, found in groups.items()}
    medians = {kind: _median(value for (_, other), value in typical.items() if other == kind) for kind in KINDS}
    return [
        Summary(
            layer,
            kind,
            typical[layer, kind],
            min(row.sqnr_db for row in found),
            max(row.underflow for row in found),
            max(row.saturation for row in found),
            _median(row.range_used for row in found),
            _less(medians[kind], typical[layer, kind]),
        )
        for (layer, kind), found in groups.items()
    ]


def _median(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return median(known) if known else math.nan


def _less(high: float, low: float) -> float:
    return 0.0 if high == low else high - low  # both may be inf


def kind_medians(found: Sequence[Summary]) -> dict[str, float]:
    """Kind → median SQNR over its layers, of the kinds that were measured."""
    return {
        kind: median(s.sqnr_db for s in found if s.kind == kind) for kind in KINDS if any(s.kind == kind for s in found)
    }


def worst(found: Sequence[Summary], count: int = 10) -> list[Summary]:
    """The layers that lie furthest below the median of a kind, each with its worst kind."""
    ranked = sorted((s for s in found if s.layer), key=lambda s: -s.below_median_db)
    first: dict[str, Summary] = {}
    for summary in ranked:
        first.setdefault(summary.layer, summary)
    return list(first.values())[:count]


def standing_out(found: Sequence[Summary]) -> list[str]:
    """Layers `activation.exclude` would help: an input or a gradient far below its kind, or an input below 20 dB."""
    layers = [
        s.layer
        for s in found
        if s.layer
        and s.kind in GEMM_KINDS
        and (s.below_median_db > OUTLIER_DB or (s.kind == INPUT and s.sqnr_db < LOW_DB))
    ]
    return list(dict.fromkeys(layers))


def exclude_yaml(layers: Sequence[str], known: Iterable[str], already: Sequence[str] = ()) -> str:
    """Lines to paste into a config.

    Args:
        layers: to be left out of FP8.
        known: all layers that were measured: one pattern stands for several layers where it matches these and no other.
        already: patterns that the config has; they stay.
    """
    patterns = [*already, *(p for p in _patterns(layers, list(known)) if p not in already)]
    return yaml.safe_dump({"coat": {"activation": {"exclude": patterns}}}, sort_keys=False, allow_unicode=True)


def _patterns(layers: Sequence[str], known: Sequence[str]) -> list[str]:
    wanted, found = set(layers), {}
    for layer in layers:
        family = re.sub(r"\.\d+\.", ".*.", layer, count=1)
        matched = {name for name in known if fnmatchcase(name, family)}
        found[family if len(matched) > 1 and matched <= wanted else layer] = None
    return list(found)
