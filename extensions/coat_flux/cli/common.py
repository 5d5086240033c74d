"""What the commands share: exit codes, the error that ends one, and reading the job."""

from __future__ import annotations

import argparse
import logging

from ..base.errors import UserError
from ..config.job import JobConfig
from ..config.job_rules import require_packages

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
NAME_HELP = "takes the place of config.name, and of every [name] in the file"


class Refused(UserError):
    """A command cannot do what it was asked for."""


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG and --name."""
    parser.add_argument("config", metavar="CONFIG", help="YAML or JSON, the same as for ai-toolkit")
    parser.add_argument("-n", "--name", help=NAME_HELP)


def show_warnings() -> None:
    """Show log records on the console, but for those a run's log has shown, and known noise of libraries."""
    from ..base.run_log import quiet_libraries

    logging.basicConfig(format="%(levelname)s: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: not getattr(record, "coat_shown", False))
    quiet_libraries()


def load_job(args: argparse.Namespace) -> JobConfig:
    """The job of CONFIG.

    Raises:
        ConfigError: it cannot be run.
    """
    job = JobConfig.from_file(args.config, name=args.name)
    require_packages(job)
    return job
