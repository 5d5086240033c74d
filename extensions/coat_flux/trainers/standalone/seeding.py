"""Random numbers that depend on *what* is drawn, never on how the run is arranged.

Every draw of a run is made from a generator seeded with (run seed, stream, index). The index of noise and timesteps is
the global micro-batch number, so one process with accumulation 2, two processes without it, and a run stopped and
resumed in between all see the same numbers. Nothing needs to be stored for a resume but the step.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from ...saves.rng import mixed_seed

if TYPE_CHECKING:
    from ...config.job import JobConfig

__all__ = ["Stream", "derived_seed", "generator_for", "seed_global", "seed_of"]

DEFAULT_SEED = 42


class Stream(IntEnum):
    """Independent sequences of draws."""

    NOISE = 0
    LORA_INIT = 1
    MODEL = 2
    OPTIMIZER = 3
    VALIDATION = 4  # drawn by `data.hold_out`


def seed_of(job: JobConfig) -> int:
    """`training_seed`, or a fixed one where none is given: a run can always be repeated."""
    return DEFAULT_SEED if job.training_seed is None else job.training_seed


def derived_seed(seed: int, stream: Stream, index: int) -> int:
    """Mix (seed, stream, index) into one 63-bit seed.

    Args:
        seed: the run's seed, not negative.
        stream: which sequence the draw belongs to.
        index: the number of the draw in its sequence, not negative.

    Returns:
        A seed in [0, 2^63).
    """
    return mixed_seed(seed, int(stream), index)


def generator_for(seed: int, stream: Stream, index: int) -> torch.Generator:
    """A CPU generator for one draw; what it draws is the same on every device."""
    return torch.Generator("cpu").manual_seed(derived_seed(seed, stream, index))


def seed_global(seed: int, stream: Stream, index: int) -> None:
    """Seed torch's global generators (all devices): LoRA dropout, stochastic rounding."""
    torch.manual_seed(derived_seed(seed, stream, index))
