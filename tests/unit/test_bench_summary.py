"""Medians, spread, share of the limit and speed-ups of a benchmark; its table and picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coat_flux.bench import report
from coat_flux.bench.flops import Geometry, forward_work, step_work
from coat_flux.bench.limits import Limit
from coat_flux.bench.options import BenchOptions
from coat_flux.bench.summary import Row, incomplete, summarize

LIMIT = Limit(10.0, 20.0, 10.0, "test")
TINY = Geometry(1, 1, 2, 4)
MACHINE = {
    "device": "a card",
    "system": "an OS",
    "python": "3",
    "versions": {"torch": "2", "torchao": None},
    "limit": LIMIT.as_dict(),
    "memory": "allocated",
}
HEAD = {"date": "today", "command": "coat-flux bench", "tests": "green", "machine": MACHINE}


def ran(
    number: int, name: str, samples: list[float], what: str = "step", level: str = "step", **figures: Any
) -> dict[str, Any]:
    found = {"what": what, "resolution": 64, "batch": 2, "samples_ms": samples, "peak_bytes": 10 * number}
    return {
        "round": number,
        "level": level,
        "configuration": name,
        "sizes": [[64, 2]],
        "status": "ok",
        "said": [f"{name} said"],
        "measurements": [{**found, "figures": figures}],
    }


def broke(number: int, name: str, status: str, reason: str) -> dict[str, Any]:
    return {**ran(number, name, []), "status": status, "reason": reason, "measurements": None}


RUNS = [
    ran(1, "bf16_compiled", [8.0, 9.0, 100.0]),
    ran(1, "coat", [4.0, 3.0, 5.0]),
    broke(1, "toolkit_default", "cannot", "needs | a package"),
    broke(1, "coat_recomputed", "out of memory", "too large"),
    ran(2, "coat", [6.0, 7.0, 6.5]),
    ran(2, "bf16_compiled", [10.0, 11.0, 12.0]),
    ran(3, "bf16_compiled", [13.0]),
    ran(3, "coat", [5.0]),
]


def test_medians_spread_and_speed() -> None:
    compiled, coat, toolkit, recomputed = summarize(RUNS, TINY, LIMIT)
    assert compiled.rounds_ms == [9.0, 11.0, 13.0]
    assert (compiled.median_ms, coat.median_ms) == (11.0, 5.0)
    assert (coat.as_dict()["min_ms"], coat.as_dict()["max_ms"]) == (4.0, 6.5)
    assert coat.speedup == {"bf16 + compile": 11.0 / 5.0}
    assert coat.peak_bytes == 30
    assert (toolkit.status, toolkit.reason) == ("cannot", "needs | a package (round 1)")
    assert (recomputed.status, recomputed.speedup) == ("out of memory", {})


def test_share_of_the_limit_counts_the_configurations_own_work() -> None:
    rows = {row.configuration: row for row in summarize(RUNS, TINY, LIMIT)}
    work = step_work(TINY, 64, 2, recomputed=False)
    assert rows["bf16_compiled"].limit_ms == pytest.approx(work.total / 1e10)
    assert rows["coat"].limit_ms == pytest.approx((work.total - work.linear / 2) / 1e10)
    assert rows["coat"].percent_of_limit == pytest.approx(100 * rows["coat"].limit_ms / 5.0)
    recomputed, block, product, optimizer = summarize(
        [
            ran(1, "bf16_checkpointed", [1.0]),
            ran(1, "bf16", [1.0], "double forward", "block"),
            ran(1, "coat", [1.0], "dX 256 -> 1024", "op", m=528, k=256, n=1024),
            ran(1, "adamw_fused", [1.0], "optimizer step", "optimizer", parameters=1000, state_bytes=8000),
        ],
        TINY,
        LIMIT,
    )
    assert recomputed.limit_ms == pytest.approx((work.total + forward_work(TINY, 64, 2).total) / 1e10)
    assert block.limit_ms == pytest.approx(forward_work(TINY.one_double, 64, 2).total / 1e10)
    assert product.limit_ms == pytest.approx(2 * 528 * 256 * 1024 / 2 / 1e10)
    assert optimizer.limit_ms == pytest.approx((12 * 1000 + 2 * 8000) / 10 / 1e6)


def test_only_an_error_of_ours_is_incomplete() -> None:
    rows = summarize([*RUNS, broke(2, "coat_per_row", "failed", "our mistake")], TINY, LIMIT)
    assert [row.configuration for row in incomplete(rows)] == ["coat_per_row"]
    later = summarize([*RUNS, broke(4, "coat", "failed", "late")], TINY, LIMIT)
    assert [(row.configuration, row.reason) for row in incomplete(later)] == [("coat", "late (round 4)")]
    assert next(row for row in later if row.configuration == "coat").rounds_ms == [4.0, 6.5, 5.0]


def test_table_and_picture_show_every_configuration(tmp_path: Path) -> None:
    rows = summarize(RUNS, TINY, LIMIT)
    report.write(tmp_path, BenchOptions(("step",)), HEAD, RUNS, rows)
    text = (tmp_path / "results.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert "| coat | step 64 px x 2 | 5 | 4 .. 6.5 | 15.1 % | 0.00 | 2.20 |" in lines
    assert "| toolkit_default | 64 px x 2 | cannot: needs / a package (round 1) |  |  |  |  |" in lines
    assert "| coat_recomputed | 64 px x 2 | out of memory: too large (round 1) |  |  |  |  |" in lines
    assert "* tests: green" in lines
    assert lines.count("* coat: coat said") == 1
    table = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    report.draw(rows, tmp_path / "results.png")
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_picture_without_any_figures(tmp_path: Path) -> None:
    report.draw([Row("step", "coat", status="failed")], tmp_path / "none.png")
    assert (tmp_path / "none.png").read_bytes().startswith(b"\x89PNG")
