"""The job as the stand-alone trainer sees it: an ai-toolkit YAML, typed and checked.

Keys ai-toolkit has and the stand-alone trainer has not are refused by name unless they change nothing
(`ai_toolkit_keys`), so a YAML that parses here means the same run in both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..base.names import COAT_OPTIMIZER, COAT_QTYPE, COAT_TYPE
from .ai_toolkit_keys import NETWORK_KWARGS, PROCESS, other_keys
from .build import build
from .coat import COATConfig
from .combinations import check_combinations
from .entry import STANDALONE, Entry
from .findings import Findings
from .full_rules import coat_of_full, is_full
from .job_file import check_plain, check_shape, load_job_yaml, load_written, replace_name
from .job_sections import (
    DTYPES,
    DatasetSection,
    EMASection,
    Job,
    LoggingSection,
    ModelSection,
    NetworkKwargs,
    NetworkSection,
    SampleItem,
    SampleSection,
    SaveSection,
    TrainSection,
)
from .rules import check_entry


@dataclass(frozen=True)
class JobConfig(Job):
    """One job, with every default filled in; how it is read."""

    @classmethod
    def load(cls, config: str | os.PathLike[str] | Mapping[str, Any]) -> JobConfig:
        """`from_dict` of a mapping, `from_file` of a path."""
        return cls.from_dict(config) if isinstance(config, Mapping) else cls.from_file(config)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, name: str | None = None) -> JobConfig:
        """Read and check a job file.

        Args:
            path: YAML or JSON; see `load_job_yaml`.
            name: takes the place of `config.name`.

        Raises:
            ConfigError: everything that is wrong with the file.
        """
        job = cls.from_dict(load_job_yaml(path, name=name), file=os.fspath(path))
        written = load_written(path, name=job.raw["config"]["name"])
        meta = written.get("meta")
        return replace(job, written=written, meta=dict(meta) if isinstance(meta, Mapping) else {})

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, file: str = "") -> JobConfig:
        """Check a job that is already read.

        Args:
            raw: the whole job: `job`, `config` and perhaps `meta`.
            file: named in errors, where there is one.

        Raises:
            ConfigError: everything that is wrong with it.
        """
        job, findings = cls.examine(raw, file=file)
        findings.raise_if_any()
        assert job is not None
        return job

    @classmethod
    def examine(cls, raw: Any, *, file: str = "") -> tuple[JobConfig | None, Findings]:
        """As `from_dict`, with everything that was found, warnings too.

        Returns:
            (job, findings). The job is None where `raw` has not the shape of one; with errors among the findings a
            refused value is replaced by its default.
        """
        findings = Findings(file)
        check_shape(raw, findings)
        check_plain(raw, findings)
        if findings.errors:
            return None, findings
        plain = replace_name(raw, raw["config"]["name"])
        config, path = plain["config"], "config.process[0]"
        _check_frame(plain, findings)
        process = config["process"][0]
        meta = plain["meta"] if isinstance(plain.get("meta"), Mapping) else {}
        job = build(
            cls, process, path, findings, others=OTHER_KEYS, file=file, meta=dict(meta), raw=plain, written=plain
        )
        job = replace(job, full=is_full(process))
        coat = _coat_in_force(job, f"{path}.coat", findings)
        job = replace(_completed(job, config["name"], path, findings), coat=coat)
        check_combinations(job.coat, f"{path}.coat", findings)
        check_entry(Entry(STANDALONE, process, path, findings, config["name"], job.coat))
        return replace(job, notes=tuple(warning.line() for warning in findings.warnings)), findings


AI_TOOLKIT_BLOCKS: dict[type, str] = {
    JobConfig: PROCESS,
    NetworkSection: "NetworkConfig",
    NetworkKwargs: NETWORK_KWARGS,
    SaveSection: "SaveConfig",
    DatasetSection: "DatasetConfig",
    TrainSection: "TrainConfig",
    EMASection: "EMAConfig",
    ModelSection: "ModelConfig",
    SampleSection: "SampleConfig",
    SampleItem: "SampleItem",
    LoggingSection: "LoggingConfig",
}
OTHER_KEYS = {cls: other_keys(block) for cls, block in AI_TOOLKIT_BLOCKS.items()}


def _check_frame(raw: Mapping[str, Any], findings: Findings) -> None:
    """What is around the process entry."""
    if raw["job"] != "extension":
        findings.add("job", "the stand-alone trainer runs job: extension; write that", raw["job"])
    config = raw["config"]
    for extra in config:
        if extra == "device":
            findings.warn("config.device", "no effect, as in ai-toolkit; write it in config.process[0]")
        elif extra not in ("name", "process"):
            findings.add(f"config.{extra}", "unknown key; known here: name, process")
    if len(config["process"]) > 1:
        count = len(config["process"])
        findings.add("config.process", f"has {count} entries, the stand-alone trainer runs one; make a file for each")
    if raw.get("meta") is not None and not isinstance(raw["meta"], Mapping):
        findings.add("meta", "must be a block of keys; write name: and version: below it", raw["meta"])


def _coat_in_force(job: JobConfig, path: str, findings: Findings) -> COATConfig:
    """The block with what the job's other keys decide, where the block leaves it open.

    Without a block ai-toolkit's own process types get from COAT what optimizer and qtype select, each alone, as in
    ai-toolkit; everything else is a plain run.
    """
    coat = _coat_of_entry(job, path, findings)
    return coat_of_full(coat, path, findings.given) if job.full else coat


def _coat_of_entry(job: JobConfig, path: str, findings: Findings) -> COATConfig:
    optimizer = job.train.optimizer == COAT_OPTIMIZER
    weights = job.model.quantize and job.model.qtype == COAT_QTYPE
    if path not in findings.given and job.type != COAT_TYPE:
        block = {
            "enabled": optimizer or weights,
            "optimizer": {"use_fp8": optimizer},
            "weight": {"use_fp8": weights},
            "activation": {"use_fp8": weights},
            "memory": {
                "enable_efficient_checkpoint": False,
                "checkpointing": "all" if job.train.gradient_checkpointing else "none",
            },
        }
        return COATConfig.from_dict(block)
    if f"{path}.optimizer" not in findings.given and not optimizer:
        return replace(job.coat, optimizer=replace(job.coat.optimizer, use_fp8=False))
    return job.coat


def _completed(job: JobConfig, name: str, path: str, findings: Findings) -> JobConfig:
    """Resolve ai-toolkit's older and implied spellings, so that the trainer has one place to look.

    A model that is trained itself is saved as it is trained where `save.dtype` does not say otherwise.
    """
    as_trained = job.full and f"{path}.save.dtype" not in findings.given
    rank = job.network.linear if job.network.rank is None else job.network.rank
    alpha = job.network.linear_alpha if job.network.linear_alpha is not None else job.network.alpha
    cached = job.train.cache_text_embeddings
    return replace(
        job,
        name=job.name or name,
        network=replace(job.network, linear=rank, rank=rank, linear_alpha=alpha),
        save=replace(job.save, dtype=DTYPES[job.train.dtype if as_trained else job.save.dtype]),
        train=replace(
            job.train,
            dtype=DTYPES[job.train.dtype],
            optimizer_params=job.train.optimizer_params or {},
            lr_scheduler_params=job.train.lr_scheduler_params or {},
        ),
        datasets=tuple(
            replace(
                entry,
                caption_ext="." + entry.caption_ext.lstrip("."),
                cache_text_embeddings=entry.cache_text_embeddings or cached,
            )
            for entry in job.datasets
        ),
    )
