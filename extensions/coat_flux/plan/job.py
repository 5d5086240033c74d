"""A job in numbers: its model's parts, tokens, adapters, how blocks save activations, and what its saves take."""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coat_core.linear.function import SCALE, stored_bytes, wants_transposed
from coat_core.linear.module import obstacle_to_conversion
from coat_core.ops.dispatch import first_line
from coat_core.ops.launch import n_blocks
from coat_core.optim.state import state_bytes

from ..base.names import COAT_OPTIMIZER, COAT_QTYPE
from ..blocks.counted import CountedBlock, DualWanTransformer3DModel, Probe, calls_of, text_width
from ..blocks.decide import Given, block_settings
from ..blocks.formats import PIXELS_PER_TOKEN, TEXT_TOKENS
from ..blocks.gemms import high_precision_reason
from ..blocks.held import largest_held
from ..blocks.lora import DROPOUT, lokr_shapes
from ..blocks.models import (
    ARCHS,
    FLUX,
    FLUX2,
    HUB_MODELS,
    family_of,
    listed_blocks,
    matches,
    target_names,
    trained_names,
)
from ..blocks.models.checkpoint import CheckpointError, base_model, cached_folder, flux_config
from ..blocks.models.encodings import read_header
from ..blocks.models.family import own_entries
from ..blocks.quantized import held_bytes
from ..blocks.sizes import FP32, LINEARS, Block, Tokens, UnknownBlock, aligned, rank_of_as_many, read_blocks
from ..config.findings import ConfigError
from ..config.job import JobConfig
from ..config.job_sections import DatasetSection, NetworkSection
from ..config.rules import STANDALONE_ARCHS
from ..data.cache import by_layer
from ..data.preflight import DataReport
from ..mini_flux import EMBEDDED_MODEL, MINI_FLUX
from ..saves.commit import SaveSpace

# --- the model ---

TRANSFORMER, VAE, TEXT = "transformer", "vae", "text_encoder"  # TEXT begins the names of all text encoders
PARTS_OF_FOLDERS = {"unet": TRANSFORMER}  # folder → part, where they differ
CLASS = "_class_name"  # key of a part's class in its config
PROBE_PIXELS = 256  # side of a probed photo; at half of it a VAE's attention would not grow with the pixels
# of a part that cannot run without weights: values per pixel, as FLUX.1's VAE has; for a prompt, a share of weights
ASSUMED_VALUES, ASSUMED_SHARE = 1100.0, 0.1
UNPROBED = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError)
Configs = Mapping[str, dict[str, Any]]  # part → config


