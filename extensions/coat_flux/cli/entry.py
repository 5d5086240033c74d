"""`coat-flux`: train, install, check, plan, bench.

Nothing heavy is imported before a command needs it, so that `--help` and a mistake in the YAML answer at once. Exit
code 0 only on success, 1 where a benchmark misses figures, 2 for something the user can put right, 130 on Ctrl+C; other
exceptions show their traceback.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import __version__
from ..config import ConfigError, JobConfig, require_packages
from . import bench

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
NAME_HELP = "takes the place of config.name, and of every [name] in the file"


class _Refused(Exception):
    """Something the user can put right; the message says what."""


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
    except (ConfigError, _Refused) as error:
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

    train = commands.add_parser("train", help="train with the stand-alone engine", description=_train.__doc__)
    train.add_argument("config", metavar="CONFIG", help="YAML or JSON, the same as for ai-toolkit")
    train.add_argument("-n", "--name", help=NAME_HELP)
    train.set_defaults(run=_train)

    install = commands.add_parser("install", help="link into an ai-toolkit checkout", description=_install.__doc__)
    install.add_argument("dir", metavar="AI_TOOLKIT_DIR", help="the folder with ai-toolkit's run.py")
    install.add_argument("--undo", action="store_true", help="remove what install made")
    install.set_defaults(run=_install)

    check = commands.add_parser("check", help="check the YAML, nothing else", description=_check.__doc__)
    check.add_argument("config", metavar="CONFIG", help="YAML or JSON")
    check.add_argument("-n", "--name", help=NAME_HELP)
    check.set_defaults(run=_check)

    plan = commands.add_parser("plan", help="memory, disk and time before the run", description=_plan.__doc__)
    plan.add_argument("config", metavar="CONFIG", help="YAML or JSON")
    plan.add_argument("-n", "--name", help=NAME_HELP)
    plan.add_argument(
        "--gpu", metavar="GB", type=_gigabytes, help="one card of so much memory, in place of the usual ones"
    )
    plan.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="write it as JSON, without FILE to the terminal"
    )
    plan.set_defaults(run=_plan)
    bench.add_parser(commands)
    return parser


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


def _train(args: argparse.Namespace) -> None:
    """Train a LoRA with the stand-alone engine, or continue its run; several GPUs with `accelerate launch`."""
    job = _load(args)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    if _is_main_process():
        for package in ("coat_core", "coat_flux"):
            logging.getLogger(package).setLevel(logging.INFO)
    from ..data.errors import DatasetError
    from ..engine.loading import ModelLoadError
    from ..engine.resume import ResumeError
    from ..engine.trainer import COATTrainer, TrainingError
    from ..engine.workers import LaunchError
    from ..flux.apply import FallbackError

    try:
        COATTrainer(job).train()
    except (DatasetError, FallbackError, LaunchError, ModelLoadError, ResumeError, TrainingError) as error:
        raise _Refused(str(error)) from error


def _install(args: argparse.Namespace) -> None:
    """Link extension, configs and example images into an ai-toolkit checkout."""
    from ..aitk.install import InstallError, install

    try:
        done = install(args.dir, undo=args.undo)
    except InstallError as error:
        raise _Refused(str(error)) from error
    print("\n".join(done))


def _check(args: argparse.Namespace) -> None:
    """Check the keys and values of a YAML for the stand-alone trainer. Images, model and memory are not looked at."""
    job = _load(args)
    for note in job.notes:
        print(f"note: {note}")
    print(f"{job.file}: no error found; '{job.name}' would train {job.train.steps} steps into {job.folder}")


def _plan(args: argparse.Namespace) -> None:
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
        raise _Refused(f"--json {args.json}: cannot be written: {error.strerror}; give another path") from error
    print(f"wrote {args.json}")


def _load(args: argparse.Namespace) -> JobConfig:
    job = JobConfig.from_file(args.config, name=args.name)
    require_packages(job)
    return job


def _is_main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"
