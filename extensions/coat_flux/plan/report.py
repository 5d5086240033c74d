"""The output of `coat-flux plan`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..base.text import GB, MB, columns
from ..blocks.held import LEAST_MARGIN, USABLE_FRACTION
from ..blocks.models.checkpoint import describe_file
from ..blocks.sizes import block_bytes
from ..config.coat import AUTO
from ..config.job import JobConfig
from .cards import CardFit
from .job import JobFacts
from .predict import PARTS, Prediction, predict
from .speed import BF16_FRACTION, CARDS, FP8_FRACTION, Card, gain_of_auto, on_card


class Plan:
    """A job's prediction (without a limit if no card was asked for), and a verdict for one card or each usual one.

    Raises ConfigError.
    """

    def __init__(self, job: JobConfig, card: Card | None = None):
        self.facts = facts = JobFacts(job)
        self.prediction = predict(facts, None if card is None or facts.on_cpu else card.gb * GB)
        on_gpu = JobFacts(replace(job, device="cuda"), facts) if facts.on_cpu else facts
        self.verdicts = [CardFit(on_gpu, each) for each in (CARDS if card is None else (card,))]


def as_text(plan: Plan) -> str:
    """The report as text."""
    kept = _kept_per_block(plan.facts)
    blocks = [["MB kept for backward by one block", *kept]]
    for row in ("all", "when recomputed"):
        blocks.append([row, *(f"{sizes[row] / MB:.2f}" for sizes in kept.values())])
    sections = [_head(plan), _phases(plan), _table(blocks), _cards(plan.verdicts)]
    coat, cards = plan.facts.job.coat, [verdict.card for verdict in plan.verdicts]
    if coat.weight.format == AUTO:
        texts = [f"{card.weight_format} on {card.name or f'{card.gb:g} GB'}{card.peaks}" for card in cards]
        sections.append(f"weight.format: auto, which a run times before the load, is by peaks {'; '.join(texts)}")
    elif gain := gain_of_auto(coat, cards[0] if len(cards) == 1 else None):
        sections.append(gain)
    if plan.prediction.assumptions:
        sections.append("\n".join(f"assumed: {line}" for line in plan.prediction.assumptions))
    return "\n\n".join(sections)


def _head(plan: Plan) -> str:
    facts, job, tokens = plan.facts, plan.facts.job, plan.facts.tokens
    flows = dict.fromkeys(settings.flow for settings in facts.settings)
    kept = f"in FP8, {' and '.join(flows)} flow, attention {facts.settings[-1].saving.attention}"
    if "eager" in flows:
        kept = "in high precision"
    if job.full:
        trained = f"full fine-tuning of {sum(facts.adapter_sizes) / GB:.2f} B parameters"
        trained += ", each updated in backward" if job.train.fused_backward else ""
    else:
        trained = f"{job.network.title} on {len(facts.targets)} linears"
    model = f"{job.model.name_or_path}, {facts.model.elements['transformer'] / GB:.2f} B parameters"
    recomputed = f"{len(plan.prediction.recomputed)} of {len(facts.blocks)} blocks recompute"
    lines = (
        f"{job.file}{': ' if job.file else ''}'{job.name}' on {model}",
        describe_file(job),
        f"largest micro-batch: {tokens.batch} x ({tokens.text} text + {tokens.image} image tokens); {trained}",
        f"kept for backward {kept}; {recomputed}",
    )
    return "\n".join(filter(None, lines))


def _phases(plan: Plan) -> str:
    phases = plan.prediction.phases.values()
    unit, scale = ("GB (10^9 bytes)", GB) if plan.prediction.peak >= GB else ("MB (10^6 bytes)", MB)
    rows = [[f"{unit} at the peak of", *plan.prediction.phases]]
    for part in PARTS:
        sizes = [parts[part] for parts in phases]
        if any(sizes):
            rows.append([part, *(f"{size / scale:.2f}" if size else "-" for size in sizes)])
    rows.append(["total on the device", *(f"{sum(parts.values()) / scale:.2f}" for parts in phases)])
    moments = plan.facts.offloaded_bytes
    offloaded = f", {moments / GB:.1f} of it the moments" if moments else ""
    memory = f"CPU memory {plan.prediction.ram_bytes / GB:.1f} GB{offloaded}"
    disk = f"disk {plan.prediction.disk_bytes / GB:.1f} GB for saves and caches, the model's own files not counted"
    return f"{_table(rows)}\n{memory}; {disk}"


def _kept_per_block(facts: JobFacts) -> dict[str, dict[str, int]]:
    pairs = zip(facts.blocks, facts.settings, strict=True)
    last = {block.kind: (block, settings) for block, settings in pairs if getattr(block, "elements", 1)}
    kept: dict[str, dict[str, int]] = {}
    for kind, (block, settings) in last.items():
        counted = block_bytes(block, facts.tokens, settings)
        kept[kind] = {"all": counted.kept, "when recomputed": counted.recomputed}
    return kept


def _cards(verdicts: Sequence[CardFit]) -> str:
    rows = [["card", "fits", "peak GB", "recomputed", "s/step >=", "run >=", "cheapest change that makes it fit"]]
    for verdict in verdicts:
        shown = verdict.changed or verdict.prediction
        fits = "with"
        changes = "; ".join(f"{change.text} (costs {change.cost})" for change in verdict.changes)
        if verdict.fits:
            fits = "yes"
        elif not changes:
            fits, changes = "no", "none"
        step, run = "-", "-"
        if verdict.step_seconds is not None and verdict.run_seconds is not None:
            step, minutes = f"{verdict.step_seconds:.3f}", verdict.run_seconds / 60
            run = f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
        recomputed = f"{len(shown.recomputed)}/{len(shown.plan.blocks)}"
        rows.append([f"{verdict.card.gb:g} GB", fits, f"{shown.peak / GB:.1f}", recomputed, step, run, changes])
    lines = [
        _table(rows),
        f"fits: the peak leaves {1 - USABLE_FRACTION:.0%} of the card, at least {LEAST_MARGIN / GB:.1f} GB, to CUDA's "
        "context, a display and fragmentation; numbers are those with the change",
    ]
    names = ", ".join(f"{v.card.gb:g} GB {v.card.name}" for v in verdicts if v.step_seconds is not None)
    if names:
        fractions = f"{BF16_FRACTION:.0%} (bf16) and {FP8_FRACTION:.0%} (FP8)"
        lines += [
            f"s/step, run: an estimate from below, matrix products and attention alone at {fractions} of peak rates",
            f"({names}); casts, norms, optimizer, encoders and data come on top",
        ]
    return "\n".join(lines)


def _table(rows: Sequence[Sequence[str]]) -> str:
    last = len(rows[0]) - 1
    return "\n".join(columns(rows, left=(0, last) if max(len(row[last]) for row in rows) > 10 else (0,)))


def as_json(plan: Plan) -> dict[str, Any]:
    """The report as plain values; sizes in bytes, times in seconds."""
    facts, job = plan.facts, plan.facts.job
    cards = [
        {
            "gb": verdict.card.gb,
            "gpu": verdict.card.name,
            "weight_format": on_card(job, verdict.card).coat.linear_config().weight_format,
            "fits": verdict.fits,
            **_prediction_json(verdict.prediction),
            "changes": [{"write": change.text, "costs": change.cost} for change in verdict.changes],
            "with_changes": None if verdict.changed is None else _prediction_json(verdict.changed),
            "step_seconds": verdict.step_seconds,
            "run_seconds": verdict.run_seconds,
        }
        for verdict in plan.verdicts
    ]
    return {
        "config": job.file,
        "name": job.name,
        "model": job.model.name_or_path,
        "tokens": {"batch": facts.tokens.batch, "text": facts.tokens.text, "image": facts.tokens.image},
        **_prediction_json(plan.prediction),
        "kept_per_block": _kept_per_block(facts),
        "assumptions": list(plan.prediction.assumptions),
        "time_assumption": {"bf16_fraction_of_peak": BF16_FRACTION, "fp8_fraction_of_peak": FP8_FRACTION},
        "cards": cards,
    }


def _prediction_json(prediction: Prediction) -> dict[str, Any]:
    return {
        "phases": {name: parts | {"total": sum(parts.values())} for name, parts in prediction.phases.items()},
        "peak": prediction.peak,
        "ram": prediction.ram_bytes,
        "disk": prediction.disk_bytes,
        "recomputed": list(prediction.recomputed),
        "blocks": len(prediction.plan.blocks),
    }
