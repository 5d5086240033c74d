"""A job in numbers: its model's parts, tokens, adapters, how blocks save activations, and what its saves take."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coat_core.linear.function import code_bytes, stored_bytes, wants_transposed
from coat_core.linear.module import obstacle_to_conversion
from coat_core.ops.packing import n_blocks
from coat_core.optim.state import state_bytes

from ..base.names import COAT_OPTIMIZER
from ..blocks.decide import Given, block_settings
from ..blocks.formats import PIXELS_PER_TOKEN, TEXT_TOKENS
from ..blocks.gemms import high_precision_reason
from ..blocks.held import largest_held
from ..blocks.lokr import lokr_shapes
from ..blocks.lora import DROPOUT
from ..blocks.models import FLUX, FLUX2, HUB_MODELS, family_of, matches, target_names, trained_names
from ..blocks.models.checkpoint import CheckpointError, flux_config, read_shapes
from ..blocks.models.flux1 import OTHER_PARTS
from ..blocks.sizes import FP32, LINEARS, Block, Tokens, aligned, rank_of_as_many
from ..config.findings import ConfigError
from ..config.job import JobConfig
from ..config.job_sections import DatasetSection, NetworkSection
from ..data.cache import by_layer
from ..data.preflight import DataReport
from ..mini_flux import EMBEDDED_MODEL, MINI_FLUX
from ..saves.commit import SaveSpace

# --- the model ---

MODEL_PARTS = ("transformer", "vae", "text_encoder", "text_encoder_2")
PROBE_PIXELS = 256  # a VAE's memory grows with the pixels; half this side and its attention would not
Configs = Mapping[str, dict[str, Any]]


class ModelParts:
    """A FLUX model in elements and shapes, built by its real classes on the meta device.

    Attributes:
        config, linears, parameters: the transformer's, by name; parameters in elements.
        converted: names of the linears that can be FP8.
        elements: parameters of each of its `MODEL_PARTS`.
        text_tokens, text_width, pooled_width: of a prompt's embeddings; FLUX.2 has no pooled one.
        encode_values, decode_values: the VAE's peak, in values per pixel.
        text_values, text_layer: the largest text encoder's peak for one prompt, and its largest parameter.
    """

    def __init__(self, configs_json: str, text_tokens: int):
        # it imports torchao, which fails under a meta device
        import diffusers.models.modeling_utils  # noqa: F401

        configs = json.loads(configs_json)
        make = (FLUX if "text_encoder_2" in configs else FLUX2).parts
        assert make is not None
        with torch.device("meta"):
            models = make(configs)
        transformer, vae = models["transformer"], models["vae"]
        self.config: dict[str, Any] = dict(transformer.config)
        self.family = family_of(transformer)
        self.linears: dict[str, nn.Linear] = {}
        self.converted: list[str] = []
        for name, module in transformer.named_modules():
            if isinstance(module, nn.Linear):
                self.linears[name] = module
                if matches(name, self.family.convert) and obstacle_to_conversion(module) is None:
                    self.converted.append(name)
        self.parameters = {name: p.numel() for name, p in transformer.named_parameters()}
        self.elements = {part: sum(p.numel() for p in model.parameters()) for part, model in models.items()}
        self.hidden = int(self.config["num_attention_heads"] * self.config["attention_head_dim"])
        self.block_names: list[str] = []
        for blocks in self.family.lists:
            self.block_names += [f"{blocks.pattern}.{i}" for i in range(self.config[blocks.count])]

        self.text_tokens = text_tokens
        self.text_width = self.config["joint_attention_dim"]
        prompt = torch.zeros((1, text_tokens), dtype=torch.long, device="meta")
        if self.family is FLUX2:  # with a mask as its layers take it, which otherwise depends on the prompt's values
            text, self.pooled_width = models["text_encoder"], 0
            mask = torch.empty(1, 1, text_tokens, text_tokens, device="meta")
            options = {"output_hidden_states": True, "use_cache": False, "attention_mask": mask}
        else:
            text = models["text_encoder_2"]
            self.pooled_width = models["text_encoder"].config.hidden_size
            options = {}
        self.text_layer = max(p.numel() for p in text.parameters())
        self.text_values = largest_held(lambda: text(prompt, **options)) / FP32

        self.latent_channels = vae.config.latent_channels
        side = PROBE_PIXELS // 2 ** (len(vae.config.block_out_channels) - 1)
        photo = torch.empty(1, 3, PROBE_PIXELS, PROBE_PIXELS, device="meta")
        latent = torch.empty(1, self.latent_channels, side, side, device="meta")
        self.encode_values = largest_held(lambda: vae.encode(photo)) / (FP32 * PROBE_PIXELS**2)
        self.decode_values = largest_held(lambda: vae.decode(latent)) / (FP32 * PROBE_PIXELS**2)

    def text_bytes(self, value_bytes: int, room: float | None = None) -> int:
        """Bytes of the text encoders while encoding; `room` as in `data.cache.by_layer`."""
        sizes = [self.elements[part] * value_bytes for part in MODEL_PARTS[2:] if part in self.elements]
        total = 0
        for size, layer_by_layer in zip(sizes, by_layer(sizes, room), strict=True):
            total += self.text_layer * value_bytes if layer_by_layer else size
        return total


def find_model(name_or_path: str, where: str) -> ModelParts:
    """The parts of a diffusers folder or a known name; ConfigError without configs."""
    folder, text_tokens = Path(name_or_path), TEXT_TOKENS
    if not folder.exists() and folder.name == Path(EMBEDDED_MODEL).name:
        folder = MINI_FLUX
    if folder.is_dir():
        configs, text_tokens = _of_folder(folder, where)
    elif folder.is_file():
        try:
            configs = {"transformer": flux_config(read_shapes(folder)), **OTHER_PARTS}
        except CheckpointError as error:
            raise ConfigError(f"{where}={folder}: {error}") from error
    elif name_or_path in HUB_MODELS:
        configs = HUB_MODELS[name_or_path]
    else:
        raise ConfigError(
            f"{where}={name_or_path!r}: plan downloads nothing, and this is not a folder here; give the folder of a "
            f"downloaded model, or plan with one of {', '.join(HUB_MODELS)}"
        )
    return _model_parts(json.dumps(configs, sort_keys=True, default=list), text_tokens)


def _of_folder(folder: Path, where: str) -> tuple[Configs, int]:
    index = folder / "model_index.json"
    family, limit = FLUX, TEXT_TOKENS
    if index.is_file() and _read_json(index).get("_class_name") in FLUX2.pipelines:
        family = FLUX2
    configs = {}
    for part in MODEL_PARTS:
        if part not in family.folders:
            continue
        file = folder / part / "config.json"
        if not file.is_file():
            raise ConfigError(f"{where}={folder}: has no {part}/config.json; give a complete diffusers folder")
        configs[part] = _read_json(file)
    tokenizer = folder / ("tokenizer" if family is FLUX2 else "tokenizer_2") / "tokenizer_config.json"
    if tokenizer.is_file():
        limit = _read_json(tokenizer).get("model_max_length") or TEXT_TOKENS
    return configs, min(TEXT_TOKENS, int(limit))


def _read_json(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


_model_parts = functools.lru_cache(maxsize=8)(ModelParts)


# --- the job ---

FLUX1_MLP_RATIO = 4
VALUE_BYTES = {"bf16": 2, "fp32": FP32}


class Data:
    """The training images, or the largest possible ones if they are absent or refused.

    Attributes:
        found: whether the folders are here.
        pixels, mean_pixels: of the largest bucket, over an epoch.
        latents: distinct (image, size, mirrored); 0 if the images are not here.
        captions: distinct prompts, a dropped caption included.
    """

    def __init__(self, job: JobConfig):
        report = DataReport(job.datasets, job.trigger_word)
        self.found = not report.errors  # `train` reports them
        self.latents = self.captions = 0
        if self.found:
            pixels = [sample.bucket.width * sample.bucket.height for sample in report.samples]
            captions = {sample.caption for sample in report.samples}
            if any(entry.caption_dropout_rate > 0 for entry in job.datasets):
                captions |= {sample.dropped_caption for sample in report.samples}
            self.latents, self.captions = len(set(report.samples)), len(captions)
        else:
            pixels = [resolution**2 for entry in job.datasets for resolution in entry.resolution]
        self.pixels, self.mean_pixels = max(pixels), sum(pixels) / len(pixels)


class JobFacts:
    """A job in numbers; unchanged images are taken from `known`. Raises ConfigError for unknown sizes.

    Attributes:
        targets: names of the linears with an adapter.
        trained: name → elements of the transformer's own parameters; empty with `network`.
        stored: the linears that codes can replace.
        adapter_sizes: elements of A and B of every target, or of each trained parameter.
        tokens, sample_tokens: of the largest micro-batch, of the largest sample image or redrawn photo (or None).
        value_bytes: per element of frozen models and hidden states.
        caches_latents, caches_text: training does not need the VAE, the text encoders.
        transformer_bytes: of the transformer in training: codes and scales, the rest as loaded.
        offloads: the moments pass through the device; `offloaded_bytes` of them are in CPU memory.
        gradient_bytes: the gradients' peak outside of backward.
        given: inputs of the run's block plan; `predict` adds the budget.
    """

    def __init__(self, job: JobConfig, known: JobFacts | None = None):
        train, coat, datasets = job.train, job.coat, job.datasets
        self.job, self.on_cpu = job, job.device == "cpu"
        self.model = model = _model_of(job)
        self.data = known.data if known is not None and _images(known.job) == _images(job) else Data(job)
        self.targets = [] if job.full else target_names(model.linears, job.network)
        self.trained = trained_sizes(job, model) if job.full else {}
        self.adapter_sizes = list(self.trained.values()) if job.full else _sizes_of_lora(job, model)
        self.stored = {name: model.linears[name] for name in model.converted if f"{name}.weight" not in self.trained}
        self.blocks = _blocks(model, self.targets, job.network, self.trained)
        self.tokens = Tokens(train.batch_size, model.text_tokens, self.data.pixels // PIXELS_PER_TOKEN)
        drawn = [] if train.disable_sampling else [item.width * item.height for item in job.sample.items()]
        if job.validation.fidelity:
            drawn.append(self.data.pixels)
        self.sample_tokens = None
        if drawn:
            self.sample_tokens = Tokens(1, model.text_tokens, max(drawn) // PIXELS_PER_TOKEN)
        self.caches_latents = all(entry.cache_latents or entry.cache_latents_to_disk for entry in datasets)
        self.caches_text = all(entry.cache_text_embeddings for entry in datasets)

        self.value_bytes = VALUE_BYTES[train.dtype]
        self.latent_bytes = self.data.latents * int(self.data.mean_pixels / 64 * model.latent_channels * FP32)
        self.vae_bytes = model.elements["vae"] * self.value_bytes
        self.transformer_bytes = model.elements["transformer"] * self.value_bytes
        if coat.enabled and coat.weight.use_fp8:
            config = coat.linear_config()
            for linear in self.stored.values():
                self.transformer_bytes += stored_bytes(linear.out_features, linear.in_features, config)
                self.transformer_bytes -= linear.weight.numel() * self.value_bytes
        self.lora_bytes = 0 if job.full else FP32 * sum(self.adapter_sizes)
        self.frees_gradients = train.fused_backward and train.gradient_accumulation == 1
        self.gradient_bytes = self.value_bytes * sum(self.adapter_sizes) if job.full else self.lora_bytes
        if self.frees_gradients:
            self.gradient_bytes = 0
        self.moment_bytes = moment_bytes(job, self.adapter_sizes)
        self.offloads = False
        if train.optimizer == COAT_OPTIMIZER:
            self.offloads = coat.optimizer_config(train.optimizer_params)[1]["offload"] == "cpu"
        self.offloaded_bytes = self.moment_bytes if self.offloads and not self.on_cpu else 0
        self.given = self._given()
        self.settings = block_settings(coat, self.given)

    def _given(self) -> Given:
        train, coat = self.job.train, self.job.coat
        dropout = bool(self.job.network.dropout)
        in_codes = coat.enabled and coat.weight.use_fp8
        config = coat.linear_config()
        all_copied = in_codes and wants_transposed(config)
        copied, codes = 0, dict.fromkeys(self.model.block_names, 0)
        for name in self.model.converted:
            linear = self.model.linears[name]
            multiplies = not high_precision_reason(name, coat, self.model.family)
            if multiplies and (all_copied or name not in self.stored):
                copied += linear.weight.numel()
            block = ".".join(name.split(".", 2)[:2])
            if in_codes and block in codes:
                codes[block] += sum(map(aligned, code_bytes(linear.out_features, linear.in_features, config)))
        unfused = [i for i, block in enumerate(self.blocks) if block.ranks] if dropout else []
        return Given(
            self.blocks,
            tokens=self.tokens,
            value_bytes=self.value_bytes,
            dropout=dropout,
            device="cpu" if self.on_cpu else "cuda",
            allow_recompute=train.gradient_checkpointing,
            accumulates=train.gradient_accumulation > 1,
            unfused=dict.fromkeys(unfused, DROPOUT),
            stream_bytes=tuple(codes.values()) if in_codes and coat.memory.stream_blocks != 0 else (),
            adapter_elements=sum(self.adapter_sizes),
            transposed_bytes=copied,
            frees_gradients=train.fused_backward,
        )


def _model_of(job: JobConfig) -> ModelParts:
    where = "config.process[0].model.name_or_path"
    return find_model(job.model.name_or_path, f"{job.file}: {where}" if job.file else where)


def trained_sizes(job: JobConfig, model: ModelParts) -> dict[str, int]:
    """Elements of each trained parameter, by name; ConfigError for unmatched patterns."""
    names = trained_names(model.parameters, job.coat.include, job.coat.exclude)
    return {name: model.parameters[name] for name in names}


def check_trained(job: JobConfig) -> None:
    """Check `coat.include` and `coat.exclude` early; raises ConfigError."""
    if not job.full:
        return
    try:
        model = _model_of(job)
    except ConfigError:
        return
    trained_sizes(job, model)


def _sizes_of_lora(job: JobConfig, model: ModelParts) -> list[int]:
    sizes = []
    network = job.network
    for name in target_names(model.linears, network):
        linear = model.linears[name]
        if network.type == "lokr":
            width = linear.out_features, linear.in_features
            sizes += map(math.prod, lokr_shapes(*width, network.lokr_factor, network.lokr_rank).values())
        else:
            sizes += [network.linear * linear.in_features, network.linear * linear.out_features]
    return sizes


def _rank_of(network: NetworkSection, linear: Any) -> int:
    """That of its LoRA, or of one as large as its LoKr."""
    if network.type == "lora":
        return network.linear
    shapes = lokr_shapes(linear.out_features, linear.in_features, network.lokr_factor, network.lokr_rank)
    return rank_of_as_many(sum(map(math.prod, shapes.values())), linear)


def _images(job: JobConfig) -> list[DatasetSection]:
    same = {"cache_latents": False, "cache_latents_to_disk": False, "cache_text_embeddings": False}
    return [replace(entry, **same, shuffle_tokens=False) for entry in job.datasets]


def _blocks(
    model: ModelParts, targets: Sequence[str], network: NetworkSection, parameters: Collection[str]
) -> tuple[Block, ...]:
    """The blocks as `read_block` describes those of a run, so that their bytes are counted once for both."""
    inside: dict[str, list[str]] = {name: [] for name in model.block_names}
    outside = []
    for name in [*targets, *parameters]:
        block = ".".join(name.split(".", 2)[:2])
        if block in inside:
            inside[block].append(name.removeprefix(f"{block}."))
        else:
            outside.append(name.removesuffix(".weight").removesuffix(".bias"))
    embedding = any(name.split(".")[0] in model.family.conditioning for name in outside)
    trained = any(name in model.family.inputs for name in outside)
    kinds = {blocks.pattern: blocks.kind for blocks in model.family.lists}
    blocks = []
    for name, names in inside.items():
        kind = kinds[name.partition(".")[0]]
        block = Block(
            kind=kind,
            hidden=model.hidden,
            heads=model.config["num_attention_heads"],
            mlp=int(model.config.get("mlp_ratio", FLUX1_MLP_RATIO) * model.hidden),
            ranks=tuple(
                (linear, _rank_of(network, model.linears[f"{name}.{linear}"]))
                for linear in LINEARS[kind]
                if linear in names
            ),
            trained_input=trained,
            trained_embedding=embedding,
            trained=tuple(names) if parameters else (),
        )
        blocks.append(block)
        trained = block.trained_output
    return tuple(blocks)


# --- its saves ---

BNB_BLOCK, BNB_SMALLEST = 256, 4096  # bitsandbytes: elements that share a scale; smaller tensors keep fp32 moments


def save_space(job: JobConfig, sizes: Sequence[int], whole: int = 0) -> SaveSpace:
    """Disk space of the saves; `sizes`: elements of A and B of each linear, or of each parameter.

    `whole` has the elements of the whole model, which full fine-tuning saves.
    """
    average = FP32 * sum(sizes) if job.train.ema_config.use_ema else 0
    raw = FP32 * sum(sizes)
    if job.full:  # a model saved in its training dtype is its own state
        as_trained = job.save.dtype == job.train.dtype and not average
        raw = 0 if as_trained else sum(sizes) * (FP32 if job.train.dtype == "fp32" else 2)
    saved = whole if job.full else sum(sizes)
    return SaveSpace(
        lora=saved * (FP32 if job.save.dtype == "fp32" else 2),
        state=raw + average + moment_bytes(job, sizes),
        loras=min(job.save.max_step_saves_to_keep, (job.train.steps - 1) // job.save.save_every) + 1,
    )


def job_space(job: JobConfig) -> SaveSpace:
    """The saves' space without reading weights; ConfigError if sizes are unknown."""
    model = _model_of(job)
    if job.full:
        return save_space(job, list(trained_sizes(job, model).values()), model.elements["transformer"])
    return save_space(job, _sizes_of_lora(job, model))


def moment_bytes(job: JobConfig, sizes: Sequence[int]) -> int:
    """Bytes of what `train.optimizer` stores."""
    optimizer, params = job.train.optimizer, job.train.optimizer_params or {}
    if optimizer == COAT_OPTIMIZER:
        return state_bytes(job.coat.optimizer_config(job.train.optimizer_params)[0], sizes)
    if optimizer == "adamw8bit":
        total = 0
        for size in sizes:
            total += FP32 * size if size < BNB_SMALLEST else size + FP32 * n_blocks(size, BNB_BLOCK)
        return 2 * total
    elements = sum(sizes)
    if optimizer == "prodigy":  # both moments, the gradients' sum, and the start values, which are zero for B
        return FP32 * (2 * elements + (elements + sum(sizes[::2])) // params.get("slice_p", 1))
    if optimizer == "adafactor":  # a row and a column for each matrix
        rank = job.network.linear
        factors = sum(size // rank + rank for size in sizes)
        return FP32 * (factors + elements if params.get("beta1") is not None else factors)
    return (1 if optimizer == "lion" else 2) * FP32 * elements
