"""All findings about one job, for either trainer."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.names import COAT_OPTIMIZER, COAT_TYPE
from .ai_toolkit_keys import CLASSES_FILE, NoToolkitError, Toolkit, check_keys, read_toolkit
from .coat import COATConfig, check_combinations
from .entry import AI_TOOLKIT, BOTH, STANDALONE, Entry
from .findings import ConfigError, Finding, Findings, closest, finding
from .job import JobConfig
from .job_file import load_job_yaml, plain_job
from .job_sections import OPTIMIZER_PACKAGES, PROCESS_TYPES, ValidationSection
from .options import build
from .rules import check_entry

TRAINERS = (STANDALONE, AI_TOOLKIT)
ROOT_VARIABLE = "AI_TOOLKIT_ROOT"


def check_job_file(
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    trainer: str = STANDALONE,
    toolkit_root: Path | None = None,
) -> list[Finding]:
    """Check a job file for one of `TRAINERS` and return errors, then warnings; an unreadable file is one error.

    `name` overrides `config.name`. The source of the ai-toolkit in `toolkit_root` may know newer keys than our table.
    """
    try:
        raw = load_job_yaml(path, name=name)
    except ConfigError as error:
        return list(error.found)
    return check_job_dict(raw, file=os.fspath(path), trainer=trainer, toolkit_root=toolkit_root)


def check_job_dict(
    raw: Any,
    *,
    file: str = "",
    trainer: str = STANDALONE,
    toolkit_root: Path | None = None,
    num_processes: int = 1,
) -> list[Finding]:
    """`check_job_file` for a job that is already parsed; raises ValueError for an unknown trainer."""
    if trainer == STANDALONE:
        job, findings = JobConfig.examine(raw, file=file)
        found = findings.all
        if job is not None and not findings.errors:
            found = [*missing_packages(job), *found]
        return found
    if trainer != AI_TOOLKIT:
        raise ValueError(f"trainer={trainer!r}: must be one of {', '.join(TRAINERS)}; write {AI_TOOLKIT}")
    findings = Findings(file)
    toolkit, plain = toolkit_of(toolkit_root, findings), plain_job(raw, findings)
    if plain is None:
        return findings.all
    name = plain["config"]["name"]
    for i, process in enumerate(plain["config"]["process"]):
        path = f"config.process[{i}]"
        _check_process(Entry(AI_TOOLKIT, process, path, findings, name, None, toolkit, num_processes))
    return findings.all


def toolkit_of(root: Path | None, findings: Findings | None = None) -> Toolkit:
    """The ai-toolkit in `root`; if its source cannot be read, the table's, with a warning."""
    if root is None:
        return Toolkit()
    try:
        return read_toolkit(Path(root).resolve())
    except NoToolkitError as error:
        toolkit = Toolkit()
        if findings is not None:
            findings.warn("ai-toolkit", f"{error}; the list of {toolkit.version} is used")
        return toolkit


def find_toolkit(given: str | os.PathLike[str] | None = None) -> Path | None:
    """The checkout `given` or AI_TOOLKIT_ROOT (raises NoToolkitError), else the working directory if it is one."""
    for place, name in ((given, "--ai-toolkit"), (os.environ.get(ROOT_VARIABLE), ROOT_VARIABLE)):
        if place:
            if not is_toolkit(Path(place)):
                raise NoToolkitError(f"{name}={place}: has no {CLASSES_FILE}; give the folder with ai-toolkit's run.py")
            return Path(place)
    return Path.cwd() if is_toolkit(Path.cwd()) else None


def is_toolkit(folder: Path) -> bool:
    """Whether a folder is a checkout of ai-toolkit."""
    return (folder / CLASSES_FILE).is_file()


def missing_packages(job: JobConfig) -> list[Finding]:
    """Optional packages that the job needs and that are not installed."""
    wanted = []
    if job.train.optimizer in OPTIMIZER_PACKAGES:
        module, package = OPTIMIZER_PACKAGES[job.train.optimizer]
        remedy = f"write {COAT_OPTIMIZER} or adamw"
        wanted.append((module, package, "train.optimizer", job.train.optimizer, remedy))
    if job.logging.use_wandb:
        wanted.append(("wandb", "wandb", "logging.use_wandb", True, "write false"))
    found = []
    for module, package, key, value, remedy in wanted:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:  # a folder that only has its name, as wandb makes one for its files
            text = f"needs the package {package}; pip install {package}, or {remedy}"
            found.append(finding(job.file, f"config.process[0].{key}", text, value))
    return found


def require_packages(job: JobConfig) -> None:
    """Raise ConfigError if an optional package that the job needs is not installed."""
    if missing := missing_packages(job):
        raise ConfigError(missing)


def _check_process(entry: Entry) -> None:
    process, path, findings, kind = entry.raw, entry.path, entry.findings, entry.raw.get("type")
    if kind is None:
        findings.add(f"{path}.type", f"is missing; write {COAT_TYPE}")
    elif kind not in PROCESS_TYPES:
        near = closest(kind, PROCESS_TYPES, cutoff=0.8)
        if near or not isinstance(kind, str):
            findings.add(f"{path}.type", f"not a process type of ai-toolkit; did you mean '{near or COAT_TYPE}'?", kind)
        else:
            findings.warn(f"{path}.type", "a process type of another extension, which is not checked here", kind)
        return
    check_keys(process, path, entry.toolkit, findings)
    coat = None
    if kind in (None, COAT_TYPE):
        coat = build(COATConfig, process.get("coat"), f"{path}.coat", findings)
        check_combinations(coat, f"{path}.coat", findings)
    elif "coat" in process:
        text = f"ai-toolkit reads this block with type: {COAT_TYPE} only, not with {kind}; write that type"
        findings.add(f"{path}.coat", text)
    entry = replace(entry, coat=coat)
    if "validation" in process:
        build(ValidationSection, process["validation"], f"{path}.validation", findings)
        text = f"is measured with type: {COAT_TYPE} and coat.enabled: true only; write those, or remove the block"
        entry.rule(BOTH, "validation", not entry.enabled, text)
        for i, dataset in enumerate(entry.entries("datasets")):
            controls = [key for key in dataset.raw if key.startswith("control_path") and dataset.raw[key]]
            text = f"cannot be measured with the control images of datasets[{i}]; remove the block"
            entry.rule(BOTH, "validation", controls, text)
    check_entry(entry)
