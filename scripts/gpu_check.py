"""What to run first on a GPU: `python scripts/gpu_check.py --out DIR --minutes N`.

Stages in order, the most informative first, each of their rows in processes of its own. What N minutes are enough for
is printed before the first. DIR/gpu_check.json is replaced as a whole whenever a row ends, gpu_check.md says the same
in tables, output.txt has what the processes print, as they print it. A row that fails, crashes or takes too long is
recorded with the end of its output, and the next begins; what is left of a row that crashed runs in a fresh process.

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
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
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
from coat_flux.bench.limits import Geometry
from coat_flux.bench.runner import OPTIMIZER, STEP, TRAINER, BenchOptions
from coat_flux.doctor.on_gpu import KINDS, MACHINE, OPERATORS, PROVED
from coat_flux.doctor.probes import driver_names
from coat_flux.plan.speed import DEVICES

ROOT = Path(__file__).resolve().parents[1]
STATE, TABLES, OUTPUT, RESULT = "gpu_check.json", "gpu_check.md", "output.txt", "running.json"
RUNNING = "running"  # the status of a result whose process has ended before it was whole
TAIL_LENGTH = 6000  # characters
SHOWN_LENGTH = 1500  # of them on the page
TRACED_KERNELS = 40  # of a step, on the page
LEAST_SECONDS = 20.0  # a stage is not begun with less
MOST_TIMES = 3.0  # its own seconds that a stage may have where --minutes leave more
ROW_SHARE = 0.6  # of what a stage has left, for a row that is not its last
OK, FAILED, CUT = "ok", "failed", "cut"  # of a stage; cut: --minutes were over
TOY, TOY_SIZES = Geometry(1, 1, 1, 4), [[64, 1]]
KILLED_SECONDS = 10.0
NEEDED = ("torch", "triton", "diffusers", "transformers", "peft", "accelerate", *runner.NEEDED)


class Stage(NamedTuple):
    """One thing to find out.

    Attributes:
        name: on the command line and in the file.
        about: in words.
        seconds: its time limit on a GPU.
        command: arguments of Python; "{spec}" and "{result}" are JSON files it reads and writes.
        level: of the specification.
        rows: what is measured, each in a process.
        sizes: (resolution, batch) pairs.
    """

    name: str
    about: str
    seconds: float
    command: tuple[str, ...]
    level: str
    rows: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...] = ((1024, 1), (512, 1))


FILES = ("{spec}", "{result}")
PRODUCTS, WORKER = (("-m", f"coat_flux.{name}", *FILES) for name in ("doctor.on_gpu", "bench.worker"))
KERNELS, TRAINERS = ((str(Path(__file__).with_name(name)), *FILES) for name in ("_gpu_kernels.py", "_gpu_trainer.py"))
PEERS = (
    *("toolkit_default", "toolkit_convrot8", "torchao_rowwise_compiled", "torchao_float8_compiled"),
    *("bf16_adapters", "bf16_compiled_checkpointed", "bf16_max_autotune"),
)
PLANNED = ("coat_streamed", "coat_nvfp4", "coat_int8", "coat_recomputed", "coat_picked")
FULL = ("full", "full_wgrad", "full_offload")
TESTS = (
    *(f"tests/kernels/test_{name}.py" for name in ("rules", "attention", "mlp", "norm", "qkv", "lora")),
    *(f"tests/kernels/test_{name}.py" for name in ("quantize", "scaled_mm", "adamw")),
    *("tests/optim/test_capturable.py", "tests/unit/test_memory.py", "tests/integration/test_gpu_step.py"),
)
LARGE = ((1024, 1),)
STAGES = (  # half an hour in all
    Stage("products", "versions; products' values and times", 120, PRODUCTS, "products", (MACHINE, *KINDS)),
    Stage("operators", "operators against their references", 120, PRODUCTS, "operators", (OPERATORS,)),
    Stage("blocks", "a block's gradients against bf16's", 60, KERNELS, "blocks", PROVED),
    Stage("rates", "attention, copy, launch", 60, KERNELS, "rates", ("attention", "memory")),
    Stage(
        "trace", "a step by kernel: COAT, and bf16 compiled", 180, KERNELS, "trace", ("coat", "bf16_compiled"), LARGE
    ),
    Stage("kernels", "each kernel against its reference, and its time", 120, KERNELS, "kernels", ("calls",)),
    Stage("trainer", "steps of the stand-alone trainer", 150, TRAINERS, TRAINER, ("coat_cudagraphs", "coat", "bf16")),
    Stage("plan", "peak memory against its plan", 180, TRAINERS, TRAINER, PLANNED, ((768, 1), (512, 4))),
    Stage("fp8", "the whole model in FP8", 120, WORKER, STEP, ("coat_transposed", "coat_cudagraphs")),
    Stage("bf16", "the whole model in bf16", 150, WORKER, STEP, ("bf16_compiled", "bf16_cudagraphs", "bf16")),
    Stage("full", "full fine-tuning", 150, TRAINERS, TRAINER, FULL, LARGE),
    Stage("optimizer", "optimizers alone", 30, WORKER, OPTIMIZER, ("coat_fp8_adamw", "adamw_fused", "adamw8bit")),
    Stage("peers", "others' FP8 and int8, and the strongest bf16", 180, WORKER, STEP, PEERS),
    Stage("tests", "the gpu tests", 180, KERNELS, "tests", TESTS),
)
TOY_ROWS = {  # of a dry run, which compiles nothing
    "products": (MACHINE, "per_row"),
    "blocks": ("coat",),
    "trace": ("bf16",),
    "trainer": ("bf16",),
    "plan": ("coat_recomputed",),
    "fp8": ("coat_transposed",),
    "bf16": ("bf16",),
    "full": ("full_offload",),
    "optimizer": ("adamw_fused",),
    "peers": ("toolkit_default",),
    "tests": TESTS[:1],
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

    def results(self, name: str) -> dict[str, Any]:
        """What a stage has found, by row."""
        found: dict[str, Any] = self.state["stages"].get(name, {}).get("results", {})
        return found

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
        write_file(self.out / TABLES, page(self))


def forecast(check: Check, left: Sequence[Stage]) -> str:
    """What the time is enough for, as lines."""
    seconds, lines = check.deadline - time.monotonic(), [f"{len(left)} stages, with their limits:"]
    for stage in left:
        limit = min(seconds, stage.seconds)
        seconds -= limit
        enough = f"{limit:4.0f} s" if limit >= LEAST_SECONDS else "if time is left"
        lines.append(f"  {stage.name:10} {enough}  {stage.about} ({len(check.rows(stage))} processes)")
    return "\n".join(lines)


def run(check: Check, again: Sequence[str] = ()) -> int:
    """Run what is left, in order, and return the exit code.

    Args:
        check: the run.
        again: names of stages to repeat; "failed" stands for those that failed.
    """
    for leftover in (*check.out.glob(f"{TEMP_PREFIX}*"), *check.out.glob(RESULT)):
        leftover.unlink()
    for stage in check.stages:
        if stage.name in again or ("failed" in again and check.status(stage) == FAILED):
            check.state["stages"].pop(stage.name, None)
    left = [stage for stage in check.stages if check.status(stage) in (None, CUT)]
    print(forecast(check, left), flush=True)
    while left:
        stage, seconds = left[0], check.deadline - time.monotonic()
        if seconds < LEAST_SECONDS:
            print(f"{stage.name}: no time is left; the same command again goes on here", flush=True)
            break
        spare = seconds / sum(other.seconds for other in left)
        run_stage(check, stage, min(seconds, stage.seconds * min(max(spare, 1.0), MOST_TIMES)))
        left.pop(0)
    statuses = {stage.name: check.status(stage) or "not run" for stage in check.stages}
    print("\n" + "\n".join(f"{name:10} {status}" for name, status in statuses.items()))
    return 0 if set(statuses.values()) == {OK} else 1


def run_stage(check: Check, stage: Stage, limit: float) -> None:
    """Run a stage and record it."""
    print(f"{stage.name}: {stage.about} (at most {limit:.0f} s)", flush=True)
    started = time.monotonic()
    cut = CUT if limit < stage.seconds else FAILED  # what it means to take longer
    status, reason, tail, results = run_rows(check, stage, started + limit, cut)
    seconds = time.monotonic() - started
    check.record(stage, status, reason, seconds=seconds, tail=tail, results=results)
    print(f"  {status} in {seconds:.0f} s" + (f": {reason}" if reason else ""), flush=True)


def run_rows(check: Check, stage: Stage, until: float, cut: str) -> tuple[str, str, str, dict[str, Any]]:
    """Run each row, and record the stage after it as cut, for a run that is killed.

    Returns:
        (status, reason, tail of the output of what ended badly, results by row).
    """
    results, tail = dict(check.results(stage.name)), ""
    left = [row for row in check.rows(stage) if row not in results]
    for number, row in enumerate(left, start=1):
        seconds = until - time.monotonic()
        row_until = time.monotonic() + seconds * (1.0 if number == len(left) else ROW_SHARE)
        result, output = run_row(check, stage, row, row_until)
        if result["status"] not in (OK, "cannot"):
            tail = output
        if time.monotonic() >= until and cut == CUT and result.get("late"):
            return CUT, f"--minutes were over in {row}", tail, results
        results[row] = result
        if row == MACHINE:
            found = result.get("items", {}).get(MACHINE, {})
            check.state["machine"] = {**found, "drivers": driver_names()} if "device" in found else None
        check.record(stage, CUT, "the run was killed", results=results)
    failed = {row: result for row, result in results.items() if result["status"] == FAILED}
    reason = "; ".join(f"{row}: {result['reason']}" for row, result in failed.items())
    return FAILED if failed else OK, reason, tail, results


def run_row(check: Check, stage: Stage, row: str, until: float) -> tuple[dict[str, Any], str]:
    """Run a row's process, after one that ended in an item another one; return the result and the end of the output."""
    items: dict[str, Any] = {}
    machine = check.state.get("machine") or {}
    spec = {"level": stage.level, "configuration": row, "device_name": machine.get("device")}
    while True:
        seconds = until - time.monotonic()
        ended, output = process(check, stage, until, **spec, items=items, seconds=seconds)
        result = _read(check.out / RESULT)
        late = time.monotonic() >= until
        if not result:
            return {"status": FAILED, "reason": ended or "the process left no result", "late": late}, output
        if result["status"] != RUNNING:
            return result, output
        item, items = result["reason"], result["items"]
        items.setdefault(item, {"error": ended})
        if late:
            return {"status": FAILED, "reason": f"{ended} in {item}", "items": items, "late": late}, output


