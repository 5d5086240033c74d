"""Every case in its own process that owns the GPU, and from their samples to results.json and results.md.

Rounds alternate their order, so that a warming card or a busy machine favours nobody. Code whose tests fail yields no
figures.

A new row of the comparison is one in `CONFIGURATIONS`. Rows of a model train the same LoRA, each as its trainer runs
it: bf16 and torchao under bf16 autocast, as accelerate's scripts do, COAT and ai-toolkit's recipes without. Rows of the
level "trainer" are for `scripts/gpu_check.py`. Nothing heavy is imported here.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ..base.errors import UserError
from ..base.files import write_file
from ..base.names import COAT_OPTIMIZER
from ..base.text import markdown_table
from .limits import Geometry, least_ms, step_work

if TYPE_CHECKING:
    from ..plan.speed import Card

OK, CANNOT, OUT_OF_MEMORY, FAILED = "ok", "cannot", "out of memory", "failed"  # how a process ends; see worker
STEP, TRAINER, OPTIMIZER = "step", "trainer", "optimizer"
LEVELS = (STEP, OPTIMIZER)
COUNT = "count"  # of operators, on no device: `count.py`
CALLS = {STEP: (3, 10), TRAINER: (5, 20), OPTIMIZER: (5, 20)}  # (warm-up, timed), on a GPU
CPU_CALLS = (1, 3)


@dataclass(frozen=True)
class Configuration:
    """One row of the comparison; without a `coat:` block it is a baseline."""

    name: str
    about: str
    levels: tuple[str, ...] = (STEP,)
    coat: Mapping[str, Any] | None = None
    checkpointing: bool = False  # torch's recomputation of every block (baselines; COAT's is in its block)
    compile_mode: str = ""  # torch.compile's, for each block separately; "" compiles nothing
    quantizer: str = ""  # of `worker.quantize_linears`
    adapters: str = "fp32"
    autocast: bool = True
    optimizer: str = "adamw_fused"
    needs: tuple[str, ...] = ()  # packages
    full: bool = False  # the transformer itself is trained, each weight updated in backward
    captures: bool = False  # a whole step is one CUDA graph of ours

    @property
    def recomputes(self) -> bool:
        """Whether every block is recomputed in backward."""
        return self.checkpointing or (self.coat or {}).get("memory", {}).get("checkpointing") == "all"

    @property
    def fp8_linears(self) -> bool:
        """Whether linears multiply in FP8 if the card can."""
        if self.coat is not None:
            return bool(self.coat.get("activation", {}).get("use_fp8", True))
        return self.quantizer.startswith("torchao")


KEPT = {"checkpointing": "none", "transposed_weights": "never"}
COPIED = {"checkpointing": "none", "transposed_weights": "always"}
RECOMPUTED = {"checkpointing": "all"}
EAGER = {"measure": "never", "cuda_graphs": "never", "kernels": "all"}
REPLAYED = {"measure": "never", "cuda_graphs": "auto", "kernels": "all"}
INT8 = {"weight": {"format": "int8"}, "activation": {"format": "int8", "grad_format": "int8"}}
TORCHAO: dict[str, Any] = {"quantizer": "torchao", "needs": ("torchao",)}
ROWWISE = {**TORCHAO, "quantizer": "torchao_rowwise"}
TOOLKIT: dict[str, Any] = {"checkpointing": True, "autocast": False, "optimizer": "adamw8bit"}


def _coat(
    name: str, about: str, *levels: str, speed: Mapping[str, Any] = EAGER, full: bool = False, **coat: Any
) -> Configuration:
    return Configuration(
        name,
        about,
        levels,
        coat={"memory": KEPT, **coat, "speed": speed, "fallback": "error"},
        autocast=False,
        optimizer=COAT_OPTIMIZER,
        full=full,
        captures=speed is REPLAYED,
    )


CONFIGURATIONS = (
    Configuration("bf16_checkpointed", "bf16, every block recomputed", checkpointing=True),
    Configuration("bf16", "bf16", (STEP, TRAINER)),
    Configuration(
        "bf16_compiled_checkpointed",
        "bf16, blocks compiled, every block recomputed",
        checkpointing=True,
        compile_mode="default",
    ),
    Configuration("bf16_compiled", "bf16, blocks compiled", compile_mode="default"),
    Configuration(
        "bf16_cudagraphs",
        "bf16, blocks compiled and recorded as CUDA graphs (reduce-overhead)",
        compile_mode="reduce-overhead",
    ),
    Configuration(
        "bf16_max_autotune",
        "bf16, blocks compiled by max-autotune, with CUDA graphs",
        compile_mode="max-autotune",
    ),
    Configuration(
        "bf16_adapters",
        "bf16 in the LoRA too, blocks compiled",
        compile_mode="default",
        adapters="bf16",
        autocast=False,
    ),
    Configuration(
        "toolkit_default",
        "optimum-quanto qfloat8 weights, every block recomputed, bitsandbytes AdamW8bit: ai-toolkit's default",
        quantizer="quanto",
        needs=("optimum.quanto", "bitsandbytes"),
        **TOOLKIT,
    ),
    Configuration(
        "toolkit_convrot8",
        "ai-toolkit's convrot8 (int8 GEMM forward), every block recomputed, bitsandbytes AdamW8bit",
        quantizer="convrot8",
        needs=("bitsandbytes",),
        **TOOLKIT,
    ),
    Configuration("torchao_float8", "torchao float8 training", **TORCHAO),
    Configuration(
        "torchao_float8_compiled", "torchao float8 training, blocks compiled", compile_mode="default", **TORCHAO
    ),
    Configuration("torchao_rowwise", "torchao float8 training, scaled per row", **ROWWISE),
    Configuration(
        "torchao_rowwise_compiled",
        "torchao float8 training, scaled per row, blocks compiled",
        compile_mode="default",
        **ROWWISE,
    ),
    _coat("coat", "COAT, fused flow, nothing recomputed", STEP, TRAINER, COUNT),
    _coat("coat_recomputed", "COAT, every block recomputed", STEP, TRAINER, memory=RECOMPUTED),
    _coat(
        "coat_per_tensor",
        "COAT, one scale for each tensor",
        STEP,
        COUNT,
        activation={"linear_granularity": "per_tensor"},
    ),
    _coat("coat_weight_only", "COAT, FP8 weights only", STEP, activation={"use_fp8": False}),
    _coat("coat_nvfp4", "COAT, weights in 4.5 bits", STEP, TRAINER, weight={"format": "nvfp4"}),
    _coat("coat_int8", "COAT, weights and inputs in INT8", STEP, TRAINER, COUNT, **INT8),
    _coat("coat_streamed", "COAT, weights in CPU memory", TRAINER, memory={**KEPT, "stream_blocks": "all"}),
    _coat("coat_transposed", "COAT, with transposed weights", STEP, TRAINER, COUNT, memory=COPIED),
    _coat("coat_cudagraphs", "COAT, the step as a CUDA graph", STEP, TRAINER, memory=COPIED, speed=REPLAYED),
    _coat("coat_picked", "COAT, what its start-up measurement picks", STEP, TRAINER, memory=COPIED, speed={}),
    _coat("full", "full fine-tuning", TRAINER, full=True),
    _coat("full_wgrad", "full fine-tuning, wgrad in e4m3", TRAINER, full=True, activation={"wgrad_format": "e4m3"}),
    _coat(
        "full_offload",
        "full fine-tuning, moments in CPU memory",
        TRAINER,
        full=True,
        optimizer={"offload": "cpu"},
    ),
    Configuration("adamw_fused", "torch AdamW, fused, fp32 moments", (OPTIMIZER,)),
    Configuration("adamw8bit", "bitsandbytes AdamW8bit", (OPTIMIZER,), needs=("bitsandbytes",)),
    Configuration("adamw_fp8_torchao", "torchao AdamWFp8", (OPTIMIZER,), needs=("torchao",)),
    Configuration(COAT_OPTIMIZER, "COAT FP8AdamW, e4m3 moments, expansion", (OPTIMIZER,)),
)


def named(level: str) -> dict[str, Configuration]:
    """The rows measured at `level`, by name, in the table's order."""
    return {row.name: row for row in CONFIGURATIONS if level in row.levels}


