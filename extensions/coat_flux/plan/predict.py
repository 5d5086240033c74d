"""Peak memory of a job, phase by phase, from the stand-alone engine's use of the device.

    load      the transformer moves to the device linear by linear, each quantized there; adapters are added
    cache     before that: the VAE encodes images, then CLIP and T5 encode prompts, one after the other, and move back
    sample    the VAE joins the transformer and decodes; with an EMA the raw adapters are set aside
    step      the peak of blocks, gradients and workspace, or the optimizer's
    save      the optimizer's state is present, activations are not

The order is that of `standalone/session.py` and `standalone/trainer.py`. A GPU's own context and its allocator's gaps
are not counted; `blocks.held.room_of` leaves room for them, for a display, and for the driver's share of CUDA graphs,
10 KB per kernel. The graphs' pool is the step's memory itself, released before other phases (`standalone.step_graph`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from coat_core.linear.function import stored_bytes
from coat_core.ops.adamw import CHUNK_ELEMENTS_CPU, CHUNK_ELEMENTS_GPU
from coat_core.optim.offload import staging_bytes

from ..base.names import COAT_OPTIMIZER
from ..blocks.decide import BlockPlan, budget_bytes, decide
from ..blocks.formats import PIXELS_PER_TOKEN
from ..blocks.held import room_of
from ..blocks.report import dropout_line
from ..blocks.sizes import FP32, Moment, forward_bytes
from ..saves.state import SHARD_BYTES
from .job import JobFacts, save_space

PARTS = (
    "transformer", "lora", "gradients", "optimizer", "ema", "saved activations", "text encoders", "vae", "workspace",
)  # fmt: skip
LIBRARY_WORKSPACE = {True: 0, False: 32 * 2**20}  # by `on_cpu`: none; cuBLAS's on a Hopper GPU, the most
PROCESS_RAM = {True: 0.6e9, False: 3e9}  # of Python and the libraries, by `on_cpu`: measured; with CUDA's
OPTIMIZER_BUFFERS = 8  # fp32 buffers of FP8AdamW's chunk: w, g, m, v, four temporaries
QUANTIZED_BYTES = 8  # per element while a weight becomes FP8: two fp32 copies


@dataclass(frozen=True)
class Prediction:
    """Memory of a run."""

    phases: dict[str, dict[str, int]]  # load, cache, sample (if images are drawn), step, save: peak bytes by part
    peak: int  # the largest phase's total, bytes on the device
    ram_bytes: int  # the most that the process holds in CPU memory
    disk_bytes: int  # of the run and its caches, without the model's own files
    plan: BlockPlan
    recomputed: tuple[int, ...]  # indices of the blocks that recompute
    assumptions: tuple[str, ...] = ()


def predict(facts: JobFacts, device_bytes: float | None = None, recomputed: Sequence[int] | None = None) -> Prediction:
    """Predict a job's memory on a device of so many bytes; `recomputed` overrides the config's choice."""
    plan = block_plan(facts, device_bytes, recomputed)
    # steps add transposed weights and copies of adapters, and move codes to CPU memory
    changes = {"transformer": plan.transposed_bytes - plan.freed_bytes, "workspace": plan.shadow_bytes}
    phases = {"load": _load(facts, plan), "cache": _cache(facts, device_bytes)}
    if sample := _sample(facts):
        phases["sample"] = _sum(sample, changes)
    phases["step"] = _sum(_step(facts, plan), changes)
    phases["save"] = _sum(_held(facts), {"gradients": facts.gradient_bytes}, changes)
    peak = max(sum(parts.values()) for parts in phases.values())

    assumptions = list(facts.assumed)
    if not facts.data.found:
        taken = "every one is taken at its full resolution; caches on disk are not counted"
        assumptions.append(f"the images are not here: {taken}")
    if line := dropout_line(plan):
        assumptions.append(line)
    blocks = tuple(plan.recomputed or ())
    return Prediction(phases, peak, _ram(facts, peak), _disk(facts), plan, blocks, tuple(assumptions))


def _sum(*held: Mapping[str, int]) -> dict[str, int]:
    return {part: sum(parts.get(part, 0) for parts in held) for part in PARTS}


def _resident(facts: JobFacts) -> dict[str, int]:
    """The models and adapters of the training loop."""
    return {
        "transformer": facts.transformer_bytes,
        "lora": facts.lora_bytes,
        "text encoders": 0 if facts.caches_text else facts.model.text_bytes(facts.value_bytes),
        "vae": 0 if facts.caches_latents else facts.vae_bytes,
    }


def _held(facts: JobFacts) -> dict[str, int]:
    """Everything held all through a step."""
    ema = FP32 * sum(facts.adapter_sizes) if facts.job.train.ema_config.use_ema else 0
    return {**_resident(facts), "optimizer": optimizer_bytes(facts), "ema": ema}


def block_plan(
    facts: JobFacts, device_bytes: float | None = None, recomputed: Sequence[int] | None = None
) -> BlockPlan:
    """The run's plan for its blocks; arguments as `predict`."""
    budget = _budget(facts, device_bytes)
    free = None if budget is None else budget - sum(_held(facts).values()) - LIBRARY_WORKSPACE[facts.on_cpu]
    chosen = None if recomputed is None else tuple(recomputed)
    inputs = replace(facts.given, free_bytes=free, recomputed=chosen, reserve_bytes=outside_bytes(facts))
    return decide(facts.job.coat, inputs)


