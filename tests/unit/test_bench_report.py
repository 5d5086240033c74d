"""The benchmark's arithmetic and limits against published counts of FLUX.1-dev; its medians, table and picture."""

from __future__ import annotations

from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

import pytest

from coat_flux.bench.configurations import BenchOptions
from coat_flux.bench.limits import (
    DEVICE_NAMES,
    GB_PER_SECOND,
    Geometry,
    Limit,
    Work,
    forward_work,
    known_limit,
    product_work,
    step_work,
    token_count,
)
from coat_flux.bench.optimizers import lora_shapes
from coat_flux.bench.report import Result, draw, incomplete, summarize, write
from coat_flux.mini_flux.geometry import make_flux_dev_geometry
from coat_flux.plan.facts import CARDS
from coat_flux.trainers.standalone.network import lora_targets
from tests.tolerances import ANCHOR_TIME_RTOL


def total(work: Work) -> float:
    return sum(astuple(work))


FLUX = Geometry()
H200 = Limit(989.4, 1978.9, 4800.0, "test")
# least milliseconds of an H200, batch 1, rank 16: forward, step, step with full recomputation
BF16_MS = {512: (21.9, 46.4, 68.2), 768: (42.6, 94.0, 136.6), 1024: (75.6, 174.2, 249.8)}
FP8_MS = {512: (11.8, 26.3, 38.2), 768: (24.3, 57.2, 81.5), 1024: (45.5, 114.1, 159.6)}


@pytest.mark.parametrize(
    ("resolution", "tokens", "linear", "attention"),
    [(512, 1536, 19.83, 1.65), (768, 2816, 36.35, 5.55), (1024, 4608, 59.49, 14.87)],
)
def test_forward_operations(resolution: int, tokens: int, linear: float, attention: float) -> None:
    work = forward_work(FLUX, resolution, 1)
    assert token_count(resolution) == tokens
    assert work.linear / 1e12 == pytest.approx(linear, abs=0.005)
    assert work.attention / 1e12 == pytest.approx(attention, abs=0.005)
    assert work.linear / tokens == pytest.approx(12.910e9, rel=1e-4)
    assert work.adapters / work.linear == pytest.approx(0.0075, abs=5e-5)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("resolution", [512, 768, 1024])
def test_least_times(resolution: int, fp8: bool) -> None:
    works = (
        forward_work(FLUX, resolution, 1),
        step_work(FLUX, resolution, 1, recomputed=False),
        step_work(FLUX, resolution, 1, recomputed=True),
    )
    found = [H200.milliseconds(work, fp8_linears=fp8) for work in works]
    assert found == pytest.approx((FP8_MS if fp8 else BF16_MS)[resolution], rel=ANCHOR_TIME_RTOL)


def test_blocks_add_up_and_batches_multiply() -> None:
    double, single = (
        forward_work(size, 768, 1) for size in (replace(FLUX, single=0, double=1), replace(FLUX, double=0, single=1))
    )
    whole = forward_work(FLUX, 768, 1)
    assert 19 * double.linear + 38 * single.linear == whole.linear
    assert 19 * double.adapters + 38 * single.adapters == whole.adapters
    assert total(forward_work(FLUX, 768, 4)) == 4 * total(whole)
    assert product_work(1536, 3072, 12288) == Work(linear=2.0 * 1536 * 3072 * 12288)


def test_cards_are_matched_by_their_whole_name() -> None:
    found = known_limit("NVIDIA H200")
    assert found is not None
    assert (found.bf16_tflops, found.fp8_tflops, found.gb_per_second) == (989.4, 1978.9, 4800.0)
    assert known_limit("NVIDIA H200 NVL") is None
    assert known_limit("NVIDIA GeForce RTX 4090 Laptop GPU") is None
    assert set(DEVICE_NAMES.values()) == set(GB_PER_SECOND) <= {card.name for card in CARDS}


def test_lora_shapes_are_those_of_the_models_linears() -> None:
    size = Geometry(1, 1, 2, 4)
    model = make_flux_dev_geometry("meta", num_layers=1, num_single_layers=1, num_attention_heads=2)
    linears = [model.get_submodule(name) for name in lora_targets(model)]
    expected = [shape for one in linears for shape in ((4, one.in_features), (one.out_features, 4))]
    assert sorted(lora_shapes(size)) == sorted(expected)
    shapes = lora_shapes(FLUX)
    assert len(shapes) == 988
    assert sum(a * b for a, b in shapes) / 16 == pytest.approx(5.37e6, rel=1e-3)


LIMIT = Limit(10.0, 20.0, 10.0, "test")
TINY = Geometry(1, 1, 2, 4)
MACHINE = {
    "device": "a card",
    "system": "an OS",
    "python": "3",
    "versions": {"torch": "2", "torchao": None},
    "limit": asdict(LIMIT),
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
    assert rows["bf16_compiled"].limit_ms == pytest.approx(total(work) / 1e10)
    assert rows["coat"].limit_ms == pytest.approx((total(work) - work.linear / 2) / 1e10)
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
    assert recomputed.limit_ms == pytest.approx((total(work) + total(forward_work(TINY, 64, 2))) / 1e10)
    assert block.limit_ms == pytest.approx(total(forward_work(replace(TINY, single=0), 64, 2)) / 1e10)
    assert product.limit_ms == pytest.approx(2 * 528 * 256 * 1024 / 2 / 1e10)
    assert optimizer.limit_ms == pytest.approx((12 * 1000 + 2 * 8000) / 10 / 1e6)


def test_only_an_error_of_ours_is_incomplete() -> None:
    rows = summarize([*RUNS, broke(2, "coat_per_tensor", "failed", "our mistake")], TINY, LIMIT)
    assert [row.configuration for row in incomplete(rows)] == ["coat_per_tensor"]
    later = summarize([*RUNS, broke(4, "coat", "failed", "late")], TINY, LIMIT)
    assert [(row.configuration, row.reason) for row in incomplete(later)] == [("coat", "late (round 4)")]
    assert next(row for row in later if row.configuration == "coat").rounds_ms == [4.0, 6.5, 5.0]


def test_table_and_picture_show_every_configuration(tmp_path: Path) -> None:
    rows = summarize(RUNS, TINY, LIMIT)
    write(tmp_path, BenchOptions(("step",)), HEAD, RUNS, rows)
    text = (tmp_path / "results.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert "| coat | step 64 px x 2 | 5 | 4 .. 6.5 | 15.1 % | 0.00 | 2.20 |" in lines
    assert "| toolkit_default | 64 px x 2 | cannot: needs / a package (round 1) |  |  |  |  |" in lines
    assert "| coat_recomputed | 64 px x 2 | out of memory: too large (round 1) |  |  |  |  |" in lines
    assert "* tests: green" in lines
    assert lines.count("* coat: coat said") == 1
    table = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    draw(rows, tmp_path / "results.png")
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_picture_without_any_figures(tmp_path: Path) -> None:
    draw([Result("step", "coat", status="failed")], tmp_path / "none.png")
    assert (tmp_path / "none.png").read_bytes().startswith(b"\x89PNG")
