"""`coat-flux plan`: memory, disk and time before the run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..config import JobConfig
from .common import Refused, add_config


def add_parser(commands: Any) -> None:
    """Add the command to the parser of `coat-flux`."""
    plan = commands.add_parser("plan", help="memory, disk and time before the run", description=run.__doc__)
    add_config(plan)
    plan.add_argument(
        "--gpu", metavar="GB", type=_gigabytes, help="one card of so much memory, in place of the usual ones"
    )
    plan.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="write it as JSON, without FILE to the terminal"
    )
    plan.set_defaults(run=run)


def _gigabytes(text: str) -> float:
    """Argument type: a positive number, which may end in GB."""
    number = text.upper().removesuffix("GB").strip()
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a card's memory in GB, above 0, such as 24")
    return value


def run(args: argparse.Namespace) -> None:
    """Predict memory by phase, disk and time of a run, which cards it fits, and the cheapest change that makes it fit.

    Needs no GPU and downloads nothing.
    """
    job = JobConfig.from_file(args.config, name=args.name)
    from ..plan.report import as_json, as_text, make_plan

    plan = make_plan(job, args.gpu)
    if args.json is None:
        print(as_text(plan))
        return
    text = json.dumps(as_json(plan), indent=2)
    if args.json == "-":
        print(text)
        return
    try:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise Refused(f"--json {args.json}: cannot be written: {error.strerror}; give another path") from error
    print(f"wrote {args.json}")
