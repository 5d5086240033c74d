"""`coat-flux doctor`: what this machine can do, one line each."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

from .common import add_command

EXIT_BROKEN = 1
PLAIN = str.maketrans({"✓": "+", "✗": "x"})  # for a console whose code page has no such signs


def add_parser(commands: Any) -> None:
    """Add the command to the parser of `coat-flux`."""
    doctor = add_command(commands, "doctor", run, "what this machine can do")
    doctor.add_argument(
        "--ai-toolkit",
        type=Path,
        metavar="DIR",
        help="its folder, the one with run.py (default: AI_TOOLKIT_ROOT, else here if it is one)",
    )


def run(args: argparse.Namespace) -> int:
    """Look at Python, torch, GPU, FP8, Triton, memory, disk and ai-toolkit; exit code 1 where training cannot work.

    ✓ works, ✗ does not: what to do follows the arrow, - is not here. Multiplies for about a second on each GPU.
    """
    from ..doctor import diagnose, verdict

    logging.getLogger("coat_core").addHandler(logging.NullHandler())  # what it warns of is a line here
    lines = []
    for line in diagnose(args.ai_toolkit):
        lines.append(line)
        _show(str(line))
    works, text = verdict(lines)
    _show(text)
    return 0 if works else EXIT_BROKEN


def _show(text: str) -> None:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(PLAIN).encode(encoding, errors="replace").decode(encoding)
    print(text, flush=True)
