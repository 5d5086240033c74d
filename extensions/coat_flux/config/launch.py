"""What of `accelerate launch`'s ways to start processes cannot train here; it passes them on in the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..base.errors import UserError

if TYPE_CHECKING:
    from .job import JobConfig

__all__ = ["LaunchError", "launch_obstacle", "shares_weights", "sharing_job"]

DDP = "use --config_file configs/accelerate/ddp.yaml"


class LaunchError(UserError, RuntimeError):
    """The processes were started in a way that cannot train together."""


def launch_obstacle(environment: Mapping[str, str]) -> str | None:
    """Return why processes started so cannot train, and what to start instead; None where they can.

    DeepSpeed's ZeRO flattens all parameters of a process into one partition and updates that inside its own engine:
    blocks of moments would span parameters, and the guard, the saves and a resume, which are per parameter, would see
    none of it. Its offload to the CPU wants DeepSpeedCPUAdam besides, in fp32.

    Args:
        environment: of the process.
    """
    if _given(environment, "ACCELERATE_USE_DEEPSPEED"):
        return (
            "accelerate launch with DeepSpeed: its engine updates one flat partition of all parameters, in which FP8 "
            f"moments, guard and saves cannot tell them apart; {DDP}, or fsdp2.yaml where a model does not fit a GPU"
        )
    if shares_weights(environment) and environment.get("FSDP_VERSION", "1") != "2":
        return "accelerate launch with FSDP: only FSDP2 is supported; use --config_file configs/accelerate/fsdp2.yaml"
    return None


def shares_weights(environment: Mapping[str, str]) -> bool:
    """Whether accelerate's FSDP was asked for: the weights are shared out over the processes."""
    return _given(environment, "ACCELERATE_USE_FSDP")


def _given(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").lower() in ("1", "true")


def sharing_job(job: JobConfig) -> JobConfig:
    """Return the job as it runs with the frozen codes of all blocks shared out over the processes.

    Codes are gathered where they would be copied from host memory, block after block, in all processes alike; so
    nothing may be run by one alone, as measuring does.

    Raises:
        LaunchError: it cannot run so.
    """
    coat = job.coat
    if job.full:
        raise LaunchError(
            "accelerate launch with FSDP2: the trainer shares out frozen codes, and without network all weights are "
            "trained (coat_core.optim.sharded is for loops of your own); train a LoRA, or one process"
        )
    if not (coat.enabled and coat.weight.use_fp8):
        raise LaunchError(
            f"accelerate launch with FSDP2: shares out FP8 codes; set coat.weight.use_fp8: true, or {DDP}"
        )
    if coat.memory.transposed_weights == "always":
        raise LaunchError("coat.memory.transposed_weights='always': copies are not shared out with FSDP2; write auto")
    memory, speed = replace(coat.memory, stream_blocks="all"), replace(coat.speed, measure="never")
    return replace(job, coat=replace(coat, memory=memory, speed=speed))
