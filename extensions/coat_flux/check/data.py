"""The dataset pre-flight of a job, from the keys that are right in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..config.build import build, config_fields
from ..config.coat_config import COATConfig
from ..config.findings import Findings
from ..config.job_config import PROCESS_TYPES
from ..config.job_sections import DatasetSection


def check_data(job: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Look at the photos and captions of a job without config errors.

    Args:
        job: as `load_job_yaml` gives it. Relative folders are relative to the working directory.

    Returns:
        (errors, warnings), one line each.
    """
    from ..data.preflight import inspect_datasets

    errors: list[str] = []
    warnings: list[str] = []
    for process in job["config"]["process"]:
        if process.get("type") not in PROCESS_TYPES:
            continue
        datasets = [_section(entry) for entry in process.get("datasets") or [] if _has_folder(entry)]
        if not datasets:
            continue
        options = build(COATConfig, process.get("coat"), "coat", Findings("")).data
        report = inspect_datasets(
            datasets, process.get("trigger_word"), background=options.background, transparency=options.transparency
        )
        errors += report.errors
        warnings += report.warnings
    return errors, warnings


def _section(entry: Mapping[str, Any]) -> DatasetSection:
    """The entry as the stand-alone trainer has it; keys of ai-toolkit alone, and null for a default, are left out."""
    known = {key: value for key, value in entry.items() if key in config_fields(DatasetSection) and value is not None}
    known["folder_path"] = entry.get("folder_path") or entry["dataset_path"]
    return build(DatasetSection, known, "datasets", Findings(""))


def _has_folder(entry: Mapping[str, Any]) -> bool:
    """False for a list of captions in a JSON file, which only ai-toolkit reads."""
    place = entry.get("folder_path") or entry.get("dataset_path")
    return isinstance(place, str) and os.path.splitext(place)[1].lower() != ".json"
