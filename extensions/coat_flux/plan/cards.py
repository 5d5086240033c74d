"""The cheapest YAML changes that make a job fit a card; a run that is out of memory suggests the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..base.names import COAT_OPTIMIZER
from ..blocks.decide import checkpointing_mode
from ..blocks.sizes import Block
from ..config.job import JobConfig
from .job import JobFacts
from .predict import Prediction, predict
from .speed import Card, on_card, run_seconds, step_seconds

REPEATS = 3  # times an edit may be made: a batch, a rank or a size halved and halved again
SMALLER = ((1024, 768), (768, 512), (512, 384))  # usual resolutions, each with the next smaller one
ROUNDING, TIME = "FP8 rounding", "time for one more forward pass"


class Change(NamedTuple):
    """A YAML edit: its text, its cost, and the resulting job."""

    text: str
    cost: str
    job: JobConfig


Edit = Callable[[JobConfig], Change | None]  # None if it does not apply


class CardFit:
    """Whether a job fits a card, or else the cheapest changes that make it fit.

    The times are those of the job that fits; None if none does, the card's rates are unknown, or the model is not FLUX.
    """

    def __init__(self, facts: JobFacts, card: Card):
        memory = card.gb * 1e9
        job = on_card(facts.job, card)
        if job is not facts.job:
            facts = JobFacts(job, facts)
        self.card, self.prediction = card, predict(facts, memory)  # of the unchanged job
        self.fits = self.prediction.peak <= card.room
        self.changes: list[Change] = []  # that make it fit; none if it fits, or cannot
        self.changed: Prediction | None = None  # of the job with these changes
        self.step_seconds: float | None = None
        self.run_seconds: float | None = None

        prediction = self.prediction
        if not self.fits:
            self.changes = cheapest_changes(facts, card)
            if not self.changes:
                return
            facts = JobFacts(self.changes[-1].job, facts)
            prediction = self.changed = predict(facts, memory)
        if card.bf16_tflops and all(type(block) is Block for block in facts.blocks):
            self.step_seconds = step_seconds(facts, prediction.plan, card)
            self.run_seconds = run_seconds(facts, prediction, card)


def remedies(
    facts: JobFacts, phase: str, device_bytes: float | None, recomputed: Sequence[int] | None = None
) -> list[tuple[Change, int]]:
    """The changes that free memory in one phase (or at the run's peak), each alone with its bytes, the cheapest first.

    `recomputed` are the blocks that recompute now (None: those of `predict`), and still do unless a change is about it.
    """

    def peak_of(prediction: Prediction) -> int:
        if phase in prediction.phases:
            return sum(prediction.phases[phase].values())
        return 0 if phase == "sample" else prediction.peak  # a change may leave samples out

    before = predict(facts, device_bytes, recomputed)
    changes = []
    for edit in EDITS:
        change = edit(facts.job)
        if change is None:
            continue
        rules = []  # of recomputation, now and changed
        for job in (facts.job, change.job):
            memory = job.coat.memory
            rules.append((job.coat.enabled, memory.checkpointing, memory.budget_gb, job.train.gradient_checkpointing))
        blocks = before.recomputed if rules[0] == rules[1] else None
        freed = peak_of(before) - peak_of(predict(JobFacts(change.job, facts), device_bytes, blocks))
        if freed > 0:
            changes.append((change, freed))
    return changes


def cheapest_changes(facts: JobFacts, card: Card) -> list[Change]:
    """The first that suffices alone; else the first that suffice together, but those not needed; [] if none do."""

    def peak(edits: Sequence[Edit]) -> float:
        changes = _applied(facts.job, edits)
        changed = JobFacts(changes[-1].job, facts) if changes else facts
        return predict(changed, card.gb * 1e9).peak

    for edit in EDITS:
        if edit(facts.job) is not None and peak([edit]) <= card.room:
            return _applied(facts.job, [edit])
    chosen: list[Edit] = []
    lowest = peak(chosen)
    for edit in EDITS:
        for _ in range(REPEATS):
            if lowest <= card.room:
                break
            lower = peak([*chosen, edit])
            if lower >= lowest:
                break
            chosen.append(edit)
            lowest = lower
    if lowest > card.room:
        return []
    for edit in reversed(EDITS):  # drop those not needed, the most expensive first
        fewer = [other for other in chosen if other is not edit]
        if len(fewer) < len(chosen) and peak(fewer) <= card.room:
            chosen = fewer
    return _applied(facts.job, chosen)


def _applied(job: JobConfig, edits: Sequence[Edit]) -> list[Change]:
    """The changes of these edits, made one after the other; of a repeated edit the last one."""
    changes: dict[Edit, Change] = {}
    for edit in edits:
        change = edit(job)
        if change is not None:
            changes.pop(edit, None)
            changes[edit] = change
            job = change.job
    return list(changes.values())


def _with(config: Any, values: dict[str, Any]) -> Any:
    """A copy with these values, by dotted key."""
    for path, value in values.items():
        name, _, rest = path.partition(".")
        config = replace(config, **{name: _with(getattr(config, name), {rest: value}) if rest else value})
    return config


def _setting(
    path: str, value: Any, cost: str, applies: Callable[[JobConfig], bool], also: Mapping[str, Any] | None = None
) -> Edit:
    """An edit of one key, of `coat:` only where that is enabled; those of `also` change with it."""

    def edit(job: JobConfig) -> Change | None:
        changed = _with(job, {path: value, **(also or {})})
        if changed == job or not applies(job) or (path.startswith("coat.") and not job.coat.enabled):
            return None
        shown = str(value).lower() if isinstance(value, bool) else value
        return Change(f"{path}: {shown}", cost, changed)

    edit.__name__ = path
    return edit


def _cached_text(job: JobConfig) -> Change | None:
    if all(entry.cache_text_embeddings for entry in job.datasets):
        return None
    text, cost = "train.cache_text_embeddings: true", "nothing"
    if any(entry.shuffle_tokens for entry in job.datasets):
        text, cost = f"{text}, shuffle_tokens: false", "shuffled captions"
    entries = tuple(replace(entry, cache_text_embeddings=True, shuffle_tokens=False) for entry in job.datasets)
    return Change(text, cost, replace(job, datasets=entries))


def _cached_latents(job: JobConfig) -> Change | None:
    if all(entry.cache_latents or entry.cache_latents_to_disk for entry in job.datasets):
        return None
    entries = tuple(replace(entry, cache_latents_to_disk=True) for entry in job.datasets)
    return Change("datasets: cache_latents_to_disk: true", "nothing", replace(job, datasets=entries))


def _fp8_weights(job: JobConfig) -> Change | None:
    if job.coat.enabled:
        if job.coat.weight.use_fp8 or job.full:
            return None
        return Change("coat.weight.use_fp8: true", ROUNDING, _with(job, {"coat.weight.use_fp8": True}))
    values = {"coat.enabled": True, "coat.weight.use_fp8": True, "coat.activation.use_fp8": True}
    values["coat.optimizer.use_fp8"] = job.train.optimizer == COAT_OPTIMIZER
    return Change("coat.enabled: true", ROUNDING, _with(job, values))


def _streamed(job: JobConfig) -> Change | None:
    coat = job.coat
    if not (coat.enabled and coat.weight.use_fp8) or job.full or coat.memory.stream_blocks == "auto":
        return None
    values = {"stream_blocks": "auto"}
    if coat.memory.transposed_weights == "always":
        values["transposed_weights"] = "auto"
    text = ", ".join(f"{key}: {value}" for key, value in values.items())
    cost = "CPU memory, and time where copies take longer than products"
    changed = _with(job, {f"coat.memory.{key}": value for key, value in values.items()})
    return Change(f"coat.memory.{text}", cost, changed)


def _offloaded(job: JobConfig) -> Change | None:
    params = job.train.optimizer_params
    if not (job.full and job.coat.enabled) or job.train.optimizer != COAT_OPTIMIZER:
        return None
    if job.coat.optimizer_config(params)[1]["offload"] == "cpu":
        return None
    others = {key: value for key, value in (params or {}).items() if key != "offload"}
    changed = _with(job, {"coat.optimizer.offload": "cpu", "train.optimizer_params": others})
    cost = "CPU memory, and time where copies take longer than the backward pass"
    return Change("coat.optimizer.offload: cpu", cost, changed)


def _automatic_checkpointing(job: JobConfig) -> Change | None:
    memory, allowed = job.coat.memory, job.train.gradient_checkpointing
    if not job.coat.enabled or (allowed and memory.checkpointing in ("auto", "all") and memory.budget_gb is None):
        return None
    texts = []
    if memory.checkpointing != "auto":
        texts.append("coat.memory.checkpointing: auto")
    if memory.budget_gb:
        texts.append("budget_gb: null")
    if not allowed:
        texts.append("train.gradient_checkpointing: true")
    values = {"coat.memory.checkpointing": "auto", "coat.memory.budget_gb": None, "train.gradient_checkpointing": True}
    return Change(", ".join(texts), "time to recompute what does not fit", _with(job, values))


def _smaller_batch(job: JobConfig) -> Change | None:
    batch = job.train.batch_size
    if batch == 1:
        return None
    half = batch // 2
    count = math.ceil(batch * job.train.gradient_accumulation / half)  # no fewer images in a step
    changed = _with(job, {"train.batch_size": half, "train.gradient_accumulation": count})
    text = f"train.batch_size: {half}, gradient_accumulation: {count}"
    return Change(text, "time, by smaller matrix products", changed)


def _below(side: int) -> int | None:
    """The next smaller one of the usual resolutions."""
    return next((lower for upper, lower in SMALLER if side >= upper), None)


def _smaller_samples(job: JobConfig) -> Change | None:
    items = () if job.train.disable_sampling else job.sample.items()
    side = _below(max((max(item.width or 0, item.height or 0) for item in items), default=0))
    if side is None:
        return None
    capped = []
    for entry in (job.sample, *job.sample.samples):  # one without a size has the block's
        width = None if entry.width is None else min(entry.width, side)
        height = None if entry.height is None else min(entry.height, side)
        capped.append(replace(entry, width=width, height=height))
    block, *samples = capped
    sample = replace(block, samples=tuple(samples))
    return Change(f"sample.width and height: at most {side}", "smaller previews", replace(job, sample=sample))


def _smaller_rank(job: JobConfig) -> Change | None:
    rank = job.network.linear // 2
    if rank < 8 or job.full or job.network.type == "lokr":
        return None
    network = replace(job.network, linear=rank, rank=rank, linear_alpha=float(rank))
    return Change(f"network.linear: {rank}", "a LoRA of half the rank", replace(job, network=network))


def _smaller_images(job: JobConfig) -> Change | None:
    lower = _below(max(resolution for entry in job.datasets for resolution in entry.resolution))
    if lower is None:
        return None
    entries = []
    for entry in job.datasets:
        sides = {min(side, lower) for side in entry.resolution}
        entries.append(replace(entry, resolution=tuple(sorted(sides))))
    return Change(f"datasets: resolution at most {lower}", "less detail", replace(job, datasets=tuple(entries)))


# by cost: nothing, rounding, time, and last the run's outputs
EDITS: tuple[Edit, ...] = (
    _cached_text,
    _cached_latents,
    _setting("coat.activation.flow", "fused", "nothing", lambda job: job.coat.activation.use_fp8 and not job.full),
    _setting("coat.activation.attention", "fp8", ROUNDING, lambda job: job.coat.activation.use_fp8),
    _setting("coat.activation.use_fp8", True, ROUNDING, lambda job: True),
    _setting(
        "coat.memory.enable_efficient_checkpoint", True, ROUNDING, lambda job: job.coat.memory.checkpointing != "none"
    ),
    _fp8_weights,
    _setting(
        "train.optimizer",
        COAT_OPTIMIZER,
        "FP8 moments",
        lambda job: job.coat.enabled and job.train.optimizer != COAT_OPTIMIZER,
        also={"coat.optimizer.use_fp8": True},
    ),
    _setting(
        "train.fused_backward",
        True,
        "gradients clipped one by one",
        lambda job: job.full and job.train.optimizer == COAT_OPTIMIZER,
    ),
    _setting(
        "coat.memory.transposed_weights",
        "never",
        "a few percent of a step's time",
        lambda job: job.coat.activation.use_fp8 and job.coat.weight.use_fp8,
    ),
    _streamed,
    _offloaded,
    _automatic_checkpointing,
    _setting("train.gradient_checkpointing", True, TIME, lambda job: not job.coat.enabled),
    _setting(
        "coat.memory.checkpointing",
        "all",
        TIME,
        lambda job: checkpointing_mode(job.coat, job.train.gradient_checkpointing) != "all",
        also={"coat.memory.budget_gb": None, "train.gradient_checkpointing": True},
    ),
    _smaller_batch,
    _smaller_samples,
    _setting("train.disable_sampling", True, "no previews", lambda job: bool(job.sample.items())),
    _setting("train.ema_config.use_ema", False, "no averaged LoRA", lambda job: True),
    _smaller_rank,
    _smaller_images,
)