def process(check: Check, stage: Stage, until: float, **spec: Any) -> tuple[str, str]:
    """Run one process of a stage, with what it starts.

    Returns:
        (how it ended badly, else nothing; the end of its output).
    """
    if check.dry:
        spec |= {"geometry": TOY._asdict(), "sizes": TOY_SIZES, "repeats": 1, "device": "cpu"}
    else:
        spec |= {"geometry": Geometry()._asdict(), "sizes": stage.sizes, "repeats": None, "device": "cuda"}
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT), str(ROOT / "extensions")]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
    if check.dry:
        environment["TRITON_INTERPRET"] = "1"
    with tempfile.TemporaryDirectory() as folder, (check.out / OUTPUT).open("a+b") as output:
        output.write(f"\n--- {stage.name}, {spec['configuration']} ---\n".encode())
        output.flush()
        begun = output.tell()
        files = {"{spec}": str(Path(folder) / "spec.json"), "{result}": str(check.out / RESULT)}
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
        output.seek(begun)
        text = output.read().decode(errors="replace")
    return ended, text[-TAIL_LENGTH:]


def _read(file: Path) -> dict[str, Any]:
    """What a process has written; nothing where it has not come so far."""
    result: dict[str, Any] = {}
    with suppress(FileNotFoundError, ValueError):  # ValueError: killed while it wrote
        result = json.loads(file.read_text(encoding="utf-8"))
    file.unlink(missing_ok=True)
    return result


