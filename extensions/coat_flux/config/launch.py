"""Multi-process modes of `accelerate launch` (passed in the environment) that cannot train here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..base.errors import UserError
from ..base.names import COAT_OPTIMIZER

if TYPE_CHECKING:
    from .job import JobConfig

ON = ("1", "true")
DDP = "use --config_file configs/accelerate/ddp.yaml"
FSDP_SETTINGS = {  # unsupported settings of its fsdp_config
    "reshard_after_forward": ("false", "gathered weights are always freed after forward; write true"),
    "offload_params": ("true", "weights and moments stay on the GPU; write false"),
    "activation_checkpointing": ("true", "coat.memory.checkpointing decides what is recomputed; write false"),
}


class LaunchError(UserError, RuntimeError):
    """The processes were launched in a mode that cannot train together."""


def require_launch(environment: Mapping[str, str]) -> None:
    """Raise LaunchError if processes launched this way cannot train.

    DeepSpeed's ZeRO flattens all parameters of a process into one partition that its own engine updates: blocks of
    moments would span parameters, and neither guard, saves nor resume would see them.
    """
    if environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() in ON:
        rule = f"its engine, not FP8 AdamW, updates parameters; {DDP}, or fsdp2.yaml where a model does not fit a GPU"
        raise LaunchError(f"accelerate launch with DeepSpeed: {rule}")
    if not shares_weights(environment):
        return
    if environment.get("FSDP_VERSION", "1") != "2":
        rule = "only FSDP2 is supported; use --config_file configs/accelerate/fsdp2.yaml"
        raise LaunchError(f"accelerate launch with FSDP: {rule}")
    for name, (value, why) in FSDP_SETTINGS.items():
        if environment.get(f"FSDP_{name.upper()}", "").lower() == value:
            raise LaunchError(f"accelerate launch with FSDP2, fsdp_{name}: {value}: {why}")


def shares_weights(environment: Mapping[str, str]) -> bool:
    """Whether accelerate's FSDP shards the weights over the processes."""
    return environment.get("ACCELERATE_USE_FSDP", "").lower() in ON


def joint_job(job: JobConfig, *, shares: bool) -> JobConfig:
    """Return the job adapted to several processes; raises LaunchError if it cannot run that way.

    With FSDP2 frozen codes are gathered block by block in all processes, so none may run blocks alone, as to measure.
    Trained weights are gathered into reused memory, so their codes cannot be cached.
    """
    coat, optimizer = job.coat, job.train.optimizer
    if job.train.fused_backward:
        raise LaunchError("train.fused_backward: true: is for one process; write false (fsdp2.yaml shares gradients)")
    if not shares:
        return job
    if coat.enabled and coat.memory.transposed_weights == "always":
        raise LaunchError("coat.memory.transposed_weights='always': copies are not shared out with FSDP2; write auto")
    if job.full and optimizer.lower() != COAT_OPTIMIZER:
        rule = f"with FSDP2 only {COAT_OPTIMIZER} updates trained weights; write it, or {DDP}"
        raise LaunchError(f"train.optimizer={optimizer!r}: {rule}")
    if job.full and coat.enabled and coat.optimizer_config(job.train.optimizer_params)[1]["offload"] != "none":
        rule = "with FSDP2 moments are shared out already; write none, or start one process"
        raise LaunchError(f"coat.optimizer.offload='cpu': {rule}")
    if not job.full and not (coat.enabled and coat.weight.use_fp8):
        text = "accelerate launch with FSDP2: shares out FP8 codes"
        raise LaunchError(f"{text}; set coat.weight.use_fp8: true, or {DDP}")
    changed = {"transposed_weights": "never"} if job.full else {"stream_blocks": "all"}
    memory, speed = replace(coat.memory, **changed), replace(coat.speed, measure="never")
    return replace(job, coat=replace(coat, memory=memory, speed=speed))