class ModelParts:
    """A model in elements and shapes, built on the meta device by its classes; sizes are the transformer's."""

    def __init__(self, configs_json: str, text_tokens: int):
        # it imports torchao, which fails under a meta device
        import diffusers.models.modeling_utils  # noqa: F401

        with torch.device("meta"):
            models = _make_parts(json.loads(configs_json))
        transformer, vae = models[TRANSFORMER], models[VAE]
        self.config: dict[str, Any] = dict(transformer.config)
        self.kind = type(transformer).__name__
        self.assumed: list[str] = []  # lines about what could not be counted
        self.family = family_of(transformer)
        self.linears: dict[str, nn.Linear] = {}
        self.converted: list[str] = []  # names of those that can be FP8
        for name, module in transformer.named_modules():
            if isinstance(module, nn.Linear):
                self.linears[name] = module
                if matches(name, self.family.convert) and obstacle_to_conversion(module) is None:
                    self.converted.append(name)
        self.parameters = {name: p.numel() for name, p in transformer.named_parameters()}
        self.elements = {part: sum(p.numel() for p in model.parameters()) for part, model in models.items()}
        self.buffers = sum(buffer.numel() for buffer in transformer.buffers())
        self.blocks = listed_blocks(transformer, self.family.blocks)  # by name, in forward order
        block_names = {id(module): name for name, block in self.blocks.items() for module in block.modules()}
        # name of each module → name of its block, or ""
        self.block_of = {name: block_names.get(id(module), "") for name, module in transformer.named_modules()}

        levels = len(vae.config.get("block_out_channels") or vae.config.get("dim_mult") or (0,))
        self.scale = vae.config.get("scale_factor_spatial") or 2 ** (levels - 1)  # pixels per side of a latent
        self.latent_channels = vae.config.get("latent_channels") or vae.config["z_dim"]
        # counts the blocks of families that `sizes.Block` does not describe
        self.probe = None if self.family.parts else Probe(transformer, self.family, self.scale)
        if self.probe is None:
            self.hidden = int(self.config["num_attention_heads"] * self.config["attention_head_dim"])
        self.text_tokens = text_tokens
        self.text_width = text_width(self.config)
        self.pooled_width = self.config.get("pooled_projection_dim") or 0

        encoders = [part for part in models if part.startswith(TEXT)]
        text = models[max(encoders, key=lambda part: self.elements[part])]
        self.text_layer = max(p.numel() for p in text.parameters())  # elements of its largest layer
        prompt = torch.zeros((1, text_tokens), dtype=torch.long, device="meta")
        options: dict[str, Any] = {}
        if "use_cache" in inspect.signature(text.forward).parameters:  # a language model, whose mask depends on values
            mask = torch.empty(1, 1, text_tokens, text_tokens, device="meta")
            options = {"output_hidden_states": True, "use_cache": False, "attention_mask": mask}
        assumed = ASSUMED_SHARE * sum(p.numel() for p in text.parameters())
        # peaks in values: of one prompt in the largest text encoder, per pixel in the VAE
        self.text_values = self._peak(lambda: text(prompt, **options), text, assumed)
        frames = () if "latent_channels" in vae.config else (1,)  # of a video VAE
        side, pixels = PROBE_PIXELS // self.scale, PROBE_PIXELS**2
        photo = torch.empty(1, 3, *frames, PROBE_PIXELS, PROBE_PIXELS, device="meta")
        latent = torch.empty(1, self.latent_channels, *frames, side, side, device="meta")
        assumed = ASSUMED_VALUES * pixels
        self.encode_values = self._peak(lambda: vae.encode(photo), vae, assumed) / pixels
        self.decode_values = self._peak(lambda: vae.decode(latent), vae, assumed) / pixels

    def _peak(self, run: Callable[[], Any], part: Any, assumed: float) -> float:
        """The most values that a run of a part holds at once; `assumed` if it cannot run without its weights."""
        try:
            return largest_held(run) / FP32
        except UNPROBED as error:
            self.assumed.append(
                f"{type(part).__name__} does not run without its weights ({first_line(error)}): taken to need "
                f"{assumed / 1e6:.0f} million values"
            )
            return assumed

    def text_bytes(self, value_bytes: int, room: float | None = None) -> int:
        """Bytes of the text encoders while encoding; `room` as in `data.cache.by_layer`."""
        sizes = [size * value_bytes for part, size in self.elements.items() if part.startswith(TEXT)]
        total = 0
        for size, layer_by_layer in zip(sizes, by_layer(sizes, room), strict=True):
            total += self.text_layer * value_bytes if layer_by_layer else size
        return total


_model_parts = functools.lru_cache(maxsize=8)(ModelParts)  # building one takes seconds


def _make_parts(configs: Configs) -> dict[str, Any]:
    """Build the parts of a model by their classes of diffusers and transformers, on the default device."""
    import diffusers
    import transformers

    kind = configs[TRANSFORMER].get(CLASS)
    if kind is None:  # published configs of FLUX have no class
        kind = FLUX.transformer if "text_encoder_2" in configs else FLUX2.transformer
    for family in (FLUX, FLUX2):
        if kind == family.transformer:
            assert family.parts is not None
            return family.parts(configs)
    parts = {}
    for part, config in configs.items():
        name, entries = config.get(CLASS, ""), own_entries(config)
        if hasattr(diffusers, name):
            parts[part] = getattr(diffusers, name).from_config(entries).eval()
        elif hasattr(transformers, name):
            cls = getattr(transformers, name)
            parts[part] = cls(cls.config_class.from_dict(entries)).eval()
        else:
            raise ConfigError(f"{part}: its class {name} is in neither diffusers nor transformers here; pip install -U")
    second = parts.pop(f"{TRANSFORMER}_2", None)
    if second is not None:
        parts[TRANSFORMER] = DualWanTransformer3DModel(parts[TRANSFORMER], second)
    return parts


