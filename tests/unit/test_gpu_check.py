"""`scripts/gpu_check.py`: what is recorded of stages that end well, badly or not at all, and where a rerun goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from coat_flux.bench import worker
from coat_flux.bench.configurations import named
from coat_flux.bench.limits import Geometry
from coat_flux.plan.speed import Card
from scripts import _gpu_kernels, gpu_check
from scripts._gpu_trainer import measure_trainer
from tests.helpers.kernel_cases import CASES

ROOT = Path(__file__).resolve().parents[2]
NOTE = "import sys; open(sys.argv[1], 'a').write(sys.argv[2])"
# stands for the benchmark's worker: writes the result of a row; "die" ends the process, "hang" waits
ROWS = """
import json, sys, time
row = json.load(open(sys.argv[1]))["configuration"]
open(sys.argv[3], "a").write(row + " ")
if row.startswith("die"):
    sys.exit("the last words of " + row)
if row.startswith("hang"):
    time.sleep(60)
status = "cannot" if row.startswith("no") else "failed" if row.startswith("bad") else "ok"
json.dump({"status": status, "reason": "of " + row, "measurements": []}, open(sys.argv[2], "w"))
"""


class Bench:
    """Stages that note that they ran, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.out, self.ran = folder / "out", folder / "ran"

    def note(self, name: str, code: str = "", **settings: Any) -> Any:
        command = ("-c", f"{NOTE}; {code}", str(self.ran), f"{name} ", "{result}")
        return gpu_check.Stage(name, "", settings.pop("seconds", 30), command, **settings)

    def rows(self, name: str, rows: str, seconds: float = 30) -> Any:
        command = ("-c", ROWS, "{spec}", "{result}", str(self.ran))
        return gpu_check.Stage(name, "", seconds, command, "step", tuple(rows.split()))

    def run(self, *stages: Any, again: tuple[str, ...] = (), minutes: float = 5.0, dry: bool = False) -> int:
        self.ran.write_text("")
        return gpu_check.run(gpu_check.open_check(self.out, dry, minutes, stages), again)

    @property
    def order(self) -> list[str]:
        return self.ran.read_text().split()

    @property
    def stages(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / "gpu_check.json").read_text())["stages"]
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_broken_stage_is_recorded_and_the_others_run(bench: Bench) -> None:
    stages = [bench.note("one"), bench.note("two", "sys.exit('what went wrong')"), bench.note("three")]
    assert bench.run(*stages) == 1
    assert bench.order == ["one", "two", "three"]
    found = bench.stages
    assert [found[name]["status"] for name in ("one", "two", "three")] == ["ok", "failed", "ok"]
    assert found["two"]["reason"] == "exit code 1"
    assert found["two"]["tail"].strip() == "what went wrong"
    assert "| two | failed |" in (bench.out / "gpu_check.md").read_text()
    assert bench.run(*stages) == 1  # what failed is not tried again by itself
    assert bench.order == []
    mended = [stages[0], bench.note("two"), stages[2]]
    assert bench.run(*mended, again=("failed",)) == 0
    assert bench.order == ["two"]
    with pytest.raises(ValueError, match="holds a run without --dry-run"):
        bench.run(*mended, dry=True)


def test_where_our_kernels_are_refused_nothing_else_runs(bench: Bench) -> None:
    machine: dict[str, Any] = {"limit": [1.0, 1.0, 1.0]}
    machine |= {"kernels_refused": "a trial gave wrong codes", "device_type": "cuda", "versions": {}, "memory": ""}
    machine |= {"device": "a card", "system": "", "python": ""}
    result = {"status": "ok", "machine": machine}

    def versions(result: Any) -> Any:
        code = f"open(sys.argv[3], 'w').write({json.dumps(result)!r})"
        return bench.note("versions", code, level="machine", needed=True)

    assert bench.run(versions(result), bench.note("tests")) == 1
    assert bench.order == ["versions"]
    assert list(bench.stages) == ["versions"]
    assert bench.stages["versions"]["reason"] == "our kernels do not run here: a trial gave wrong codes"
    machine["kernels_refused"] = None
    assert bench.run(versions(result), bench.note("tests")) == 0  # tried again without being asked
    assert bench.order == ["versions", "tests"]


def test_a_row_that_ends_its_process_costs_itself_alone(bench: Bench) -> None:
    assert bench.run(bench.rows("step", "a die bad c no")) == 1
    assert bench.order == ["a", "die", "bad", "c", "no"]
    results = bench.stages["step"]["results"]
    assert [results[row]["status"] for row in bench.order] == ["ok", "failed", "failed", "ok", "cannot"]
    assert bench.stages["step"]["reason"] == "die: exit code 1; bad: of bad"
    assert "the last words of die" in bench.stages["step"]["tail"]