def outside_bytes(facts: JobFacts) -> int:
    """Peak device bytes outside the blocks, beyond what is always held."""
    sample = sum(_sample(facts).values()) - sum(_held(facts).values())
    return max(sample, _update(facts).total)


def _budget(facts: JobFacts, device_bytes: float | None) -> float | None:
    usable = None if device_bytes is None else room_of(device_bytes)
    return budget_bytes(facts.job.coat, usable)


def _step(facts: JobFacts, plan: BlockPlan) -> dict[str, int]:
    moment = plan.moment or Moment(0, 0, 0)
    around = plan.around_bytes
    update = _update(facts)
    if update.total > moment.total + around:
        moment, around = update, 0
    if facts.frees_gradients:  # one at a time, out of the workspace
        largest = min(facts.value_bytes * max(facts.trained.values(), default=0), moment.workspace)
        moment = moment._replace(gradients=largest, workspace=moment.workspace - largest + update.workspace)
    needs = {
        "saved activations": moment.kept + around,
        "workspace": moment.workspace + LIBRARY_WORKSPACE[facts.on_cpu],
        "gradients": moment.gradients,
    }
    return _sum(_held(facts), needs)


def _update(facts: JobFacts) -> Moment:
    """The optimizer's: all gradients, and FP8AdamW's buffers of a chunk or another's one buffer of all."""
    elements = sum(facts.adapter_sizes)
    updated = elements // OPTIMIZER_BUFFERS
    if facts.job.train.optimizer == COAT_OPTIMIZER:
        updated = min(elements, CHUNK_ELEMENTS_CPU if facts.on_cpu else CHUNK_ELEMENTS_GPU)
    return Moment(0, FP32 * OPTIMIZER_BUFFERS * updated, facts.gradient_bytes)


def _load(facts: JobFacts, plan: BlockPlan) -> dict[str, int]:
    """Linear by linear: a weight in high precision next to the codes so far; streamed codes leave at once."""
    resident = _resident(facts)
    coat = facts.job.coat
    config = coat.linear_config()
    peak = codes = 0
    if coat.enabled and coat.weight.use_fp8:
        for linear in facts.stored.values():
            peak = max(peak, codes + linear.weight.numel() * (facts.value_bytes + QUANTIZED_BYTES))
            if facts.on_cpu or not facts.given.stream_bytes:
                codes += sum(stored_bytes(linear.out_features, linear.in_features, config).values())
    stays = resident["transformer"] - plan.freed_bytes + resident["lora"]
    return _sum(resident, {"transformer": -plan.freed_bytes, "workspace": max(0, peak - stays)})


