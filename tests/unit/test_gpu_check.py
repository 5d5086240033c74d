"""`scripts/gpu_check.py`: what is recorded of stages that end well, badly or not at all, and where a rerun goes on."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coat_flux.bench import worker
from coat_flux.bench.runner import named
from coat_flux.doctor import on_gpu
from scripts import _gpu_kernels, gpu_check
from scripts._gpu_trainer import measure_trainer

ROOT = Path(__file__).resolve().parents[2]
# stands for a process of a row, which its name describes: some end it, "hang" waits, "items" ends in its first item
ROWS = """
import json, os, signal, sys, time
spec = json.load(open(sys.argv[1]))
row, items = spec["configuration"], spec["items"]
def write(status, reason):
    json.dump({"status": status, "reason": reason, "items": items, "measurements": []}, open(sys.argv[2], "w"))
open(sys.argv[3], "a").write(row + " ")
if row.startswith("raise"):
    raise ValueError("the last words of " + row)
if row.startswith("kill"):
    os.kill(os.getpid(), signal.SIGKILL)
if row.startswith("hang"):
    time.sleep(60)
if row.startswith("half"):
    open(sys.argv[2], "w").write('{"status": "o')
    sys.exit(3)
if row.startswith("items") and not items:
    write("running", "first")
    os.kill(os.getpid(), signal.SIGSEGV)
write("cannot" if row.startswith("no") else "failed" if row.startswith("bad") else "ok", "of " + row)
"""


class Bench:
    """Stages whose rows note that they ran, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.out, self.ran = folder / "out", folder / "ran"

    def stage(self, name: str, rows: str, seconds: float = 30, level: str = "") -> Any:
        command = ("-c", ROWS, "{spec}", "{result}", str(self.ran))
        return gpu_check.Stage(name, "", seconds, command, level, tuple(rows.split()))

    def run(self, *stages: Any, again: tuple[str, ...] = (), minutes: float = 5.0, dry: bool = False) -> int:
        self.ran.write_text("")
        return gpu_check.run(gpu_check.open_check(self.out, dry, minutes, stages), again)

    @property
    def order(self) -> list[str]:
        return self.ran.read_text().split()

    @property
    def stages(self) -> dict[str, Any]:
        return json.loads((self.out / "gpu_check.json").read_text())["stages"]

    @property
    def page(self) -> str:
        return (self.out / "gpu_check.md").read_text()


def test_stages_name_rows_that_exist_and_take_half_an_hour_together():
    assert sum(stage.seconds for stage in gpu_check.STAGES) <= 30 * 60
    for stage in gpu_check.STAGES:
        level = "step" if stage.name == "trace" else stage.level
        rows = set() if stage.command == gpu_check.KERNELS and level != "step" else set(stage.rows)
        assert stage.command == gpu_check.PRODUCTS or rows <= named(level).keys(), stage.name


def test_the_gpu_tests_are_those_of_the_repository():
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "kernels").glob("test_*.py")}
    for path in (ROOT / "tests").rglob("test_*.py"):
        if "mark.gpu" in path.read_text(encoding="utf-8") and path != Path(__file__):
            files.add(str(path.relative_to(ROOT)))
    without_gpu = {f"tests/kernels/test_{name}.py" for name in ("compile", "dispatch", "proof")}
    assert files - without_gpu == set(gpu_check.TESTS)


