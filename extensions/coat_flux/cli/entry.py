"""`coat-flux`; its commands are the modules of this folder.

Nothing heavy is imported before a command needs it, so `--help` and YAML mistakes answer at once. Exit codes: 0
success; 1 a benchmark misses figures, the doctor finds something broken, a trial of a sweep failed or COAT is not
shown to be lossless; 2 something the user can fix; 130 Ctrl+C. Other exceptions show their traceback.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from .. import __version__
from ..base.errors import UserError
from ..base.run_log import drop_noise
from . import bench, check, machine, new, runs
from .common import EXIT_INTERRUPTED, EXIT_REFUSED


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, by default from the command line, and return its exit code."""
    for stream in (sys.stdout, sys.stderr):  # a console of a narrow code page must not fail on a file's name
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    logging.basicConfig(format="%(levelname)s: %(message)s")  # before a library does
    drop_noise("")
    given = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(given, argparse.Namespace(given=given))
    try:
        return args.run(args) or 0
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return EXIT_REFUSED
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}; correct the path or its permissions", file=sys.stderr)
        return EXIT_REFUSED
    except MemoryError:
        text = "out of CPU memory; close other programs or take smaller photos"
        print(f"error: {text} (`coat-flux plan CONFIG` says how much CPU memory a run needs)", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="coat-flux", description="Train FLUX LoRAs in FP8 after the COAT paper.")
    parser.add_argument("--version", action="version", version=f"coat-flux {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (runs, new, check, machine, bench):
        module.add_parsers(commands)
    return parser
