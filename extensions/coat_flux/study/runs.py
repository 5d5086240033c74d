"""The runs of a comparison: their jobs, which differ in arm and seed alone, and the results of finished ones.

An *arm* overrides options of the config's `coat:` block: `{}` is the config itself, `BF16` the run without COAT,
`{"optimizer": {"m1_format": "e5m2"}}` changes one option. All random draws (LoRA start, noise, timesteps, order,
caption dropout) depend on the seed and the number of the draw, so runs of one seed get the same in all arms.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from ..base.errors import UserError
from ..base.names import COAT_OPTIMIZER, COAT_QTYPE, COAT_TYPE
from ..config.coat import ADAMW_OPTIONS, OptimizerOptions
from ..config.job import JobConfig
from ..pages.run import MEMORY_FILE, RunFolder
from ..trainers.standalone.resume import find_resume_point

__all__ = ["BF16", "Arm", "ArmResult", "VerifyError", "prepare_job", "read_result", "require_same", "run_name"]

Arm: TypeAlias = Mapping[str, Any]

BF16: Arm = {"enabled": False}
NOTHING_IN_FP8: Arm = {
    **{section: {"use_fp8": False} for section in ("weight", "activation", "optimizer")},
    "memory": {"enable_efficient_checkpoint": False},
}
EIGHT_BIT = (COAT_OPTIMIZER, "adamw8bit")
ADAMW_KEYS = tuple(option.key for option in ADAMW_OPTIONS)
OPTIMIZER_KEYS = tuple(field.name for field in fields(OptimizerOptions))


class VerifyError(UserError, RuntimeError):
    """Runs cannot be compared as requested, or a folder belongs to another comparison."""


@dataclass(frozen=True)
class ArmResult:
    """The result of one run.

    `curve` is (step, held-out loss), `final_own` that loss at the end, both in the run's own precision; `seconds` are
    those of all steps without validation; `peak_bytes` is the most device memory of a step (None: not measured).
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
        """Name of the run and its folder."""
        return run_name(self.arm, self.seed)


def run_name(arm_name: str, seed: int) -> str:
    """Name and folder of a run."""
    return f"{arm_name}_seed{seed}"


def bf16_arm(job: JobConfig) -> Arm:
    """The arm that a job's COAT runs are compared with; in full fine-tuning the config's optimizer with fp32 moments.

    AdamW, rounding to nearest, would lose most updates of bf16 weights, which matters more than FP8 (RESULTS.md).
    """
    return NOTHING_IN_FP8 if job.full and job.train.optimizer == COAT_OPTIMIZER else BF16


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
    """One run of an arm, as a job that any command accepts; ConfigError if the arm's options contradict it.

    Samples are drawn at the end only, one checkpoint is kept. Without COAT the optimizer is AdamW with the same lr,
    betas, eps and weight decay, and the model is not quantized.
    """
    raw = copy.deepcopy(job.raw)
    raw["config"]["name"] = name
    process = raw["config"]["process"][0]
    for key in ("name", "log_dir", "validation"):  # the study holds out its own photos
        process.pop(key, None)
    params = dict(job.train.optimizer_params or {})
    in_force = {key: value for key, value in params.items() if key in OPTIMIZER_KEYS}
    coat = _laid_over(_laid_over(process.get("coat") or {}, {"optimizer": in_force}), arm)
    process.update(type=COAT_TYPE, training_folder=str(folder), training_seed=seed, coat=coat)
    train = process.setdefault("train", {})
    train.update(steps=steps or job.train.steps, skip_first_sample=True)
    train["optimizer_params"] = {key: value for key, value in params.items() if key in ADAMW_KEYS}
    process["save"] = {**(process.get("save") or {}), "max_step_saves_to_keep": 1}
    process["sample"] = {**(process.get("sample") or {}), "sample_every": train["steps"]}
    if datasets is not None:
        process["datasets"] = [dict(entry) for entry in datasets]
    enabled = coat.get("enabled", True)
    if not enabled and job.train.optimizer in EIGHT_BIT:
        train["optimizer"] = "adamw"
        train.pop("fused_backward", None)
    codes = enabled and coat.get("weight", {}).get("use_fp8", True)
    if process["model"].get("qtype") == COAT_QTYPE and not codes:
        process["model"]["quantize"] = False
    return JobConfig.from_dict(raw, file=f"{job.file} ({name})").raw


def _laid_over(block: Mapping[str, Any], arm: Arm) -> dict[str, Any]:
    """The block with the arm's options, without FP8 options that no longer apply."""
    merged = dict(block)
    for key, value in arm.items():
        if not isinstance(value, Mapping):
            merged[key] = value
        elif value.get("use_fp8", True) or key == "optimizer":
            merged[key] = {**(merged.get(key) or {}), **value}
        else:
            merged[key] = dict(value)
    return merged


def read_result(folder: Path, arm_name: str, seed: int, steps: int) -> ArmResult:
    """Read a finished run of `steps` steps; VerifyError if `verify` did not finish it, ResumeError if damaged."""
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


def require_same_job(run: Path, job: Mapping[str, Any]) -> None:
    """VerifyError if a run's folder has another saved config."""
    path = run / "config.yaml"
    if path.exists():
        saved = yaml.safe_load(path.read_text(encoding="utf-8"))
        require_same(saved.get("config"), job["config"], path, "is of a run with other settings", run)


def require_same(saved: Any, now: Any, path: Path, problem: str, folder: Path) -> None:
    """VerifyError, naming the first key, where what `path` has saved differs."""
    differing = list(_differences("", saved, now))
    if differing:
        key, old, new = differing[0]
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise VerifyError(f"{path}: {problem} ({key} {old!r} -> {new!r}{more}); choose another --name; {folder} stays")


def _differences(path: str, saved: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in sorted({*saved, *now}):
            yield from _differences(f"{path}.{key}" if path else key, saved.get(key), now.get(key))
    elif isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        for number, (old, new) in enumerate(zip(saved, now, strict=True)):
            yield from _differences(f"{path}[{number}]", old, new)
    elif saved != now:
        yield path, saved, now
