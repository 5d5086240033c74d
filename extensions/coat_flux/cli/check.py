"""`coat-flux check`: the whole YAML and the photos, in seconds, for both hosts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..check import HOSTS, Finding, check_job_dict, find_toolkit
from ..check.job import AI_TOOLKIT, STANDALONE, schema_of
from ..config import load_job_yaml
from ..config.job_config import PROCESS_TYPES
from .common import EXIT_REFUSED, add_config


def add_parser(commands: Any) -> None:
    """Add the command to the parser of `coat-flux`."""
    check = commands.add_parser("check", help="check YAML and photos before a run", description=run.__doc__)
    add_config(check)
    check.add_argument("--host", choices=HOSTS, default=STANDALONE, help="who will run it (default: %(default)s)")
    check.add_argument(
        "--ai-toolkit",
        metavar="DIR",
        help="take ai-toolkit's keys from this folder (default: AI_TOOLKIT_ROOT, else the working directory if it is "
        "one, else a list that comes with coat-flux)",
    )
    check.add_argument("--no-data", action="store_true", help="do not look at photos and captions")
    check.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check every key and value of a YAML, and the photos and captions it names, without loading a model.

    One line for each finding. Errors stop a run, and end this command with exit code 2; warnings do not. Without
    --host it is checked for the stand-alone trainer, and a last line says whether ai-toolkit would run it as well.
    """
    root = find_toolkit(args.ai_toolkit)
    raw = load_job_yaml(args.config, name=args.name)
    file = os.fspath(args.config)
    found = check_job_dict(raw, file=file, host=args.host, toolkit_root=root)
    failed = _print(found)
    if not failed and not args.no_data:
        failed = _check_data(raw)
    if args.host == STANDALONE:
        _print_other_host(raw, file, root, found)
    if not failed:
        print(_summary(raw, file))
    return EXIT_REFUSED if failed else 0


def _print(found: Sequence[Finding]) -> bool:
    """Errors to stderr, warnings to stdout; whether there are errors."""
    for item in found:
        stop = item.severity == "error"
        print(f"{item.severity}: {item.line()}", file=sys.stderr if stop else sys.stdout)
    return any(item.severity == "error" for item in found)


def _check_data(raw: dict[str, Any]) -> bool:
    from ..check.data import check_data

    errors, warnings = check_data(raw)
    for line in errors:
        print(f"error: {line}", file=sys.stderr)
    for line in warnings:
        print(f"warning: {line}")
    return bool(errors)


def _print_other_host(raw: dict[str, Any], file: str, root: Path | None, shown: Sequence[Finding]) -> None:
    """One line: would ai-toolkit run it; then its errors that were not shown."""
    schema = schema_of(root)
    name = f"{AI_TOOLKIT} {schema.version}"
    errors = [item for item in check_job_dict(raw, file=file, host=AI_TOOLKIT, toolkit_root=root) if _stops(item)]
    seen = {item.key for item in shown if _stops(item)}
    own = [item for item in errors if item.key not in seen]
    if not errors:
        print(f"{name}: would run it too" if not seen else f"{name}: would run it")
    elif not own:
        print(f"{name}: would not run it either, for the same keys")
    else:
        print(f"{name}: would not run it:")
        for item in own:
            print(f"  {item.line()}")


def _stops(item: Finding) -> bool:
    return item.severity == "error"


def _summary(raw: dict[str, Any], file: str) -> str:
    process = raw["config"]["process"][0]
    text = f"{file}: no error found"
    if process.get("type") not in PROCESS_TYPES:
        return text
    name = process.get("name") or raw["config"]["name"]
    folder = Path(process["training_folder"]) / name
    steps = (process.get("train") or {}).get("steps", 1000)
    return f"{text}; '{name}' would train {steps} steps into {folder}"
