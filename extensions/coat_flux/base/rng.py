"""Random numbers that depend on *what* is drawn, never on how the run is arranged; states of the generators.

Every draw of the stand-alone trainer uses a generator seeded with (run seed, stream, index), on the CPU where all
devices must see the same. The index of noise and timesteps is the global micro-batch number, so one process with
accumulation 2, two processes without it, and a resumed run all see the same numbers. What libraries draw is saved and
restored: the states are tensors, for no pickle.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

CUDA = "cuda."


class Stream(IntEnum):
    """Independent sequences of draws."""

    NOISE = 0
    LORA_INIT = 1
    MODEL = 2
    OPTIMIZER = 3
    HELD_OUT = 4
    REDRAWN = 5


def mixed_seed(*numbers: int) -> int:
    """One seed in [0, 2^63) from non-negative numbers: a run's seed, the kind of draw, its index."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1


def rng_state() -> dict[str, Tensor]:
    """States of Python's, NumPy's and torch's global generators, and of every GPU's if CUDA is in use.

    python int64 [626] (version, state), python_gauss float64 [0 or 1]; numpy int64 [626] (state, position, has a
    second normal number), numpy_gauss float64 [1]; torch uint8; cuda.<device> uint8.
    """
    version, internal, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 (the global one is what libraries draw from)
    states = {
        "python": torch.tensor([version, *internal], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        states |= {f"{CUDA}{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def set_rng_state(states: Mapping[str, Tensor]) -> None:
    """Restore the states of `rng_state`; GPUs missing here or there are named in a warning."""
    version, *internal = states["python"].tolist()
    gauss = states["python_gauss"].tolist()
    random.setstate((version, tuple(internal), gauss[0] if gauss else None))
    *keys, position, has_gauss = states["numpy"].tolist()
    cached = states["numpy_gauss"].item()
    legacy = ("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached)
    np.random.set_state(legacy)  # noqa: NPY002
    torch.set_rng_state(states["torch"].to("cpu", torch.uint8))
    saved = {int(name.removeprefix(CUDA)): state for name, state in states.items() if name.startswith(CUDA)}
    here = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else range(0)
    for index in sorted(saved.keys() & set(here)):
        torch.cuda.set_rng_state(saved[index].to("cpu", torch.uint8), index)
    odd = sorted(saved.keys() ^ set(here))
    if odd:
        logger.warning("resume: GPUs %s are only in the save or only here; their random numbers start over", odd)


@contextmanager
def kept_draws() -> Iterator[None]:
    """Restore the generators after the block."""
    states = rng_state()
    try:
        yield
    finally:
        set_rng_state(states)
