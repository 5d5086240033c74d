"""All findings about one job, for either trainer."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.names import COAT_TYPE
from .ai_toolkit_keys import Toolkit, check_keys
from .coat import COATConfig
from .findings import NEEDS, Block, ConfigError, Finding, Findings, closest
from .job import JobConfig
from .job_file import plain_job
from .job_sections import PROCESS_TYPES, ValidationSection
from .options import build
from .rules import AI_TOOLKIT, STANDALONE, Entry, arch_of, check_entry

TRAINERS = (STANDALONE, AI_TOOLKIT)
PLACES = {"file": "one that exists", "file or hub": "one that exists, or owner/name"}
_HUB = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*){1,2}")  # a third part names a file


def check_job_dict(
    raw: Any,
    *,
    file: str = "",
    trainer: str = STANDALONE,
    toolkit_root: Path | None = None,
    num_processes: int = 1,
) -> list[Finding]:
    """Check a parsed job for one of `TRAINERS` and return errors, then warnings; raises ValueError for another trainer.

    The source of the ai-toolkit in `toolkit_root` may know newer keys than our table.
    """
    if trainer == STANDALONE:
        job, findings = JobConfig.examine(raw, file=file)
        missing = missing_packages(job) if job is not None and not findings.errors else []
        return [*missing, *findings.all]
    if trainer != AI_TOOLKIT:
        raise ValueError(f"trainer={trainer!r}: must be one of {', '.join(TRAINERS)}; write {AI_TOOLKIT}")
    findings, toolkit = Findings(file), Toolkit(toolkit_root)
    if toolkit.problem:
        findings.warn("ai-toolkit", toolkit.problem)
    plain = plain_job(raw, findings)
    if plain is not None:
        name = plain["config"]["name"]
        for i, process in enumerate(plain["config"]["process"]):
            _check_process(process, f"config.process[{i}]", name, toolkit, findings, num_processes)
    return findings.all


def job_for_plan(raw: Mapping[str, Any], file: str = "") -> JobConfig:
    """A parsed job of either trainer: where the stand-alone one lacks its model, ai-toolkit's rules hold.

    Keys that only ai-toolkit has get their defaults, and are named in `uncounted`. Raises ConfigError.
    """
    job, findings = JobConfig.examine(raw, file=file)
    foreign = [f"config.process[0].model.{key}" for key in ("arch", "is_flux", "qtype")]
    if job is None or not any(finding.key in foreign for finding in findings.errors):
        return JobConfig.from_dict(raw, file=file)
    errors = [each for each in check_job_dict(raw, file=file, trainer=AI_TOOLKIT) if each.severity == "error"]
    if errors:
        raise ConfigError(errors)
    return replace(job, uncounted=tuple(each.key for each in findings.errors if each.key not in foreign))


def check_needs(process: Mapping[str, Any], path: str, findings: Findings, *, alone: bool = False) -> None:
    """Check for packages and files that the job needs here; `alone`: without ai-toolkit."""
    block = Block(process, path, findings)
    block.facts["arch"] = arch_of(block.get("model", {}))
    for row in filter(block.fits, NEEDS):
        key, need = row["key"], row["finding"]
        if need in PLACES:
            place = Path(block.get(key))
            on_hub = "hub" in need and _HUB.fullmatch(block.get(key))
            if not (place.exists() or (on_hub and not Path(place.parts[0]).is_dir())):
                block.error(key, f"is not in {Path.cwd()}; give {PLACES[need]}")
        elif not is_installed(need):
            rule = f"needs the package {need}; pip install {need}"
            # ai-toolkit's own Python has lycoris
            if alone or is_installed("lycoris"):
                block.error(key, f"{rule}, or write another value")
            else:
                block.warn(key, f"{rule}, if ai-toolkit's Python lacks it, too")


IMPORTED_AS = {"scikit-image": "skimage"}


def is_installed(package: str) -> bool:
    """Whether a package, as pip calls it, is here."""
    spec = None
    with suppress(ModuleNotFoundError):  # of the parent
        spec = importlib.util.find_spec(IMPORTED_AS.get(package, package.replace("-", "_")))
    # wandb's folder of files has no origin
    return spec is not None and spec.origin is not None


def missing_packages(job: JobConfig) -> list[Finding]:
    """Packages that the job needs and that are not here."""
    findings = Findings(job.file)
    check_needs(job.raw["config"]["process"][0], "config.process[0]", findings, alone=True)
    return findings.errors


def _check_process(process: Any, path: str, name: str, toolkit: Toolkit, findings: Findings, processes: int) -> None:
    """Check an entry of `config.process` for ai-toolkit."""
    kind = process.get("type")
    if kind is None:
        findings.add(f"{path}.type", f"is missing; write {COAT_TYPE}")
    elif kind not in PROCESS_TYPES:
        near = closest(kind, PROCESS_TYPES, cutoff=0.8)
        if near or not isinstance(kind, str):
            findings.add(f"{path}.type", f"not a process type; did you mean '{near or COAT_TYPE}'?", kind)
        else:
            findings.warn(f"{path}.type", "a process type of another extension, not checked here", kind)
        return
    check_keys(process, path, toolkit, findings)
    coat = None
    if kind in (None, COAT_TYPE):
        coat = build(COATConfig, process.get("coat"), f"{path}.coat", findings)
    elif "coat" in process:
        findings.add(f"{path}.coat", f"is not read with type: {kind}; write type: {COAT_TYPE}")
    entry = Entry(AI_TOOLKIT, process, path, findings, name, coat)
    if "validation" in process:
        build(ValidationSection, process["validation"], f"{path}.validation", findings)
        if not entry.enabled:
            entry.error("validation", f"needs type: {COAT_TYPE} and coat.enabled: true; write those, or remove it")
        for i, dataset in enumerate(entry.blocks("datasets")):
            if any(key.startswith("control_path") and dataset.raw[key] for key in dataset.raw):
                entry.error("validation", f"cannot use the control images of datasets[{i}]; remove the block")
    check_entry(entry)
    if processes == 1:
        return
    # our loop inside ai-toolkit sums the gradients of a network, and of nothing else
    others = any(process.get(key) for key in ("embedding", "adapter", "decorator"))
    if not entry.enabled:
        text = f"ai-toolkit does not sum their gradients; write type: {COAT_TYPE}, coat.enabled: true, or start one"
        findings.add("num_processes", text, processes)
    elif others or not process.get("network") or entry.get("train.merge_network_on_save"):
        text = "several processes train a network (a LoRA) and nothing else; start one"
        findings.add("num_processes", text, processes)