def find_model(name_or_path: str, where: str, extras: str | None = None) -> ModelParts:
    """The parts of a model, VAE and text encoders from where a run loads them; ConfigError without configs.

    `name_or_path` is a diffusers folder, a FLUX.1 file, a model in the hub's cache or a known name.
    """
    configs, _ = _configs_of(name_or_path, f"{where}.name_or_path", (TRANSFORMER,))
    base = base_model(name_or_path, extras)
    key = "name_or_path" if extras is None else "extras_name_or_path"
    others, text_tokens = _configs_of(base, f"{where}.{key}", (VAE, TEXT))
    return _model_parts(json.dumps({**configs, **others}, sort_keys=True, default=list), text_tokens)


def _configs_of(name_or_path: str, where: str, parts: tuple[str, ...]) -> tuple[Configs, int]:
    """The configs of the parts whose names begin with one of `parts`, and the prompt's length in tokens."""
    folder = Path(name_or_path)
    if not folder.exists() and folder.name == Path(EMBEDDED_MODEL).name:
        folder = MINI_FLUX
    if not folder.exists() and name_or_path not in HUB_MODELS:
        folder = cached_folder(name_or_path) or folder
    if folder.is_dir():
        return _configs_in_folder(folder, where, parts)
    if folder.is_file() and TRANSFORMER in parts:
        try:
            header = read_header(folder)
            header.encodings()  # raises for a file that contradicts itself
            return {TRANSFORMER: flux_config(header.shapes)}, TEXT_TOKENS
        except CheckpointError as error:
            raise ConfigError(f"{where}={folder}: {error}") from error
    if name_or_path in HUB_MODELS:
        known = HUB_MODELS[name_or_path]
        return {part: config for part, config in known.items() if part.startswith(parts)}, TEXT_TOKENS
    raise ConfigError(
        f"{where}={name_or_path!r}: plan downloads nothing, and this is neither a folder here nor in the hub's "
        "cache; give the folder of a downloaded model in diffusers layout, or plan with one of "
        f"{', '.join(HUB_MODELS)}"
    )


def _configs_in_folder(folder: Path, where: str, parts: tuple[str, ...]) -> tuple[Configs, int]:
    index_file = folder / "model_index.json"
    index = dict.fromkeys(FLUX.folders, ("", ""))  # subfolder → (library, class)
    if index_file.is_file():
        index = json.loads(index_file.read_text(encoding="utf-8"))
    configs, prompt_lengths = {}, []
    for subfolder, entry in index.items():
        if not isinstance(entry, list | tuple) or entry[0] is None:
            continue
        part = PARTS_OF_FOLDERS.get(subfolder, subfolder)
        tokenizer_file = folder / subfolder / "tokenizer_config.json"
        if part.startswith("tokenizer") and tokenizer_file.is_file():
            tokenizer = json.loads(tokenizer_file.read_text(encoding="utf-8"))
            prompt_lengths.append(tokenizer.get("model_max_length") or TEXT_TOKENS)
        if not part.startswith(parts):
            continue
        file = folder / subfolder / "config.json"
        if not file.is_file():
            raise ConfigError(f"{where}={folder}: has no {subfolder}/config.json; give a complete diffusers folder")
        configs[part] = {CLASS: entry[1], **json.loads(file.read_text(encoding="utf-8"))}
    return configs, int(min(TEXT_TOKENS, max(prompt_lengths, default=TEXT_TOKENS)))


# --- the job ---

FLUX1_MLP_RATIO = 4
VALUE_BYTES = {"bf16": 2, "fp32": FP32}


class Data:
    """The training images, or the largest possible ones if they are absent or refused."""

    def __init__(self, job: JobConfig):
        report = DataReport(job.datasets, job.trigger_word)
        self.found = not report.errors  # `train` shows them
        self.latents = self.captions = 0  # distinct ones, with the caption that stands for dropped ones
        if self.found:
            pixels = [sample.bucket.width * sample.bucket.height for sample in report.samples]
            captions = {sample.caption for sample in report.samples}
            if any(entry.caption_dropout_rate > 0 for entry in job.datasets):
                captions |= {sample.dropped_caption for sample in report.samples}
            self.latents, self.captions = len(set(report.samples)), len(captions)
        else:
            pixels = [resolution**2 for entry in job.datasets for resolution in entry.resolution]
        self.pixels, self.mean_pixels = max(pixels), sum(pixels) / len(pixels)  # of buckets, over an epoch


