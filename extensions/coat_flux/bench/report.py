"""From the samples of all rounds to one row per thing measured, and these as results.json, results.md and results.png.

The files are rewritten after every process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from ..base.files import write_file
from .configurations import ENGINE, FAILED, OK, RATES, BenchOptions, named, rivals
from .limits import Geometry, Limit, forward_work, product_work, step_work

BAR_INCHES, PANEL_COLUMNS, PANEL_INCHES = 0.2, 2, 7.0
MOMENTS_TRAFFIC = 2  # the state is read and written
OTHER_TRAFFIC_BYTES = 12  # fp32 parameter read and written, gradient read


@dataclass
class Result:
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


def summarize(runs: Sequence[Mapping[str, Any]], geometry: Geometry, limit: Limit) -> list[Result]:
    """One row per thing measured and one per case without figures, in the order of first appearance."""
    rows: dict[tuple[Any, ...], Result] = {}
    for run in runs:
        level, name = run["level"], run["configuration"]
        if run["status"] != OK:
            resolution, batch = run["sizes"][0] if len(run["sizes"]) == 1 else (0, 0)
            key = (level, name, "", resolution, batch)
            rows[key] = Result(*key, status=run["status"], reason=f"{run['reason']} (round {run['round']})")
            continue
        for found in run["measurements"]:
            key = (level, name, found["what"], found["resolution"], found["batch"])
            row = rows.setdefault(key, Result(*key))
            row.rounds_ms.append(median(found["samples_ms"]))
            row.peak_bytes = max(row.peak_bytes, found["peak_bytes"])
            row.figures = found["figures"]
            row.limit_ms = limit_ms(row, geometry, limit)
    for row in rows.values():
        for title, name in rivals(row.level, row.configuration).items() if row.status == OK else ():
            rival = rows.get((row.level, name, row.what, row.resolution, row.batch))
            if rival is not None:
                row.speedup[title] = rival.median_ms / row.median_ms
    return list(rows.values())


def incomplete(rows: Sequence[Result]) -> list[Result]:
    """Results of what could have run and did not give figures."""
    return [row for row in rows if row.status == FAILED]


def limit_ms(row: Result, geometry: Geometry, limit: Limit) -> float:
    """The least time the device's limit allows for what the row measured."""
    if row.level == "optimizer":
        traffic = row.figures["parameters"] * OTHER_TRAFFIC_BYTES + MOMENTS_TRAFFIC * row.figures["state_bytes"]
        return float(traffic / limit.gb_per_second / 1e6)
    configuration = named(row.level)[row.configuration]
    if row.level == RATES:
        flops, kind = (
            row.figures.get("flops", 0.0),
            limit.fp8_tflops if "fp8" in row.configuration else limit.bf16_tflops,
        )
        return float(flops / kind / 1e9 + row.figures.get("bytes", 0.0) / limit.gb_per_second / 1e6)
    if row.level == "block":
        double = row.what.startswith("double")
        geometry = replace(geometry, double=int(double), single=int(not double))
    if row.level == "op":
        work = product_work(row.figures["m"], row.figures["k"], row.figures["n"])
    elif row.what.endswith("forward"):
        work = forward_work(geometry, row.resolution, row.batch)
    else:
        kind = {"recomputed": configuration.recomputes, "full": configuration.full}
        work = step_work(geometry, row.resolution, row.batch, **kind)
    return limit.milliseconds(work, fp8_linears=configuration.fp8_linears)


def write(
    folder: Path,
    options: BenchOptions,
    head: Mapping[str, Any],
    runs: Sequence[Mapping[str, Any]],
    rows: Sequence[Result],
) -> None:
    """Write results.json, with every raw sample, and results.md; `head` has "date", "command", "tests", "machine"."""
    tree = {**head, "options": asdict(options), "rows": [row.as_dict() for row in rows], "runs": list(runs)}
    write_file(folder / "results.json", json.dumps(tree, indent=1) + "\n")
    write_file(folder / "results.md", markdown(options, head, runs, rows))


