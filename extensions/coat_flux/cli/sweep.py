"""`coat-flux sweep`: which settings are best on the user's own photos?"""

from __future__ import annotations

import argparse
import shlex
from functools import partial
from pathlib import Path
from typing import Any

from ..base.streams import keep_streams
from ..base.text import columns
from .common import add_command, add_config, load_job, positive, show_warnings

EXIT_FAILED = 1


def add_parser(commands: Any) -> None:
    """Add the command to the parser of `coat-flux`."""
    sweep = add_command(commands, "sweep", run, "try settings, ranked by held-out loss")
    add_config(sweep)
    sweep.add_argument(
        "--set",
        dest="axes",
        action="append",
        required=True,
        metavar="KEY=VALUES",
        help="a key of the process entry and its values, as train.lr=1e-4,3e-4; once for each key; network.linear "
        "takes linear_alpha along",
    )
    sweep.add_argument("--jobs", type=positive, default=1, metavar="N", help="trials at a time (default: 1)")
    sweep.add_argument("--seeds", type=positive, default=1, metavar="K", help="runs of each combination (default: 1)")
    chosen = sweep.add_mutually_exclusive_group()
    chosen.add_argument(
        "--random", type=positive, metavar="N", help="N combinations, drawn at random (default: all of them)"
    )
    chosen.add_argument("--tpe", type=positive, metavar="N", help="N combinations, chosen by Optuna's TPE sampler")
    sweep.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the runs (default: <training_folder>/<name>_sweep)"
    )


def run(args: argparse.Namespace) -> int:
    """Train the config with each combination of the given values, and rank them by the loss on photos held out.

    Each trial is a run folder of its own. Start the same command again to resume after an interruption, or with more
    values, seeds or random combinations to add some; what is finished stays. Writes report.html. Exit code 0: all
    trials are finished; 1: one failed.
    """
    keep_streams()
    job = load_job(args)
    show_warnings()
    from ..study.ranking import noise_text, rank, ranking_rows, sentence_of, write_sweep_page
    from ..study.sweep import FINISHED, Sweep, find_axis
    from ..trainers.standalone.seeding import seed_of

    folder = args.out or job.folder.with_name(f"{job.folder.name}_sweep")
    sweep = Sweep(
        args.config,
        [find_axis(text) for text in args.axes],
        range(seed_of(job), seed_of(job) + args.seeds),
        folder,
        name=args.name,
        most=args.tpe or args.random,
        tpe=args.tpe is not None,
    )
    try:
        trials = sweep.run(jobs=args.jobs, log=partial(print, flush=True), on_result=lambda: write_sweep_page(sweep))
    except KeyboardInterrupt:
        print(f"To go on: {shlex.join(['coat-flux', *args.given])}\nreport so far: {folder / 'report.html'}")
        raise
    places, spread = rank(trials)
    print("\n".join(["", *columns(ranking_rows(places, spread)), "", noise_text(spread)]))
    print(f"report: {write_sweep_page(sweep)}\n{sentence_of(places, spread, sweep.total)[0]}")
    return 0 if all(trial.state == FINISHED for trial in trials) else EXIT_FAILED
