"""What to run first on a GPU: `python scripts/gpu_check.py --out DIR --minutes N`.

Stages in order, the most informative first, each in processes of its own with a time limit. DIR/gpu_check.json is
replaced as a whole whenever a stage ends, gpu_check.md says the same in tables, tests.txt is pytest's output. A stage
that fails or takes too long is recorded with the end of its output, and the next begins; the first one stops the run
where our kernels do not work on this GPU, since everything after it would time something else.

The same command again goes on where it stopped, also after it was killed; --again repeats a stage. --dry-run runs the
code of every stage on a CPU at toy size. Exit code 0: all stages are done; 1: one failed, or has not been run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

sys.path.append(str(Path(__file__).resolve().parents[1]))  # coat_core and coat_flux need not be installed
sys.path.append(str(Path(__file__).resolve().parents[1] / "extensions"))

from _gpu_stages import PYTEST, STAGES, WORKER, Stage

from coat_flux.base.files import TEMP_PREFIX, write_file
from coat_flux.bench import report
from coat_flux.bench.configurations import RATES, BenchOptions
from coat_flux.bench.limits import Geometry, Limit

ROOT = Path(__file__).resolve().parents[1]
STATE, TABLES, TESTS = "gpu_check.json", "gpu_check.md", "tests.txt"
RUNNING = "running-"  # and the stage's name: what its process has measured so far
MAX_FILES = 8
TAIL_LENGTH = 6000  # characters
LEAST_SECONDS = 20.0  # a stage is not begun with less
MOST_TIMES = 2.0  # its own seconds that a stage may have where --minutes leave more
OK, FAILED, CUT = "ok", "failed", "cut"  # of a stage; cut: --minutes were over
TOY, TOY_SIZES = Geometry(1, 1, 2, 4), [[64, 1]]
KILLED_SECONDS = 10.0
NEEDED = (
    "torch",
    "triton",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "pytest",
    "pytest_timeout",
    "hypothesis",
)
OPERATOR_CALLS = 5, 20  # of each kernel: for warm-up, and timed


@dataclass
class Check:
    """A run.

    Attributes:
        out: the folder it writes to.
        dry: on a CPU at toy size.
        deadline: of `time.monotonic`.
        state: what `STATE` holds: when, command, commit, machine, and of each stage status, reason, commit, seconds,
            tail of the output and results.
        stages: in order.
    """

    out: Path
    dry: bool
    deadline: float
    state: dict[str, Any]
    stages: Sequence[Stage] = STAGES

    def status(self, stage: Stage) -> str | None:
        """`OK`, `FAILED` or `CUT`; None where it has not been run."""
        found: str | None = self.state["stages"].get(stage.name, {}).get("status")
        return found

    def results(self, stage: Stage) -> dict[str, Any]:
        """What a stage has measured so far, by row."""
        return dict(self.state["stages"].get(stage.name, {}).get("results", {}))

    def record(self, stage: Stage, status: str, reason: str, **found: Any) -> None:
        """Put what is known of a stage into the files."""
        known = {"status": status, "reason": reason, "commit": self.state["commit"], **found}
        self.state["stages"][stage.name] = known
        write_file(self.out / STATE, json.dumps(self.state, indent=1) + "\n")
        write_file(self.out / TABLES, tables(self))

    def running(self, stage: Stage) -> Path:
        """Where the stage's process writes what it has measured."""
        return self.out / f"{RUNNING}{stage.name}.json"


def run(check: Check, again: Sequence[str] = ()) -> int:
    """Run what is left, in order.

    Args:
        check: the run.
        again: names of stages to repeat; "failed" stands for those that failed.

    Returns:
        The exit code.
    """
    for stage in check.stages:
        keep_what_was_measured(check, stage)
        failed = check.status(stage) == FAILED and (stage.needed or "failed" in again)
        if stage.name in again or failed:
            check.state["stages"].pop(stage.name, None)
    left = [stage for stage in check.stages if check.status(stage) in (None, CUT)]
    while left:
        stage, seconds = left[0], check.deadline - time.monotonic()
        if seconds < LEAST_SECONDS:
            print(f"{stage.name}: no time is left; the same command again goes on here", flush=True)
            break
        spare = seconds / sum(other.seconds for other in left)
        run_stage(check, stage, min(seconds, stage.seconds * min(max(spare, 1.0), MOST_TIMES)))
        if stage.needed and check.status(stage) != OK:
            print("stopped: nothing that follows would be worth its time", flush=True)
            break
        left.pop(0)
    statuses = {stage.name: check.status(stage) or "not run" for stage in check.stages}
    print("\n" + "\n".join(f"{name:10} {status}" for name, status in statuses.items()))
    return 0 if set(statuses.values()) == {OK} else 1


def keep_what_was_measured(check: Check, stage: Stage) -> None:
    """Take over the rows of a stage that was killed, with this script, while it ran."""
    file = check.running(stage)
    if stage.rows and file.exists():
        check.record(stage, CUT, "the run was killed", results=check.results(stage) | _read(file))
    file.unlink(missing_ok=True)
    for left_behind in check.out.glob(f"{TEMP_PREFIX}*"):
        left_behind.unlink()


