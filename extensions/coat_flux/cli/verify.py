"""`coat-flux verify`: is COAT lossless on the user's own data?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .common import add_config, load_job, show_warnings

EXIT_NOT_LOSSLESS = 1


def add_parser(commands: Any) -> None:
    """Add the command to the parser of `coat-flux`."""
    verify = commands.add_parser("verify", help="is COAT lossless on your data?", description=run.__doc__)
    add_config(verify)
    verify.add_argument("--seeds", type=_positive, default=3, metavar="N", help="pairs of runs (default: 3)")
    verify.add_argument("--steps", type=_positive, metavar="N", help="of each run (default: the config's)")
    held_out = verify.add_mutually_exclusive_group()
    held_out.add_argument(
        "--hold-out", type=_positive, metavar="K", help="photos kept out of training (default: a tenth, 1 to 16)"
    )
    held_out.add_argument(
        "--validation", type=Path, metavar="DIR", help="photos and captions to validate on; then none is held out"
    )
    verify.add_argument(
        "--every", type=_positive, metavar="N", help="steps between points of the curves (default: steps / 20)"
    )
    verify.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the runs (default: <training_folder>/<name>_verify)"
    )
    verify.set_defaults(run=run)


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least 1")
    return value


def run(args: argparse.Namespace) -> int:
    """Train with and without COAT from several seeds on the config's own photos, and say whether COAT loses anything.

    Some photos are not trained on; the loss on them is compared with bf16's, and the gap with what another seed does to
    bf16. Start the same command again to go on after an interruption, or with more --seeds to add some. Writes
    verdict.json and report.html. Exit code 0: lossless; 1: not, or undecided.
    """
    job = load_job(args)
    show_warnings()
    from ..study import Settings, verify

    settings = Settings(steps=args.steps, hold_out=args.hold_out, validation=args.validation, every=args.every)
    try:
        verdict = verify(job, seeds=args.seeds, settings=settings, folder=args.out)
    except KeyboardInterrupt:
        print("To go on with verify, start the same command again")
        raise
    for note in verdict.notes:
        print(note)
    print(f"report: {verdict.page_path}\n{verdict.sentence}")
    return 0 if verdict.lossless else EXIT_NOT_LOSSLESS
