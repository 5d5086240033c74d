"""Does a job fit a card, and if not: which change of its YAML makes it fit, the cheapest first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..base.names import COAT_OPTIMIZER
from ..blocks.decide import checkpointing_mode
from ..blocks.held import USABLE_FRACTION
from ..config.job import JobConfig
from .facts import Card
from .job import JobFacts, job_facts
from .predict import Prediction, predict_facts
from .speed import run_seconds, step_seconds

__all__ = ["CardFit", "Change", "judge"]

REPEATS = 3  # times an edit may be made: a batch, a rank or a size halved and halved again
SMALLER = ((1024, 768), (768, 512), (512, 384))  # resolutions, and what comes below each


@dataclass(frozen=True)
class Change:
    """An edit of the YAML.

    Attributes:
        text: what to write.
        cost: what it costs.
        job: the job with it.
    """

    text: str
    cost: str
    job: JobConfig


@dataclass(frozen=True)
class CardFit:
    """What a card makes of a job.

    Attributes:
        card: the card.
        fits: the job as it is.
        prediction: of the job on this card, as it is.
        changes: that make it fit, together; empty where it fits or where none does.
        changed: the prediction with them.
        step_seconds: of the job that fits; None where none does or the card's rates are unknown.
        run_seconds: likewise, for the whole run.
    """

    card: Card
    fits: bool
    prediction: Prediction
    changes: tuple[Change, ...] = ()
    changed: Prediction | None = None
    step_seconds: float | None = None
    run_seconds: float | None = None

    @property
    def room(self) -> float:
        """Bytes of the card that a run may use."""
        return _room(self.card)


def judge(facts: JobFacts, card: Card) -> CardFit:
    """Say whether a job fits a card, or find the cheapest change, else the fewest of the cheapest, that make it fit."""
    memory = card.gb * 1e9
    prediction = predict_facts(facts, memory)
    if _fits(prediction, card):
        return _timed(CardFit(card, True, prediction), facts, prediction)
    edits = _edits_that_fit(facts, card)
    if not edits:
        return CardFit(card, False, prediction)
    changes = _applied(facts.job, edits)
    changed = job_facts(changes[-1].job, facts)
    found = predict_facts(changed, memory)
    return _timed(CardFit(card, False, prediction, tuple(changes), found), changed, found)


def _edits_that_fit(facts: JobFacts, card: Card) -> list[Edit]:
    """The first edit that is enough alone; else edits taken in order until they are, less those not needed then."""

    def peak(edits: Sequence[Edit]) -> float:
        changes = _applied(facts.job, edits)
        changed = job_facts(changes[-1].job, facts) if changes else facts
        return predict_facts(changed, card.gb * 1e9).peak

    room = _room(card)
    for edit in EDITS:
        if edit(facts.job) is not None and peak([edit]) <= room:
            return [edit]
    taken: list[Edit] = []
    lowest = peak(taken)
    for edit in (edit for edit in EDITS for _ in range(REPEATS)):
        found = peak([*taken, edit])
        if lowest > room and found < lowest:
            taken.append(edit)
            lowest = found
    if lowest > room:
        return []
    for edit in reversed(EDITS):
        without = [other for other in taken if other is not edit]
        if len(without) < len(taken) and peak(without) <= room:
            taken = without
    return taken


def _applied(job: JobConfig, edits: Sequence[Edit]) -> list[Change]:
    """The changes that edits make, one after the other; of an edit that is made again, the last."""
    changes: dict[Edit, Change] = {}
    for edit in edits:
        change = edit(job)
        if change is not None:
            changes.pop(edit, None)
            changes[edit] = change
            job = change.job
    return list(changes.values())


def _fits(prediction: Prediction, card: Card) -> bool:
    return prediction.peak <= _room(card)


def _room(card: Card) -> float:
    return card.gb * 1e9 * USABLE_FRACTION


def _timed(verdict: CardFit, facts: JobFacts, prediction: Prediction) -> CardFit:
    if not verdict.card.bf16_tflops:
        return verdict
    return replace(
        verdict,
        step_seconds=step_seconds(facts, prediction.plan, verdict.card),
        run_seconds=run_seconds(facts, prediction, verdict.card),
    )


def _with(job: JobConfig, section: str, **values: Any) -> JobConfig:
    return replace(job, **{section: replace(getattr(job, section), **values)})


def _with_coat(job: JobConfig, section: str, **values: Any) -> JobConfig:
    return replace(job, coat=replace(job.coat, **{section: replace(getattr(job.coat, section), **values)}))


def _cached_text(job: JobConfig) -> Change | None:
    if all(entry.cache_text_embeddings for entry in job.datasets):
        return None
    entries = tuple(replace(entry, cache_text_embeddings=True, shuffle_tokens=False) for entry in job.datasets)
    shuffles = any(entry.shuffle_tokens for entry in job.datasets)
    text = "train.cache_text_embeddings: true" + (", shuffle_tokens: false" if shuffles else "")
    return Change(text, "shuffled captions" if shuffles else "nothing", replace(job, datasets=entries))


def _cached_latents(job: JobConfig) -> Change | None:
    if all(entry.cache_latents or entry.cache_latents_to_disk for entry in job.datasets):
        return None
    entries = tuple(replace(entry, cache_latents_to_disk=True) for entry in job.datasets)
    return Change("datasets: cache_latents_to_disk: true", "nothing", replace(job, datasets=entries))


def _fp8_activations(job: JobConfig) -> Change | None:
    if not job.coat.enabled or job.coat.activation.use_fp8:
        return None
    return Change("coat.activation.use_fp8: true", "FP8 rounding", _with_coat(job, "activation", use_fp8=True))


def _in_fp8(job: JobConfig) -> bool:
    return job.coat.enabled and job.coat.activation.use_fp8


def _fused_flow(job: JobConfig) -> Change | None:
    if not _in_fp8(job) or job.full or job.coat.activation.flow == "fused":
        return None
    return Change("coat.activation.flow: fused", "nothing", _with_coat(job, "activation", flow="fused"))


def _fp8_attention(job: JobConfig) -> Change | None:
    if not _in_fp8(job) or job.coat.activation.attention == "fp8":
        return None
    return Change("coat.activation.attention: fp8", "FP8 rounding", _with_coat(job, "activation", attention="fp8"))


def _fp8_optimizer(job: JobConfig) -> Change | None:
    if not job.coat.enabled or job.train.optimizer == COAT_OPTIMIZER:
        return None
    changed = _with_coat(_with(job, "train", optimizer=COAT_OPTIMIZER), "optimizer", use_fp8=True)
    return Change(f"train.optimizer: {COAT_OPTIMIZER}", "FP8 moments", changed)


def _updated_in_backward(job: JobConfig) -> Change | None:
    train = job.train
    if not job.full or train.optimizer != COAT_OPTIMIZER or train.fused_backward:
        return None
    changed = _with(job, "train", fused_backward=True)
    return Change("train.fused_backward: true", "gradients clipped one by one", changed)


def _fp8_weights(job: JobConfig) -> Change | None:
    if job.coat.enabled and (job.coat.weight.use_fp8 or job.full):
        return None
    if job.coat.enabled:
        return Change("coat.weight.use_fp8: true", "FP8 rounding", _with_coat(job, "weight", use_fp8=True))
    enabled = replace(job, coat=replace(job.coat, enabled=True))
    optimizer = job.train.optimizer == COAT_OPTIMIZER
    enabled = _with_coat(_with_coat(enabled, "weight", use_fp8=True), "activation", use_fp8=True)
    return Change("coat.enabled: true", "FP8 rounding", _with_coat(enabled, "optimizer", use_fp8=optimizer))


def _fp8_inputs(job: JobConfig) -> Change | None:
    memory = job.coat.memory
    if not job.coat.enabled or memory.enable_efficient_checkpoint or memory.checkpointing == "none":
        return None
    changed = _with_coat(job, "memory", enable_efficient_checkpoint=True)
    return Change("coat.memory.enable_efficient_checkpoint: true", "FP8 rounding", changed)


def _no_transposed(job: JobConfig) -> Change | None:
    memory = job.coat.memory
    if not _in_fp8(job) or not job.coat.weight.use_fp8 or memory.transposed_weights == "never":
        return None
    changed = _with_coat(job, "memory", transposed_weights="never")
    return Change("coat.memory.transposed_weights: never", "a few percent of a step's time", changed)


def _streamed(job: JobConfig) -> Change | None:
    coat = job.coat
    if not (coat.enabled and coat.weight.use_fp8) or job.full or coat.memory.stream_blocks == "auto":
        return None
    cost = "host memory, and time where copies take longer than products"
    text, values = "coat.memory.stream_blocks: auto", {"stream_blocks": "auto"}
    if coat.memory.transposed_weights == "always":
        text, values = f"{text}, transposed_weights: auto", {**values, "transposed_weights": "auto"}
    return Change(text, cost, _with_coat(job, "memory", **values))


def _offloaded(job: JobConfig) -> Change | None:
    params = job.train.optimizer_params
    if not (job.full and job.coat.enabled) or job.train.optimizer != COAT_OPTIMIZER:
        return None
    if job.coat.optimizer_config(params)[1]["offload"] == "cpu":
        return None
    changed = _with_coat(job, "optimizer", offload="cpu")
    changed = _with(changed, "train", optimizer_params={k: v for k, v in (params or {}).items() if k != "offload"})
    cost = "host memory, and time where copies take longer than the backward pass"
    return Change("coat.optimizer.offload: cpu", cost, changed)


def _automatic_checkpointing(job: JobConfig) -> Change | None:
    memory, allowed = job.coat.memory, job.train.gradient_checkpointing
    if not job.coat.enabled or (allowed and memory.checkpointing in ("auto", "all") and memory.budget_gb is None):
        return None
    changed = _with_coat(job, "memory", checkpointing="auto", budget_gb=None)
    edits = {"coat.memory.checkpointing: auto": memory.checkpointing != "auto", "budget_gb: null": memory.budget_gb}
    edits["train.gradient_checkpointing: true"] = not allowed
    text = ", ".join(text for text, needed in edits.items() if needed)
    return Change(text, "time to recompute what does not fit", _with(changed, "train", gradient_checkpointing=True))


def _full_checkpointing(job: JobConfig) -> Change | None:
    if checkpointing_mode(job.coat, job.train.gradient_checkpointing) == "all":
        return None
    changed = _with(job, "train", gradient_checkpointing=True)
    if not job.coat.enabled:
        return Change("train.gradient_checkpointing: true", "time for one more forward pass", changed)
    changed = _with_coat(changed, "memory", checkpointing="all", budget_gb=None)
    return Change("coat.memory.checkpointing: all", "time for one more forward pass", changed)


def _smaller_batch(job: JobConfig) -> Change | None:
    train = job.train
    if train.batch_size == 1:
        return None
    half, count = train.batch_size // 2, -(-train.gradient_accumulation * train.batch_size // (train.batch_size // 2))
    text = f"train.batch_size: {half}, gradient_accumulation: {count}"
    return Change(
        text, "time, by smaller matrix products", _with(job, "train", batch_size=half, gradient_accumulation=count)
    )


def _below(side: int) -> int | None:
    return next((lower for upper, lower in SMALLER if side >= upper), None)


def _smaller_samples(job: JobConfig) -> Change | None:
    items = () if job.train.disable_sampling else job.sample.items()
    largest = max((max(item.width or 0, item.height or 0) for item in items), default=0)
    side = _below(largest)
    if side is None:
        return None
    capped = tuple(replace(item, **_capped(item.width, item.height, side)) for item in job.sample.samples)
    values = {**_capped(job.sample.width, job.sample.height, side), "samples": capped}
    return Change(f"sample.width and height: at most {side}", "smaller previews", _with(job, "sample", **values))


def _capped(width: int | None, height: int | None, side: int) -> Mapping[str, int | None]:
    return {
        "width": None if width is None else min(width, side),
        "height": None if height is None else min(height, side),
    }


def _no_samples(job: JobConfig) -> Change | None:
    if job.train.disable_sampling or not job.sample.items():
        return None
    return Change("train.disable_sampling: true", "no previews", _with(job, "train", disable_sampling=True))


def _no_ema(job: JobConfig) -> Change | None:
    if not job.train.ema_config.use_ema:
        return None
    ema = replace(job.train.ema_config, use_ema=False)
    return Change("train.ema_config.use_ema: false", "no averaged LoRA", _with(job, "train", ema_config=ema))


def _smaller_rank(job: JobConfig) -> Change | None:
    rank = job.network.linear // 2
    if rank < 8 or job.full:
        return None
    changed = _with(job, "network", linear=rank, rank=rank, linear_alpha=float(rank))
    return Change(f"network.linear: {rank}", "a LoRA of half the rank", changed)


def _smaller_images(job: JobConfig) -> Change | None:
    largest = max(resolution for entry in job.datasets for resolution in entry.resolution)
    lower = _below(largest)
    if lower is None:
        return None
    entries = tuple(
        replace(entry, resolution=tuple(sorted({min(side, lower) for side in entry.resolution})))
        for entry in job.datasets
    )
    return Change(f"datasets: resolution at most {lower}", "less detail", replace(job, datasets=entries))


Edit = Callable[[JobConfig], Change | None]

# by what they cost: nothing, rounding, time, and last what the run makes
EDITS: tuple[Edit, ...] = (
    _cached_text,
    _cached_latents,
    _fused_flow,
    _fp8_attention,
    _fp8_activations,
    _fp8_inputs,
    _fp8_weights,
    _fp8_optimizer,
    _updated_in_backward,
    _no_transposed,
    _streamed,
    _offloaded,
    _automatic_checkpointing,
    _full_checkpointing,
    _smaller_batch,
    _smaller_samples,
    _no_samples,
    _no_ema,
    _smaller_rank,
    _smaller_images,
)
