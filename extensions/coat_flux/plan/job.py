"""A job's demands on memory and time: tokens, samples, adapters, and the storage of saved activations."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from coat_core.linear.weight import code_bytes, wants_transposed

from ..base.names import COAT_OPTIMIZER
from ..blocks.decide import Given, block_settings, copied_bytes
from ..blocks.described import Block
from ..blocks.gemms import high_precision_reason
from ..blocks.lookup import trained_names
from ..blocks.lora import DROPOUT
from ..blocks.placement import aligned
from ..blocks.sizes import FP32, FlowSettings, Tokens
from ..config.findings import ConfigError
from ..config.job import JobConfig
from ..config.job_sections import DatasetSection
from ..data.dataset import scan
from ..data.files import DatasetError
from .models import Linear, ModelParts, find_model

__all__ = ["JobFacts", "check_trained", "job_facts", "trained_sizes"]

PIXELS_PER_TOKEN = 256  # the VAE takes 8 × 8 pixels to a latent, FLUX packs 2 × 2 of them
FLUX1_MLP_RATIO = 4
VALUE_BYTES = {"bf16": 2, "fp32": FP32}


class Data(NamedTuple):
    """The training images."""

    pixels: int  # of the largest bucket
    mean_pixels: float  # over an epoch
    latents: int  # distinct (image, size, mirrored); 0 if the images are not here
    captions: int  # distinct prompts, a dropped caption included
    found: bool  # whether the folders are here


@dataclass(frozen=True)
class JobFacts:
    """A job in numbers."""

    job: JobConfig
    model: ModelParts
    data: Data
    targets: tuple[Linear, ...]  # with an adapter
    trained: Mapping[str, int]  # name → elements of the transformer's own parameters; empty with `network`
    blocks: tuple[Block, ...]  # in forward order, with their adapters
    tokens: Tokens  # of the largest micro-batch
    sample_tokens: Tokens | None  # of the largest sample image; None without samples

    @functools.cached_property
    def given(self) -> Given:
        """The inputs of the run's block plan; `predict` adds the budget."""
        train, coat, dropout = self.job.train, self.job.coat, bool(self.job.network.dropout)
        in_codes, config = coat.enabled and coat.weight.use_fp8, coat.linear_config()
        all_copied = in_codes and wants_transposed(config)
        copied, codes = 0, dict.fromkeys(_block_names(self.model), 0)
        for linear in (linear for linear in self.model.linears if linear.is_fp8):
            multiplies = not high_precision_reason(linear.name, coat, self.model.family)
            if multiplies and (all_copied or not self.is_stored(linear)):
                copied += linear.weights
            block = ".".join(linear.name.split(".", 2)[:2])
            if in_codes and block in codes:
                codes[block] += sum(map(aligned, code_bytes(linear.outputs, linear.inputs, config)))
        return Given(
            self.blocks,
            tokens=self.tokens,
            value_bytes=self.value_bytes,
            dropout=dropout,
            device="cpu" if self.on_cpu else "cuda",
            allow_recompute=train.gradient_checkpointing,
            accumulates=train.gradient_accumulation > 1,
            unfused={i: DROPOUT for i, block in enumerate(self.blocks) if block.ranks} if dropout else {},
            stream_bytes=tuple(codes.values()) if in_codes and coat.memory.stream_blocks != 0 else (),
            shadow_bytes=copied_bytes(coat, sum(self.adapter_sizes), self.value_bytes),
            transposed_bytes=copied if coat.enabled and not self.on_cpu else 0,
            frees_gradients=train.fused_backward,
        )

    def is_stored(self, linear: Linear) -> bool:
        """Whether codes can replace the linear's weight."""
        return linear.is_fp8 and f"{linear.name}.weight" not in self.trained

    @functools.cached_property
    def transformer_bytes(self) -> int:
        """Bytes of the transformer in training: codes and scales, the rest as loaded."""
        return self.model.transformer_bytes(self.job.coat, self.value_bytes, self.trained)

    @functools.cached_property
    def block_settings(self) -> list[FlowSettings]:
        """The storage of each block's saved activations."""
        return block_settings(self.job.coat, self.given)

    @property
    def settings(self) -> FlowSettings:
        """The last block's `block_settings`."""
        return self.block_settings[-1]

    @property
    def value_bytes(self) -> int:
        """Bytes per element of frozen models and hidden states."""
        return VALUE_BYTES[self.job.train.dtype]

    @property
    def on_cpu(self) -> bool:
        """Whether the job trains on a CPU: device memory is CPU memory."""
        return self.job.device == "cpu"

    @property
    def caches_latents(self) -> bool:
        """Whether training does not need the VAE."""
        return all(entry.cache_latents or entry.cache_latents_to_disk for entry in self.job.datasets)

    @property
    def caches_text(self) -> bool:
        """Whether training does not need the text encoders."""
        return all(entry.cache_text_embeddings for entry in self.job.datasets)

    @functools.cached_property
    def adapter_sizes(self) -> list[int]:
        """Elements of each trained parameter: A and B of every target, or the transformer's own."""
        rank = self.job.network.linear
        if self.job.full:
            return list(self.trained.values())
        return [size for linear in self.targets for size in (rank * linear.inputs, rank * linear.outputs)]

    @property
    def lora_bytes(self) -> int:
        """The adapters, fp32; none in full fine-tuning."""
        return 0 if self.job.full else FP32 * sum(self.adapter_sizes)

    @property
    def gradient_bytes(self) -> int:
        """Peak bytes of gradients outside of backward, each in its parameter's dtype."""
        if self.frees_gradients:
            return 0
        return self.value_bytes * sum(self.adapter_sizes) if self.job.full else self.lora_bytes

    @property
    def frees_gradients(self) -> bool:
        """Whether there are never more than one or two gradients."""
        return self.job.train.fused_backward and self.job.train.gradient_accumulation == 1

    @functools.cached_property
    def offloads(self) -> bool:
        """Whether the moments are in CPU memory and pass through the device."""
        train = self.job.train
        given = self.job.coat.optimizer_config(train.optimizer_params)[1] if train.optimizer == COAT_OPTIMIZER else {}
        return given.get("offload") == "cpu"


