"""Does the run without COAT fit this GPU? Known before the first hour, not after it."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..blocks.budget import USABLE_FRACTION
from ..config.job import JobConfig
from ..plan.cards import Verdict
from ..plan.report import make_plan
from .errors import VerifyError

__all__ = ["require_room"]

GB = 1e9
LEAN = "train.gradient_checkpointing: true and train.cache_text_embeddings: true"


def require_room(bf16: JobConfig, device: torch.device, memory_bytes: float | None = None) -> None:
    """Refuse a bf16 run that the plan says is too large.

    Args:
        bf16: the run without COAT.
        device: where it would train; only a GPU is asked.
        memory_bytes: of the GPU; None asks it.

    Raises:
        VerifyError: names what it needs, what there is, and what to do.
    """
    if device.type != "cuda":
        return
    if memory_bytes is None:
        memory_bytes = float(torch.cuda.get_device_properties(device).total_memory)
    verdict = _judged(bf16, memory_bytes)
    if verdict.fits:
        return
    weights = verdict.prediction.phases[0].parts["transformer"] / GB
    raise VerifyError(
        f"{bf16.file}: verify compares with a bf16 run, which needs a GPU of about {_needed_gb(verdict):.0f} GB (its "
        f"weights alone {weights:.1f} GB); this one has {memory_bytes / GB:.0f} GB\n{_remedy(bf16, memory_bytes)}"
    )


def _judged(job: JobConfig, memory_bytes: float) -> Verdict:
    return make_plan(job, memory_bytes / GB).verdicts[0]


def _needed_gb(verdict: Verdict) -> float:
    return verdict.prediction.peak / USABLE_FRACTION / GB


def _remedy(bf16: JobConfig, memory_bytes: float) -> str:
    """What to do: first what changes no result."""
    train = replace(bf16.train, gradient_checkpointing=True)
    entries = tuple(replace(entry, cache_text_embeddings=True, shuffle_tokens=False) for entry in bf16.datasets)
    lean = _judged(replace(bf16, train=train, datasets=entries), memory_bytes)
    if lean.fits:
        return f"write {LEAN}: with both it fits"
    return (
        f"run verify once on a larger card, {_needed_gb(lean):.0f} GB are enough with {LEAN}; the COAT runs alone do "
        "not need one"
    )
