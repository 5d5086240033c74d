"""Shared parts of the commands: exit codes, errors, arguments, reading the job."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ..base.errors import UserError

EXIT_FAILED = 1  # figures missed, a broken machine, a failed trial, not lossless
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130


class UsageError(UserError):
    """A command cannot do what was asked."""


def add_command(
    commands: Any, name: str, run: Callable[..., Any], help: str, *, of_config: bool = False
) -> argparse.ArgumentParser:
    """Add a command to the parser of `coat-flux`, with CONFIG and --name if it is about a config.

    Its description is the docstring of `run`.
    """
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=run.__doc__)
    parser.set_defaults(run=run)
    if of_config:
        parser.add_argument("config", metavar="CONFIG", help="YAML or JSON, the same as for ai-toolkit")
        parser.add_argument("-n", "--name", help="takes the place of config.name, and of every [name] in the file")
    return parser


def number(smallest: int, largest: int | None = None, step: int = 1) -> Callable[[str], int]:
    """Argument type: a whole number from `smallest`, a multiple of `step`."""
    rule = f"must be a whole number of at least {smallest}"
    if largest is not None:
        rule = f"must be a whole number from {smallest} to {largest}"
    if step > 1:
        rule += f" and a multiple of {step}"

    def parse(text: str) -> int:
        value = int(text) if text.isdecimal() else -1
        if value < smallest or (largest is not None and value > largest) or value % step:
            raise argparse.ArgumentTypeError(f"{text!r}: {rule}")
        return value

    return parse


positive = number(1)


@contextmanager
def writing(name: str) -> Iterator[None]:
    """Turn an error of writing the file of an argument into a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{name}: cannot be written ({error.strerror or error}); give another path") from error


def print_findings(errors: Iterable[str], warnings: Iterable[str]) -> bool:
    """Print errors to stderr, then warnings to stdout; returns whether there are errors."""
    errors = list(errors)
    for line in errors:
        print(f"error: {line}", file=sys.stderr)
    for line in warnings:
        print(f"warning: {line}")
    return bool(errors)


def show_warnings() -> None:
    """Show log records on the console, except known library noise and those already shown by a run's log."""
    from ..base.run_log import quiet_libraries

    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: not getattr(record, "coat_shown", False))
    quiet_libraries()
