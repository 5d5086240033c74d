"""Runs: `coat-flux train`, `rewind`, `report`, `watch`, `compare`; and studies of several: `verify`, `sweep`."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..base.interrupts import keep_streams
from ..base.text import columns
from ..config.job import JobConfig
from .common import EXIT_FAILED, UsageError, add_command, number, positive, show_warnings

ASIDE = "newer saves are moved aside, nothing is deleted"


def add_parsers(commands: Any) -> None:
    """Add the commands of this module."""
    runner = add_command(commands, "train", train, "train with the stand-alone engine", of_config=True)
    runner.add_argument("--watch", action="store_true", help="serve the live page of `coat-flux watch` meanwhile")
    runner.add_argument("--verbose", action="store_true", help="show on the console what goes to coat/log.txt, too")
    runner.add_argument("--from-step", metavar="N", type=int, help=f"resume from the state of step N; {ASIDE}")
    back = add_command(commands, "rewind", rewind, "bring a run back to an earlier state")
    page = add_command(commands, "report", report, "one HTML page on a run")
    live = add_command(commands, "watch", watch, "a live page on a run")
    grid = add_command(commands, "compare", compare, "draw with each save of a run: which one to take")
    for parser in (back, page, live, grid):
        parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of a run: <training_folder>/<name>")
    back.add_argument("--to-step", metavar="N", type=int, required=True, help=f"a kept state; {ASIDE}")
    page.add_argument("--out", metavar="FILE", type=Path, help="file to write (default: RUN_DIR/coat/report.html)")
    listens = "listen there, for other machines to see (default: 127.0.0.1, this one only)"
    for parser in (runner, live):
        parser.add_argument("--host", metavar="ADDRESS", help=listens)
        parser.add_argument("--port", type=int, help="default: the first free one from 8675 on")
    grid.add_argument("loras", metavar="LORA", nargs="*", type=Path, help="files to compare in place of the saves")
    grid.add_argument("--saves", type=numbers, default=[], metavar="N,N", help="their steps (default: up to six saves)")
    grid.add_argument("--prompts", action="append", default=[], metavar="TEXT", help="default: the config's first four")
    grid.add_argument("--strengths", type=numbers, default=[1.0], metavar="X,X", help="of LoRAs (default: 1.0)")
    pixels = number(16, 8192, 16)
    for name, kind in (("seed", number(0)), ("steps", positive), ("width", pixels), ("height", pixels)):
        grid.add_argument(f"--{name}", type=kind, metavar="N", help="of the pictures (default: the config's)")
    grid.add_argument("--out", type=Path, metavar="DIR", help="default: RUN_DIR/coat/compare")
    pairs = add_command(commands, "verify", verify, "is COAT lossless on your data?", of_config=True)
    pairs.add_argument("--seeds", type=positive, default=3, metavar="N", help="pairs of runs (default: 3)")
    pairs.add_argument("--steps", type=positive, metavar="N", help="of each run (default: the config's)")
    held_out = pairs.add_mutually_exclusive_group()
    held_out.add_argument(
        "--hold-out",
        type=positive,
        metavar="K",
        help="photos kept out of training (default: validation.hold_out, else a tenth)",
    )
    held_out.add_argument(
        "--validation", type=Path, metavar="DIR", help="photos and captions to validate on; then none is held out"
    )
    pairs.add_argument(
        "--every", type=positive, metavar="N", help="steps between points of the curves (default: steps / 20)"
    )
    trials = add_command(commands, "sweep", sweep, "try settings, ranked by held-out loss", of_config=True)
    trials.add_argument(
        "--set",
        dest="axes",
        action="append",
        required=True,
        metavar="KEY=VALUES",
        help="a key of the process entry and its values, as train.lr=1e-4,3e-4; once for each key; network.linear "
        "takes linear_alpha along",
    )
    trials.add_argument("--jobs", type=positive, default=1, metavar="N", help="trials at a time (default: 1)")
    trials.add_argument("--seeds", type=positive, default=1, metavar="K", help="runs of each combination (default: 1)")
    chosen = trials.add_mutually_exclusive_group()
    chosen.add_argument(
        "--random", type=positive, metavar="N", help="N combinations, drawn at random (default: all of them)"
    )
    chosen.add_argument("--tpe", type=positive, metavar="N", help="N combinations, chosen by Optuna's TPE sampler")
    for parser, name in ((pairs, "verify"), (trials, "sweep")):
        text = f"folder of the runs (default: <training_folder>/<name>_{name})"
        parser.add_argument("--out", type=Path, metavar="DIR", help=text)


def numbers(text: str) -> list[float]:
    """Argument type: finite numbers with commas between them, each once."""
    values = list(dict.fromkeys(map(float, text.split(","))))
    if not all(map(math.isfinite, values)):
        raise ValueError
    return values


def train(args: argparse.Namespace) -> None:
    """Train a LoRA with the stand-alone engine, or continue its run; several GPUs with `accelerate launch`."""
    keep_streams()
    if not args.watch and (args.host is not None or args.port is not None):
        raise UsageError("--host, --port: are for the live page; add --watch, or remove them")
    job = JobConfig.load(args.config, name=args.name)
    if args.verbose:
        job = replace(job, logging=replace(job.logging, verbose=True))
    show_warnings()
    if args.watch and os.environ.get("RANK", "0") == "0":
        serve(job.folder, args.host, args.port)
    from ..trainers.standalone.trainer import COATTrainer

    COATTrainer(job).train(from_step=args.from_step)


def rewind(args: argparse.Namespace) -> None:
    """Make a run resume from an earlier state at its next start, bit for bit; also a run of ai-toolkit."""
    from ..saves.commit import newest_set
    from ..saves.repair import go_back, run_lock

    if newest_set(args.run_dir) is None:
        rule = "has no saved state" if args.run_dir.is_dir() else "is not a folder"
        raise UsageError(f"RUN_DIR={args.run_dir}: {rule}; give <training_folder>/<name> of a run")
    with run_lock(args.run_dir):
        print("\n".join(go_back(args.run_dir, args.to_step)))


def report(args: argparse.Namespace) -> None:
    """Write one self-contained HTML page on a run, of this trainer or of ai-toolkit, that ended or is still going.

    Loss, learning rate, speed, samples over time, memory by phase against the plan, precision of FP8 by layer with what
    to change, guard, what was asked for and what it got, versions, config, LoRA files.
    """
    from ..pages.report import write_report

    print(f"wrote {write_report(args.run_dir, args.out)}")


def watch(args: argparse.Namespace) -> None:
    """Serve a page on a run while it trains, here or inside ai-toolkit: progress, loss, samples, log.

    Its buttons sample, save and stop. Ctrl+C ends the page; the run goes on.
    """
    from ..pages.run import RunFolder

    RunFolder(args.run_dir)
    serve(args.run_dir, args.host, args.port)
    threading.Event().wait()


def serve(run_dir: Path, host: str | None, port: int | None) -> None:
    """Start the live page and print where it is."""
    from ..pages.live import LOOPBACK, Watch

    page = Watch(run_dir.resolve(), LOOPBACK if host is None else host)
    print(f"watch: {page.start(port)}", flush=True)
    if not page.is_private:
        print("watch: whoever reaches this address sees the samples; the part after # is needed to sample, save, stop")


def compare(args: argparse.Namespace) -> None:
    """Draw the config's samples without a LoRA and with each save of a run, all with the same noise, into one page.

    The base model is in FP8 as in the run, of this trainer or of ai-toolkit (FLUX.1 and FLUX.2). The save that is best
    on held-out photos is marked. Start the same command again to resume after an interruption: pictures that are
    there are not drawn again. Writes compare.html, grid.png and cells/; `coat-flux report` shows them, too.
    """
    show_warnings()
    from ..pages.compare import COMPARE, choose_columns, draw_comparison, job_of, make_index
    from ..pages.run import RunFolder

    run = RunFolder(args.run_dir)
    asked = {"seed": args.seed, "sample_steps": args.steps, "width": args.width, "height": args.height}
    job = job_of(run, args.prompts, {key: value for key, value in asked.items() if value is not None})
    columns, lines = choose_columns(run, args.loras, args.saves)
    for line in lines:
        print(line)
    index = make_index(job, columns, args.strengths, lines)
    try:
        print(f"page: {draw_comparison(job, index, args.out or run.path / COMPARE, partial(print, flush=True))}")
    except KeyboardInterrupt:
        print(f"To go on: {shlex.join(['coat-flux', *args.given])}")
        raise


def verify(args: argparse.Namespace) -> int:
    """Train with and without COAT from several seeds on the config's own photos, and judge whether COAT loses anything.

    Some photos are not trained on; the loss on them is compared with bf16's, and the gap with what another seed does to
    bf16. Start the same command again to resume after an interruption, or with more --seeds to add some. Writes
    verdict.json and report.html. Exit code 0: lossless; 1: not, or undecided.
    """
    job = JobConfig.load(args.config, name=args.name)
    show_warnings()
    from ..study import compare, open_study

    study = open_study(
        job,
        steps=args.steps,
        hold_out=args.hold_out,
        validation=args.validation,
        every=args.every,
        folder=args.out,
    )
    try:
        verdict = compare.verify(study, seeds=args.seeds)
    except KeyboardInterrupt:
        print("To resume verify, start the same command again")
        raise
    for note in verdict.notes:
        print(note)
    print(f"report: {study.folder / compare.REPORT_FILE}\n{verdict.judgement.sentence}")
    return 0 if verdict.judgement.outcome == compare.LOSSLESS else EXIT_FAILED


def sweep(args: argparse.Namespace) -> int:
    """Train the config with each combination of the given values, and rank them by the loss on photos held out.

    Each trial is a run folder of its own. Start the same command again to resume after an interruption, or with more
    values, seeds or random combinations to add some; what is finished stays. Writes report.html. Exit code 0: all
    trials are finished; 1: one failed.
    """
    keep_streams()
    job = JobConfig.load(args.config, name=args.name)
    show_warnings()
    from ..study.sweep import FINISHED, Sweep, find_axis, noise_text, rank, ranking_rows, sentence_of, write_sweep_page

    folder = args.out or job.folder.with_name(f"{job.folder.name}_sweep")
    study = Sweep(
        args.config,
        [find_axis(text) for text in args.axes],
        range(job.seed, job.seed + args.seeds),
        folder,
        name=args.name,
        most=args.tpe or args.random,
        tpe=args.tpe is not None,
    )
    try:
        trials = study.run(jobs=args.jobs, log=partial(print, flush=True), on_result=lambda: write_sweep_page(study))
    except KeyboardInterrupt:
        print(f"To go on: {shlex.join(['coat-flux', *args.given])}\nreport so far: {folder / 'report.html'}")
        raise
    ranked, spread = rank(trials)
    print("\n".join(["", *columns(ranking_rows(ranked, spread)), "", noise_text(spread)]))
    print(f"report: {write_sweep_page(study)}\n{sentence_of(ranked, spread, study.total)[0]}")
    return 0 if all(run.state == FINISHED for run in study.runs) else EXIT_FAILED
