"""`coat-flux train`, `rewind`, `report` and `watch`: a run, and pages on it."""

from __future__ import annotations

import argparse
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.streams import keep_streams
from .common import UsageError, add_command, add_config, load_job, show_warnings

ASIDE = "newer saves are moved aside, nothing is deleted"


def add_parsers(commands: Any) -> None:
    """Add the commands of this module."""
    runner = add_command(commands, "train", train, "train with the stand-alone engine")
    add_config(runner)
    runner.add_argument("--watch", action="store_true", help="serve the live page of `coat-flux watch` meanwhile")
    runner.add_argument("--verbose", action="store_true", help="show on the console what goes to coat/log.txt, too")
    runner.add_argument("--from-step", metavar="N", type=int, help=f"resume from the state of step N; {ASIDE}")
    back = add_command(commands, "rewind", rewind, "bring a run back to an earlier state")
    page = add_command(commands, "report", report, "one HTML page on a run")
    live = add_command(commands, "watch", watch, "a live page on a run")
    for parser in (back, page, live):
        parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of a run: <training_folder>/<name>")
    back.add_argument("--to-step", metavar="N", type=int, required=True, help=f"a kept state; {ASIDE}")
    page.add_argument("--out", metavar="FILE", type=Path, help="file to write (default: RUN_DIR/coat/report.html)")
    listens = "listen there, for other machines to see (default: 127.0.0.1, this one only)"
    for parser in (runner, live):
        parser.add_argument("--host", metavar="ADDRESS", help=listens)
        parser.add_argument("--port", type=int, help="default: the first free one from 8675 on")


def train(args: argparse.Namespace) -> None:
    """Train a LoRA with the stand-alone engine, or continue its run; several GPUs with `accelerate launch`."""
    keep_streams()
    if not args.watch and (args.host is not None or args.port is not None):
        raise UsageError("--host, --port: are for the live page; add --watch, or remove them")
    job = load_job(args)
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
        raise UsageError(f"RUN_DIR={args.run_dir}: has no saved state; give <training_folder>/<name> of a run")
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
    from ..pages.live import Watch

    page = Watch(run_dir.resolve(), *([] if host is None else [host]))
    print(f"watch: {page.start(port)}", flush=True)
    if not page.is_private:
        print("watch: whoever reaches this address sees the samples; the part after # is needed to sample, save, stop")
