"""A model's parts, built by their real classes on the meta device: exact bytes without a download."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coat_core.linear.module import obstacle_to_conversion
from coat_core.linear.weight import stored_bytes

from ..blocks.held import largest_held
from ..blocks.lookup import family_of, matches, target_names
from ..blocks.models import FLUX, FLUX2, Family
from ..blocks.models.checkpoint import CheckpointError, flux_config, read_header
from ..blocks.sizes import FP32
from ..config.coat import COATConfig
from ..config.findings import ConfigError
from ..data.cache import by_layer
from ..mini_flux.folder import EMBEDDED_MODEL, MINI_FLUX
from .facts import CLIP_L, FLUX_VAE, HUB_MODELS, T5_XXL, TEXT_TOKENS

__all__ = ["ModelParts", "find_model"]

PARTS = ("transformer", "vae", "text_encoder", "text_encoder_2")
_PROBE_PIXELS = 256  # a VAE's memory grows with the pixels; half this side and its attention would not


@dataclass(frozen=True)
class Linear:
    """A linear of the transformer [outputs, inputs]; if is_fp8, `weight.use_fp8` stores its weight as codes."""

    name: str
    inputs: int
    outputs: int
    is_fp8: bool

    @property
    def weights(self) -> int:
        """Elements of the weight."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class ModelParts:
    """A FLUX model in elements and shapes.

    Attributes:
        config, linears, parameters: the transformer's; parameters by name, in elements.
        elements: parameters of each of its `PARTS`.
        text_tokens, text_width, pooled_width: of a prompt's embeddings; FLUX.2 has no pooled one.
        encode_values, decode_values: the VAE's peak, in values per pixel.
        text_values, text_layer: the largest text encoder's peak for one prompt, and its largest parameter.
    """

    config: dict[str, Any] = field(hash=False)
    family: Family = field(hash=False)
    linears: tuple[Linear, ...]
    parameters: dict[str, int] = field(hash=False)
    elements: dict[str, int] = field(hash=False)
    text_tokens: int
    text_width: int
    pooled_width: int
    latent_channels: int
    encode_values: float
    decode_values: float
    text_values: float
    text_layer: int

    @property
    def hidden(self) -> int:
        """Width d of hidden states."""
        return int(self.config["num_attention_heads"] * self.config["attention_head_dim"])

    def transformer_bytes(self, coat: COATConfig, value_bytes: int, trained: Collection[str] = ()) -> int:
        """Bytes of the model after `apply_coat`: codes and scales; the rest, and trained parameters, as loaded."""
        total = self.elements["transformer"] * value_bytes
        if coat.enabled and coat.weight.use_fp8:
            config = coat.linear_config()
            for linear in self.linears:
                if linear.is_fp8 and f"{linear.name}.weight" not in trained:
                    total += stored_bytes(linear.outputs, linear.inputs, config) - linear.weights * value_bytes
        return total

    def text_bytes(self, value_bytes: int, room: float | None = None) -> int:
        """Bytes of the text encoders while encoding; `room` as in `data.cache.by_layer`."""
        sizes = [self.elements[part] * value_bytes for part in PARTS[2:] if part in self.elements]
        layers = zip(sizes, by_layer(sizes, room), strict=True)
        return sum(self.text_layer * value_bytes if by_layers else size for size, by_layers in layers)

    def targets(self, transformer_only: bool, only: Sequence[str] | None, ignore: Sequence[str]) -> list[Linear]:
        """The linears that get an adapter."""
        names = target_names(
            (linear.name for linear in self.linears),
            only_if_contains=only,
            ignore_if_contains=ignore,
            transformer_only=transformer_only,
        )
        chosen = set(names)
        return [linear for linear in self.linears if linear.name in chosen]


def find_model(name_or_path: str, where: str) -> ModelParts:
    """Build a model's parts from a diffusers folder or a known name; raises ConfigError without configs."""
    configs, text_tokens = _configs(name_or_path, where)
    return _make(json.dumps(configs, sort_keys=True, default=list), text_tokens)


