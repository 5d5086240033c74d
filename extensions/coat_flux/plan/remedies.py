"""What each change of a job's YAML, alone, frees in one phase: for a run that is out of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..config.job import JobConfig
from .cards import EDITS, Change
from .job import JobFacts, job_facts
from .predict import Prediction, predict_facts

__all__ = ["Remedy", "remedies"]


class Remedy(NamedTuple):
    """A change of the YAML, and the bytes that the phase holds less with it."""

    change: Change
    bytes: int


def remedies(
    facts: JobFacts, phase: str, device_bytes: float | None, recomputed: Sequence[int] | None = None
) -> list[Remedy]:
    """Find the changes that free memory, the cheapest first.

    Args:
        facts: the job.
        phase: one of the prediction's; where it has none of that name, the run's peak counts.
        device_bytes: memory of the device.
        recomputed: indices of the blocks that recompute now; None: as `predict_facts` has it. They stay the same under
            every change but one of recomputation itself, or `auto` would fill what a change frees.
    """
    before = predict_facts(facts, device_bytes, recomputed)
    held, found = _held(before, phase), []
    for edit in EDITS:
        change = edit(facts.job)
        if change is None:
            continue
        kept = before.recomputed if _recomputes_alike(facts.job, change.job) else None
        after = predict_facts(job_facts(change.job, facts), device_bytes, kept)
        found.append(Remedy(change, held - _held(after, phase)))
    return [remedy for remedy in found if remedy.bytes > 0]


def _held(prediction: Prediction, phase: str) -> int:
    """What the phase holds; nothing where a change leaves out the phase (samples)."""
    found = prediction.phase(phase)
    if found is not None:
        return found.total
    return 0 if phase == "sample" else prediction.peak


def _recomputes_alike(*jobs: JobConfig) -> bool:
    """Whether the jobs choose by the same rule which blocks recompute."""
    rules = {
        (job.coat.enabled, job.coat.memory.checkpointing, job.coat.memory.budget_gb, job.train.gradient_checkpointing)
        for job in jobs
    }
    return len(rules) == 1
