"""`coat-flux sweep`: which settings are best on the user's own photos?"""

from __future__ import annotations

import argparse
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.streams import keep_streams
from ..base.text import columns
from .common import add_command, add_config, load_job, positive, show_warnings

if TYPE_CHECKING:
    from ..study.ranking import Result

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
    sweep.add_argument(
        "--random", type=positive, metavar="N", help="N combinations, drawn at random (default: all of them)"
    )
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
    from ..study.grid import find_axis, make_trials
    from ..study.ranking import FINISHED, rank
    from ..study.sweep import run_trials
    from ..study.sweep_page import noise_text, ranking_rows, sentence_of, write_sweep_page
    from ..trainers.standalone.seeding import seed_of

    folder = args.out or job.folder.with_name(f"{job.folder.name}_sweep")
    seeds = range(seed_of(job), seed_of(job) + args.seeds)
    axes = [find_axis(text) for text in args.axes]
    trials = make_trials(args.config, axes, seeds, folder, name=args.name, most=args.random)
    page = folder / "report.html"

    def write(results: list[Result]) -> None:
        write_sweep_page(page, results, job)

    try:
        results = run_trials(trials, folder, jobs=args.jobs, log=partial(print, flush=True), on_result=write)
    except KeyboardInterrupt:
        print(f"To go on: {shlex.join(['coat-flux', *args.given])}\nreport so far: {page}")
        raise
    places, noise = rank(results)
    print("\n".join(["", *columns(ranking_rows(places, noise)), "", noise_text(noise)]))
    print(f"report: {page}\n{sentence_of(places, noise)[0]}")
    return 0 if all(result.state == FINISHED for result in results) else EXIT_FAILED
