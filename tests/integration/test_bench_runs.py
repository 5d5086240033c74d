"""`coat-flux bench` and `scripts/benchmark_coat.py` at tiny sizes on a CPU."""

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from coat_flux.bench import runner, worker
from coat_flux.cli.entry import main
from tests.tolerances import BENCH_LOSS_RTOL

GEOMETRY = {"double": 1, "single": 1, "heads": 1, "rank": 4}
TINY = [word for name, value in GEOMETRY.items() for word in (f"--{name}", str(value))]


def figures_of(level: str, configuration: str) -> dict[str, Any]:
    spec = {"sizes": [[64, 1]], "geometry": GEOMETRY, "device": "cpu", "repeats": 2}
    result = worker.run({"level": level, "configuration": configuration, **spec})
    assert result["status"] == "ok", result["traceback"]
    (step,) = result["measurements"]
    assert min(step["samples_ms"]) > 0
    return {**step, **step["figures"]}


def test_steps_train_the_same_task():
    steps = {name: figures_of("step", name) for name in ("bf16", "coat")}
    for name, step in steps.items():
        assert step["loss"][-1] < step["loss"][0]
        assert step["loss"] == pytest.approx(steps["bf16"]["loss"], rel=BENCH_LOSS_RTOL), name
    assert steps["coat"]["state_bytes"] < 0.3 * steps["bf16"]["state_bytes"]


def test_results_of_a_run(tmp_path, capsys, monkeypatch):
    def here(command: list[str], **_: Any) -> SimpleNamespace:
        """In place of a process."""
        monkeypatch.setattr(sys, "argv", command[2:])
        worker.main()
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(runner, "subprocess", SimpleNamespace(run=here, TimeoutExpired=subprocess.TimeoutExpired))
    names = ["adamw_fused", "coat_fp8_adamw"]
    where = ["--device", "cpu", "--repeats", "2", "--skip-tests", "--out", str(tmp_path)]
    assert main(["bench", "--level", "optimizer", "--configs", *names, "--rounds", "1", *TINY, *where]) == 0
    first, *_, out = capsys.readouterr().out.partition("\n")
    assert ("2 processes, at most 1:00:00" in first, "[2/2] round 1, optimizer coat_fp8_adamw: " in out) == (True, True)
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["options"]["geometry"] == GEOMETRY
    assert results["command"].startswith("coat-flux ")
    assert [len(run["measurements"][0]["samples_ms"]) for run in results["runs"]] == [2, 2]
    fused, coat = results["rows"]
    assert fused["figures"]["tensors"] == 2 * (14 + 6)
    features = 2 * (7 + 4 * 2 + 5 + 5) + 4 + 3 * 2 + 5 + 6  # in and out, over d, of two streams and a single block
    assert coat["figures"]["parameters"] == fused["figures"]["parameters"] == 4 * 128 * features
    assert fused["figures"]["state_bytes"] >= 8 * fused["figures"]["parameters"]
    assert coat["figures"]["state_bytes"] < 0.3 * fused["figures"]["state_bytes"]
    assert coat["speedup"] == {"torch fused": fused["median_ms"] / coat["median_ms"]}
    assert "| adamw_fused | optimizer step | " in (tmp_path / "results.md").read_text(encoding="utf-8")