def test_a_broken_row_costs_itself_alone_and_the_page_says_so(tmp_path):
    """An exception, a hang, a killed child, a child killed while it writes; what is left of a row runs in another."""
    bench = Bench(tmp_path)
    stages = [bench.stage(name, f"{name} after") for name in ("raise", "kill", "half", "bad")]
    stages.insert(1, bench.stage("hang", "hang after", seconds=5))
    assert bench.run(*stages, bench.stage("last", "items no")) == 1
    assert " ".join(bench.order) == "raise after hang after kill after half after bad after items items no"
    found = bench.stages
    assert found["last"]["results"]["items"]["items"] == {"first": {"error": "signal 11"}}
    assert {name: known["status"] for name, known in found.items() if known["status"] != "failed"} == {"last": "ok"}
    reasons = {name: known["reason"] for name, known in found.items()}
    assert reasons["raise"] == "raise: exit code 1"
    assert reasons["hang"] == "hang: took longer than its time"
    assert (reasons["kill"], reasons["half"]) == ("kill: signal 9", "half: exit code 3")
    for text in (found["raise"]["tail"], bench.page, (bench.out / "output.txt").read_text()):
        assert "ValueError: the last words of raise" in text
    for name, reason in reasons.items():
        assert f"| {name} |  | {found[name]['status']} |" in bench.page
        assert reason in bench.page
    assert bench.run(*stages, bench.stage("last", "items no")) == 1  # what failed is not tried again by itself
    assert bench.order == []
    mended = [bench.stage(stage.name, "a") for stage in stages]
    assert bench.run(*mended, bench.stage("last", "items no"), again=("failed",)) == 0
    assert bench.order == ["a"] * len(mended)
    with pytest.raises(ValueError, match="holds a run without --dry-run"):
        bench.run(*mended, dry=True)


@pytest.mark.triton
def test_a_dry_run_executes_every_kind_of_stage(tmp_path, monkeypatch):
    """The processes of stages run in this one, but for the tests'; kernels are those of one launcher."""
    from tests.helpers.kernel_cases import CASES

    bench = Bench(tmp_path)
    monkeypatch.setattr(on_gpu, "SHAPES", ((1, 1),))
    mains = {
        gpu_check.PRODUCTS: lambda: worker.main(on_gpu.run),
        gpu_check.WORKER: worker.main,
        gpu_check.KERNELS: _gpu_kernels.main,
        gpu_check.TRAINERS: lambda: worker.main(partial(worker.run, measure=measure_trainer)),
    }

    def here(check: Any, stage: Any, until: float, **spec: Any) -> tuple[str, str]:
        spec |= {"geometry": gpu_check.TOY._asdict(), "sizes": gpu_check.TOY_SIZES, "repeats": 1, "device": "cpu"}
        (tmp_path / "spec.json").write_text(json.dumps(spec))
        monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "spec.json"), str(check.out / gpu_check.RESULT)])
        mains[stage.command]()
        return "", ""

    monkeypatch.setattr(gpu_check, "process", here)
    monkeypatch.setattr("tests.helpers.kernel_cases.CASES", {"rotate fp32": CASES["rotate fp32"]})
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    left_out = ("bf16", "fp8", "peers", "plan", "optimizer", "tests")  # of kinds that others are of, too
    stages = [stage for stage in gpu_check.STAGES if stage.name not in left_out]
    assert bench.run(*stages, dry=True, minutes=30) == 0
    assert {name: known["status"] for name, known in bench.stages.items()} == {stage.name: "ok" for stage in stages}
    results = {name: known["results"] for name, known in bench.stages.items()}
    assert min(found["db"] for found in results["products"]["per_row"]["items"].values()) > 50
    assert results["kernels"]["calls"]["items"]["rotate fp32"]["launches"] == 1
    assert results["blocks"]["coat"]["items"]["coat"]["lowest"] > 10
    (traced,) = results["trace"]["bf16"]["measurements"]
    assert traced["kernels"]["aten::mm"][0] > 10
    for stage, row in (("trainer", "bf16"), ("full", "full_offload")):
        (step,) = results[stage][row]["measurements"]
        assert step["figures"]["steps_per_second"] == pytest.approx(1e3 / step["samples_ms"][0])
        assert 0 < step["figures"]["predicted_peak_bytes"] < step["peak_bytes"]
    wanted = ("planned GB", "## Stage kernels", "A step of bf16", "per_row, 128 -> 128", "nothing here is a mea")
    assert [part for part in wanted if part not in bench.page] == []
