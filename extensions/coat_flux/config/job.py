"""The job as the stand-alone trainer sees it: a YAML that is valid here means the same run in ai-toolkit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..base.names import COAT_OPTIMIZER, COAT_QTYPE, COAT_TYPE
from .ai_toolkit_keys import BLOCKS, PROCESS
from .coat import COATConfig
from .findings import ConfigError, Findings
from .job_file import load_job_yaml, load_written, plain_job
from .job_sections import (
    DTYPES,
    PROCESS_TYPES,
    DatasetSection,
    LoggingSection,
    ModelSection,
    NetworkSection,
    SampleSection,
    SaveSection,
    TrainSection,
    ValidationSection,
)
from .options import blocks, build, choice, key
from .rules import STANDALONE, Entry, check_entry, is_full

DEFAULT_SEED = 42


@dataclass(frozen=True)
class JobConfig:
    """One job, with every default filled in: the process entry under ai-toolkit's names."""

    name: str | None = key(None, "str", nullable=True)
    type: str = choice(PROCESS_TYPES, required=True)
    training_folder: str = key(None, "str", required=True)
    device: str | None = key(None, "str", "cuda, cuda:0, mps or cpu; null: the best there is", nullable=True)
    trigger_word: str | None = key(None, "str", "goes into every caption", nullable=True)
    training_seed: int | None = key(None, "int", nullable=True, minimum=0)
    log_dir: str | None = key(None, "str", "folder for TensorBoard", nullable=True)
    performance_log_every: int = key(0, "int", "0: never", minimum=0)
    network: NetworkSection = field(default_factory=NetworkSection)
    save: SaveSection = field(default_factory=SaveSection)
    datasets: tuple[DatasetSection, ...] = blocks(DatasetSection)
    train: TrainSection = field(default_factory=TrainSection)
    model: ModelSection = field(default_factory=ModelSection)
    sample: SampleSection = field(default_factory=SampleSection)
    logging: LoggingSection = field(default_factory=LoggingSection)
    validation: ValidationSection = field(default_factory=ValidationSection)
    coat: COATConfig = field(default_factory=COATConfig)
    full: bool = False  # without `network`, the transformer itself is trained
    file: str = ""
    notes: tuple[str, ...] = ()  # lines to show the user
    uncounted: tuple[str, ...] = ()  # keys that `plan` leaves out, since only ai-toolkit has them
    raw: dict[str, Any] = field(default_factory=dict)  # the parsed job
    written: dict[str, Any] = field(default_factory=dict)  # the same with `${VARIABLE}` unexpanded, for storage

    @property
    def folder(self) -> Path:
        """`<training_folder>/<name>`."""
        return Path(self.training_folder) / str(self.name)

    @property
    def seed(self) -> int:
        """`training_seed`, or a fixed default: every run is reproducible."""
        return DEFAULT_SEED if self.training_seed is None else self.training_seed

    @classmethod
    def load(cls, config: str | os.PathLike[str] | Mapping[str, Any], *, name: str | None = None) -> JobConfig:
        """Read and check a YAML or JSON file, or check a parsed job; `name` overrides a file's `config.name`.

        Raises ConfigError with every finding.
        """
        if isinstance(config, Mapping):
            return cls.from_dict(config)
        job = cls.from_dict(load_job_yaml(config, name=name), file=os.fspath(config))
        return replace(job, written=load_written(config, name=job.raw["config"]["name"]))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, file: str = "") -> JobConfig:
        """Check a parsed job (`job`, `config`, optional `meta`); raises ConfigError with every finding."""
        job, findings = cls.examine(raw, file=file)
        if findings.errors:
            raise ConfigError(findings.errors)
        return job

    @classmethod
    def examine(cls, raw: Any, *, file: str = "") -> tuple[JobConfig | None, Findings]:
        """`from_dict` with all findings and defaults for refused values; the job is None if `raw` is not one."""
        findings = Findings(file)
        plain = plain_job(raw, findings)
        if plain is None:
            return None, findings
        processes, path = plain["config"]["process"], "config.process[0]"
        if len(processes) > 1:
            text = f"has {len(processes)} entries, the stand-alone trainer runs one; make a file for each"
            findings.add("config.process", text)
        process, name = processes[0], plain["config"]["name"]
        own = {"file": file, "raw": plain, "written": plain, "full": is_full(process)}
        job = build(cls, process, path, findings, rows=BLOCKS, block=PROCESS, **own)
        coat = _coat_in_force(job, f"{path}.coat", findings)
        job = replace(_completed(job, name, path, findings), coat=coat)
        check_entry(Entry(STANDALONE, process, path, findings, name, job.coat))
        return replace(job, notes=tuple(warning.line() for warning in findings.warnings)), findings


def coat_of_entry(process: Mapping[str, Any], file: str) -> COATConfig:
    """The `coat:` block of a process entry as it applies inside ai-toolkit; raises ConfigError."""
    coat = COATConfig.from_dict(process.get("coat"), file=file, key_path="config.process[0].coat")
    if not is_full(process):
        return coat
    optimizer = (process.get("coat") or {}).get("optimizer") or {}
    return _coat_of_full(coat, keeps_rounding="stochastic_rounding" in optimizer)


def _coat_in_force(job: JobConfig, path: str, findings: Findings) -> COATConfig:
    """The `coat:` block; without one, ai-toolkit's processes get the parts that their optimizer and qtype select."""
    coat, optimizer = job.coat, job.train.optimizer == COAT_OPTIMIZER
    if path not in findings.given and job.type != COAT_TYPE:
        weights = job.model.quantize and job.model.qtype == COAT_QTYPE
        mode = "all" if job.train.gradient_checkpointing else "none"
        coat = COATConfig.from_dict(
            {
                "enabled": optimizer or weights,
                "optimizer": {"use_fp8": optimizer},
                "weight": {"use_fp8": weights},
                "activation": {"use_fp8": weights},
                "memory": {"enable_efficient_checkpoint": False, "checkpointing": mode},
            }
        )
    elif f"{path}.optimizer" not in findings.given and not optimizer:
        coat = replace(coat, optimizer=replace(coat.optimizer, use_fp8=False))
    if not job.full:
        return coat
    return _coat_of_full(coat, keeps_rounding=f"{path}.optimizer.stochastic_rounding" in findings.given)


def _coat_of_full(coat: COATConfig, *, keeps_rounding: bool) -> COATConfig:
    """The block as it applies to full fine-tuning.

    Trained weights change in every step, so blocks take the generic flow. bf16 weights are rounded stochastically by
    default, since most updates are smaller than half a bf16 step.
    """
    optimizer = coat.optimizer
    return replace(
        coat,
        optimizer=optimizer if keeps_rounding else replace(optimizer, stochastic_rounding=True),
        activation=replace(coat.activation, flow="generic"),
        speed=replace(coat.speed, cuda_graphs="never", measure="never"),
        fallback="error" if coat.fallback == "error" else "bf16",
    )


def _completed(job: JobConfig, name: str, path: str, findings: Findings) -> JobConfig:
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