def rivals(level: str, name: str) -> dict[str, str]:
    """The baselines of a row: column title → name of the baseline at the same level."""
    if level == OPTIMIZER:
        return {"torch fused": "adamw_fused"}
    row = named(level)[name]
    if level == TRAINER:
        return {} if row.full else {"bf16": "bf16"}
    compiled = "bf16_compiled_checkpointed" if row.recomputes else "bf16_compiled"
    return {"bf16 + compile": compiled, "ai-toolkit": "toolkit_default"}


@dataclass(frozen=True)
class BenchOptions:
    """A benchmark run: each case in a new process in every round; without names, all configurations."""

    levels: tuple[str, ...] = LEVELS
    resolutions: tuple[int, ...] = (512, 768, 1024)
    batches: tuple[int, ...] = (1, 4)
    rounds: int = 3
    configurations: tuple[str, ...] = ()
    geometry: Geometry = field(default_factory=Geometry)
    device: str = "cpu"
    repeats: int | None = None
    timeout_s: float = 1800.0

    def cases(self) -> list[tuple[str, str, tuple[tuple[int, int], ...]]]:
        """Level, configuration and sizes of every process, rivals next to each other."""
        pairs = [((resolution, batch),) for batch in self.batches for resolution in self.resolutions]
        cases = []
        for level in self.levels:
            names = [name for name in named(level) if not self.configurations or name in self.configurations]
            for sizes in [()] if level == OPTIMIZER else pairs:
                cases += [(level, name, sizes) for name in names]
        return cases