def _cache(facts: JobFacts, device_bytes: float | None) -> dict[str, int]:
    """The largest of: the VAE with an image, the encoders with a prompt, what training keeps of both."""
    model, value_bytes, datasets = facts.model, facts.value_bytes, facts.job.datasets
    image = {"vae": facts.vae_bytes, "workspace": int(model.encode_values * value_bytes * facts.data.pixels)}
    room = None if facts.on_cpu else _budget(facts, device_bytes)
    prompt = {"text encoders": model.text_bytes(value_bytes, room), "workspace": int(model.text_values * value_bytes)}
    resident = _resident(facts)
    moments = [{part: resident[part] for part in ("text encoders", "vae")}]
    if any(entry.cache_latents or entry.cache_latents_to_disk for entry in datasets):
        moments.append(image)
    if facts.sample_tokens is not None or any(entry.cache_text_embeddings for entry in datasets):
        moments.append(prompt)
    if facts.on_cpu:  # both are in memory all along
        both = {"vae": image["vae"], "text encoders": prompt["text encoders"]}
        moments = [{**moment, **both} for moment in moments]
    return _sum(max(moments, key=lambda moment: sum(moment.values())))


def _sample(facts: JobFacts) -> dict[str, int]:
    """The largest image, a redrawn photo included, after a step, whose gradients stay; empty if none is drawn."""
    if facts.sample_tokens is None:
        return {}
    held = {**_held(facts), "vae": facts.vae_bytes, "gradients": facts.gradient_bytes}
    held["ema"] *= 2
    denoise = max(forward_bytes(block, facts.sample_tokens, facts.settings[-1]) for block in facts.blocks)
    pixels = facts.sample_tokens.image * PIXELS_PER_TOKEN
    decode = int(facts.model.decode_values * facts.value_bytes * pixels)
    return _sum(held, {"workspace": max(denoise, decode) + LIBRARY_WORKSPACE[facts.on_cpu]})


def optimizer_bytes(facts: JobFacts) -> int:
    """Device bytes of the optimizer's state; where offloaded, of its staging buffers."""
    moments = facts.moment_bytes - facts.offloaded_bytes
    if not facts.offloads:
        return moments
    config, _ = facts.job.coat.optimizer_config(facts.job.train.optimizer_params)
    device = torch.device("cpu" if facts.on_cpu else "cuda")
    return moments + staging_bytes(config, facts.adapter_sizes, device)


def _ram(facts: JobFacts, peak: int) -> int:
    """CPU memory at its peak: while loading, or in a step; `peak` is the device's."""
    model, value_bytes = facts.model, facts.value_bytes
    vae = 0 if facts.sample_tokens is None else facts.vae_bytes
    streamed = sum(facts.given.stream_bytes)
    largest = max(linear.weight.numel() for linear in model.linears.values())
    passing = 2 * value_bytes * largest  # as stored on disk, and in `train.dtype`
    loading = max(facts.vae_bytes + model.text_bytes(value_bytes), streamed + passing + vae)
    shard = min(SHARD_BYTES, value_bytes * model.elements["transformer"]) if facts.job.full else 0
    training = peak if facts.on_cpu else streamed + vae + facts.offloaded_bytes + shard
    total = PROCESS_RAM[facts.on_cpu] + max(loading, training)
    if any(entry.cache_latents for entry in facts.job.datasets):
        total += facts.latent_bytes
    return int(total)


def _disk(facts: JobFacts) -> int:
    """Kept saves, the final one, the states to resume from, one being written, and caches."""
    job, model = facts.job, facts.model
    total = save_space(job, facts.adapter_sizes, model.elements["transformer"]).most
    if any(entry.cache_latents_to_disk for entry in job.datasets):
        total += facts.latent_bytes
    if facts.caches_text:
        total += 2 * facts.data.captions * (model.text_tokens * model.text_width + model.pooled_width)  # bf16
    return total
