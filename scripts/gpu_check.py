"""What to run first on a GPU: `python scripts/gpu_check.py --out DIR --minutes N`.

Stages in order, the most informative first, each of their rows in a process of its own. DIR/gpu_check.json is replaced
as a whole whenever a row or a stage ends, gpu_check.md says the same in tables, tests.txt is pytest's output. A stage
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import psutil

sys.path.append(str(Path(__file__).resolve().parents[1]))  # coat_core and coat_flux need not be installed
sys.path.append(str(Path(__file__).resolve().parents[1] / "extensions"))

from coat_flux.base.files import TEMP_PREFIX, write_file
from coat_flux.bench import runner
from coat_flux.bench.configurations import OPTIMIZER, STEP, TRAINER, BenchOptions
from coat_flux.bench.limits import Geometry
from coat_flux.plan.speed import DEVICES, Card

ROOT = Path(__file__).resolve().parents[1]
STATE, TABLES, TESTS, RUNNING = "gpu_check.json", "gpu_check.md", "tests.txt", "running.json"
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


class Stage(NamedTuple):
    """One thing to find out.

    Attributes:
        name: on the command line and in the file.
        about: in words.
        seconds: its time limit on a GPU.
        command: arguments of Python; "{spec}" and "{result}" are JSON files it may read and write.
        level: of the specification.
        rows: names in `bench.configurations`, each a process; none: the command is one process.
        sizes: (resolution, batch) pairs.
        needed: where it fails, nothing else is run.
    """

    name: str
    about: str
    seconds: float
    command: tuple[str, ...]
    level: str = ""
    rows: tuple[str, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ((1024, 1), (512, 1))
    needed: bool = False


PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu")
WORKER = ("-m", "coat_flux.bench.worker", "{spec}", "{result}")
KERNELS, TRAINERS = (
    (str(Path(__file__).with_name(name)), "{spec}", "{result}") for name in ("_gpu_kernels.py", "_gpu_trainer.py")
)
FULL = ("full", "full_wgrad", "full_offload")
STAGES = (
    Stage("versions", "versions, choices, our kernels' self-test", 180, KERNELS, level="machine", needed=True),
    Stage("tests", "the gpu tests", 420, (*PYTEST, "tests/kernels", "tests/integration/test_gpu_step.py")),
    Stage("kernels", "products, attention, copy, launch, and each kernel of ours", 390, KERNELS, level="kernels"),
    Stage("fp8", "the whole model in FP8", 300, WORKER, STEP, ("coat_transposed", "coat_cudagraphs")),
    Stage("bf16", "the whole model in bf16", 360, WORKER, STEP, ("bf16_compiled", "bf16_cudagraphs", "bf16")),
    Stage(
        "peers",
        "others' FP8 and int8, and the strongest bf16",
        600,
        WORKER,
        STEP,
        (
            *("toolkit_default", "toolkit_convrot8", "torchao_rowwise_compiled", "torchao_float8_compiled"),
            *("bf16_adapters", "bf16_compiled_checkpointed", "bf16_max_autotune"),
        ),
    ),
    Stage(
        "trainer",
        "steps of the stand-alone trainer",
        300,
        TRAINERS,
        TRAINER,
        ("coat_transposed", "coat_cudagraphs", "bf16"),
    ),
    Stage(
        "plan",
        "peak memory of the trainer against its plan",
        420,
        TRAINERS,
        TRAINER,
        ("coat_streamed", "coat_nvfp4", "coat_int8", "coat_recomputed", "coat_picked"),
        sizes=((768, 1), (512, 4)),
    ),
    Stage("full", "full fine-tuning: wgrad in FP8, moments in CPU memory", 300, TRAINERS, TRAINER, FULL, ((1024, 1),)),
    Stage("optimizer", "optimizers alone", 120, WORKER, OPTIMIZER, ("coat_fp8_adamw", "adamw_fused", "adamw8bit")),
)
TOY_ROWS = {  # of a dry run, which compiles nothing
    "bf16": ("bf16_cudagraphs", "bf16"),
    "peers": ("toolkit_default",),
    "trainer": ("bf16",),
    "plan": ("coat_recomputed",),
    "full": ("full_offload",),
}


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
        status: str | None = self.state["stages"].get(stage.name, {}).get("status")
        return status

    def rows(self, stage: Stage) -> tuple[str, ...]:
        """The rows it measures."""
        return TOY_ROWS.get(stage.name, stage.rows) if self.dry else stage.rows

    def record(self, stage: Stage, status: str, reason: str, **known: Any) -> None:
        """Put the state of a stage into the files."""
        self.state["stages"][stage.name] = {
            "status": status,
            "reason": reason,
            "commit": self.state["commit"],
            **known,
        }
        write_file(self.out / STATE, json.dumps(self.state, indent=1) + "\n")
        write_file(self.out / TABLES, tables(self))


def run(check: Check, again: Sequence[str] = ()) -> int:
    """Run what is left, in order, and return the exit code.

    Args:
        check: the run.
        again: names of stages to repeat; "failed" stands for those that failed.
    """
    for leftover in (*check.out.glob(f"{TEMP_PREFIX}*"), *check.out.glob(RUNNING)):
        leftover.unlink()
    for stage in check.stages:
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
    """Measure each row in a process, and record the stage after it as cut, for a run that is killed.

    Returns:
        (status, reason, tail of the output of what ended badly, results by row).
    """
    results, tail = dict(check.state["stages"].get(stage.name, {}).get("results", {})), ""
    for row in check.rows(stage):
        if row in results:
            continue
        ended, output = process(check, stage, until, level=stage.level, configuration=row)
        result = _read(check.out / RUNNING)
        if not result:
            tail = output
            if time.monotonic() >= until and cut == CUT:
                return CUT, f"--minutes were over in {row}", tail, results
            result = {"status": FAILED, "reason": ended or "the process left no result"}
        results[row] = result
        check.record(stage, CUT, "the run was killed", results=results)
    failed = {row: result for row, result in results.items() if result["status"] == FAILED}
    reason = "; ".join(f"{row}: {result['reason']}" for row, result in failed.items())
    return FAILED if failed else OK, reason, tail, results


def run_command(check: Check, stage: Stage, until: float, cut: str) -> tuple[str, str, str, dict[str, Any]]:
    """Run a stage that is one process; likewise."""
    machine = check.state.get("machine") or {}
    ended, output = process(check, stage, until, level=stage.level, device_name=machine.get("device"))
    results = _read(check.out / RUNNING)
    if stage.command[: len(PYTEST)] == PYTEST:
        write_file(check.out / TESTS, output)
        results["summary"] = (output.strip().splitlines() or ["no output"])[-1].strip("= ")
    if stage.level == "machine":
        check.state["machine"] = results.get("machine")
        refused = (results.get("machine") or {}).get("kernels_refused")
        ended = ended or results.get("reason", "") or (f"our kernels do not run here: {refused}" if refused else "")
    wrong = {name: found["error"] for name, found in results.items() if isinstance(found, dict) and "error" in found}
    ended = ended or "; ".join(f"{name}: {error}" for name, error in wrong.items())
    if not ended:
        return OK, "", "", results
    return cut if time.monotonic() >= until else FAILED, ended, output[-TAIL_LENGTH:], results


def process(check: Check, stage: Stage, until: float, **spec: Any) -> tuple[str, str]:
    """Run one process of a stage, with what it starts.

    Returns:
        (how it ended badly, else nothing; its output).
    """
    if check.dry:
        spec |= {"geometry": TOY._asdict(), "sizes": TOY_SIZES, "repeats": 1, "device": "cpu"}
    else:
        spec |= {"geometry": Geometry()._asdict(), "sizes": stage.sizes, "repeats": None, "device": "cuda"}
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT), str(ROOT / "extensions")]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
    if check.dry:
        environment["TRITON_INTERPRET"] = "1"
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "output").open("w+b") as output:
        files = {"{spec}": str(Path(folder) / "spec.json"), "{result}": str(check.out / RUNNING)}
        Path(files["{spec}"]).write_text(json.dumps(spec), encoding="utf-8")
        command = [sys.executable, *(files.get(part, part) for part in stage.command)]
        started = psutil.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            code, ended = started.wait(max(until - time.monotonic(), 0.0)), ""
            if code:
                ended = f"signal {-code}" if code < 0 else f"exit code {code}"
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
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file.unlink(missing_ok=True)
    return result


def tables(check: Check) -> str:
    """All that is known, as Markdown."""
    parts = ["# A first run on a GPU" + (", dry: nothing here is a measurement" if check.dry else "")]
    lines = ["| stage | status | s | reason |", "|---|---|---|---|"]
    runs: list[dict[str, Any]] = []
    for stage in check.stages:
        known = check.state["stages"].get(stage.name, {})
        reason = str(known.get("reason") or known.get("results", {}).get("summary", "")).replace("|", "/")
        lines.append(f"| {stage.name} | {known.get('status', 'not run')} | {known.get('seconds', 0):.0f} | {reason} |")
        sizes = TOY_SIZES if check.dry else stage.sizes
        for row, result in known.get("results", {}).items() if stage.rows else ():
            runs.append({"round": 1, "level": stage.level, "configuration": row, "sizes": sizes, **result})
    parts.append("\n".join(lines))
    machine = check.state.get("machine")
    if machine is None:
        return "\n\n".join(parts) + "\n"
    card = DEVICES.get(machine["device"])
    geometry = TOY if check.dry else Geometry()
    keys = ("attention", "attention_kernels", "fp8_products", "kernels_refused")
    parts.append("\n".join(f"* {key}: {machine[key]}" for key in keys if key in machine))
    options = BenchOptions((STEP, TRAINER, OPTIMIZER), rounds=1, geometry=geometry, device=machine["device_type"])
    head = {
        "date": check.state["date"],
        "command": check.state["command"],
        "tests": check.state["stages"].get("tests", {}).get("results", {}).get("summary", "not run"),
        "machine": machine,
    }
    parts.append(runner.markdown(options, head, runner.summarize(runs, geometry, card)))
    kernels = check.state["stages"].get("kernels", {}).get("results", {})
    if kernels:
        parts.append(kernels_table(kernels, card))
    return "\n\n".join(parts) + "\n"


def kernels_table(kernels: Mapping[str, Mapping[str, Any]], card: Card | None) -> str:
    """What replaces the assumptions in `bench/limits.py`, and every kernel, the slowest first, as Markdown."""
    from _gpu_kernels import constants

    lines = ["## Each kernel", ""]
    if card is not None:
        lines += [f"* for bench/limits.py: {line}" for line in constants(kernels, card)]
    lines += ["", "| kernel | us | of bandwidth | TFLOP/s | host us | launches |", "|---|---|---|---|---|---|"]
    for name, row in sorted(kernels.items(), key=lambda item: -item[1].get("us", 0.0)):
        if "us" not in row:
            reason = row.get("error") or row["note"]
            lines.append(f"| {name} | {reason.replace('|', '/')} | | | | |")
            continue
        share, rate = (f"{row[key]:.0f}" if key in row else "" for key in ("percent_of_bandwidth", "tflops"))
        lines.append(
            f"| {name} | {row['us']:.1f} | {share} | {rate} | {row['host_us']:.1f} | {row.get('launches', '')} |"
        )
    return "\n".join(lines)


def open_check(out: Path, dry: bool, minutes: float, stages: Sequence[Stage] = STAGES) -> Check:
    """Begin a run, or go on with the one in this folder.

    Raises:
        ValueError: the folder holds another kind of run.
    """
    out.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {"dry": dry, "stages": {}}
    if (out / STATE).exists():
        state = json.loads((out / STATE).read_text(encoding="utf-8"))
    if state["dry"] != dry:
        raise ValueError(f"--out {out}: holds a run {'with' if state['dry'] else 'without'} --dry-run; give another")
    state |= {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "command": shlex.join(sys.argv)}
    state["commit"] = ""
    if shutil.which("git") is not None:
        command = ["git", "rev-parse", "HEAD"]
        state["commit"] = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return Check(out.resolve(), dry, time.monotonic() + 60 * minutes, state, stages)  # processes run in the repository


def main() -> int:
    """Run the stages; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "output" / "gpu_check", metavar="DIR")
    parser.add_argument("--minutes", type=float, default=45.0, metavar="N", help="for this call (default: 45)")
    names = [stage.name for stage in STAGES]
    parser.add_argument("--again", nargs="+", default=[], choices=[*names, "failed"], metavar="STAGE", help="repeat")
    parser.add_argument("--dry-run", action="store_true", help="every stage's code on a CPU, at toy size")
    options = parser.parse_args()
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
