"""`coat-flux plan`: memory, disk and time before the run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..config.job import JobConfig
from .common import UsageError, add_command, add_config


def add_parser(commands: Any) -> None:
    """Add the command to the parser of `coat-flux`."""
    plan = add_command(commands, "plan", run, "memory, disk and time before the run")
    add_config(plan)
    plan.add_argument(
        "--gpu", metavar="CARD", help="one card by GB or name, as 24, 4090 or 'A100 80GB', in place of the usual ones"
    )
    plan.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="write it as JSON, without FILE to the terminal"
    )


def run(args: argparse.Namespace) -> None:
    """Predict memory by phase, disk and time of a run, which cards it fits, and the cheapest change that makes it fit.

    Needs no GPU and downloads nothing.
    """
    job = JobConfig.from_file(args.config, name=args.name)
    from ..plan.facts import find_card
    from ..plan.report import as_json, as_text, make_plan

    card = None if args.gpu is None else find_card(args.gpu)
    plan = make_plan(job, card)
    if args.json is None:
        print(as_text(plan))
        if card is not None and card.name:
            print(f"--gpu {args.gpu}: {card.gb:g} GB" + (f", rates of the {card.name}" if card.bf16_tflops else ""))
        return
    text = json.dumps(as_json(plan), indent=2)
    if args.json == "-":
        print(text)
        return
    try:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json {args.json}: cannot be written: {error.strerror}; give another path") from error
    print(f"wrote {args.json}")
