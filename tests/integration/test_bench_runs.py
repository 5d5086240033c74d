"""`coat-flux bench` and `scripts/benchmark_coat.py` at tiny sizes on a CPU."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from coat_flux.bench import models, worker
from coat_flux.bench.configurations import named
from coat_flux.blocks.gemms import set_transposed
from coat_flux.cli.entry import main
from tests.tolerances import BENCH_LOSS_RTOL

ROOT = Path(__file__).resolve().parents[2]
GEOMETRY = {"double": 1, "single": 1, "heads": 2, "rank": 4}
TINY = [word for name, value in GEOMETRY.items() for word in (f"--{name}", str(value))]


def work(level: str, configuration: str) -> dict[str, dict[str, Any]]:
    spec = {"sizes": [[64, 1]], "geometry": GEOMETRY, "device": "cpu", "repeats": 2}
    found = worker.run({"level": level, "configuration": configuration, **spec})
    assert found["status"] == "ok", found["traceback"]
    assert all(len(one["samples_ms"]) == 2 and min(one["samples_ms"]) > 0 for one in found["measurements"])
    return {one["what"]: one for one in found["measurements"]}


@pytest.mark.slow
def test_steps_train_the_same_task() -> None:
    names = ("bf16", "bf16_checkpointed", "coat", "coat_recomputed", "coat_per_tensor", "coat_weight_only")
    found = {name: work("step", name) for name in names}
    losses = {name: one["step"]["figures"]["loss"] for name, one in found.items()}
    assert losses["bf16_checkpointed"] == losses["bf16"]
    for name, values in losses.items():
        assert values[-1] < values[0]
        assert values == pytest.approx(losses["bf16"], rel=BENCH_LOSS_RTOL), name
    assert found["bf16"].keys() == {"forward", "step"}
    states = {name: one["step"]["figures"]["state_bytes"] for name, one in found.items()}
    assert states["coat"] < 0.3 * states["bf16"]


def test_blocks_and_linears_of_every_own_configuration() -> None:
    for name in ("bf16", "coat", "coat_recomputed"):
        kinds = [f"{kind} {what}" for kind in ("double", "single") for what in ("forward", "forward + backward")]
        assert list(work("block", name)) == kinds
    for name, row in named("op").items():
        if not row.may_be_missing:
            found = work("op", name)
            assert [(what, one["figures"]["m"]) for what, one in found.items()] == [
                (f"{what} {k} -> {n}", 528)
                for k, n in ((256, 256), (256, 1024), (1024, 256), (1280, 256))
                for what in ("forward", "dX")
            ]


@pytest.mark.slow
def test_rows_that_share_a_model_measure_what_they_would_alone() -> None:
    """Recomputation, flow and copies of the row before are gone, and the LoRA starts over."""
    kept: dict[str, Any] = {}
    spec = {"level": "step", "sizes": [[64, 1]], "geometry": GEOMETRY, "device": "cpu", "repeats": 2}
    weights, losses, runners = set(), {}, {}
    for name in ("coat_transposed", "coat_recomputed", "coat", "bf16_checkpointed", "bf16"):
        if name == "coat":  # a GPU's run before it has made copies
            set_transposed(kept["model"].transformer_blocks, True)
        found = worker.run({**spec, "configuration": name}, kept)
        assert found["status"] == "ok", found["traceback"]
        assert not any("transposed" in buffer for buffer, _ in kept["model"].named_buffers())
        weights.add(kept["key"])
        runners[name] = models.runner_of(kept["model"])
        losses[name] = found["measurements"][1]["figures"]["loss"]
    assert len(weights) == 2
    assert runners["bf16"] is models.run_plainly is not runners["bf16_checkpointed"]
    assert runners["coat"] is not runners["coat_recomputed"]
    for name in ("coat", "bf16"):
        assert losses[name] == work("step", name)["step"]["figures"]["loss"]


def test_kernels_alone_and_their_rates() -> None:
    from coat_flux.bench.limits import Geometry, Limit
    from coat_flux.bench.report import measured_rates, summarize

    runs = []
    for name in named("rates"):
        spec = {"level": "rates", "configuration": name, "sizes": [[64, 1]], "geometry": GEOMETRY, "device": "cpu"}
        runs.append({"round": 1, **spec, **worker.run({**spec, "repeats": 2})})
    status = {run["configuration"]: run["status"] for run in runs}
    on_gpus = {name for name in status if name.startswith("attention_")} | {"launches"}
    assert {name for name, value in status.items() if value != "ok"} == on_gpus
    fp8 = next(run for run in runs if run["configuration"] == "gemm_fp8")["measurements"][0]
    assert (fp8["what"], fp8["figures"]["flops"]) == ("256 -> 256 forward", 2 * 528 * 256 * 256)
    rows = summarize(runs, Geometry(**GEOMETRY), Limit(100.0, 200.0, 1000.0, "test"))
    lines, table = measured_rates(rows, Limit(100.0, 200.0, 1000.0, "test"))[1:]
    product = next(row for row in rows if row.configuration == "gemm_bf16")
    assert product.limit_ms == pytest.approx(2 * 528 * 256 * 256 / 100.0 / 1e9)
    best = max(100 * row.limit_ms / row.median_ms for row in rows if row.configuration == "gemm_bf16")
    assert f"* RATE_SHARES bf16: {best / 100:.3f}" in lines
    assert "| launches |  | cannot: needs a GPU (round 1) |" in table


@pytest.mark.slow
def test_the_trainers_own_steps() -> None:
    spec = {"level": "engine", "sizes": [[64, 1]], "geometry": GEOMETRY, "device": "cpu", "repeats": 2}
    for name in ("bf16", "coat_recomputed", "full_wgrad", "full_offload"):
        found = worker.run({**spec, "configuration": name})
        assert found["status"] == "ok", found["traceback"]
        (step,) = found["measurements"]
        assert step["figures"]["steps_per_second"] == pytest.approx(1e3 / step["samples_ms"][0])
        assert 0 < step["figures"]["predicted_peak_bytes"] < step["peak_bytes"]


@pytest.fixture
def no_bitsandbytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes started from here do not find bitsandbytes."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "def find_others(name, path=None, target=None):\n"
        "    return None if name == 'bitsandbytes' else find(name, path, target)\n"
        "PathFinder.find_spec = find_others\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)


@pytest.mark.slow
@pytest.mark.usefixtures("no_bitsandbytes")
def test_results_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["adamw_fused", "adamw8bit", "coat_fp8_adamw"]
    where = ["--device", "cpu", "--repeats", "2", "--skip-tests", "--out", str(tmp_path)]
    assert main(["bench", "--level", "optimizer", "--configs", *names, "--rounds", "1", *TINY, *where]) == 0
    out, missing = capsys.readouterr().out, "needs the package bitsandbytes, which is not installed"
    assert [line.split(": ")[0] for line in out.splitlines() if line.startswith("[")] == [
        "[1/3] round 1, optimizer adamw_fused",
        "[2/3] round 1, optimizer adamw8bit",
        "[3/3] round 1, optimizer coat_fp8_adamw",
    ]
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["tests"] == "not run: --skip-tests"
    assert results["options"]["geometry"] == GEOMETRY
    assert results["date"].startswith("20")
    assert results["command"].startswith("coat-flux ")
    assert results["machine"]["versions"]["torch"] == torch.__version__
    assert results["machine"]["limit"]["source"].startswith("measured: a 1024")
    measured = [run["measurements"][0] for run in results["runs"] if run["status"] == "ok"]
    assert [len(found["samples_ms"]) for found in measured] == [2] * 2
    fused, theirs, coat = results["rows"]
    assert (theirs["status"], theirs["reason"]) == ("cannot", f"{missing} (round 1)")
    assert f"adamw8bit: cannot run here: {missing}" in out
    assert fused["figures"]["tensors"] == 2 * (14 + 6)
    assert coat["figures"]["state_bytes"] < 0.3 * fused["figures"]["state_bytes"]
    assert coat["speedup"] == {"torch fused": fused["median_ms"] / coat["median_ms"]}
    assert fused["percent_of_limit"] > 0
    assert "| adamw_fused | optimizer step | " in (tmp_path / "results.md").read_text(encoding="utf-8")
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True])
def test_benchmark_coat(tmp_path: Path, fp8: bool) -> None:
    out = tmp_path / "results.json"
    sizes = ["--hidden_size", "128", "--num_layers", "2", "--batch_size", "2", "--num_steps", "12", "--rounds", "5"]
    command = [sys.executable, str(ROOT / "scripts" / "benchmark_coat.py"), *sizes, "--output", str(out)]
    command += ["--device", "cpu", *(["--use_fp8_activation"] if fp8 else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(out.read_text(encoding="utf-8"))
    standard, coat, against = results["standard"], results["coat"], results["comparison"]
    parameters = 2 * (128 * 128 + 128 + 2 * 128)
    memory = standard["memory_bytes"]
    assert memory["weights"] == memory["gradients"] == 4 * parameters
    assert memory["optimizer_states"] == 8 * parameters
    assert coat["memory_bytes"]["optimizer_states"] < 0.3 * memory["optimizer_states"]
    saved = coat["memory_bytes"]["saved_activations"] / memory["saved_activations"]
    assert saved < 0.75 if fp8 else saved == 1.0  # the loss keeps its own in fp32
    assert coat["largest_batch"] > standard["largest_batch"] > 0
    for side in (standard, coat):
        parts = [value for name, value in side["memory_bytes"].items() if name != "peak"]
        assert side["memory_bytes"]["peak"] == sum(parts)
        assert len(side["losses"]) == len(side["step_ms"]) == 12
        assert side["losses"][-1] < side["losses"][0]
        starts = [0, 2, 4, 7, 9, 12]  # of the rounds
        times = [statistics.median(side["step_ms"][a:b]) for a, b in pairwise(starts)]
        assert side["round_ms"] == times
        assert side["ms_per_step"] == statistics.median(times) > 0
    assert against["optimizer_states_ratio"] == coat["memory_bytes"]["optimizer_states"] / memory["optimizer_states"]
    assert math.isclose(against["final_loss_difference"], coat["final_loss"] - standard["final_loss"])
    assert abs(against["final_loss_relative_difference"]) < BENCH_LOSS_RTOL
    assert "optimizer states, MB" in done.stdout
    assert_time_ratio_is_of_its_own_figures(results, done.stdout)
    assert [line.split(",")[0] for line in done.stderr.splitlines() if line.startswith("round ")] == [
        f"round {number}/5" for number in range(1, 6)
    ]


def assert_time_ratio_is_of_its_own_figures(results: dict[str, Any], out: str) -> None:
    """COAT over standard everywhere: of the table's row, of the sentence, of the file, with the rounds' spread."""
    standard, coat, against = results["standard"], results["coat"], results["comparison"]
    ratio = coat["ms_per_step"] / standard["ms_per_step"]
    rounds = [ours / theirs for ours, theirs in zip(coat["round_ms"], standard["round_ms"], strict=True)]
    assert (against["ms_per_step_ratio"], against["speedup"]) == (ratio, pytest.approx(1 / ratio))
    assert (against["ms_per_step_ratio_min"], against["ms_per_step_ratio_max"]) == (min(rounds), max(rounds))
    assert min(rounds) <= ratio <= max(rounds)
    assert f"A step of COAT takes {ratio:.3f} times as long as a standard step" in out
    assert f"({min(rounds):.3f} to {max(rounds):.3f} in 5 rounds)" in out
    row = re.search(r"^ms per step, median +(\S+) +(\S+) +(\S+)$", out, re.MULTILINE)
    assert row is not None
    assert row[3] == f"{ratio:.3f}"
    assert float(row[2]) / float(row[1]) == pytest.approx(ratio, rel=0.05)  # two decimals of a millisecond
