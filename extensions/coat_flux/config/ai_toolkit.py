"""A whole job as ai-toolkit would take it: keys first, then what its keys say together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..base.names import COAT_TYPE
from .ai_toolkit_entry import Entry
from .ai_toolkit_keys import Schema, check_keys
from .ai_toolkit_rules import check_entry
from .build import build
from .coat import COATConfig, check_combinations
from .findings import Findings, closest
from .job_file import check_plain, check_shape, replace_name
from .job_sections import PROCESS_TYPES, ValidationSection


def check_job(raw: Any, findings: Findings, schema: Schema, num_processes: int = 1) -> None:
    """Add what ai-toolkit would refuse late, ignore in silence, or take for something else.

    Args:
        raw: the whole job as read, with or without `[name]` replaced.
        findings: receives errors and warnings.
        schema: what this ai-toolkit reads.
        num_processes: how many processes accelerate started.
    """
    check_shape(raw, findings)
    check_plain(raw, findings)
    if findings.errors:
        return
    job = replace_name(raw, raw["config"]["name"])
    if job["job"] != "extension":
        findings.add("job", "only jobs that train by a process type are checked; write job: extension", job["job"])
        return
    _check_frame(job["config"], findings)
    for i, process in enumerate(job["config"]["process"]):
        _check_process(process, job["config"]["name"], f"config.process[{i}]", findings, schema, num_processes)


def _check_frame(config: Mapping[str, Any], findings: Findings) -> None:
    for extra in config:
        if extra == "device":
            findings.warn("config.device", "ai-toolkit trains on the first visible GPU; remove it", config[extra])
        elif extra not in ("name", "process"):
            findings.add(f"config.{extra}", "unknown key; known here: name, process")


def _check_process(
    process: Mapping[str, Any], name: str, path: str, findings: Findings, schema: Schema, num_processes: int
) -> None:
    kind = process.get("type")
    if kind is None:
        findings.add(f"{path}.type", f"is missing; write {COAT_TYPE}")
    elif kind not in PROCESS_TYPES:
        _check_other_type(kind, f"{path}.type", findings)
        return
    check_keys(process, path, schema, findings)
    coat = None
    if kind in (None, COAT_TYPE):
        at = f"{path}.coat"
        coat = build(COATConfig, process.get("coat"), at, findings)
        check_combinations(coat, at, findings)
    elif "coat" in process:
        rule = f"ai-toolkit reads this block with type: {COAT_TYPE} only, not with {kind}; write that type"
        findings.add(f"{path}.coat", rule)
    if "validation" in process:
        build(ValidationSection, process["validation"], f"{path}.validation", findings)
        if coat is None or not coat.enabled:
            rule = f"is measured with type: {COAT_TYPE} and coat.enabled: true only; write those, or remove the block"
            findings.add(f"{path}.validation", rule)
        for i, entry in enumerate(process.get("datasets") or []):
            if isinstance(entry, Mapping) and any(str(key).startswith("control_path") and entry[key] for key in entry):
                rule = f"cannot be measured with the control images of datasets[{i}]; remove the block"
                findings.add(f"{path}.validation", rule)
    check_entry(Entry(process, name, path, coat, findings, schema, num_processes))


def _check_other_type(kind: Any, path: str, findings: Findings) -> None:
    near = closest(kind, PROCESS_TYPES, cutoff=0.8)
    if not isinstance(kind, str) or near:
        findings.add(path, f"no process type of ai-toolkit; did you mean '{near or COAT_TYPE}'?", kind)
    else:
        findings.warn(path, "a process type of another extension, which is not checked here", kind)