def run_stage(check: Check, stage: Stage, limit: float) -> None:
    """Run a stage and record it."""
    print(f"{stage.name}: {stage.about} (at most {limit:.0f} s)", flush=True)
    started = time.monotonic()
    cut = CUT if limit < stage.seconds else FAILED  # what it means to take longer
    run_what = run_rows if stage.rows else run_command
    status, reason, tail, results = run_what(check, stage, started + limit, cut)
    seconds = time.monotonic() - started
    check.record(stage, status, reason, seconds=seconds, tail=tail, results=results)
    print(f"  {status} in {seconds:.0f} s" + (f": {reason}" if reason else ""), flush=True)


def run_rows(check: Check, stage: Stage, until: float, cut: str) -> tuple[str, str, str, dict[str, Any]]:
    """Measure rows in one process; where that ends at a row, those after it in another.

    Returns:
        (status, reason, tail of the output of what ended badly, results by row).
    """
    results, tail = check.results(stage), ""
    rows = (stage.toy_rows or stage.rows) if check.dry else stage.rows
    while left := [row for row in rows if row not in results]:
        ended, output = process(check, stage, until, level=stage.level, configurations=left)
        found = _read(check.running(stage))
        results |= found
        missing = [row for row in left if row not in results]
        tail = output if ended else tail
        if ended and missing:
            if time.monotonic() < until:
                missing = missing[:1]
            elif cut == CUT:
                return CUT, f"--minutes were over in {missing[0]}", tail, results
            results |= {row: {"status": FAILED, "reason": ended} for row in missing}
        elif not found:
            results |= {row: {"status": FAILED, "reason": "the process left no result"} for row in missing}
    failed = {row: found for row, found in results.items() if found["status"] == FAILED}
    reason = "; ".join(f"{row}: {found['reason']}" for row, found in failed.items())
    return FAILED if failed else OK, reason, tail, results


def run_command(check: Check, stage: Stage, until: float, cut: str) -> tuple[str, str, str, dict[str, Any]]:
    """Run a stage that is one process; likewise."""
    machine = check.state.get("machine") or {}
    ended, output = process(check, stage, until, level=stage.level, limit=machine.get("limit"))
    results = _read(check.running(stage))
    if stage.command[: len(PYTEST)] == PYTEST:
        write_file(check.out / TESTS, output)
        results["summary"] = (output.strip().splitlines() or ["no output"])[-1].strip("= ")
    if stage.level == "machine":
        check.state["machine"] = results.get("machine")
        refused = (results.get("machine") or {}).get("kernels_refused")
        ended = ended or results.get("reason", "") or (f"our kernels do not run here: {refused}" if refused else "")
    wrong = {name: found["error"] for name, found in results.items() if isinstance(found, dict) and "error" in found}
    ended = ended or "; ".join(f"{name}: {error}" for name, error in wrong.items())
    status = OK if not ended else cut if time.monotonic() >= until else FAILED
    return status, ended, output[-TAIL_LENGTH:] if ended else "", results


def process(check: Check, stage: Stage, until: float, **spec: Any) -> tuple[str, str]:
    """Run one process of a stage, with what it starts.

    Returns:
        (how it ended badly, else nothing; its output).
    """
    size: dict[str, Any] = {
        "geometry": asdict(TOY),
        "sizes": TOY_SIZES,
        "repeats": 1,
        "device": "cpu",
        "training_only": True,
    }
    if not check.dry:
        size |= {"geometry": asdict(Geometry()), "sizes": stage.sizes, "repeats": None, "device": "cuda"}
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT), str(ROOT / "extensions")]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
    if check.dry:
        environment["TRITON_INTERPRET"] = "1"
    check.running(stage).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "output").open("w+b") as output:
        files = {"{spec}": str(Path(folder) / "spec.json"), "{result}": str(check.running(stage))}
        Path(files["{spec}"]).write_text(json.dumps({**size, **spec}), encoding="utf-8")
        command = [sys.executable, *(files.get(part, part) for part in stage.command or WORKER)]
        started = psutil.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = started.wait(max(until - time.monotonic(), 0.0))
            ended = f"signal {-code}" if code < 0 else f"exit code {code}" if code else ""
        except psutil.TimeoutExpired:
            ended = "took longer than its time"
        finally:
            if started.is_running():
                for one in [*started.children(recursive=True), started]:
                    one.kill()
                with suppress(psutil.TimeoutExpired):  # a driver may keep it
                    started.wait(KILLED_SECONDS)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return ended, text if stage.command[: len(PYTEST)] == PYTEST else text[-TAIL_LENGTH:]


def _read(file: Path) -> dict[str, Any]:
    """What a process has written; nothing where it has not come so far."""
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file.unlink(missing_ok=True)
    return found


