"""The jobs of paired runs: one config, several arms, and nothing else that differs.

An *arm* is a block that is laid over the config's own `coat:` block: `{}` is the config as it is, `BF16` the run
without COAT, `{"optimizer": {"m1_format": "e5m2"}}` one option changed. The engine draws everything at random (LoRA
start, noise, timesteps, order, caption dropout) from the seed and the number of the draw, so runs of one seed meet the
same in all arms.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ..base.names import COAT_OPTIMIZER, COAT_QTYPE, COAT_TYPE
from ..config.coat import ADAMW_OPTIONS, FORMATS
from ..config.findings import ConfigError
from ..config.job import JobConfig

__all__ = ["BF16", "Arm", "has_coat", "prepare_job", "require_coat", "run_name"]

Arm: TypeAlias = Mapping[str, Any]

BF16: Arm = {"enabled": False}
EIGHT_BIT = (COAT_OPTIMIZER, "adamw8bit")
ADAMW_KEYS = tuple(option.key for option in ADAMW_OPTIONS)


def has_coat(arm: Arm) -> bool:
    """Whether the arm leaves COAT on."""
    return arm.get("enabled", True) is not False


def run_name(arm_name: str, seed: int) -> str:
    """Name and folder of a run."""
    return f"{arm_name}_seed{seed}"


def prepare_job(
    job: JobConfig,
    arm: Arm,
    *,
    name: str,
    folder: str | Path,
    seed: int,
    steps: int | None = None,
    datasets: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """One run of an arm, as a job that any command takes.

    What only tells of a run is set so that it costs little: samples are drawn at the end only, one checkpoint is kept.
    Without COAT the optimizer is AdamW with the same lr, betas, eps and weight decay, and the model is not quantized.

    Args:
        job: the user's.
        arm: laid over its `coat:` block.
        name: of the run, a folder in `folder`.
        folder: its `training_folder`.
        seed: `training_seed`.
        steps: `train.steps`; None: the config's.
        datasets: in place of the config's `datasets`.

    Raises:
        ConfigError: the arm's options contradict each other or the job.
    """
    raw = copy.deepcopy(job.raw)
    raw["config"]["name"] = name
    process = raw["config"]["process"][0]
    train = process.setdefault("train", {})
    coat = _laid_over(_coat_in_force(job), arm)
    process.update(type=COAT_TYPE, training_folder=str(folder), training_seed=seed, coat=coat)
    process.pop("name", None)
    process.pop("log_dir", None)
    process.pop("validation", None)  # the study holds out photos of its own
    train.update(steps=steps or job.train.steps, skip_first_sample=True)
    train["optimizer_params"] = {key: value for key, value in _params(job).items() if key in ADAMW_KEYS}
    process["save"] = {**(process.get("save") or {}), "max_step_saves_to_keep": 1}
    process["sample"] = {**(process.get("sample") or {}), "sample_every": train["steps"]}
    if datasets is not None:
        process["datasets"] = [dict(entry) for entry in datasets]
    _follow_coat(process, job, coat)
    return JobConfig.from_dict(raw, file=f"{job.file} ({name})").raw


def _params(job: JobConfig) -> dict[str, Any]:
    return dict(job.train.optimizer_params or {})


def _coat_in_force(job: JobConfig) -> dict[str, Any]:
    """The block with every option, those that `train.optimizer_params` overrides too."""
    block = job.coat.to_dict()
    params = _params(job)
    block["optimizer"].update({key: value for key, value in params.items() if key in block["optimizer"]})
    return block


def _laid_over(block: Mapping[str, Any], arm: Arm) -> dict[str, Any]:
    """The block with the arm's options, without those of the block that have no effect beside them."""
    merged = {key: dict(value) if isinstance(value, Mapping) else value for key, value in block.items()}
    for key, value in arm.items():
        merged[key] = {**merged.get(key, {}), **value} if isinstance(value, Mapping) else value
    for section, key in _idle(merged):
        if key not in arm.get(section, {}):
            merged[section].pop(key, None)
    return merged


def _idle(block: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Options that a config must not name beside the others; `check_combinations` has the rules."""
    optimizer, activation, way = block["optimizer"], block["activation"], block["memory"]["checkpointing"]
    if way != "every_n":
        yield "memory", "every_n"
    if way != "auto":
        yield "memory", "budget_gb"
    if optimizer["m1_format"] not in FORMATS and optimizer["m2_format"] not in FORMATS:
        yield "optimizer", "use_dynamic_range_expansion"
    if activation["flow"] == "generic":
        yield "speed", "compile"
    if not activation["use_fp8"] or activation["linear_granularity"] == "per_group":
        yield "activation", "min_sqnr_db"


def _follow_coat(process: dict[str, Any], job: JobConfig, coat: Mapping[str, Any]) -> None:
    """Optimizer and quantization must not contradict the block."""
    train, model = process["train"], process["model"]
    if not coat["enabled"] and job.train.optimizer in EIGHT_BIT:
        train["optimizer"] = "adamw"
    if model.get("qtype") == COAT_QTYPE and not (coat["enabled"] and coat["weight"]["use_fp8"]):
        model["quantize"] = False


def require_coat(job: JobConfig) -> None:
    """Refuse a config that has nothing to compare with bf16.

    Raises:
        ConfigError: COAT is off.
    """
    if not job.coat.enabled:
        raise ConfigError(
            f"{job.file}: config.process[0].coat.enabled=false: verify compares COAT with bf16; "
            f"give the config you mean to train with, with type: {COAT_TYPE} and coat.enabled: true"
        )
