"""The runs of a comparison: their jobs, which differ in the arm and the seed alone, and what a finished one came to.

An *arm* is a block that is laid over the config's own `coat:` block: `{}` is the config as it is, `BF16` the run
without COAT, `{"optimizer": {"m1_format": "e5m2"}}` one option changed. The trainer draws everything at random (LoRA
start, noise, timesteps, order, caption dropout) from the seed and the number of the draw, so runs of one seed meet the
same in all arms.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ..base.errors import UserError
from ..base.names import COAT_OPTIMIZER, COAT_QTYPE, COAT_TYPE
from ..config.coat import ADAMW_OPTIONS
from ..config.job import JobConfig
from ..config.options import FORMATS, INT8
from ..pages.run import MEMORY_FILE, RunFolder
from ..trainers.standalone.resume import find_resume_point

__all__ = ["BF16", "Arm", "ArmResult", "VerifyError", "prepare_job", "read_result", "run_name"]

Arm: TypeAlias = Mapping[str, Any]

BF16: Arm = {"enabled": False}
_NOTHING_IN_FP8: Arm = {
    **{key: {"use_fp8": False} for key in ("weight", "activation", "optimizer")},
    "memory": {"enable_efficient_checkpoint": False},
}
EIGHT_BIT = (COAT_OPTIMIZER, "adamw8bit")
ADAMW_KEYS = tuple(option.key for option in ADAMW_OPTIONS)


class VerifyError(UserError, RuntimeError):
    """Runs cannot be compared as asked, or a folder holds those of another comparison."""


def run_name(arm_name: str, seed: int) -> str:
    """Name and folder of a run."""
    return f"{arm_name}_seed{seed}"


def bf16_arm(job: JobConfig) -> Arm:
    """Return what the COAT runs of a job are compared with: its run in bf16.

    In full fine-tuning that is the config's own optimizer with fp32 moments. AdamW would round the weights to nearest
    and lose most updates of bf16 weights, which has more effect on a run than FP8 has (RESULTS.md).
    """
    return _NOTHING_IN_FP8 if job.full and job.train.optimizer == COAT_OPTIMIZER else BF16


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

    What only reports on a run is set to cost little: samples are drawn at the end only, one checkpoint is kept.
    Without COAT the optimizer is AdamW with the same lr, betas, eps and weight decay, and the model is not quantized.

    Args:
        job: the user's; `steps` and `datasets` take the place of its own.
        arm: laid over its `coat:` block.
        name: of the run, a folder in `folder`.
        folder: its `training_folder`.
        seed: `training_seed`.
        steps: None: the config's.
        datasets: None: the config's.

    Raises:
        ConfigError: the arm's options contradict each other or the job.
    """
    params = dict(job.train.optimizer_params or {})
    in_force = job.coat.to_dict()
    in_force["optimizer"].update({key: value for key, value in params.items() if key in in_force["optimizer"]})
    coat = _laid_over(in_force, arm)
    raw = copy.deepcopy(job.raw)
    raw["config"]["name"] = name
    process = raw["config"]["process"][0]
    for key in ("name", "log_dir", "validation"):  # the study holds out photos of its own
        process.pop(key, None)
    process.update(type=COAT_TYPE, training_folder=str(folder), training_seed=seed, coat=coat)
    train = process.setdefault("train", {})
    train.update(steps=steps or job.train.steps, skip_first_sample=True)
    train["optimizer_params"] = {key: value for key, value in params.items() if key in ADAMW_KEYS}
    process["save"] = {**(process.get("save") or {}), "max_step_saves_to_keep": 1}
    process["sample"] = {**(process.get("sample") or {}), "sample_every": train["steps"]}
    if datasets is not None:
        process["datasets"] = [dict(entry) for entry in datasets]
    if not coat["enabled"] and job.train.optimizer in EIGHT_BIT:
        train["optimizer"] = "adamw"
        train.pop("fused_backward", None)
    if process["model"].get("qtype") == COAT_QTYPE and not (coat["enabled"] and coat["weight"]["use_fp8"]):
        process["model"]["quantize"] = False
    return JobConfig.from_dict(raw, file=f"{job.file} ({name})").raw


def _laid_over(block: Mapping[str, Any], arm: Arm) -> dict[str, Any]:
    """The block with the arm's options, without those of the block that have no effect then."""
    merged = {key: dict(value) if isinstance(value, Mapping) else value for key, value in block.items()}
    for key, value in arm.items():
        merged[key] = {**merged.get(key, {}), **value} if isinstance(value, Mapping) else value
    for section, key in _idle(merged):
        if key not in arm.get(section, {}):
            merged[section].pop(key, None)
    return merged


def _idle(block: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Options that a config must not name together with the others; `check_combinations` has the rules."""
    optimizer, activation, way = block["optimizer"], block["activation"], block["memory"]["checkpointing"]
    if way != "every_n":
        yield "memory", "every_n"
    if way != "auto":
        yield "memory", "budget_gb"
    if optimizer["m1_format"] not in FORMATS and optimizer["m2_format"] not in FORMATS:
        yield "optimizer", "use_dynamic_range_expansion"
    if block["weight"]["format"] == INT8:
        yield "weight", "granularity"
        if activation["grad_format"] in FORMATS:
            yield "activation", "grad_format"
    if activation["flow"] == "generic":
        yield "speed", "compile"
    if not activation["use_fp8"] or activation["linear_granularity"] == "per_group":
        yield "activation", "min_sqnr_db"


@dataclass(frozen=True)
class ArmResult:
    """What one run came to.

    Attributes:
        arm: its arm's name.
        seed: of the run.
        lora: the final LoRA.
        curve: (step, held-out loss) in the run's own precision, by `Settings.curve_sigmas`.
        final_own: held-out loss at the end in the run's own precision, by `Settings.final_sigmas`.
        seconds: of all optimizer steps, without validation.
        steps_per_s: optimizer steps per second.
        peak_bytes: most device memory of a training step; None where it was not measured.
        samples: images of the last step, in the order of the prompts.
    """

    arm: str
    seed: int
    lora: Path
    curve: tuple[tuple[int, float], ...]
    final_own: float
    seconds: float
    steps_per_s: float
    peak_bytes: int | None
    samples: tuple[Path, ...]

    @property
    def name(self) -> str:
        """Of the run and its folder."""
        return run_name(self.arm, self.seed)


def read_result(folder: Path, arm_name: str, seed: int, steps: int) -> ArmResult:
    """Read a finished run of `steps` steps.

    Raises:
        VerifyError: it was not finished by `verify`.
        ResumeError: its last save is damaged.
    """
    point = find_resume_point(folder, folder.name)
    observed = {} if point is None else point.record.get("observed", {})
    if point is None or "final" not in observed:
        raise VerifyError(f"{folder}: was finished without verify, so it has no held-out losses; move it elsewhere")
    run = RunFolder(folder)
    seconds = sum(value for _, value in run.metrics.get("s_per_it", []))
    phases = (run.json(MEMORY_FILE) or {}).get("phases", {})
    return ArmResult(
        arm=arm_name,
        seed=seed,
        lora=point.path,
        curve=tuple((int(step), float(loss)) for step, loss in observed["curve"]),
        final_own=float(observed["final"]),
        seconds=seconds,
        steps_per_s=steps / seconds if seconds else 0.0,
        peak_bytes=phases["step"]["peak"]["allocated"] if "step" in phases else None,
        samples=tuple(sample.path for sample in run.samples() if sample.step == steps),
    )
