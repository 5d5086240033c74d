"""What `coat-flux plan` says, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..base.text import GB, MB, columns
from ..blocks.block_bytes import block_bytes
from ..blocks.held import USABLE_FRACTION
from ..blocks.sizes import kept_by_kind
from ..config.job import JobConfig
from .cards import CardFit, judge
from .facts import CARDS, Card
from .job import JobFacts, job_facts
from .predict import PARTS, Prediction, offloaded_bytes, predict_facts
from .speed import BF16_FRACTION, FP8_FRACTION

__all__ = ["Plan", "as_json", "as_text", "make_plan"]


@dataclass(frozen=True)
class Plan:
    """A job's prediction, and what cards make of it.

    Attributes:
        facts: the job in numbers.
        prediction: on the one card asked for, else without a limit.
        verdicts: one per card.
    """

    facts: JobFacts
    prediction: Prediction
    verdicts: tuple[CardFit, ...]


def make_plan(job: JobConfig, gpu: Card | float | None = None) -> Plan:
    """Plan a job for one card, given as such or by its GB, or for the usual ones.

    Raises:
        ConfigError: the model's sizes cannot be known.
    """
    facts = job_facts(job)
    on_gpu = job_facts(replace(job, device="cuda"), facts) if facts.on_cpu else facts
    if isinstance(gpu, (int, float)):
        gpu = next((card for card in CARDS if card.gb == gpu), Card(gpu))
    cards = CARDS if gpu is None else (gpu,)
    limit = None if gpu is None or facts.on_cpu else gpu.gb * GB
    return Plan(facts, predict_facts(facts, limit), tuple(judge(on_gpu, card) for card in cards))


def as_text(plan: Plan) -> str:
    """The report as text."""
    sections = [_head(plan), _phases(plan), _blocks(plan), _cards(plan)]
    if plan.prediction.assumptions:
        sections.append("\n".join(f"assumed: {line}" for line in plan.prediction.assumptions))
    return "\n\n".join(sections)


def _head(plan: Plan) -> str:
    facts, job = plan.facts, plan.facts.job
    tokens, flows = facts.tokens, dict.fromkeys(settings.flow for settings in facts.block_settings)
    kept = f"in FP8, {' and '.join(flows)} flow, attention {facts.settings.attention}"
    kept = "in high precision" if "eager" in flows else kept
    recomputed = f"{len(plan.prediction.recomputed)} of {plan.prediction.blocks} blocks recompute"
    model = f"{job.model.name_or_path}, {facts.model.elements['transformer'] / GB:.2f} B parameters"
    return (
        f"{job.file}{': ' if job.file else ''}'{job.name}' on {model}\n"
        f"largest micro-batch: {tokens.batch} x ({tokens.text} text + {tokens.image} image tokens); {_trained(facts)}\n"
        f"kept for backward {kept}; {recomputed}"
    )


def _trained(facts: JobFacts) -> str:
    if not facts.job.full:
        return f"LoRA rank {facts.job.network.linear} on {len(facts.targets)} linears"
    how = ", each updated in backward" if facts.job.train.fused_backward else ""
    return f"full fine-tuning of {sum(facts.adapter_sizes) / GB:.2f} B parameters{how}"


def _phases(plan: Plan) -> str:
    """Parts by phase, GB; parts that are never there are left out."""
    phases = plan.prediction.phases
    unit, scale = ("GB (10^9 bytes)", GB) if plan.prediction.peak >= GB else ("MB (10^6 bytes)", MB)
    rows = [[f"{unit} at the peak of", *(phase.name for phase in phases)]]
    for part in PARTS:
        sizes = [phase.parts[part] for phase in phases]
        if any(sizes):
            rows.append([part, *(f"{size / scale:.2f}" if size else "-" for size in sizes)])
    rows.append(["total on the device", *(f"{phase.total / scale:.2f}" for phase in phases)])
    moments = offloaded_bytes(plan.facts)
    there = f", {moments / GB:.1f} of it the moments" if moments else ""
    disk = f"disk {plan.prediction.disk_bytes / GB:.1f} GB"
    memory = f"host memory {plan.prediction.ram_bytes / GB:.1f} GB{there}; {disk}"
    return _table(rows) + f"\n{memory} for saves and caches, the model's own files not counted"


def _blocks(plan: Plan) -> str:
    """What one block of each kind keeps, by kind of tensor, MB."""
    kept = _kept_by_kind(plan.facts)
    whats = list(dict.fromkeys(what for sizes in kept.values() for what in sizes))
    rows = [["MB kept for backward by one block", *kept]]
    rows += [[what, *(f"{sizes.get(what, 0) / MB:.2f}" for sizes in kept.values())] for what in whats]
    return _table(rows)


def _kept_by_kind(facts: JobFacts) -> dict[str, dict[str, int]]:
    """Kind of block → kind of tensor → bytes, for the last block of each kind."""
    last = {block.kind: (block, settings) for block, settings in zip(facts.blocks, facts.block_settings, strict=True)}
    found: dict[str, dict[str, int]] = {}
    for kind, (block, settings) in last.items():
        counted = block_bytes(block, facts.tokens, settings)
        sizes = kept_by_kind(block, facts.tokens, settings)
        found[kind] = {**sizes, "all": counted.kept, "when recomputed": counted.recomputed}
    return found


def _cards(plan: Plan) -> str:
    header = ["card", "fits", "peak GB", "recomputed", "s/step >=", "run >=", "cheapest change that makes it fit"]
    rows = [header, *(_card_row(verdict) for verdict in plan.verdicts)]
    lines = [
        _table(rows),
        f"fits: the peak is at most {USABLE_FRACTION:.0%} of the card; numbers are those with the change",
    ]
    names = ", ".join(f"{v.card.gb:g} GB {v.card.name}" for v in plan.verdicts if v.step_seconds is not None)
    if names:
        fractions = f"{BF16_FRACTION:.0%} (bf16) and {FP8_FRACTION:.0%} (FP8)"
        lines += [
            f"s/step, run: an estimate from below, matrix products and attention alone at {fractions} of peak rates",
            f"({names}); casts, norms, optimizer, encoders and data come on top",
        ]
    return "\n".join(lines)


def _card_row(verdict: CardFit) -> list[str]:
    shown = verdict.changed or verdict.prediction
    step, run = verdict.step_seconds, verdict.run_seconds
    return [
        f"{verdict.card.gb:g} GB",
        "yes" if verdict.fits else "with" if verdict.changes else "no",
        f"{shown.peak / GB:.1f}",
        f"{len(shown.recomputed)}/{shown.blocks}",
        "-" if step is None else f"{step:.3f}",
        "-" if run is None else _duration(run),
        _remedy(verdict),
    ]


def _remedy(verdict: CardFit) -> str:
    if verdict.fits:
        return ""
    if verdict.changes:
        return "; ".join(f"{change.text} (costs {change.cost})" for change in verdict.changes)
    return "none"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Rows under their header; first and last column to the left where they are text, numbers to the right."""
    last = len(rows[0]) - 1
    return "\n".join(columns(rows, left=(0, last) if max(len(row[last]) for row in rows) > 10 else (0,)))


