"""`coat-flux bench`: arguments, progress and exit code of the benchmark harness."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from ..base.files import write_file
from ..bench.limits import Geometry
from ..bench.runner import COUNT, FAILED, LEVELS, STEP, BenchOptions, named
from .common import EXIT_FAILED, UsageError, add_command, number, positive, show_warnings, writing

RESOLUTION_STEP = 16
COUNTED_BY_DEFAULT = "coat_transposed"  # as a card runs it that has the memory


def add_parsers(commands: Any) -> None:
    """Add the commands of this module."""
    bench = add_command(commands, "bench", run, "speed and memory against bf16 and others")
    names = list(dict.fromkeys(name for level in LEVELS for name in named(level)))
    bench.add_argument("--level", choices=(*LEVELS, COUNT, "all"), default="all", help="count: no timing, no GPU")
    pixels = number(RESOLUTION_STEP, step=RESOLUTION_STEP)
    bench.add_argument("--resolution", nargs="+", type=pixels, default=BenchOptions.resolutions, metavar="PX")
    bench.add_argument("--batch", nargs="+", type=positive, default=BenchOptions.batches, metavar="N")
    bench.add_argument(
        "--rounds", type=positive, default=BenchOptions.rounds, help="processes of each case (default: 3)"
    )
    bench.add_argument(
        "--configs", nargs="+", choices=names, default=[], metavar="NAME", help=f"only these: {', '.join(names)}"
    )
    for size, value in Geometry()._asdict().items():
        bench.add_argument(f"--{size}", type=positive, default=value, metavar="N", help=f"default: {value}")
    bench.add_argument("--repeats", type=positive, metavar="N", help="timed calls in a process (default: by level)")
    bench.add_argument("--timeout", type=positive, default=1800, metavar="S", help="of a process (default: 1800)")
    bench.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    bench.add_argument("--out", type=Path, default=Path("output") / "bench", metavar="DIR")
    bench.add_argument("--skip-tests", action="store_true", help="do not run the matching tests first")
    bench.add_argument("--verbose", action="store_true", help="with --level count: every operator of a block")


def run(args: argparse.Namespace) -> int:
    """Measure training steps and optimizers at FLUX.1-dev's size with random weights.

    COAT, bf16, torch.compile, optimum-quanto, torchao, bitsandbytes and ai-toolkit's convrot8, each in a process of its
    own, in interleaved rounds; the matching tests run first, without them green there are no figures. Downloads
    nothing. Writes results.json and .md. `--level count` times nothing: it counts the operators of a step on shapes
    alone, models what they take on known cards, and writes count.json.
    """
    if args.level == COUNT:
        return _count(args)
    from ..bench import runner
    from ..plan.speed import DEVICES

    device = args.device
    if device is None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    options = BenchOptions(
        levels=LEVELS if args.level == "all" else (args.level,),
        resolutions=tuple(args.resolution),
        batches=tuple(args.batch),
        rounds=args.rounds,
        configurations=tuple(args.configs),
        geometry=Geometry(args.double, args.single, args.heads, args.rank),
        device=device,
        repeats=args.repeats,
        timeout_s=args.timeout,
    )
    if not options.cases():
        raise UsageError(f"--configs {' '.join(args.configs)}: none is measured at --level {args.level}")
    if args.device is None and device == "cpu" and STEP in options.levels:
        rule = "torch finds no CUDA GPU here, and steps of FLUX.1-dev's size are not for a CPU"
        remedy = "write --device cpu --double 1 --single 1, or --level optimizer"
        raise UsageError(f"--device: {rule}; {remedy}")
    count = len(options.cases()) * options.rounds
    most = datetime.timedelta(seconds=count * args.timeout)
    print(f"{count} processes, at most {most}; --configs, --level: fewer", flush=True)
    passed, tests, output = True, "not run: --skip-tests", ""
    if not args.skip_tests:
        passed, tests, output = runner.run_tests(options.levels)
    print(f"tests: {tests}", flush=True)
    if not passed:
        print(f"{output}\nerror: no figures from code whose tests fail; fix it first", file=sys.stderr)
        return EXIT_FAILED
    with writing(f"--out {args.out}"):  # before hours of measuring
        args.out.mkdir(parents=True, exist_ok=True)
    machine = runner.describe(options)
    card = DEVICES.get(machine["device"])
    print(machine["device"], flush=True)
    head = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["coat-flux", *args.given]),
        "tests": tests,
        "machine": machine,
    }
    runs: list[dict[str, Any]] = []
    rows = []
    for result in runner.run_cases(options, lambda line: print(line, flush=True)):
        runs.append(result)
        rows = runner.summarize(runs, options.geometry, card)
        runner.write(args.out, options, head, runs, rows)
    print(f"\n{runner.markdown(options, head, rows)}\nwrote {args.out}: results.json, results.md")
    return EXIT_FAILED if any(row.status == FAILED for row in rows) else 0


def _count(args: argparse.Namespace) -> int:
    name = args.configs[0] if args.configs else COUNTED_BY_DEFAULT
    known = named(COUNT)
    if len(args.configs) > 1 or name not in known:
        raise UsageError(f"--configs {' '.join(args.configs)}: --level count takes one of {', '.join(known)}")
    if importlib.util.find_spec("triton") is None:
        raise UsageError("--level count runs the launchers of Triton kernels: pip install triton")
    from ..bench import count
    from ..config.coat import COATConfig

    with writing(f"--out {args.out}"):
        args.out.mkdir(parents=True, exist_ok=True)
    show_warnings()
    config = COATConfig.from_dict(dict(known[name].coat or {}))
    counts = count.count(config, Geometry(args.double, args.single, args.heads, args.rank), args.resolution)
    path = args.out / "count.json"
    write_file(path, json.dumps(counts, indent=1) + "\n")
    print(f"{known[name].about}; {count.report(counts, args.verbose)}\n\nwrote {path}")
    return 0