class JobFacts:
    """A job in numbers; raises ConfigError for unknown sizes. Images are read unless `known` has the same ones."""

    def __init__(self, job: JobConfig, known: JobFacts | None = None):
        train, coat, datasets = job.train, job.coat, job.datasets
        self.job, self.on_cpu = job, job.device == "cpu"
        self.model = model = _model_of(job)
        same_images = known is not None and _image_settings(known.job) == _image_settings(job)
        self.data = known.data if known is not None and same_images else Data(job)
        self.tokens = Tokens(train.batch_size, model.text_tokens, self.data.pixels // PIXELS_PER_TOKEN)
        self.value_bytes = VALUE_BYTES[train.dtype]  # per element of frozen models and hidden states

        self.targets = [] if job.full else target_names(model.linears, job.network, model.family.convert)
        self.trained = trained_sizes(job, model) if job.full else {}  # the transformer's own parameters
        # elements of A and B of every target, or of each trained parameter
        self.adapter_sizes = list(self.trained.values()) if job.full else _sizes_of_lora(job, model)
        self.quantized: dict[str, int] = {}  # linear that ai-toolkit quantizes → its bytes
        quantizes = job.model.quantize and job.model.qtype != COAT_QTYPE
        if quantizes:
            qtype = job.model.qtype.partition("|")[0]
            sizes = {name: held_bytes(qtype, linear) for name, linear in model.linears.items()}
            self.quantized = {name: size for name, size in sizes.items() if size is not None}
        self.stored: dict[str, nn.Linear] = {}  # the linears that codes can replace
        for name in model.converted:
            if f"{name}.weight" not in self.trained and name not in self.quantized:
                self.stored[name] = model.linears[name]
        self.assumed = list(model.assumed)
        arch = ARCHS.get(str(job.model.arch).partition(":")[0])
        if arch is not None and job.model.arch not in STANDALONE_ARCHS and arch.transformer != model.kind:
            self.assumed.append(f"ai-toolkit's {arch.transformer} is taken to be diffusers' {model.kind}")
        if quantizes and not self.quantized:
            self.assumed.append(f"model.qtype={job.model.qtype}: its bytes are not known, so counted as not quantized")
        if job.uncounted:
            self.assumed.append(f"not counted: {', '.join(job.uncounted)}, which only ai-toolkit has")
        self.blocks = self._blocks()

        drawn_pixels = [] if train.disable_sampling else [item.width * item.height for item in job.sample.items()]
        if job.validation.fidelity:
            drawn_pixels.append(self.data.pixels)
        self.sample_tokens = None  # of the largest sample image or redrawn photo
        if drawn_pixels:
            self.sample_tokens = Tokens(1, model.text_tokens, max(drawn_pixels) // PIXELS_PER_TOKEN)
        self.caches_latents = all(entry.cache_latents or entry.cache_latents_to_disk for entry in datasets)
        self.caches_text = all(entry.cache_text_embeddings for entry in datasets)

        mean_positions = self.data.mean_pixels / model.scale**2
        self.latent_bytes = self.data.latents * int(mean_positions * model.latent_channels * FP32)
        self.vae_bytes = model.elements[VAE] * self.value_bytes
        self.transformer_bytes = (model.elements[TRANSFORMER] + model.buffers) * self.value_bytes
        if coat.enabled and coat.weight.use_fp8:
            config = coat.linear_config()
            for linear in self.stored.values():
                self.transformer_bytes += sum(stored_bytes(linear.out_features, linear.in_features, config).values())
                self.transformer_bytes -= linear.weight.numel() * self.value_bytes
        for name, size in self.quantized.items():
            self.transformer_bytes += size - model.linears[name].weight.numel() * self.value_bytes
        self.lora_bytes = 0 if job.full else FP32 * sum(self.adapter_sizes)
        self.frees_gradients = train.fused_backward and train.gradient_accumulation == 1
        self.gradient_bytes = self.value_bytes * sum(self.adapter_sizes) if job.full else self.lora_bytes
        if self.frees_gradients:
            self.gradient_bytes = 0
        self.moment_bytes = moment_bytes(job, self.adapter_sizes)
        self.offloads = False  # whether the moments pass through the device
        if train.optimizer == COAT_OPTIMIZER:
            self.offloads = coat.optimizer_config(train.optimizer_params)[1]["offload"] == "cpu"
        self.offloaded_bytes = self.moment_bytes if self.offloads and not self.on_cpu else 0
        self.given = self._given()  # `predict` adds the budget
        self.settings = block_settings(coat, self.given)

    def _blocks(self) -> tuple[Block | UnknownBlock, ...]:
        """The blocks as `read_blocks` describes them in a run, so that both count the same bytes.

        Only a plan counts those of models other than FLUX: a run does not know its later blocks' arguments.
        """
        model, job = self.model, self.job
        trained_in: dict[str, list[str]] = {name: [] for name in model.blocks}  # by block, names in it
        outside = []
        for name in [*self.targets, *self.trained]:
            block_name = model.block_of.get(name) or model.block_of.get(name.rpartition(".")[0])
            if block_name:
                trained_in[block_name].append(name.removeprefix(f"{block_name}."))
            else:
                outside.append(name.removesuffix(".weight").removesuffix(".bias"))
        trained_embedding = any(name.split(".")[0] in model.family.conditioning for name in outside)
        trained_input = any(name in model.family.inputs for name in outside)  # of the block at hand
        kinds = {blocks.pattern: blocks.kind for blocks in model.family.lists}
        alike: Mapping[int, int] = {}  # block that a step runs → the last of those equal to it
        # a block that cannot run here is taken to be as wide as the widest linear, one that no step runs to be empty
        width = max(min(x.in_features, x.out_features) for x in model.linears.values())
        if model.probe is not None:
            try:
                alike = calls_of(model.probe, self.tokens, self.value_bytes, not self.on_cpu).alike
                width = 0
            except UNPROBED as error:
                why = f"{model.kind} does not run without its weights ({first_line(error)})"
                self.assumed.append(f"{why}: its blocks are taken to save what a run plans with for their classes")
        unknown = read_blocks(model.blocks.values(), (), self.tokens.rows * width)
        blocks: list[Block | UnknownBlock] = []
        for i, (name, trained) in enumerate(trained_in.items()):
            kind = kinds.get(name.partition(".")[0]) or type(model.blocks[name]).__name__
            adapted = {x: model.linears[f"{name}.{x}"] for x in LINEARS.get(kind, trained) if x in trained}
            ranks = tuple((x, _rank_of(job.network, linear)) for x, linear in adapted.items())
            common = {"ranks": ranks, "trained_input": trained_input, "trained": tuple(trained) if job.full else ()}
            if model.probe is None:
                heads, mlp = model.config["num_attention_heads"], model.config.get("mlp_ratio", FLUX1_MLP_RATIO)
                sizes = {"hidden": model.hidden, "heads": heads, "mlp": int(mlp * model.hidden)}
                blocks.append(Block(kind, **sizes, **common, trained_embedding=trained_embedding))
            elif i in alike:
                blocks.append(CountedBlock(kind, 0, 0, 0, **common, probe=model.probe, index=alike[i]))
            else:
                gradients = sum(rank * sum(adapted[x].weight.shape) for x, rank in ranks)
                blocks.append(replace(unknown[i], gradients=FP32 * gradients if width else 0))
            trained_input = trained_input or trained_embedding or bool(trained)
        return tuple(blocks)

    def _given(self) -> Given:
        train, coat = self.job.train, self.job.coat
        dropout = bool(self.job.network.dropout)
        in_codes = coat.enabled and coat.weight.use_fp8
        config = coat.linear_config()
        all_transposed = in_codes and wants_transposed(config)
        transposed = 0
        codes = dict.fromkeys(self.model.blocks, 0)  # bytes by block
        for name in self.model.converted:
            if name in self.quantized:
                continue
            linear = self.model.linears[name]
            multiplies_in_fp8 = not high_precision_reason(name, coat, self.model.family)
            if multiplies_in_fp8 and (all_transposed or name not in self.stored):
                transposed += linear.weight.numel()
            block = self.model.block_of[name]
            if in_codes and block:
                sizes = stored_bytes(linear.out_features, linear.in_features, config)
                codes[block] += sum(aligned(size) for buffer, size in sizes.items() if buffer != SCALE)
        unfused = [i for i, block in enumerate(self.blocks) if block.ranks] if dropout else []
        return Given(
            self.blocks,
            tokens=self.tokens,
            value_bytes=self.value_bytes,
            dropout=dropout,
            quantized=bool(self.quantized),
            device="cpu" if self.on_cpu else "cuda",
            allow_recompute=train.gradient_checkpointing,
            accumulates=train.gradient_accumulation > 1,
            unfused=dict.fromkeys(unfused, DROPOUT),
            stream_bytes=tuple(codes.values()) if in_codes and coat.memory.stream_blocks != 0 else (),
            adapter_elements=sum(self.adapter_sizes),
            transposed_bytes=transposed,
            frees_gradients=train.fused_backward,
        )


def _model_of(job: JobConfig) -> ModelParts:
    where = f"{job.file}: config.process[0].model" if job.file else "config.process[0].model"
    return find_model(job.model.name_or_path, where, job.model.extras_name_or_path)


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
    for name in target_names(model.linears, job.network, model.family.convert):
        sizes += _adapter_sizes(job.network, model.linears[name])
    return sizes


def _adapter_sizes(network: NetworkSection, linear: Any) -> list[int]:
    """Elements of each matrix of a linear's LoRA or LoKr."""
    if network.type != "lokr":
        return [network.linear * linear.in_features, network.linear * linear.out_features]
    shapes = lokr_shapes(linear.out_features, linear.in_features, network.lokr_factor, network.lokr_rank)
    return [math.prod(shape) for shape in shapes.values()]


def _rank_of(network: NetworkSection, linear: Any) -> int:
    """The rank of a linear's LoRA, or of a LoRA as large as its LoKr."""
    if network.type == "lora":
        return network.linear
    return rank_of_as_many(sum(_adapter_sizes(network, linear)), linear)


def _image_settings(job: JobConfig) -> list[DatasetSection]:
    """The settings of the data sets that `Data` depends on."""
    ignored = {"cache_latents": False, "cache_latents_to_disk": False, "cache_text_embeddings": False}
    return [replace(entry, **ignored, shuffle_tokens=False) for entry in job.datasets]


# --- its saves ---

BNB_BLOCK, BNB_SMALLEST = 256, 4096  # bitsandbytes: elements that share a scale; smaller tensors keep fp32 moments


def save_space(job: JobConfig, sizes: Sequence[int], whole: int = 0) -> SaveSpace:
    """Disk space of the saves; `sizes`: elements of A and B of each linear, or of each parameter.

    `whole`: elements of the whole model, which full fine-tuning saves.
    """
    elements = sum(sizes)
    average = FP32 * elements if job.train.ema_config.use_ema else 0
    raw = FP32 * elements  # the parameters as trained
    if job.full:
        raw = elements * (FP32 if job.train.dtype == "fp32" else 2)
        if job.save.dtype == job.train.dtype and not average:
            raw = 0  # they are the saved model
    saved = whole if job.full else elements
    return SaveSpace(
        lora=saved * (FP32 if job.save.dtype == "fp32" else 2),
        state=raw + average + moment_bytes(job, sizes),
        loras=min(job.save.max_step_saves_to_keep, (job.train.steps - 1) // job.save.save_every) + 1,
    )


def job_space(job: JobConfig) -> SaveSpace:
    """The saves' space without reading weights; ConfigError if sizes are unknown."""
    model = _model_of(job)
    if job.full:
        return save_space(job, list(trained_sizes(job, model).values()), model.elements[TRANSFORMER])
    return save_space(job, _sizes_of_lora(job, model))


def moment_bytes(job: JobConfig, sizes: Sequence[int]) -> int:
    """Bytes of the optimizer's state."""
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
