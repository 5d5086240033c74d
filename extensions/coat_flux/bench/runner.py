"""Run every case in its own process that owns the GPU; code whose tests fail yields no figures.

Rounds alternate their order, so that a warming card or a busy machine favours nobody.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ..base.errors import UserError
from .configurations import CANNOT, FAILED, OK, OUT_OF_MEMORY, STEP, BenchOptions

REPOSITORY = Path(__file__).resolve().parents[3]
TESTS = ("tests/kernels", "tests/optim")
STEP_TESTS = ("tests/kernels", "tests/autograd", "tests/optim")
NEEDED = {"pytest": "pytest", "pytest_timeout": "pytest-timeout", "hypothesis": "hypothesis"}  # module: package
WORKER = f"{__package__}.worker"
STDERR_LINES = 5
Start = Callable[[dict[str, Any], float], dict[str, Any]]


class MachineError(UserError, RuntimeError):
    """The device cannot be used at all."""


class TestResult(NamedTuple):
    """Whether figures may be shown; which tests ran with which result, or why none; the output of failures."""

    passed: bool
    text: str
    output: str = ""


def run_tests(levels: Sequence[str], repository: Path | None = None) -> TestResult:
    """Run this repository's tests of these levels; raises UserError if the test runner is not installed."""
    root = repository or REPOSITORY
    folders = [folder for folder in (STEP_TESTS if STEP in levels else TESTS) if (root / folder).is_dir()]
    if not folders:
        return TestResult(True, "no tests were run: this is an installation without the repository")
    listed = " ".join(folders)
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise UserError(
            f"the tests that come before figures need {', '.join(missing)}; pip install -e '{root}[bench]', "
            "or give --skip-tests, which the results will say"
        )
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", *folders]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    summary = (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
    if done.returncode:
        return TestResult(False, f"{listed}: red ({summary})", done.stdout + done.stderr)
    return TestResult(True, f"{listed}: green ({summary})")


def start_worker(spec: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Run one worker process and return its result; a process without a result has failed."""
    with tempfile.TemporaryDirectory() as folder:
        spec_file, result_file = Path(folder) / "spec.json", Path(folder) / "result.json"
        spec_file.write_text(json.dumps(spec), encoding="utf-8")
        command = [sys.executable, "-m", WORKER, str(spec_file), str(result_file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return {"status": FAILED, "reason": f"took longer than {timeout_s:g} s and was stopped; raise --timeout"}
        if result_file.exists():
            result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
            return result
    last = " | ".join(done.stderr.strip().splitlines()[-STDERR_LINES:])
    ended = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return {"status": FAILED, "reason": f"the process ended with {ended} and no result: {last}"}


def describe(options: BenchOptions, start: Start = start_worker) -> dict[str, Any]:
    """Machine, versions and physical limit, from a separate process; raises MachineError if the device is unusable."""
    result = start({"level": "machine", "device": options.device}, options.timeout_s)
    if result["status"] != OK:
        raise MachineError(f"--device {options.device}: {result['reason']}; give a device that torch can use")
    machine: dict[str, Any] = result["machine"]
    return machine


def run_cases(
    options: BenchOptions, log: Callable[[str], None], start: Start = start_worker
) -> Iterator[dict[str, Any]]:
    """Measure every case in every round and yield its figures; a case without figures is not tried again."""
    cases, given_up = options.cases(), set()
    common = {"geometry": options.geometry._asdict(), "device": options.device, "repeats": options.repeats}
    for number in range(1, options.rounds + 1):
        for place, case in enumerate(cases if number % 2 else reversed(cases), start=1):
            if case in given_up:
                continue
            started = time.monotonic()
            result = start({**asdict(case), **common}, options.timeout_s)
            seconds = time.monotonic() - started
            if result["status"] != OK:
                given_up.add(case)
            sizes = ", ".join(f"{resolution} px x {batch}" for resolution, batch in case.sizes)
            label = f"{case.level} {case.configuration}" + (f" at {sizes}" if sizes else "")
            count = f"{(number - 1) * len(cases) + place}/{len(cases) * options.rounds}"
            log(f"[{count}] round {number}, {label}: {_outcome(result)} ({seconds:.0f} s)")
            yield {"round": number, **asdict(case), "seconds": seconds, **result}


def _outcome(result: dict[str, Any]) -> str:
    if result["status"] == OK:
        return ", ".join(f"{each['what']} {median(each['samples_ms']):.2f} ms" for each in result["measurements"])
    if result["status"] == OUT_OF_MEMORY:
        return OUT_OF_MEMORY
    return f"{'cannot run here' if result['status'] == CANNOT else 'FAILED'}: {result['reason']}"
