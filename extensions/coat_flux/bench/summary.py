"""From the samples of all rounds to one row per thing measured: median, spread, share of the limit, speed-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from .configurations import OK, Configuration, named, rivals
from .flops import Geometry, Work, forward_work, product_work, step_work
from .limits import Limit

MOMENTS_TRAFFIC = 2  # the state is read and written
OTHER_TRAFFIC_BYTES = 12  # fp32 parameter read and written, gradient read


@dataclass
class Row:
    """One thing measured in one configuration, over all rounds.

    Attributes:
        level, configuration: as in `Case`.
        what, resolution, batch: as in `levels.Measurement`.
        rounds_ms: the median of each round.
        peak_bytes: the most of any round.
        limit_ms: the least time that the device's limit allows.
        speedup: title to how many times faster than that rival, where it has figures.
        figures: others, of the last round.
        status: "ok", or why there are no figures (then `reason` says more).
    """

    level: str
    configuration: str
    what: str = ""
    resolution: int = 0
    batch: int = 0
    rounds_ms: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    limit_ms: float | None = None
    speedup: dict[str, float] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    status: str = OK
    reason: str = ""

    @property
    def median_ms(self) -> float:
        """Median over the rounds' medians."""
        return median(self.rounds_ms)

    @property
    def percent_of_limit(self) -> float | None:
        """How much of the device's limit is reached."""
        return None if self.limit_ms is None else 100 * self.limit_ms / self.median_ms

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with what is derived."""
        plain = dict(vars(self))
        if self.rounds_ms:
            plain |= {"median_ms": self.median_ms, "min_ms": min(self.rounds_ms), "max_ms": max(self.rounds_ms)}
            plain["percent_of_limit"] = self.percent_of_limit
        return plain


def summarize(runs: Sequence[Mapping[str, Any]], geometry: Geometry, limit: Limit) -> list[Row]:
    """One row per thing measured and one per case without figures, in the order of first appearance."""
    rows: dict[tuple[Any, ...], Row] = {}
    for run in runs:
        level, name = run["level"], run["configuration"]
        if run["status"] != OK:
            resolution, batch = run["sizes"][0] if len(run["sizes"]) == 1 else (0, 0)
            key = (level, name, "", resolution, batch)
            rows[key] = Row(*key, status=run["status"], reason=f"{run['reason']} (round {run['round']})")
            continue
        for found in run["measurements"]:
            key = (level, name, found["what"], found["resolution"], found["batch"])
            row = rows.setdefault(key, Row(*key))
            row.rounds_ms.append(median(found["samples_ms"]))
            row.peak_bytes = max(row.peak_bytes, found["peak_bytes"])
            row.figures = found["figures"]
            row.limit_ms = limit_ms(row, geometry, limit)
    for row in rows.values():
        _compare(row, rows)
    return list(rows.values())


def incomplete(rows: Sequence[Row]) -> list[Row]:
    """Rows of what could have run and did not give figures."""
    return [row for row in rows if row.status == "failed"]


def limit_ms(row: Row, geometry: Geometry, limit: Limit) -> float:
    """The least time the device's limit allows for what the row measured."""
    if row.level == "optimizer":
        traffic = row.figures["parameters"] * OTHER_TRAFFIC_BYTES + MOMENTS_TRAFFIC * row.figures["state_bytes"]
        return float(traffic / limit.gb_per_second / 1e6)
    choice = named(row.level)[row.configuration]
    assert isinstance(choice, Configuration)
    work = _work(row, geometry, recomputed=choice.recomputes)
    return limit.milliseconds(work, fp8_linears=choice.fp8_linears)


def _work(row: Row, geometry: Geometry, *, recomputed: bool) -> Work:
    if row.level == "op":
        return product_work(row.figures["m"], row.figures["k"], row.figures["n"])
    if row.level == "block":
        geometry = geometry.one_double if row.what.startswith("double") else geometry.one_single
    if row.what.endswith("forward"):
        return forward_work(geometry, row.resolution, row.batch)
    return step_work(geometry, row.resolution, row.batch, recomputed=recomputed)


def _compare(row: Row, rows: Mapping[tuple[Any, ...], Row]) -> None:
    if row.status != OK:
        return
    for title, name in rivals(row.level, row.configuration).items():
        rival = rows.get((row.level, name, row.what, row.resolution, row.batch))
        if rival is not None:
            row.speedup[title] = rival.median_ms / row.median_ms


def log_lines(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """What the libraries said while a configuration ran: name to its lines, each once."""
    said: dict[str, dict[str, None]] = {}
    for run in runs:
        for line in run.get("said", ()):
            said.setdefault(run["configuration"], {})[line] = None
    return {name: list(lines) for name, lines in said.items()}