def _configs(name_or_path: str, where: str) -> tuple[dict[str, dict[str, Any]], int]:
    folder = Path(name_or_path)
    if folder.is_dir():
        return _of_folder(folder, where)
    if folder.is_file():
        try:
            transformer = flux_config(read_header(folder))
        except CheckpointError as error:
            raise ConfigError(f"{where}={folder}: {error}") from error
        return {
            "transformer": transformer,
            "vae": FLUX_VAE,
            "text_encoder": CLIP_L,
            "text_encoder_2": T5_XXL,
        }, TEXT_TOKENS
    if folder.name == Path(EMBEDDED_MODEL).name:
        return _of_folder(MINI_FLUX, where)
    if name_or_path in HUB_MODELS:
        return HUB_MODELS[name_or_path], TEXT_TOKENS
    raise ConfigError(
        f"{where}={name_or_path!r}: plan downloads nothing; this is not a folder here, nor a model it knows "
        f"({', '.join(HUB_MODELS)}); give the folder of a downloaded model, or plan with one of these names"
    )


def _of_folder(folder: Path, where: str) -> tuple[dict[str, dict[str, Any]], int]:
    index = folder / "model_index.json"
    pipeline = json.loads(index.read_text(encoding="utf-8")).get("_class_name") if index.is_file() else None
    family = FLUX2 if pipeline in FLUX2.pipelines else FLUX
    parts = [part for part in PARTS if part in family.folders]
    missing = [part for part in parts if not (folder / part / "config.json").is_file()]
    if missing:
        raise ConfigError(
            f"{where}={folder}: has no {missing[0]}/config.json; give a complete diffusers folder, as training needs it"
        )
    configs = {part: json.loads((folder / part / "config.json").read_text(encoding="utf-8")) for part in parts}
    tokenizer = folder / ("tokenizer" if family is FLUX2 else "tokenizer_2") / "tokenizer_config.json"
    limit = json.loads(tokenizer.read_text(encoding="utf-8")).get("model_max_length") if tokenizer.is_file() else None
    return configs, min(TEXT_TOKENS, int(limit or TEXT_TOKENS))


@functools.lru_cache(maxsize=8)
def _make(configs_json: str, text_tokens: int) -> ModelParts:
    configs = json.loads(configs_json)
    make = (FLUX if "text_encoder_2" in configs else FLUX2).parts
    assert make is not None
    with torch.device("meta"):
        models = make(configs)
    transformer, vae = models["transformer"], models["vae"]
    text: Any = models.get("text_encoder_2", models["text_encoder"])  # the larger one
    family = family_of(transformer)
    prompt, asks = torch.zeros((1, text_tokens), dtype=torch.long, device="meta"), {}
    if family is FLUX2:  # with a mask as its layers take it, which otherwise depends on the values of the prompt
        asks = {"output_hidden_states": True, "use_cache": False}
        asks["attention_mask"] = torch.empty(1, 1, text_tokens, text_tokens, device="meta")
    channels, pixels = vae.config.latent_channels, _PROBE_PIXELS
    side = pixels // 2 ** (len(vae.config.block_out_channels) - 1)
    photo, latent = (torch.empty(1, *shape, device="meta") for shape in ((3, pixels, pixels), (channels, side, side)))
    linears = [(name, module) for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    return ModelParts(
        config=dict(transformer.config),
        family=family,
        linears=tuple(
            Linear(
                name, m.in_features, m.out_features, matches(name, family.convert) and obstacle_to_conversion(m) is None
            )
            for name, m in linears
        ),
        parameters={name: p.numel() for name, p in transformer.named_parameters()},
        elements={part: sum(p.numel() for p in model.parameters()) for part, model in models.items()},
        text_tokens=text_tokens,
        text_width=transformer.config.joint_attention_dim,
        pooled_width=0 if family is FLUX2 else models["text_encoder"].config.hidden_size,
        latent_channels=channels,
        encode_values=largest_held(lambda: vae.encode(photo)) / (FP32 * pixels**2),
        decode_values=largest_held(lambda: vae.decode(latent)) / (FP32 * pixels**2),
        text_values=largest_held(lambda: text(prompt, **asks)) / FP32,
        text_layer=max(p.numel() for p in text.parameters()),
    )
