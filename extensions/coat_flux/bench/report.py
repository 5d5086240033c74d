"""results.json and results.md, rewritten after every process, and results.png."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..base.files import write_file
from .configurations import OK, named
from .options import BenchOptions
from .summary import Row, log_lines

BAR_INCHES, PANEL_COLUMNS, PANEL_INCHES = 0.2, 2, 7.0


def write(
    folder: Path, options: BenchOptions, head: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], rows: Sequence[Row]
) -> None:
    """Write results.json and results.md.

    Args:
        folder: made if need be.
        options: what was asked for.
        head: "date", "command", "tests", "machine".
        runs: from `runner.run_cases`, every raw sample.
        rows: from `summary.summarize`.
    """
    tree = {**head, "options": asdict(options), "rows": [row.as_dict() for row in rows], "runs": list(runs)}
    write_file(folder / "results.json", json.dumps(tree, indent=1) + "\n")
    write_file(folder / "results.md", markdown(options, head, runs, rows))


def markdown(
    options: BenchOptions, head: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], rows: Sequence[Row]
) -> str:
    """The machine, one table per level, and what the libraries said."""
    parts = [_heading(options, head)]
    parts += [_table(level, [row for row in rows if row.level == level]) for level in options.levels]
    said = [f"* {name}: {line}" for name, lines in log_lines(runs).items() for line in lines]
    if said:
        parts.append("## Said while running\n\n" + "\n".join(said))
    return "\n\n".join(parts) + "\n"


def _heading(options: BenchOptions, head: Mapping[str, Any]) -> str:
    machine, size = head["machine"], options.geometry
    limit = machine["limit"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    return "\n".join(
        [
            "# Benchmark",
            "",
            f"* {head['date']}: `{head['command']}`",
            f"* {machine['device']}, {machine['system']}, Python {machine['python']}, {versions}",
            f"* {size.double} double and {size.single} single blocks, {size.heads} heads of 128, rank {size.rank}, "
            f"random weights; {options.rounds} rounds, each case in its own process",
            f"* limit: {limit['bf16_tflops']:.4g} TFLOPS bf16, {limit['fp8_tflops']:.4g} FP8, "
            f"{limit['gb_per_second']:.4g} GB/s ({limit['source']}); peak memory: {machine['memory']}",
            f"* tests: {head['tests']}",
        ]
    )


def _table(level: str, rows: Sequence[Row]) -> str:
    titles = list(dict.fromkeys(title for row in rows for title in row.speedup))
    header = ["configuration", "measured", "ms", "min .. max", "of limit", "peak GB", *(f"x {t}" for t in titles)]
    rows = sorted(rows, key=lambda row: (row.batch, row.resolution, row.what))
    lines = [" | ".join(header), "|".join(["---"] * len(header)), *(" | ".join(_cells(row, titles)) for row in rows)]
    about = [f"* {name}: {choice.about}" for name, choice in named(level).items() if _is_in(name, rows)]
    return "\n".join([f"## {level}", "", *(f"| {line} |" for line in lines), "", *about])


def _is_in(name: str, rows: Sequence[Row]) -> bool:
    return any(row.configuration == name for row in rows)


def _cells(row: Row, titles: Sequence[str]) -> list[str]:
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


def size_label(row: Row) -> str:
    """Resolution and batch in words; empty where the row has none."""
    return f" {row.resolution} px x {row.batch}".rstrip() if row.resolution else ""


def draw(rows: Sequence[Row], path: Path) -> None:
    """Bars of the medians with min to max, one panel per thing measured; a case without figures is named as such."""
    from matplotlib.figure import Figure

    panels: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.status == OK:
            panels.setdefault((row.level, row.what), []).append(row)
    for row in rows:
        if row.status != OK:
            for (level, _), listed in panels.items():
                if level == row.level:
                    listed.append(row)
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


def _panel(axes: Any, title: str, rows: Sequence[Row]) -> None:
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
