"""`coat-flux report`: one page on a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """Add the command to the parser of `coat-flux`."""
    report = commands.add_parser("report", help="one HTML page on a run", description=run.__doc__)
    report.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of a run: <training_folder>/<name>")
    report.add_argument("--out", metavar="FILE", type=Path, help="file to write (default: RUN_DIR/coat/report.html)")
    report.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Write one self-contained HTML page on a run, of this trainer or of ai-toolkit, that ended or goes on.

    Loss, learning rate, speed, samples over time, memory by phase against the plan, precision of FP8 by layer with what
    to change, guard, what was asked for and what it got, versions, config, LoRA files. precision.png goes beside it.
    """
    from ..pages.report import write_report

    print(f"wrote {write_report(args.run_dir, args.out)}")
