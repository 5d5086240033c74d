"""`coat-flux verify`: is COAT lossless on the user's data? `coat-flux sweep`: which settings are best there?"""

from __future__ import annotations

import argparse
import shlex
from functools import partial
from pathlib import Path
from typing import Any

from ..base.streams import keep_streams
from ..base.text import columns
from .common import EXIT_FAILED, add_command, add_config, load_job, positive, show_warnings


def add_parsers(commands: Any) -> None:
    """Add the commands of this module."""
    parser = add_command(commands, "verify", verify, "is COAT lossless on your data?")
    add_config(parser)
    parser.add_argument("--seeds", type=positive, default=3, metavar="N", help="pairs of runs (default: 3)")
    parser.add_argument("--steps", type=positive, metavar="N", help="of each run (default: the config's)")
    held_out = parser.add_mutually_exclusive_group()
    held_out.add_argument(
        "--hold-out", type=positive, metavar="K", help="photos kept out of training (default: a tenth, 1 to 16)"
    )
    held_out.add_argument(
        "--validation", type=Path, metavar="DIR", help="photos and captions to validate on; then none is held out"
    )
    parser.add_argument(
        "--every", type=positive, metavar="N", help="steps between points of the curves (default: steps / 20)"
    )
    _add_out(parser, "verify")
    parser = add_command(commands, "sweep", sweep, "try settings, ranked by held-out loss")
    add_config(parser)
    parser.add_argument(
        "--set",
        dest="axes",
        action="append",
        required=True,
        metavar="KEY=VALUES",
        help="a key of the process entry and its values, as train.lr=1e-4,3e-4; once for each key; network.linear "
        "takes linear_alpha along",
    )
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="trials at a time (default: 1)")
    parser.add_argument("--seeds", type=positive, default=1, metavar="K", help="runs of each combination (default: 1)")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--random", type=positive, metavar="N", help="N combinations, drawn at random (default: all of them)"
    )
    chosen.add_argument("--tpe", type=positive, metavar="N", help="N combinations, chosen by Optuna's TPE sampler")
    _add_out(parser, "sweep")


def _add_out(parser: argparse.ArgumentParser, name: str) -> None:
    text = f"folder of the runs (default: <training_folder>/<name>_{name})"
    parser.add_argument("--out", type=Path, metavar="DIR", help=text)


def verify(args: argparse.Namespace) -> int:
    """Train with and without COAT from several seeds on the config's own photos, and judge whether COAT loses anything.

    Some photos are not trained on; the loss on them is compared with bf16's, and the gap with what another seed does to
    bf16. Start the same command again to resume after an interruption, or with more --seeds to add some. Writes
    verdict.json and report.html. Exit code 0: lossless; 1: not, or undecided.
    """
    job = load_job(args)
    show_warnings()
    from ..study import Settings
    from ..study import verify as run_study

    settings = Settings(steps=args.steps, hold_out=args.hold_out, validation=args.validation, every=args.every)
    try:
        verdict = run_study(job, seeds=args.seeds, settings=settings, folder=args.out)
    except KeyboardInterrupt:
        print("To resume verify, start the same command again")
        raise
    for note in verdict.notes:
        print(note)
    print(f"report: {verdict.page_path}\n{verdict.sentence}")
    return 0 if verdict.lossless else EXIT_FAILED


def sweep(args: argparse.Namespace) -> int:
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