def tables(check: Check) -> str:
    """All that is known, as Markdown."""
    parts = ["# A first run on a GPU" + (", dry: nothing here is a measurement" if check.dry else "")]
    lines = ["| stage | status | s | reason |", "|---|---|---|---|"]
    runs: list[dict[str, Any]] = []
    for stage in check.stages:
        found = check.state["stages"].get(stage.name, {})
        reason = str(found.get("reason") or found.get("results", {}).get("summary", "")).replace("|", "/")
        lines.append(f"| {stage.name} | {found.get('status', 'not run')} | {found.get('seconds', 0):.0f} | {reason} |")
        sizes = TOY_SIZES if check.dry else stage.sizes
        for row, result in found.get("results", {}).items() if stage.rows else ():
            runs.append({"round": 1, "level": stage.level, "configuration": row, "sizes": sizes, **result})
    parts.append("\n".join(lines))
    machine = check.state.get("machine")
    if machine is not None:
        limit, geometry = Limit(**machine["limit"]), TOY if check.dry else Geometry()
        shown = {
            key: machine[key]
            for key in ("attention", "attention_kernels", "fp8_products", "kernels_refused")
            if key in machine
        }
        parts += [f"* {key}: {value}" for key, value in shown.items()]
        rows = report.summarize(runs, geometry, limit)
        parts += report.measured_rates(rows, limit)
        rows = [row for row in rows if row.level != RATES]
        levels = tuple(dict.fromkeys(stage.level for stage in check.stages if stage.rows and stage.level != RATES))
        options = BenchOptions(levels, rounds=1, geometry=geometry, device=machine["device_type"])
        tests = check.state["stages"].get("tests", {}).get("results", {}).get("summary", "not run")
        head = {
            "date": check.state["date"],
            "command": check.state["command"],
            "tests": tests,
            "machine": machine,
            "processes": "one for the rows of a stage",
        }
        parts.append(report.markdown(options, head, runs, rows))
        parts += report.peaks_against_plan(rows)
    kernels = check.state["stages"].get("operators", {}).get("results", {})
    if kernels:
        parts.append(report.operators_table(kernels))
    return "\n\n".join(parts) + "\n"


def time_operators(spec_file: Path, result_file: Path) -> None:
    """The process of the stage "operators": every launcher that the list of cases has."""
    import torch
    from _kernel_cases import CASES

    from coat_flux.bench import operators

    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    device = torch.device("meta" if spec["device"] == "cpu" else spec["device"])
    found: dict[str, Any] = {name: {"note": "no case in _kernel_cases.py"} for name in operators.uncovered(CASES)}
    for name, figures in operators.measure_operators(CASES, device, OPERATOR_CALLS, Limit(**spec["limit"])):
        found[name] = figures
        write_file(result_file, json.dumps(found))


def _commit() -> str:
    if shutil.which("git") is None:
        return ""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def open_check(out: Path, dry: bool, minutes: float, stages: Sequence[Stage] = STAGES) -> Check:
    """Begin a run, or go on with the one in this folder.

    Raises:
        ValueError: the folder holds another kind of run, or other files.
    """
    out.mkdir(parents=True, exist_ok=True)
    names = {STATE, TABLES, TESTS, *(f"{RUNNING}{stage.name}.json" for stage in stages)}
    others = [path.name for path in out.iterdir() if path.name not in names and not path.name.startswith(TEMP_PREFIX)]
    if len(others) + 4 > MAX_FILES:
        raise ValueError(f"--out {out}: holds other files ({', '.join(sorted(others)[:3])}, ...); give an empty folder")
    state: dict[str, Any] = {"dry": dry, "stages": {}}
    if (out / STATE).exists():
        state = json.loads((out / STATE).read_text(encoding="utf-8"))
    if state["dry"] != dry:
        raise ValueError(f"--out {out}: holds a run {'with' if state['dry'] else 'without'} --dry-run; give another")
    out = out.resolve()  # processes run in the repository
    state |= {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "command": shlex.join(sys.argv)}
    state["commit"] = _commit()
    return Check(out, dry, time.monotonic() + 60 * minutes, state, stages)


def main() -> int:
    """Run the stages; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "output" / "gpu_check", metavar="DIR")
    parser.add_argument("--minutes", type=float, default=45.0, metavar="N", help="for this call (default: 45)")
    names = [stage.name for stage in STAGES]
    parser.add_argument("--again", nargs="+", default=[], choices=[*names, "failed"], metavar="STAGE", help="repeat")
    parser.add_argument("--dry-run", action="store_true", help="every stage's code on a CPU, at toy size")
    parser.add_argument("--operators", nargs=2, type=Path, metavar=("SPEC", "RESULT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.operators:
        time_operators(*options.operators)
        return 0
    try:
        check = open_check(options.out, options.dry_run, options.minutes)
    except ValueError as error:
        parser.error(str(error))
    missing = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        parser.error(f"these packages are missing: {', '.join(missing)}; pip install -e '{ROOT}[bench]'")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the process of the stage is ended, too
    return run(check, options.again)


if __name__ == "__main__":
    sys.exit(main())
