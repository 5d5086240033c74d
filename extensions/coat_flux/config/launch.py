"""What of `accelerate launch`'s ways to start processes cannot train here; it passes them on in the environment."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["launch_obstacle"]

INSTEAD = "use --config_file configs/accelerate/ddp.yaml, and memory.stream_blocks where the model does not fit a GPU"


def launch_obstacle(environment: Mapping[str, str]) -> str | None:
    """Return why processes started so cannot train, and what to start instead; None where they can.

    DeepSpeed's ZeRO flattens all parameters of a process into one partition and updates that inside its own engine:
    blocks of moments would span parameters, and the guard, the saves and a resume, which are per parameter, would see
    none of it. Its offload to the CPU wants DeepSpeedCPUAdam besides, in fp32.

    Args:
        environment: of the process.
    """

    def given(name: str) -> bool:
        return environment.get(name, "").lower() in ("1", "true")

    if given("ACCELERATE_USE_DEEPSPEED"):
        return (
            "accelerate launch with DeepSpeed: its engine updates one flat partition of all parameters, in which FP8 "
            f"moments, guard and saves cannot tell them apart; {INSTEAD}"
        )
    if given("ACCELERATE_USE_FSDP"):
        return f"accelerate launch with FSDP: each process holds the whole model here; {INSTEAD}"
    return None
