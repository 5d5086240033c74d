"""`coat-flux bench`: its rows, the work of a step against published counts, medians, processes, the tests before it."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from coat_flux.bench import runner, worker
from coat_flux.bench.limits import Geometry, least_ms, step_work, token_count
from coat_flux.bench.runner import BenchOptions, summarize
from coat_flux.cli.entry import main
from coat_flux.plan.speed import CARDS, Card
from tests.tolerances import ANCHOR_TIME_RTOL

FLUX, TINY = Geometry(), Geometry(1, 1, 2, 4)
H200 = CARDS[-1]
# least milliseconds of an H200, batch 1, rank 16: step, step with full recomputation
LEAST_MS = {(512, False): (46.4, 68.2), (1024, False): (174.2, 249.8), (1024, True): (114.1, 159.6)}


@pytest.mark.parametrize(
    ("resolution", "tokens", "linear", "attention"),
    [(512, 1536, 2 * 19.83, 3.5 * 1.65), (1024, 4608, 2 * 59.49, 3.5 * 14.87)],
)
def test_operations_of_a_step(resolution, tokens, linear, attention):
    work = step_work(FLUX, resolution, 1, recomputed=False)
    linears, attended, adapters = work
    assert token_count(resolution) == tokens
    assert linears / 1e12 == pytest.approx(linear, abs=0.01)
    assert attended / 1e12 == pytest.approx(attention, abs=0.02)
    assert adapters / 3 / (linears / 2) == pytest.approx(0.0075, abs=5e-5)
    assert step_work(FLUX, resolution, 4, recomputed=False) == pytest.approx([4 * part for part in work])
    full = step_work(FLUX, resolution, 1, recomputed=False, full=True)
    assert full == (pytest.approx(1.5 * linears), attended, 0)


@pytest.mark.parametrize(("resolution", "fp8"), LEAST_MS)
def test_least_times(resolution, fp8):
    works = [step_work(FLUX, resolution, 1, recomputed=recomputed) for recomputed in (False, True)]
    times = [least_ms(H200, work, fp8_linears=fp8) for work in works]
    assert times == pytest.approx(LEAST_MS[resolution, fp8], rel=ANCHOR_TIME_RTOL)


def spec(level: str, configuration: str, **changes: Any) -> dict[str, Any]:
    plain = {"sizes": [[64, 1]], "geometry": TINY._asdict(), "device": "cpu", "repeats": 2}
    return {"level": level, "configuration": configuration, **plain, **changes}


@pytest.mark.parametrize(("level", "name"), [("step", "coat_weight_only"), ("optimizer", "coat_fp8_adamw")])
def test_references_are_never_timed_as_our_kernels(monkeypatch, level, name):
    monkeypatch.setattr(worker.torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(worker.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(worker, "triton_obstacle", lambda device: "a trial gave wrong codes")
    result = worker.run(spec(level, name, device="cuda"))
    assert result["status"] == "failed"
    assert "a trial gave wrong codes" in result["reason"]
    assert "measurements" not in result


@pytest.mark.parametrize(
    ("configuration", "error", "status", "reason"),
    [
        ("torchao_float8", ValueError("no such card\nmore"), "cannot", "ValueError: no such card"),
        ("bf16_compiled", RuntimeError("no compiler"), "cannot", "RuntimeError: no compiler"),
        ("coat", ValueError("our mistake"), "failed", "ValueError: our mistake"),
        ("bf16", ValueError("x" * 999), "failed", "ValueError: " + "x" * 288),
        ("coat", RuntimeError("CUDA error: out of memory"), "out of memory", "RuntimeError: CUDA error: out of memory"),
        ("bf16_cudagraphs", None, "cannot", "needs a GPU"),
        ("toolkit_default", None, "cannot", "needs the package optimum.quanto, which is not installed"),
    ],
)
def test_errors_become_results(monkeypatch, configuration, error, status, reason):
    monkeypatch.setattr(worker, "is_installed", lambda package: package != "optimum.quanto")
    monkeypatch.setattr(worker, "make_model", Mock(side_effect=error))
    result = worker.run(spec("step", configuration))
    assert (result["status"], result["reason"]) == (status, reason)
    assert reason[:40].split(": ")[-1] in result["traceback"]


def test_rounds_alternate_and_what_gives_no_figures_is_not_tried_again(monkeypatch):
    step = {"what": "step", "resolution": 64, "batch": 1, "samples_ms": [2.0], "peak_bytes": 7, "figures": {}}
    works, oom = {"status": "ok", "measurements": [step]}, {"status": "out of memory", "reason": "5 GB asked for"}
    cannot = {"status": "cannot", "reason": "needs a package"}
    results = {"bf16": works, "torchao_float8": cannot, "coat": oom, "coat_int8": works}
    started, lines = [], []

    def start(asked: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        started.append(asked["configuration"])
        return results[asked["configuration"]]

    monkeypatch.setattr(runner, "start_worker", start)
    options = BenchOptions(("step",), (64,), (1,), 2, tuple(results), TINY, timeout_s=9.0)
    runs = list(runner.run_cases(options, lines.append))
    assert started == ["bf16", "torchao_float8", "coat", "coat_int8", "coat_int8", "bf16"]
    assert [run["round"] for run in runs] == [1, 1, 1, 1, 2, 2]
    assert lines[0].startswith("[1/8] round 1, step bf16 at 64 px x 1: step 2.00 ms")
    assert "torchao_float8 at 64 px x 1: cannot run here: needs a package" in lines[1]


def ran(number: int, name: str, samples: list[float], level: str = "step", **figures: Any) -> dict[str, Any]:
    step = {"what": "step", "resolution": 64, "batch": 2, "samples_ms": samples, "peak_bytes": 10 * number}
    row = {"round": number, "level": level, "configuration": name, "sizes": [[64, 2]]}
    return {**row, "status": "ok", "measurements": [{**step, "figures": figures}]}


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
CARD = Card(1, "", 10.0, 20.0, gb_per_second=10.0)


def test_medians_spread_and_speed_and_the_share_of_the_limit_by_the_rows_own_work():
    compiled, coat, toolkit, recomputed = summarize(RUNS, TINY, CARD)
    assert compiled.rounds_ms == [9.0, 11.0, 13.0]
    assert coat.rounds_ms == [4.0, 6.5, 5.0]
    assert (compiled.median_ms, coat.median_ms, coat.peak_bytes) == (11.0, 5.0, 30)
    assert coat.speedup == {"bf16 + compile": 11.0 / 5.0}
    assert (toolkit.status, toolkit.reason) == ("cannot", "needs | a package (round 1)")
    assert (recomputed.status, recomputed.speedup) == ("out of memory", {})
    work = step_work(TINY, 64, 2, recomputed=False)
    assert compiled.percent_of_limit == pytest.approx(sum(work) / 1e8 / 11.0)
    assert coat.percent_of_limit == pytest.approx((sum(work) - work[0] / 2) / 1e8 / 5.0)
    rows = summarize([*RUNS, broke(4, "coat", "failed", "late")], TINY, CARD)  # in place of its figures
    assert [(row.configuration, row.reason) for row in rows if row.status == "failed"] == [("coat", "late (round 4)")]
    runs = [
        ran(1, "bf16_checkpointed", [1.0]),
        ran(1, "adamw_fused", [1.0], "optimizer", parameters=1000, state_bytes=8000),
    ]
    checkpointed, optimizer = summarize(runs, TINY, CARD)
    assert checkpointed.percent_of_limit == pytest.approx(sum(step_work(TINY, 64, 2, recomputed=True)) / 1e8)
    assert optimizer.percent_of_limit == pytest.approx((12 * 1000 + 2 * 8000) / 10 / 1e4)
    assert summarize(runs, TINY, None)[0].percent_of_limit is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--level", "step"], "--device cpu"),
        (["--level", "all"], "--device cpu"),
        (["--resolution", "500"], "a multiple of 16"),
        (["--level", "optimizer", "--configs", "bf16", "--skip-tests"], "--configs bf16"),
        (["--level", "count", "--configs", "bf16"], "--configs bf16"),
        pytest.param(["--level", "count", "--out", f"{__file__}/x"], "--out", marks=pytest.mark.triton),
        (["--level", "optimizer", "--skip-tests", "--out", __file__], "--out"),
    ],
)
def test_arguments_that_cannot_be(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # steps on a CPU are asked for by name
    try:
        code = main(["bench", *arguments])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    assert words in capsys.readouterr().err
