"""All findings about one job, for the host that would run it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from . import ai_toolkit
from .ai_toolkit_keys import Schema, shipped_schema
from .ai_toolkit_source import CLASSES_FILE, NoToolkitError, read_schema
from .findings import ConfigError, Finding, Findings
from .job import JobConfig
from .job_file import load_job_yaml
from .job_rules import require_packages
from .job_sections import PROCESS_TYPES
from .model_folder import STANDALONE, check_device, check_model

AI_TOOLKIT = "ai-toolkit"
HOSTS = (STANDALONE, AI_TOOLKIT)
ROOT_VARIABLE = "AI_TOOLKIT_ROOT"


def check_job_file(
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    host: str = STANDALONE,
    toolkit_root: Path | None = None,
) -> list[Finding]:
    """Check a job file.

    Args:
        path: YAML or JSON.
        name: takes the place of `config.name`.
        host: who would run it: one of `HOSTS`.
        toolkit_root: ai-toolkit's folder, whose own config classes say which keys it knows; without one the list that
            comes with this package does.

    Returns:
        Errors, then warnings; empty where all is well. A file that cannot be read is one error.
    """
    try:
        raw = load_job_yaml(path, name=name)
    except ConfigError as error:
        return list(error.found)
    return check_job_dict(raw, file=os.fspath(path), host=host, toolkit_root=toolkit_root)


def check_job_dict(
    raw: Any,
    *,
    file: str = "",
    host: str = STANDALONE,
    toolkit_root: Path | None = None,
    num_processes: int = 1,
) -> list[Finding]:
    """As `check_job_file`, for a job that is already read.

    Args:
        raw: the whole job: `job`, `config` and perhaps `meta`.
        file: named in the findings.
        host: who would run it: one of `HOSTS`.
        toolkit_root: ai-toolkit's folder.
        num_processes: how many processes train together; ai-toolkit can do one.

    Raises:
        ValueError: no such host.
    """
    if host == STANDALONE:
        job, findings = JobConfig.examine(raw, file=file)
        found = findings.all
        if job is not None and not findings.errors:
            found = [*_missing_packages(job), *found]
        return found
    if host != AI_TOOLKIT:
        raise ValueError(f"host={host!r}: must be one of {', '.join(HOSTS)}; write {AI_TOOLKIT}")
    findings = Findings(file)
    ai_toolkit.check_job(raw, findings, schema_of(toolkit_root, findings), num_processes)
    return findings.all


def check_here(raw: Any, *, file: str = "", host: str = STANDALONE, toolkit_root: Path | None = None) -> list[Finding]:
    """What this machine has against a job without config errors: its GPU, the model's files, a download it cannot do.

    Arguments are `check_job_dict`'s. Nothing is downloaded and no weights are read.
    """
    findings = Findings(file)
    for i, process in enumerate(raw["config"]["process"]):
        if process.get("type") in PROCESS_TYPES:
            path = f"config.process[{i}]"
            check_device(process.get("device"), f"{path}.device", findings)
            check_model(process["model"], f"{path}.model", findings, host, toolkit_root)
    return findings.all


def require_here(job: JobConfig) -> None:
    """Check that this machine can start a job of the stand-alone trainer.

    Raises:
        ConfigError: a package, the GPU or the model is missing, or the model is not FLUX.1.
    """
    require_packages(job)
    errors = [item for item in check_here(job.raw, file=job.file) if item.severity == "error"]
    if errors:
        raise ConfigError(errors)


def schema_of(root: Path | None, findings: Findings | None = None) -> Schema:
    """What an ai-toolkit reads; the shipped list, with a warning, where its source is not as we know it."""
    if root is None:
        return shipped_schema()
    try:
        return read_schema(Path(root).resolve())
    except NoToolkitError as error:
        schema = shipped_schema()
        if findings is not None:
            findings.warn("ai-toolkit", f"its keys cannot be read from its source ({error}); {schema.source} is used")
        return schema


def find_toolkit(given: str | os.PathLike[str] | None = None) -> Path | None:
    """The ai-toolkit to check against: the given folder, `AI_TOOLKIT_ROOT`, or the working directory if it is one.

    Raises:
        NoToolkitError: the given folder, or the variable's, is no ai-toolkit.
    """
    for place, said in ((given, "--ai-toolkit"), (os.environ.get(ROOT_VARIABLE), ROOT_VARIABLE)):
        if place:
            if not is_toolkit(Path(place)):
                raise NoToolkitError(f"{said}={place}: has no {CLASSES_FILE}; give the folder with ai-toolkit's run.py")
            return Path(place)
    return Path.cwd() if is_toolkit(Path.cwd()) else None


def is_toolkit(folder: Path) -> bool:
    """Whether a folder is a checkout of ai-toolkit."""
    return (folder / CLASSES_FILE).is_file()


def _missing_packages(job: JobConfig) -> list[Finding]:
    try:
        require_packages(job)
    except ConfigError as error:
        return list(error.found)
    return []
