"""`coat-flux train`: the stand-alone engine; `coat-flux rewind`: a run of either trainer goes back to a state."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import Any

from ..base.streams import keep_streams
from .common import UsageError, add_command, add_config, add_run_dir, load_job, show_warnings
from .report import add_address, serve

ASIDE = "newer saves are moved aside, nothing is deleted"


def add_parser(commands: Any) -> None:
    """Add both commands to the parser of `coat-flux`."""
    train = add_command(commands, "train", run, "train with the stand-alone engine")
    add_config(train)
    train.add_argument("--watch", action="store_true", help="serve the live page of `coat-flux watch` meanwhile")
    add_address(train)
    train.add_argument("--verbose", action="store_true", help="show on the console what goes to coat/log.txt, too")
    train.add_argument("--from-step", metavar="N", type=int, help=f"resume from the state of step N; {ASIDE}")
    back = add_command(commands, "rewind", rewind, "bring a run back to an earlier state")
    add_run_dir(back)
    back.add_argument("--to-step", metavar="N", type=int, required=True, help=f"a kept state; {ASIDE}")


def run(args: argparse.Namespace) -> None:
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
    from ..saves.lock import run_lock
    from ..saves.repair import go_back

    if newest_set(args.run_dir) is None:
        raise UsageError(f"RUN_DIR={args.run_dir}: has no saved state; give <training_folder>/<name> of a run")
    with run_lock(args.run_dir):
        print("\n".join(go_back(args.run_dir, args.to_step)))