def job_facts(job: JobConfig, known: JobFacts | None = None) -> JobFacts:
    """Gather a job's numbers, with unchanged images from `known`; raises ConfigError for unknown sizes."""
    where = ": ".join(filter(None, (job.file, "config.process[0].model.name_or_path")))
    model = find_model(job.model.name_or_path, where)
    targets, trained = adapted(job, model), trained_sizes(job, model) if job.full else {}
    data = known.data if known is not None and _images(known.job) == _images(job) else _data(job)
    drawn = () if job.train.disable_sampling else job.sample.items()
    tokens = Tokens(job.train.batch_size, model.text_tokens, data.pixels // PIXELS_PER_TOKEN)
    largest = max((item.width * item.height for item in drawn), default=0)
    return JobFacts(
        job=job,
        model=model,
        data=data,
        targets=targets,
        trained=trained,
        blocks=_blocks(model, targets, job.network.linear, trained),
        tokens=tokens,
        sample_tokens=Tokens(1, model.text_tokens, largest // PIXELS_PER_TOKEN) if drawn else None,
    )


def trained_sizes(job: JobConfig, model: ModelParts) -> dict[str, int]:
    """Elements of each parameter that full fine-tuning trains, by name; raises ConfigError for unmatched patterns."""
    names = trained_names(model.parameters, job.coat.include, job.coat.exclude)
    return {name: model.parameters[name] for name in names}


def check_trained(job: JobConfig) -> None:
    """Check `coat.include` and `coat.exclude` early, if the parameters are known; raises ConfigError."""
    if not job.full:
        return
    try:
        model = find_model(job.model.name_or_path, "model.name_or_path")
    except ConfigError:
        return
    trained_sizes(job, model)


def adapted(job: JobConfig, model: ModelParts) -> tuple[Linear, ...]:
    """The linears with an adapter; none in full fine-tuning."""
    kwargs = job.network.network_kwargs
    if job.full:
        return ()
    return tuple(model.targets(job.network.transformer_only, kwargs.only_if_contains, tuple(kwargs.ignore_if_contains)))


def _images(job: JobConfig) -> list[DatasetSection]:
    same = {"cache_latents": False, "cache_latents_to_disk": False, "cache_text_embeddings": False}
    return [replace(entry, **same, shuffle_tokens=False) for entry in job.datasets]


def _block_names(model: ModelParts) -> list[str]:
    return [f"{part.pattern}.{i}" for part in model.family.lists for i in range(model.config[part.count])]


def _blocks(
    model: ModelParts, targets: tuple[Linear, ...], rank: int, parameters: Collection[str]
) -> tuple[Block, ...]:
    adapters: dict[str, list[str]] = {}
    own: dict[str, list[str]] = {}
    known = model.family
    outside = []
    for full_names, by_block in (([linear.name for linear in targets], adapters), (parameters, own)):
        for full_name in full_names:
            pattern, _, rest = full_name.partition(".")
            if pattern in known.blocks:
                place, _, name = rest.partition(".")
                by_block.setdefault(f"{pattern}.{place}", []).append(name)
            else:
                outside.append(full_name if by_block is adapters else full_name.rpartition(".")[0])
    embedding = any(name.split(".")[0] in known.conditioning for name in outside)
    trained = any(name in known.inputs for name in outside)
    width = int(model.config.get("mlp_ratio", FLUX1_MLP_RATIO) * model.hidden)
    kinds = {part.pattern: part.kind for part in known.lists}
    blocks = []
    for name in _block_names(model):
        ranks = tuple((linear, rank) for linear in adapters.get(name, ()))
        heads, itself = model.config["num_attention_heads"], tuple(own.get(name, ()))
        kind = kinds[name.partition(".")[0]]
        blocks.append(Block(kind, model.hidden, heads, width, ranks, trained, embedding, itself))
        trained = blocks[-1].trained_output
    return tuple(blocks)


def _data(job: JobConfig) -> Data:
    """The training images, or the largest possible ones if they are absent or refused."""
    logger = logging.getLogger("coat_flux.data")
    level = logger.level
    logger.setLevel(logging.ERROR)  # `train` reports what is missing
    try:
        samples = scan(job.datasets, job.trigger_word)
    except DatasetError:
        sizes = [resolution**2 for entry in job.datasets for resolution in entry.resolution]
        return Data(max(sizes), sum(sizes) / len(sizes), 0, 0, False)
    finally:
        logger.setLevel(level)
    pixels = [sample.bucket.width * sample.bucket.height for sample in samples]
    captions = {sample.caption for sample in samples}
    if any(entry.caption_dropout_rate > 0 for entry in job.datasets):
        captions |= {sample.dropped_caption for sample in samples}
    return Data(max(pixels), sum(pixels) / len(pixels), len(set(samples)), len(captions), True)
