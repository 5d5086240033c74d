"""Random numbers that depend on *what* is drawn, never on how the run is arranged.

Every draw uses a generator seeded with (run seed, stream, index). The index of noise and timesteps is the global
micro-batch number, so one process with accumulation 2, two processes without it, and a resumed run all see the same
numbers, and a resume needs only the step.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from ...saves.rng import mixed_seed

if TYPE_CHECKING:
    from ...config.job import JobConfig

__all__ = ["Stream", "generator_for", "seed_global", "seed_of"]

DEFAULT_SEED = 42


class Stream(IntEnum):
    """Independent sequences of draws; `data.hold_out` has one more, 4."""

    NOISE = 0
    LORA_INIT = 1
    MODEL = 2
    OPTIMIZER = 3


def seed_of(job: JobConfig) -> int:
    """`training_seed`, or a fixed default: every run is reproducible."""
    return DEFAULT_SEED if job.training_seed is None else job.training_seed


def generator_for(seed: int, stream: Stream, index: int) -> torch.Generator:
    """A CPU generator for one draw, which is thus the same on every device."""
    return torch.Generator("cpu").manual_seed(mixed_seed(seed, int(stream), index))


def seed_global(seed: int, stream: Stream, index: int) -> None:
    """Seed torch's global generators (all devices): LoRA dropout, stochastic rounding."""
    torch.manual_seed(mixed_seed(seed, int(stream), index))