REPOSITORY = Path(__file__).resolve().parents[3]
TESTS = ("tests/kernels", "tests/optim")
STEP_TESTS = ("tests/kernels", "tests/autograd", "tests/optim")
NEEDED = {"pytest": "pytest", "pytest_timeout": "pytest-timeout", "hypothesis": "hypothesis"}  # module: package
WORKER = f"{__package__}.worker"
STDERR_LINES = 5


def run_tests(levels: Sequence[str]) -> tuple[bool, str, str]:
    """Run the tests of these levels; raises UserError without the test runner.

    Returns whether figures may be shown; which tests ran with which result, or why none; the output of failures.
    """
    folders = [folder for folder in (STEP_TESTS if STEP in levels else TESTS) if (REPOSITORY / folder).is_dir()]
    if not folders:
        return True, "no tests were run: this is an installation without the repository", ""
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise UserError(
            f"the tests that come before figures need {', '.join(missing)}; pip install -e '{REPOSITORY}[bench]', "
            "or give --skip-tests, which the results will say"
        )
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", *folders]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    summary = (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
    passed = done.returncode == 0
    text = f"{' '.join(folders)}: {'green' if passed else 'red'} ({summary})"
    return passed, text, "" if passed else done.stdout + done.stderr


def start_worker(spec: dict[str, Any], timeout_s: float, module: str = WORKER) -> dict[str, Any]:
    """Run one worker process and return its result; a process without a result has failed."""
    with tempfile.TemporaryDirectory() as folder:
        spec_file = Path(folder) / "spec.json"
        result_file = Path(folder) / "result.json"
        spec_file.write_text(json.dumps(spec), encoding="utf-8")
        command = [sys.executable, "-m", module, str(spec_file), str(result_file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return {"status": FAILED, "reason": f"took longer than {timeout_s:g} s and was stopped; raise --timeout"}
        if result_file.exists():
            return json.loads(result_file.read_text(encoding="utf-8"))
    last = " | ".join(done.stderr.strip().splitlines()[-STDERR_LINES:])
    ended = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return {"status": FAILED, "reason": f"the process ended with {ended} and no result: {last}"}


def describe(options: BenchOptions) -> dict[str, Any]:
    """Machine, versions and limit, from a process; raises UserError where it cannot be used."""
    result = start_worker({"level": "machine", "device": options.device}, options.timeout_s)
    if result["status"] != OK:
        raise UserError(f"--device {options.device}: {result['reason']}; give a device that torch can use")
    return result["machine"]


def run_cases(options: BenchOptions, log: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield the figures of every case in every round; one without is not tried again."""
    cases, given_up = options.cases(), set()
    common = {"geometry": options.geometry._asdict(), "device": options.device, "repeats": options.repeats}
    for number in range(1, options.rounds + 1):
        for place, case in enumerate(cases if number % 2 else reversed(cases), start=1):
            if case in given_up:
                continue
            level, name, pairs = case
            spec = {"level": level, "configuration": name, "sizes": pairs}
            started = time.monotonic()
            result = start_worker(spec | common, options.timeout_s)
            seconds = time.monotonic() - started
            if result["status"] != OK:
                given_up.add(case)
            if result["status"] == OK:
                steps = []
                for each in result["measurements"]:
                    steps.append(f"{each['what']} {median(each['samples_ms']):.2f} ms")
                outcome = ", ".join(steps)
            elif result["status"] == OUT_OF_MEMORY:
                outcome = OUT_OF_MEMORY
            else:
                outcome = "cannot run here" if result["status"] == CANNOT else "FAILED"
                outcome += f": {result['reason']}"
            sizes = ", ".join(f"{resolution} px x {batch}" for resolution, batch in pairs)
            label = f"{level} {name}" + (f" at {sizes}" if sizes else "")
            count = f"{(number - 1) * len(cases) + place}/{len(cases) * options.rounds}"
            log(f"[{count}] round {number}, {label}: {outcome} ({seconds:.0f} s)")
            yield {"round": number, **spec, "seconds": seconds, **result}


MOMENTS_TRAFFIC = 2  # the state is read and written
OTHER_TRAFFIC_BYTES = 12  # fp32 parameter read and written, gradient read


@dataclass
class Result:
    """One measurement of one configuration, over all rounds."""

    level: str
    configuration: str
    what: str = ""
    resolution: int = 0
    batch: int = 0
    rounds_ms: list[float] = field(default_factory=list)  # the median of each round
    median_ms: float = 0.0  # of the rounds' medians
    peak_bytes: int = 0  # the most of any round
    percent_of_limit: float | None = None  # None if the device's rates are unknown
    speedup: dict[str, float] = field(default_factory=dict)  # title → times faster than that rival
    figures: dict[str, Any] = field(default_factory=dict)  # others, of the last round
    status: str = OK
    reason: str = ""  # why there are no figures


def summarize(runs: Sequence[Mapping[str, Any]], geometry: Geometry, card: Card | None) -> list[Result]:
    """One row per measurement and one per case without figures, in the order of first appearance."""
    rows: dict[tuple[Any, ...], Result] = {}
    for run in runs:
        level, name = run["level"], run["configuration"]
        if run["status"] != OK:
            resolution, batch = run["sizes"][0] if len(run["sizes"]) == 1 else (0, 0)
            key = (level, name, "", resolution, batch)
            rows[key] = Result(*key, status=run["status"], reason=f"{run['reason']} (round {run['round']})")
            continue
        for measured in run["measurements"]:
            key = (level, name, measured["what"], measured["resolution"], measured["batch"])
            row = rows.setdefault(key, Result(*key))
            row.rounds_ms.append(median(measured["samples_ms"]))
            row.median_ms = median(row.rounds_ms)
            row.peak_bytes = max(row.peak_bytes, measured["peak_bytes"])
            row.figures = measured["figures"]
            if card is None:
                continue
            if level == OPTIMIZER:
                traffic = row.figures["parameters"] * OTHER_TRAFFIC_BYTES + MOMENTS_TRAFFIC * row.figures["state_bytes"]
                limit_ms = traffic / card.gb_per_second / 1e6
            else:
                case = named(level)[name]
                treatment = {"recomputed": case.recomputes, "full": case.full}
                work = step_work(geometry, row.resolution, row.batch, **treatment)
                limit_ms = least_ms(card, work, fp8_linears=case.fp8_linears)
            row.percent_of_limit = 100 * limit_ms / row.median_ms
    for row in rows.values():
        for title, name in rivals(row.level, row.configuration).items() if row.status == OK else ():
            rival = rows.get((row.level, name, row.what, row.resolution, row.batch))
            if rival is not None:
                row.speedup[title] = rival.median_ms / row.median_ms
    return list(rows.values())


def write(
    folder: Path,
    options: BenchOptions,
    head: Mapping[str, Any],
    runs: Sequence[Mapping[str, Any]],
    rows: Sequence[Result],
) -> None:
    """Write results.json, with every raw sample, and results.md."""
    plain = asdict(options) | {"geometry": options.geometry._asdict()}
    tree = {**head, "options": plain, "rows": [asdict(row) for row in rows], "runs": list(runs)}
    write_file(folder / "results.json", json.dumps(tree, indent=1) + "\n")
    write_file(folder / "results.md", markdown(options, head, rows))


def markdown(options: BenchOptions, head: Mapping[str, Any], rows: Sequence[Result]) -> str:
    """The machine, and one table per level."""
    machine, size = head["machine"], options.geometry
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    limit = "not known"
    if machine["limit"] is not None:
        limit = "{:.4g} TFLOPS bf16, {:.4g} FP8, {:.4g} GB/s (published)".format(*machine["limit"])
    parts = [
        f"# Benchmark\n\n* {head['date']}: `{head['command']}`\n"
        f"* {machine['device']}, {machine['system']}, Python {machine['python']}, {versions}\n"
        f"* {size.double} double and {size.single} single blocks, {size.heads} heads of 128, rank {size.rank}, "
        f"random weights; {options.rounds} rounds, processes: one for each case\n"
        f"* limit: {limit}; peak memory: {machine['memory']}\n* tests: {head['tests']}"
    ]
    for level in options.levels:
        measured = [row for row in rows if row.level == level]
        if measured:
            parts.append(_table(level, measured))
    return "\n\n".join(parts) + "\n"


def _table(level: str, rows: Sequence[Result]) -> str:
    titles = list(dict.fromkeys(title for row in rows for title in row.speedup))
    header = ["configuration", "measured", "ms", "min .. max", "of limit", "peak GB", *(f"x {t}" for t in titles)]
    if level == TRAINER:
        header += ["planned GB", "steps a second"]
    lines = [header]
    for row in sorted(rows, key=lambda row: (row.batch, row.resolution, row.what)):
        size = f"{row.resolution} px x {row.batch}" if row.resolution else ""
        cells = [row.configuration, f"{row.what} {size}".strip()]
        if row.status != OK:
            cells += [f"{row.status}: {row.reason.replace('|', '/')}", *[""] * (len(header) - 3)]
            lines.append(cells)
            continue
        share = "–" if row.percent_of_limit is None else f"{row.percent_of_limit:.3g} %"
        spread = f"{min(row.rounds_ms):.4g} .. {max(row.rounds_ms):.4g}"
        cells += [f"{row.median_ms:.4g}", spread, share, f"{row.peak_bytes / 1e9:.2f}"]
        cells += [f"{row.speedup[title]:.2f}" if title in row.speedup else "–" for title in titles]
        if level == TRAINER:
            planned = row.figures["predicted_peak_bytes"]
            rate = row.figures["steps_per_second"]
            cells += [f"{planned / 1e9:.2f}", f"{rate:.3f}"]
        lines.append(cells)
    measured = {row.configuration for row in rows}
    about = [f"* {name}: {row.about}" for name, row in named(level).items() if name in measured]
    return "\n".join([f"## {level}", "", markdown_table(*lines), "", *about])
