"""The dataset pre-flight of a job, for either trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from ..config.coat import COATConfig
from ..config.findings import Findings
from ..config.job_sections import PROCESS_TYPES, DatasetSection, ValidationSection
from ..config.options import build, config_fields

T5_ARCHS = ("flux", "flex1", "flux_kontext", "chroma", "chroma_radiance")


def check_data(job: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Inspect photos and captions of a job (from `load_job_yaml`) without config errors; returns (errors, warnings)."""
    from .files import DatasetError
    from .hold_out import choose_hold_out
    from .preflight import inspect_datasets

    errors: list[str] = []
    warnings: list[str] = []
    for process in job["config"]["process"]:
        if process.get("type") in PROCESS_TYPES and (datasets := list(datasets_of(process))):
            report = inspect_datasets(
                datasets, process.get("trigger_word"), **photo_policy(process), t5_of=t5_of(process)
            )
            errors += report.errors
            warnings += report.warnings
            asked = build(ValidationSection, process.get("validation"), "validation", Findings(""))
            trained = [data.folder_path for data in datasets_of(process, regularization=False)]
            try:
                choose_hold_out(trained, asked.hold_out, process.get("training_seed"))
            except DatasetError as error:
                errors.append(str(error))
    return errors, warnings


def datasets_of(process: Mapping[str, Any], *, regularization: bool = True) -> Iterator[DatasetSection]:
    """A process entry's datasets for the stand-alone trainer, without JSON captions, which only ai-toolkit reads."""
    known = config_fields(DatasetSection)
    for entry in process.get("datasets") or []:
        place = entry.get("folder_path") or entry.get("dataset_path")
        wanted = regularization or not entry.get("is_reg")
        if wanted and isinstance(place, str) and os.path.splitext(place)[1].lower() != ".json":
            keys = {key: value for key, value in entry.items() if key in known and value is not None}
            yield build(DatasetSection, {**keys, "folder_path": place}, "datasets", Findings(""))


def photo_policy(process: Mapping[str, Any]) -> dict[str, str]:
    """`background` and `transparency` of a process entry's `coat.data`."""
    asked = build(COATConfig, process.get("coat"), "coat", Findings("")).data
    return {"background": asked.background, "transparency": asked.transparency}


def t5_of(process: Mapping[str, Any]) -> str | None:
    """The model whose T5 reads the captions of a process entry, or None."""
    model = process.get("model") or {}
    arch = str(model.get("arch") or ("flux" if model.get("is_flux") else "")).split(":")[0]
    return str(model.get("name_or_path", "")) if arch in T5_ARCHS else None
