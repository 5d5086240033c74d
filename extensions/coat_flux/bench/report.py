"""From the samples of all rounds to one row per measurement, as results.json and results.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ..base.files import write_file
from .configurations import FAILED, OK, OPTIMIZER, TRAINER, BenchOptions, named, rivals
from .limits import Geometry, Limit, step_work

MOMENTS_TRAFFIC = 2  # the state is read and written
OTHER_TRAFFIC_BYTES = 12  # fp32 parameter read and written, gradient read


@dataclass
class Result:
    """One measurement of one configuration, over all rounds."""

    level: str
    configuration: str
    what: str = ""
    resolution: int = 0
    batch: int = 0
    rounds_ms: list[float] = field(default_factory=list)  # the median of each round
    median_ms: float = 0.0  # of the rounds' medians
    peak_bytes: int = 0  # the most of any round
    percent_of_limit: float | None = None  # None if the device's rates are unknown
    speedup: dict[str, float] = field(default_factory=dict)  # title → times faster than that rival
    figures: dict[str, Any] = field(default_factory=dict)  # others, of the last round
    status: str = OK
    reason: str = ""  # why there are no figures

    @property
    def size(self) -> str:
        """Resolution and batch in words; empty for rows without."""
        return f"{self.resolution} px x {self.batch}" if self.resolution else ""


def summarize(runs: Sequence[Mapping[str, Any]], geometry: Geometry, limit: Limit | None) -> list[Result]:
    """One row per measurement and one per case without figures, in the order of first appearance."""
    rows: dict[tuple[Any, ...], Result] = {}
    for run in runs:
        level, name = run["level"], run["configuration"]
        if run["status"] != OK:
            resolution, batch = run["sizes"][0] if len(run["sizes"]) == 1 else (0, 0)
            key = (level, name, "", resolution, batch)
            rows[key] = Result(*key, status=run["status"], reason=f"{run['reason']} (round {run['round']})")
            continue
        for measured in run["measurements"]:
            key = (level, name, measured["what"], measured["resolution"], measured["batch"])
            row = rows.setdefault(key, Result(*key))
            row.rounds_ms.append(median(measured["samples_ms"]))
            row.median_ms = median(row.rounds_ms)
            row.peak_bytes = max(row.peak_bytes, measured["peak_bytes"])
            row.figures = measured["figures"]
            if limit is not None:
                row.percent_of_limit = 100 * limit_ms(row, geometry, limit) / row.median_ms
    for row in rows.values():
        for title, name in rivals(row.level, row.configuration).items() if row.status == OK else ():
            rival = rows.get((row.level, name, row.what, row.resolution, row.batch))
            if rival is not None:
                row.speedup[title] = rival.median_ms / row.median_ms
    return list(rows.values())


def incomplete(rows: Sequence[Result]) -> list[Result]:
    """Results without figures that should have had some."""
    return [row for row in rows if row.status == FAILED]


def limit_ms(row: Result, geometry: Geometry, limit: Limit) -> float:
    """The device's lower bound on the row's time."""
    if row.level == OPTIMIZER:
        traffic = row.figures["parameters"] * OTHER_TRAFFIC_BYTES + MOMENTS_TRAFFIC * row.figures["state_bytes"]
        return float(traffic / limit.gb_per_second / 1e6)
    configuration = named(row.level)[row.configuration]
    treatment = {"recomputed": configuration.recomputes, "full": configuration.full}
    work = step_work(geometry, row.resolution, row.batch, **treatment)
    return limit.milliseconds(work, fp8_linears=configuration.fp8_linears)


def write(
    folder: Path,
    options: BenchOptions,
    head: Mapping[str, Any],
    runs: Sequence[Mapping[str, Any]],
    rows: Sequence[Result],
) -> None:
    """Write results.json, with every raw sample, and results.md; `head` has "date", "command", "tests", "machine"."""
    plain = asdict(options) | {"geometry": options.geometry._asdict()}
    tree = {**head, "options": plain, "rows": [asdict(row) for row in rows], "runs": list(runs)}
    write_file(folder / "results.json", json.dumps(tree, indent=1) + "\n")
    write_file(folder / "results.md", markdown(options, head, runs, rows))


def markdown(
    options: BenchOptions, head: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], rows: Sequence[Result]
) -> str:
    """The machine, one table per level, and what the libraries logged."""
    machine, size = head["machine"], options.geometry
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    limit = "not known"
    if machine["limit"] is not None:
        limit = "{:.4g} TFLOPS bf16, {:.4g} FP8, {:.4g} GB/s (published)".format(*machine["limit"])
    parts = [
        f"# Benchmark\n\n* {head['date']}: `{head['command']}`\n"
        f"* {machine['device']}, {machine['system']}, Python {machine['python']}, {versions}\n"
        f"* {size.double} double and {size.single} single blocks, {size.heads} heads of 128, rank {size.rank}, "
        f"random weights; {options.rounds} rounds, processes: one for each case\n"
        f"* limit: {limit}; peak memory: {machine['memory']}\n* tests: {head['tests']}"
    ]
    for level in options.levels:
        measured = [row for row in rows if row.level == level]
        if measured:
            parts.append(_table(level, measured))
    lines: dict[str, dict[str, None]] = {}  # by configuration, each line once
    for run in runs:
        lines.setdefault(run["configuration"], {}).update(dict.fromkeys(run.get("logged", ())))
    logged = [f"* {name}: {line}" for name, own in lines.items() for line in own]
    if logged:
        parts.append("## Logged while running\n\n" + "\n".join(logged))
    return "\n\n".join(parts) + "\n"


def _table(level: str, rows: Sequence[Result]) -> str:
    titles = list(dict.fromkeys(title for row in rows for title in row.speedup))
    header = ["configuration", "measured", "ms", "min .. max", "of limit", "peak GB", *(f"x {t}" for t in titles)]
    if level == TRAINER:
        header += ["planned GB", "steps a second"]
    lines = [header, ["---"] * len(header)]
    for row in sorted(rows, key=lambda row: (row.batch, row.resolution, row.what)):
        cells = [row.configuration, f"{row.what} {row.size}".strip()]
        if row.status != OK:
            cells += [f"{row.status}: {row.reason.replace('|', '/')}", *[""] * (len(header) - 3)]
            lines.append(cells)
            continue
        share = "–" if row.percent_of_limit is None else f"{row.percent_of_limit:.3g} %"
        spread = f"{min(row.rounds_ms):.4g} .. {max(row.rounds_ms):.4g}"
        cells += [f"{row.median_ms:.4g}", spread, share, f"{row.peak_bytes / 1e9:.2f}"]
        cells += [f"{row.speedup[title]:.2f}" if title in row.speedup else "–" for title in titles]
        if level == TRAINER:
            planned, rate = row.figures["predicted_peak_bytes"], row.figures["steps_per_second"]
            cells += [f"{planned / 1e9:.2f}", f"{rate:.3f}"]
        lines.append(cells)
    measured = {row.configuration for row in rows}
    about = [f"* {name}: {row.about}" for name, row in named(level).items() if name in measured]
    return "\n".join([f"## {level}", "", *(f"| {' | '.join(line)} |" for line in lines), "", *about])