def test_rows_of_a_killed_run_stay(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    process = gpu_check.process

    def killed(check: Any, stage: Any, until: float, **spec: Any) -> Any:
        if spec["configuration"] == "b":
            raise KeyboardInterrupt
        return process(check, stage, until, **spec)

    monkeypatch.setattr(gpu_check, "process", killed)
    with pytest.raises(KeyboardInterrupt):
        bench.run(bench.rows("step", "a b"))
    assert bench.stages["step"]["status"] == "cut"
    monkeypatch.setattr(gpu_check, "process", process)
    (bench.out / "running.json").write_text("half")
    (bench.out / ".writing-0123-gpu_check.json").write_text("half a file")
    assert bench.run(bench.rows("step", "a b")) == 0
    assert bench.order == ["b"]
    assert sorted(path.name for path in bench.out.iterdir()) == ["gpu_check.json", "gpu_check.md"]


@pytest.mark.triton
def test_every_listed_kernel_is_timed() -> None:
    """On the meta device: the launchers run at FLUX.1's shapes, their kernels do not."""
    rows = dict(_gpu_kernels.measure_launchers(CASES, torch.device("meta"), (1, 1), Card(1, gb_per_second=1e6)))
    assert {name for name, figures in rows.items() if "us" in figures} == set(CASES)
    quantized = rows["quantize per row e4m3"]
    assert quantized["launches"] == 1
    assert quantized["bytes"] == 4608 * (12288 * 3 + 4)  # bf16 read, codes and a scale for each row written
    assert quantized["percent_of_bandwidth"] == pytest.approx(quantized["bytes"] / 1e7 / quantized["us"])
    assert all(name.startswith("coat::") for name in _gpu_kernels.uncovered(CASES))


@pytest.mark.triton
def test_a_dry_run_executes_every_kind_of_stage(bench: Bench, tmp_path: Path, monkeypatch: Any) -> None:
    """The processes of stages run in this one, but for pytest's; kernels are those of one launcher."""
    monkeypatch.setattr(gpu_check, "TOY", Geometry(1, 1, 1, 4))
    monkeypatch.setitem(gpu_check.TOY_ROWS, "bf16", ("bf16",))
    mains = {
        gpu_check.WORKER: worker.main,
        gpu_check.KERNELS: _gpu_kernels.main,
        gpu_check.TRAINERS: lambda: worker.main(measure_trainer),
    }
    process = gpu_check.process

    def here(check: Any, stage: Any, until: float, **spec: Any) -> tuple[str, str]:
        if stage.command not in mains:
            return process(check, stage, until, **spec)
        spec |= {"geometry": gpu_check.TOY._asdict(), "sizes": gpu_check.TOY_SIZES, "repeats": 1, "device": "cpu"}
        (tmp_path / "spec.json").write_text(json.dumps(spec))
        monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "spec.json"), str(check.out / gpu_check.RUNNING)])
        mains[stage.command]()
        return "", ""

    monkeypatch.setattr(gpu_check, "process", here)
    monkeypatch.setattr("tests.helpers.kernel_cases.CASES", {"quantize per row e4m3": CASES["quantize per row e4m3"]})
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    tests, stages = (*gpu_check.PYTEST, "--version"), []
    for stage in gpu_check.STAGES:
        assert not stage.rows or set(stage.rows) <= named(stage.level).keys(), stage.name
        if stage.name not in ("fp8", "peers", "plan"):  # of kinds that others are of, too
            stages.append(stage._replace(command=tests) if stage.name == "tests" else stage)
    assert bench.run(*stages, dry=True, minutes=30) == 0
    assert {name: known["status"] for name, known in bench.stages.items()} == {stage.name: "ok" for stage in stages}
    results = {name: known["results"] for name, known in bench.stages.items()}
    assert "pytest" in results["tests"]["summary"]
    assert results["kernels"]["quantize per row e4m3"]["launches"] == 1
    assert min(results["bf16"]["bf16"]["measurements"][0]["samples_ms"]) > 0
    for stage, row in (("trainer", "bf16"), ("full", "full_offload")):
        (step,) = results[stage][row]["measurements"]
        assert step["figures"]["steps_per_second"] == pytest.approx(1e3 / step["samples_ms"][0])
        assert 0 < step["figures"]["predicted_peak_bytes"] < step["peak_bytes"]
    text = (bench.out / "gpu_check.md").read_text()
    assert [part for part in ("planned GB", "## Each kernel", "nothing here is a mea") if part not in text] == []
    assert sorted(path.name for path in bench.out.iterdir()) == ["gpu_check.json", "gpu_check.md", "tests.txt"]
