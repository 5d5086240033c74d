"""`coat-flux`: one module of this folder for each command.

Nothing heavy is imported before a command needs it, so that `--help` and a mistake in the YAML answer at once. Exit
code 0 only on success, 1 where a benchmark misses figures or the doctor finds something broken, 2 for something the
user can put right, 130 on Ctrl+C; other exceptions show their traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from .. import __version__
from ..config import ConfigError
from . import bench, install, plan, train
from .common import EXIT_INTERRUPTED, EXIT_REFUSED, NAME_HELP, Refused, load_job


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None takes them from the command line.

    Returns:
        The exit code.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(given, argparse.Namespace(given=given))
    try:
        return args.run(args) or 0
    except (ConfigError, Refused) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="coat-flux", description="Train FLUX LoRAs in FP8 after the COAT paper.")
    parser.add_argument("--version", action="version", version=f"coat-flux {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    train.add_parser(commands)
    install.add_parser(commands)
    _add_check(commands)
    plan.add_parser(commands)
    bench.add_parser(commands)
    return parser


def _add_check(commands: Any) -> None:
    check = commands.add_parser("check", help="check the YAML, nothing else", description=_check.__doc__)
    check.add_argument("config", metavar="CONFIG", help="YAML or JSON")
    check.add_argument("-n", "--name", help=NAME_HELP)
    check.set_defaults(run=_check)


def _check(args: argparse.Namespace) -> None:
    """Check the keys and values of a YAML for the stand-alone trainer. Images, model and memory are not looked at."""
    job = load_job(args)
    for note in job.notes:
        print(f"note: {note}")
    print(f"{job.file}: no error found; '{job.name}' would train {job.train.steps} steps into {job.folder}")