# --- the page ---


def page(check: Check) -> str:
    """All that is known, as Markdown; a table that cannot be made says why."""
    parts = ["# A first run on a GPU" + (", dry: nothing here is a measurement" if check.dry else "")]
    for table in (stages_table, machine_table, constants_table, items_table, trace_table, benchmark_tables):
        try:
            parts.append(table(check))
        except Exception:  # the rest of the page is worth having
            parts.append(f"{table.__name__}:\n\n```\n{traceback.format_exc()}```")
    return "\n\n".join(filter(None, parts)) + "\n"


def _grid(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table under its title; empty without rows."""
    lines = [" | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in row) for row in rows]
    marks = [" | ".join(head), " | ".join(["---"] * len(head))]
    return "\n".join([f"## {title}", "", *(f"| {line} |" for line in [*marks, *lines])]) if lines else ""


def stages_table(check: Check) -> str:
    """What became of each stage, with the end of what failed printed."""
    rows = []
    for stage in check.stages:
        known = check.state["stages"].get(stage.name, {})
        cells = known.get("status", "not run"), f"{known.get('seconds', 0):.0f}", known.get("reason", "")
        rows.append([stage.name, stage.about, *cells])
    parts = [_grid("Stages", ("stage", "about", "status", "s", "reason"), rows)]
    for name, known in check.state["stages"].items():
        if known.get("tail"):
            parts.append(f"The output of {name} ends:\n\n```\n{known['tail'].strip()[-SHOWN_LENGTH:]}\n```")
    return "\n\n".join(parts)


def machine_table(check: Check) -> str:
    """Versions, card and driver."""
    return "\n".join(f"* {key}: {value}" for key, value in (check.state.get("machine") or {}).items() if value)


def constants_table(check: Check) -> str:
    """What the measured rates put in place of assumptions."""
    card = DEVICES.get((check.state.get("machine") or {}).get("device", ""))
    if card is None:
        return ""
    from _gpu_kernels import constants

    products = {kind: result.get("items", {}) for kind, result in check.results("products").items()}
    rates = {name: row for result in check.results("rates").values() for name, row in result.get("items", {}).items()}
    return "\n".join(f"* for bench/limits.py: {line}" for line in constants(products, rates, card))


def items_table(check: Check) -> str:
    """Operators, blocks, rates, kernels and tests, of each stage the slowest first."""
    parts = []
    for stage in check.stages:
        found = {}
        for row, result in check.results(stage.name).items():
            for name, figures in result.get("items", {}).items() if row != MACHINE else ():
                found[f"{row}, {name}" if stage.name == "products" else name] = figures
        if stage.level == "tests" and found:
            counts = Counter(figures.get("outcome", "failed") for figures in found.values())
            parts.append(f"Tests: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}")
            found = {name: figures for name, figures in found.items() if "error" in figures}
        keys = list(dict.fromkeys(key for figures in found.values() for key in figures))
        order = sorted(found.items(), key=lambda item: ("error" not in item[1], -item[1].get("us", 0.0)))
        rows = []
        for name, figures in order:
            cells = (figures.get(key, "") for key in keys)
            rows.append([name, *(f"{cell:.4g}" if isinstance(cell, float) else cell for cell in cells)])
        parts.append(_grid(f"Stage {stage.name}", ("", *keys), rows))
    return "\n\n".join(filter(None, parts))


def trace_table(check: Check) -> str:
    """A step's kernels, the longest first."""
    parts = []
    for row, result in check.results("trace").items():
        for measured in result.get("measurements", []):
            spent = measured["kernels"]
            total = sum(us for _, us in spent.values())
            rows = [(name[:100], calls, f"{us / 1e3:.3f}") for name, (calls, us) in [*spent.items()][:TRACED_KERNELS]]
            rows.append(("all", sum(calls for calls, _ in spent.values()), f"{total / 1e3:.3f}"))
            title = f"A step of {row}, {measured['resolution']} px, {measured['samples_ms'][0]:.1f} ms"
            parts.append(_grid(title, ("kernel", "calls", "ms"), rows))
    return "\n\n".join(parts)


def benchmark_tables(check: Check) -> str:
    """The rows of the benchmark."""
    machine, runs = check.state.get("machine"), []
    for stage in check.stages:
        for row, result in check.results(stage.name).items() if stage.level in (STEP, TRAINER, OPTIMIZER) else ():
            sizes = TOY_SIZES if check.dry else stage.sizes
            runs.append({"round": 1, "level": stage.level, "configuration": row, "sizes": sizes, **result})
    if not runs or machine is None:
        return ""
    geometry = TOY if check.dry else Geometry()
    options = BenchOptions((STEP, TRAINER, OPTIMIZER), rounds=1, geometry=geometry, device=machine["device_type"])
    head = {"date": check.state["date"], "command": check.state["command"], "machine": machine, "tests": "their stage"}
    return runner.markdown(options, head, runner.summarize(runs, geometry, DEVICES.get(machine["device"])))


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
    parser.add_argument("--minutes", type=float, default=30.0, metavar="N", help="for this call (default: 30)")
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