def markdown(
    options: BenchOptions, head: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], rows: Sequence[Result]
) -> str:
    """The machine, one table per level, and what the libraries logged."""
    parts = [_heading(options, head)]
    parts += [_table(level, [row for row in rows if row.level == level]) for level in options.levels]
    lines: dict[str, dict[str, None]] = {}  # by configuration, each line once
    for run in runs:
        lines.setdefault(run["configuration"], {}).update(dict.fromkeys(run.get("said", ())))
    logged = [f"* {name}: {line}" for name, found in lines.items() for line in found]
    if logged:
        parts.append("## Logged while running\n\n" + "\n".join(logged))
    return "\n\n".join(parts) + "\n"


def _heading(options: BenchOptions, head: Mapping[str, Any]) -> str:
    machine, size = head["machine"], options.geometry
    limit = machine["limit"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    return (
        f"# Benchmark\n\n* {head['date']}: `{head['command']}`\n"
        f"* {machine['device']}, {machine['system']}, Python {machine['python']}, {versions}\n"
        f"* {size.double} double and {size.single} single blocks, {size.heads} heads of 128, rank {size.rank}, "
        f"random weights; {options.rounds} rounds, processes: {head.get('processes', 'one for each case')}\n"
        f"* limit: {limit['bf16_tflops']:.4g} TFLOPS bf16, {limit['fp8_tflops']:.4g} FP8, "
        f"{limit['gb_per_second']:.4g} GB/s ({limit['source']}); peak memory: {machine['memory']}\n"
        f"* tests: {head['tests']}"
    )


def _table(level: str, rows: Sequence[Result]) -> str:
    titles = list(dict.fromkeys(title for row in rows for title in row.speedup))
    header = ["configuration", "measured", "ms", "min .. max", "of limit", "peak GB", *(f"x {t}" for t in titles)]
    rows = sorted(rows, key=lambda row: (row.batch, row.resolution, row.what))
    lines = [" | ".join(header), "|".join(["---"] * len(header)), *(" | ".join(_cells(row, titles)) for row in rows)]
    measured = {row.configuration for row in rows}
    about = [f"* {name}: {row.about}" for name, row in named(level).items() if name in measured]
    return "\n".join([f"## {level}", "", *(f"| {line} |" for line in lines), "", *about])


def _cells(row: Result, titles: Sequence[str]) -> list[str]:
    measured = (row.what + size_label(row)).strip()
    if row.status != OK:
        reason = row.reason.replace("|", "/")
        return [row.configuration, measured, f"{row.status}: {reason}", *[""] * (3 + len(titles))]
    assert row.percent_of_limit is not None
    return [
        row.configuration,
        measured,
        f"{row.median_ms:.4g}",
        f"{min(row.rounds_ms):.4g} .. {max(row.rounds_ms):.4g}",
        f"{row.percent_of_limit:.3g} %",
        f"{row.peak_bytes / 1e9:.2f}",
        *(f"{row.speedup[title]:.2f}" if title in row.speedup else "–" for title in titles),
    ]


def measured_rates(rows: Sequence[Result], limit: Limit) -> list[str]:
    """What replaces the assumptions in `limits`, from rows of the level "rates"; nothing where there are none.

    Shares of the peak are the best of all shapes, attention's that of the largest.
    """
    rows = [row for row in rows if row.level == RATES]
    found = [row for row in rows if row.status == OK]
    if not found:
        return []

    def rate(row: Result) -> float:
        return float(row.figures["flops"] / row.median_ms / 1e9)

    def best(name: str, what: str, peak: float) -> float | None:
        mine = [row for row in found if row.configuration == name and row.what.endswith(what)]
        if name == "attention":
            mine = sorted(mine, key=lambda row: row.figures["flops"])[-1:]
        return max((rate(row) / peak for row in mine), default=None)

    shares = {
        "bf16": best("gemm_bf16", "", limit.bf16_tflops),
        "fp8": best("gemm_fp8", "forward", limit.fp8_tflops),
        "attention": best("attention", "forward", limit.bf16_tflops),
        "attention_backward": best("attention", "backward", limit.bf16_tflops),
    }
    lines = [f"RATE_SHARES {name}: {share:.3f}" for name, share in shares.items() if share is not None]
    for row in found:
        if "bytes" in row.figures:
            share = row.figures["bytes"] / row.median_ms / 1e6 / limit.gb_per_second
            lines.append(f"BANDWIDTH_SHARE: {share:.3f}")
        if "kernels" in row.figures:
            lines.append(f"LAUNCH_MS: {row.median_ms / row.figures['kernels']:.5f}")
    cells = [
        (row.configuration, row.what + size_label(row), f"{rate(row):.0f}") for row in found if "flops" in row.figures
    ]
    cells += [(row.configuration, "", f"{row.status}: {row.reason}") for row in rows if row.status != OK]
    table = ["| kernel | shape | TFLOP/s |", "|---|---|---|", *(f"| {' | '.join(cell)} |" for cell in cells)]
    head = "## For bench/limits.py, measured"
    return [head, "\n".join(f"* {line}" for line in lines), "\n".join(table)]


def peaks_against_plan(rows: Sequence[Result]) -> list[str]:
    """Peak memory of the trainer's steps next to what `coat-flux plan` predicts; nothing where there are none."""
    found = [row for row in rows if row.level == ENGINE and row.status == OK]
    lines = [
        f"| {row.configuration}{size_label(row)} | {row.peak_bytes / 1e9:.2f} | "
        f"{row.figures['predicted_peak_bytes'] / 1e9:.2f} | {row.figures['steps_per_second']:.3f} |"
        for row in found
    ]
    head = ["| trainer's steps | peak GB | planned GB | steps a second |", "|---|---|---|---|"]
    return ["## Plan against peak\n\n" + "\n".join(head + lines)] if lines else []


def operators_table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Every kernel of `operators.measure_operators`, the slowest first, as Markdown."""
    head = ["| operator | us | of bandwidth | host us | launches |", "|---|---|---|---|---|"]
    lines = [
        f"| {name} | {row['us']:.1f} | {row['percent_of_bandwidth']:.0f} % | {row['host_us']:.1f} | {row['launches']} |"
        for name, row in sorted(found.items(), key=lambda item: -item[1].get("us", 0.0))
        if "us" in row
    ]
    wrong = {name: row.get("error") or row["note"] for name, row in found.items() if "us" not in row}
    lines += [f"| {name} | {why.replace('|', '/')} | | | |" for name, why in wrong.items()]
    return "## Each kernel\n\n" + "\n".join(head + lines)


def size_label(row: Result) -> str:
    """Resolution and batch in words; empty where the row has none."""
    return f" {row.resolution} px x {row.batch}".rstrip() if row.resolution else ""


def draw(rows: Sequence[Result], path: Path) -> None:
    """Bars of the medians with min to max, one panel per thing measured; a case without figures is named as such."""
    from matplotlib.figure import Figure

    panels: dict[tuple[str, str], list[Result]] = {(row.level, row.what): [] for row in rows if row.status == OK}
    for (level, what), listed in panels.items():
        listed += [row for row in rows if row.level == level and (row.what == what or row.status != OK)]
    lines = -(-max(len(panels), 1) // PANEL_COLUMNS)
    tallest = max((len(listed) for listed in panels.values()), default=1)
    size = (PANEL_INCHES * PANEL_COLUMNS, lines * (BAR_INCHES * tallest + 1.0))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(lines, PANEL_COLUMNS, squeeze=False).flat
    for place, ((level, what), listed) in zip(axes, panels.items(), strict=False):
        _panel(place, f"{level}: {what}", listed)
    for place in list(axes)[len(panels) :]:
        place.set_axis_off()
    figure.savefig(path, dpi=90)


def _panel(axes: Any, title: str, rows: Sequence[Result]) -> None:
    rows = sorted(rows, key=lambda row: (row.batch, row.resolution), reverse=True)
    labels = [row.configuration + size_label(row) for row in rows]
    heights = [row.median_ms if row.status == OK else 0.0 for row in rows]
    below = [row.median_ms - min(row.rounds_ms) if row.status == OK else 0.0 for row in rows]
    above = [max(row.rounds_ms) - row.median_ms if row.status == OK else 0.0 for row in rows]
    colors = ["#ee6677" if row.configuration.startswith("coat") else "#4477aa" for row in rows]
    bars = axes.barh(range(len(rows)), heights, xerr=(below, above), color=colors, ecolor="#555555")
    texts = [f"{row.median_ms:.3g}" if row.status == OK else row.status for row in rows]
    axes.bar_label(bars, labels=texts, padding=3, fontsize=7)
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.set_title(f"{title}, ms", fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
