"""`coat-flux check`: the whole YAML, the model and the photos, in seconds, for both trainers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..config.check import AI_TOOLKIT, STANDALONE, TRAINERS, check_job_dict, find_toolkit, is_toolkit, toolkit_of
from ..config.findings import ConfigError, Finding
from ..config.job import JobConfig
from ..config.job_file import load_job_yaml
from ..config.job_sections import PROCESS_TYPES
from .common import EXIT_REFUSED, add_command, add_config, print_findings


def add_parsers(commands: Any) -> None:
    """Add the commands of this module."""
    check = add_command(commands, "check", run, "check YAML, model and photos before a run")
    add_config(check)
    check.add_argument(
        "--host",
        choices=TRAINERS,
        help="who will run it (default: ai-toolkit with --ai-toolkit or in its folder, else whichever of both can)",
    )
    check.add_argument(
        "--ai-toolkit",
        metavar="DIR",
        help="ai-toolkit's folder, whose own keys count (default: AI_TOOLKIT_ROOT, else the working directory if it is "
        "one, else a list that comes with coat-flux)",
    )
    check.add_argument("--no-data", action="store_true", help="skip photos and captions")
    check.add_argument(
        "--elsewhere", action="store_true", help="it will run on another machine: do not check for GPU and model here"
    )


def run(args: argparse.Namespace) -> int:
    """Check every key and value of a YAML, the model, and the photos and captions, without loading a model.

    One line for each finding. Errors stop a run, and end this command with exit code 2; warnings do not. A last line
    says whether the other of the two trainers, stand-alone and ai-toolkit, would run it as well. Where neither is asked
    for, it is enough that one of them would.
    """
    root = find_toolkit(args.ai_toolkit)
    raw = load_job_yaml(args.config, name=args.name)
    from ..blocks.models.check import check_models  # with torch, which a mistake in the command does not need

    file = os.fspath(args.config)
    findings = {host: check_job_dict(raw, file=file, trainer=host, toolkit_root=root) for host in TRAINERS}
    sound = [host for host in TRAINERS if not _errors(findings[host])]
    for host in sound:
        findings[host] += check_models(raw, file=file, trainer=host, toolkit_root=root, elsewhere=args.elsewhere)
    inside = args.ai_toolkit or is_toolkit(Path.cwd())
    able = (host for host in TRAINERS if not _errors(findings[host]))
    host = args.host or (AI_TOOLKIT if inside else next(able, STANDALONE))
    errors, warnings = _errors(findings[host]), [item for item in findings[host] if item.severity != "error"]
    failed = print_findings((item.line() for item in errors), (item.line() for item in warnings))
    if host in sound and not args.no_data:
        from ..data.check import check_data

        failed = print_findings(*check_data(raw)) or failed
    if not failed and not args.elsewhere:
        failed = check_outputs(raw, file)
    if args.host != AI_TOOLKIT:
        other = STANDALONE if host == AI_TOOLKIT else AI_TOOLKIT
        name = "the stand-alone trainer" if other == STANDALONE else f"{AI_TOOLKIT} {toolkit_of(root).version}"
        _print_other_host(name, errors, _errors(findings[other]))
    if failed:
        return EXIT_REFUSED
    process, text = raw["config"]["process"][0], f"{file}: no error found"
    if process.get("type") in PROCESS_TYPES:
        name, steps = process.get("name") or raw["config"]["name"], (process.get("train") or {}).get("steps", 1000)
        text += f"; '{name}' would train {steps} steps into {Path(process['training_folder']) / name}"
    print(text)
    return 0


def check_outputs(raw: dict[str, Any], file: str) -> bool:
    """Print problems of the job's output folder and free space; returns whether they stop the run."""
    from ..plan.job import check_trained, job_space
    from ..saves.commit import check_output

    ours = [process for process in raw["config"]["process"] if process.get("type") in PROCESS_TYPES]
    job, findings = JobConfig.examine(raw, file=file) if ours else (None, None)
    failed, space = False, None  # unknown model sizes, or a LoRA that is not ours
    if job is not None and not findings.errors:
        try:
            check_trained(job)
        except ConfigError as error:
            failed = print_findings([f"{file}: config.process[0].{error}"], [])
        with suppress(ConfigError):
            space = job_space(job)
    for process in ours:
        folder = Path(process["training_folder"]) / (process.get("name") or raw["config"]["name"])
        failed = print_findings(*check_output(folder, space)) or failed
    return failed


def _errors(findings: Sequence[Finding]) -> list[Finding]:
    return [item for item in findings if item.severity == "error"]


def _print_other_host(name: str, shown: Sequence[Finding], errors: Sequence[Finding]) -> None:
    seen = {(item.key, item.text()) for item in shown}
    own = [item for item in errors if (item.key, item.text()) not in seen]
    if not errors:
        print(f"{name}: would run it" + ("" if seen else " too"))
    elif not own:
        print(f"{name}: would not run it either, for the same reasons")
    else:
        print("\n  ".join([f"{name}: would not run it:", *(item.line() for item in own)]))
