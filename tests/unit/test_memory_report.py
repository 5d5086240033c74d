"""The memory report's table, picture and prediction."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from coat_flux.config.findings import ConfigError
from coat_flux.watch.memory_report import as_table, finish
from coat_flux.watch.phases import PhaseTracker

GB = 10**9


def _phase(peak: int, *, exact: bool = True, **parts: int) -> dict[str, Any]:
    at = {"allocated": peak // 2, "reserved": peak}
    return {
        "entered": 1, "open": False, "start": at, "end": at, "peak": {"allocated": peak, "reserved": peak},
        "exact": exact, "parts": {**parts, "rest": peak - sum(parts.values())}, "most": parts,
    }  # fmt: skip


def _record(**values: Any) -> dict[str, Any]:
    return {
        "device": "cuda",
        "method": {"memory": "torch's CUDA allocator", "saved activations": ""},
        "baseline": 0,
        "peak": 20 * GB,
        "phases": {"load": _phase(15 * GB, transformer=12 * GB), "step": _phase(20 * GB, transformer=12 * GB, lora=GB)},
        "moments": {"before_training": {"allocated": 13 * GB, "reserved": 14 * GB, "peak": 15 * GB}},
        "transformer": {},
        "prediction": {"peak": 19 * GB, "phases": {"step": {"transformer": 12 * GB, "workspace": 7 * GB}}},
    } | values


def test_table_shows_prediction_beside_measurement() -> None:
    lines = as_table(_record()).splitlines()
    assert lines[0] == "Memory by phase, GB (10^9 bytes), torch's CUDA allocator"
    assert lines[1].split() == ["phase", "times", "start", "end", "peak", "reserved", "predicted"]
    assert lines[2].split() == ["load", "1", "7.50", "7.50", "15.00", "15.00", "-"]
    assert lines[3].split() == ["step", "1", "10.00", "10.00", "20.00", "20.00", "19.00"]
    assert lines[4] == "before training: 13.00, peak until then 15.00"
    assert lines[5] == "held in a step (predicted): transformer 12.00 (12.00), lora 1.00, rest 7.00"
    assert lines[6] == "prediction: peak 19.00 GB; measured 20.00 GB, +5.3% of the prediction"


def test_table_of_a_cpu_run_says_resident_and_lower_bounds() -> None:
    phases = {"step": _phase(400 * 10**6, exact=False)}
    text = as_table(_record(baseline=300 * 10**6, peak=400 * 10**6, phases=phases))
    assert "above start" in text
    assert text.splitlines()[2].split()[4:] == [">=400.00", "400.00", ">=100.00", "19000.00"]
    assert "measured 100.00 MB of resident memory above the start" in text


def _finished(tmp_path: Path, job: Any, *, table: bool = True) -> tuple[list[str], dict[str, Any]]:
    tracker = PhaseTracker(torch.device("cpu"), tmp_path / "coat" / "memory.json")
    tracker.enter("load")
    lines: list[str] = []
    finish(tracker, job, lines.append, lines.append if table else None)
    return lines, json.loads((tmp_path / "coat" / "memory.json").read_text())


def _refuse() -> Any:
    raise ConfigError("job.yaml: 2 problems\n  a.b=1: no")


def test_a_job_that_cannot_be_predicted_is_one_line(tmp_path: Path) -> None:
    lines, record = _finished(tmp_path, _refuse)
    reason = "ConfigError: job.yaml: 2 problems a.b=1: no"
    assert record["prediction"] == {"missing": reason}
    assert lines == [as_table(record)]
    assert lines[0].splitlines()[-1].endswith(f"({reason})")
    assert "did not come to its end" in as_table(record | {"prediction": None})
    assert (tmp_path / "coat" / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    lines, _ = _finished(tmp_path, _refuse, table=False)
    assert len(lines) == 1
    assert lines[0].startswith("Memory report: coat/memory.png is left out: ")
    assert not (tmp_path / "coat" / "memory.png").exists()


def test_other_processes_say_nothing() -> None:
    tracker = PhaseTracker(torch.device("cpu"), None)
    tracker.enter("load")
    finish(tracker, _refuse, lambda line: pytest.fail(line), lambda line: pytest.fail(line))
    assert tracker.forecast is None
