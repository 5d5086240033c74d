"""`coat-flux data`: the report on a folder of photos, and its contact sheet."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..config.findings import ConfigError
from ..config.job_file import load_job_yaml
from .common import EXIT_REFUSED, UsageError, add_command, print_findings

DEFAULT_RESOLUTIONS = (512, 768, 1024)
DEFAULT_EXTENSION = "txt"
SMALLEST, LARGEST = 32, 8192


def add_parsers(commands: Any) -> None:
    """Add the commands of this module."""
    data = add_command(commands, "data", run, "check photos and captions, draw a contact sheet")
    data.add_argument("data", type=Path, metavar="DIR", help="folder of photos, or a YAML with datasets")
    data.add_argument("--resolution", nargs="+", type=_pixels, metavar="PX", help="default: 512 768 1024")
    data.add_argument("--caption-ext", metavar="EXT", help=f"default: {DEFAULT_EXTENSION}")
    data.add_argument("--trigger", metavar="WORD", help="trigger_word")
    data.add_argument("--sheet", type=Path, metavar="FILE", help="default: output/data/<name>.png")


def _pixels(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if not SMALLEST <= value <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from {SMALLEST} to {LARGEST}, such as 512")
    return value


def run(args: argparse.Namespace) -> int:
    """Read every photo and caption as training would, and list what is wrong, cropped or corrected.

    Nothing in the folder is changed. The contact sheet shows the photos as they are read, with the frames of their
    crops. Exit code 2 where training would be refused.
    """
    from ..data.preflight import inspect_datasets
    from ..data.sheet import MOST_PHOTOS, contact_sheet

    datasets, trigger, policy, t5, name = _wanted(args)
    report = inspect_datasets(datasets, trigger, **policy, t5_of=t5)
    for table in report.tables:
        print(table)
    print_findings((), report.warnings)
    count = len(report.photos) + len(report.unreadable)
    if count:
        sheet = args.sheet or Path("output") / "data" / f"{name}.png"
        try:
            sheet.parent.mkdir(parents=True, exist_ok=True)
            contact_sheet(report, **policy).save(sheet)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"--sheet {sheet}: cannot be written ({error}); name another file ending in .png"
            ) from error
        print(f"contact sheet: {sheet}" + (f" (the first {MOST_PHOTOS} of {count})" if count > MOST_PHOTOS else ""))
    return EXIT_REFUSED if print_findings(report.errors, ()) else 0


def _wanted(args: argparse.Namespace) -> tuple[list[Any], str | None, dict[str, str], str | None, str]:
    """Datasets, trigger word, photo policy, the model whose T5 reads the captions, and a name."""
    from ..config.check import TRAINERS, check_job_dict
    from ..config.job_sections import DatasetSection
    from ..data.check import datasets_of, photo_policy, t5_of

    if args.data.is_file():
        given = [flag for flag in ("resolution", "caption_ext", "trigger") if getattr(args, flag) is not None]
        if given:
            flag = given[0].replace("_", "-")
            raise UsageError(
                f"--{flag}: {args.data} is a file that says so itself; leave the option out, or name a folder"
            )
        job = load_job_yaml(args.data)
        errors = [
            [item for item in check_job_dict(job, file=str(args.data), trainer=host) if item.severity == "error"]
            for host in TRAINERS
        ]
        if all(errors):  # refused by both trainers: the stand-alone one's findings
            raise ConfigError(errors[0])
        process = job["config"]["process"][0]
        name = process.get("name") or job["config"]["name"]
        return list(datasets_of(process)), process.get("trigger_word"), photo_policy(process), t5_of(process), name
    section = DatasetSection(
        folder_path=str(args.data),
        caption_ext=args.caption_ext or DEFAULT_EXTENSION,
        resolution=tuple(args.resolution or DEFAULT_RESOLUTIONS),
    )
    return [section], args.trigger, {}, "", args.data.resolve().name
