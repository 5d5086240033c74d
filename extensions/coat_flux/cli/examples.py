"""`coat-flux examples`: the ready-made configs and the example photos, as files of the user's own."""

from __future__ import annotations

import argparse
import filecmp
import shutil
from pathlib import Path
from typing import Any

from ..config.job_file import shipped_folder
from .common import Refused

FOLDERS = ("configs", "datasets_example")


def add_parser(commands: Any) -> None:
    """Add the command to the parser of `coat-flux`."""
    examples = commands.add_parser("examples", help="copy configs and example photos here", description=run.__doc__)
    examples.add_argument("dir", nargs="?", type=Path, default=Path(), metavar="DIR", help="default: this folder")
    examples.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Copy the ready-made configs and the example photos into DIR, to train on and to edit.

    An installation from a wheel has no checkout to run `configs/flux_clothing_tiny.yaml` in; here it is. A file that is
    already there is left as it is.
    """
    for name in FOLDERS:
        origin = shipped_folder(name)
        if origin is None:
            raise Refused(f"{name}: not part of this installation; install coat-flux from a wheel or a checkout")
        copied = 0
        for source in sorted(path for path in origin.rglob("*.*") if path.is_file()):
            inside = source.relative_to(origin)
            if any(part.startswith((".", "_")) for part in inside.parts):  # caches of earlier runs
                continue
            target = args.dir / name / inside
            if target.exists() and not filecmp.cmp(source, target, shallow=False):
                print(f"{target}: left as it is, it differs from {source}")
            elif not target.exists():
                _copy(source, target)
                copied += 1
        print(f"{args.dir / name}: {copied} files copied")


def _copy(source: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    except OSError as error:
        raise Refused(f"{target}: cannot be written ({error.strerror}); name another folder") from error
