"""`coat-flux verify`: is COAT lossless on the user's own data?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .common import add_command, add_config, load_job, positive, show_warnings

EXIT_NOT_LOSSLESS = 1


def add_parser(commands: Any) -> None:
    """Add the command to the parser of `coat-flux`."""
    verify = add_command(commands, "verify", run, "is COAT lossless on your data?")
    add_config(verify)
    verify.add_argument("--seeds", type=positive, default=3, metavar="N", help="pairs of runs (default: 3)")
    verify.add_argument("--steps", type=positive, metavar="N", help="of each run (default: the config's)")
    held_out = verify.add_mutually_exclusive_group()
    held_out.add_argument(
        "--hold-out", type=positive, metavar="K", help="photos kept out of training (default: a tenth, 1 to 16)"
    )
    held_out.add_argument(
        "--validation", type=Path, metavar="DIR", help="photos and captions to validate on; then none is held out"
    )
    verify.add_argument(
        "--every", type=positive, metavar="N", help="steps between points of the curves (default: steps / 20)"
    )
    verify.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the runs (default: <training_folder>/<name>_verify)"
    )


def run(args: argparse.Namespace) -> int:
    """Train with and without COAT from several seeds on the config's own photos, and judge whether COAT loses anything.

    Some photos are not trained on; the loss on them is compared with bf16's, and the gap with what another seed does to
    bf16. Start the same command again to resume after an interruption, or with more --seeds to add some. Writes
    verdict.json and report.html. Exit code 0: lossless; 1: not, or undecided.
    """
    job = load_job(args)
    show_warnings()
    from ..study import Settings, verify

    settings = Settings(steps=args.steps, hold_out=args.hold_out, validation=args.validation, every=args.every)
    try:
        verdict = verify(job, seeds=args.seeds, settings=settings, folder=args.out)
    except KeyboardInterrupt:
        print("To resume verify, start the same command again")
        raise
    for note in verdict.notes:
        print(note)
    print(f"report: {verdict.page_path}\n{verdict.sentence}")
    return 0 if verdict.lossless else EXIT_NOT_LOSSLESS