def as_json(plan: Plan) -> dict[str, Any]:
    """The report as plain values; sizes in bytes, times in seconds."""
    facts, job = plan.facts, plan.facts.job
    return {
        "config": job.file,
        "name": job.name,
        "model": job.model.name_or_path,
        "tokens": {"batch": facts.tokens.batch, "text": facts.tokens.text, "image": facts.tokens.image},
        **_prediction_json(plan.prediction),
        "kept_per_block": _kept_by_kind(facts),
        "assumptions": list(plan.prediction.assumptions),
        "time_assumption": {"bf16_fraction_of_peak": BF16_FRACTION, "fp8_fraction_of_peak": FP8_FRACTION},
        "cards": [_verdict_json(verdict) for verdict in plan.verdicts],
    }


def _prediction_json(prediction: Prediction) -> dict[str, Any]:
    return {
        "phases": {phase.name: phase.parts | {"total": phase.total} for phase in prediction.phases},
        "peak": prediction.peak,
        "ram": prediction.ram_bytes,
        "disk": prediction.disk_bytes,
        "recomputed": list(prediction.recomputed),
        "blocks": prediction.blocks,
    }


def _verdict_json(verdict: CardFit) -> dict[str, Any]:
    changes: Iterable[dict[str, str]] = ({"write": change.text, "costs": change.cost} for change in verdict.changes)
    return {
        "gb": verdict.card.gb,
        "gpu": verdict.card.name,
        "fits": verdict.fits,
        **_prediction_json(verdict.prediction),
        "changes": list(changes),
        "with_changes": None if verdict.changed is None else _prediction_json(verdict.changed),
        "step_seconds": verdict.step_seconds,
        "run_seconds": verdict.run_seconds,
    }
