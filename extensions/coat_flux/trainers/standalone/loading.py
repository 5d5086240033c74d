"""Loads the parts of a FLUX model from a diffusers folder, a hub id or a file, each frozen, in one dtype.

VAE and text encoders are loaded by their libraries, on the CPU. The transformer is built on the meta device and filled
weight by weight (`weights`) on its device, so it is never whole in CPU memory before quantization.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from accelerate import init_empty_weights
from diffusers import AutoModel, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from torch import nn
from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

from ...base.errors import UserError
from ...blocks.apply import convert_weights
from ...blocks.cast_loss import decibels
from ...blocks.models.checkpoint import SUFFIXES, CheckpointError, base_model
from ...blocks.models.flux2 import Flux2Text
from ...config.coat import COATConfig
from ...data.cache import TextEncoders
from ...watch.casts import weight_rows
from ..weights import Weights, check_weights, fill, folder_weights, local_folder, original_weights

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # of train and save
MAX_TEXT_TOKENS = 512
TRANSFORMERS = ("FluxTransformer2DModel", "Flux2Transformer2DModel")
# pipeline → transformers' classes of its text encoder and tokenizer or processor
TEXT_PARTS = {
    "Flux2KleinPipeline": ("Qwen3ForCausalLM", "AutoTokenizer"),
    "Flux2Pipeline": ("Mistral3ForConditionalGeneration", "AutoProcessor"),
}
QUANTIZED = "its weights are quantized and cannot be trained; give the original model, or add network to train a LoRA"


class ModelLoadError(UserError, RuntimeError):
    """A part of the model cannot be loaded."""


@dataclass
class Encoders:
    """The encoders of images and prompts (`text` None once freed); `distilled` is FLUX.2 klein without "base"."""

    vae: nn.Module
    text: TextEncoders | Flux2Text | None
    scheduler: FlowMatchEulerDiscreteScheduler
    distilled: bool = False


def load_encoders(name_or_path: str, dtype: torch.dtype, extras: str | None = None) -> Encoders:
    """VAE, text encoders, tokenizers and scheduler of FLUX.1 or FLUX.2; ModelLoadError if a part cannot be read."""
    name_or_path = base_model(name_or_path, extras)
    vae = _load_frozen(AutoModel, name_or_path, "vae", torch_dtype=dtype)
    scheduler = _load(FlowMatchEulerDiscreteScheduler, name_or_path, "scheduler")
    if type(vae).__name__ != "AutoencoderKLFlux2":
        clip = _load_frozen(CLIPTextModel, name_or_path, "text_encoder", dtype=dtype)
        t5 = _load_frozen(T5EncoderModel, name_or_path, "text_encoder_2", dtype=dtype)
        clip_tokenizer = _load(AutoTokenizer, name_or_path, "tokenizer")
        t5_tokenizer = _load(AutoTokenizer, name_or_path, "tokenizer_2")
        length = min(MAX_TEXT_TOKENS, t5_tokenizer.model_max_length)
        return Encoders(vae, TextEncoders(clip, t5, clip_tokenizer, t5_tokenizer, length), scheduler)
    with _explained(name_or_path, "model_index.json"):
        index = diffusers.DiffusionPipeline.load_config(name_or_path)
        name = index.get("_class_name", "")
        if name not in TEXT_PARTS:
            raise CheckpointError(f"is a {name or 'folder of no pipeline'}, not {' or '.join(TEXT_PARTS)}")
        if not hasattr(diffusers, name):
            raise CheckpointError(f"is a {name}, which diffusers {diffusers.__version__} does not have; update it")
    encoder, tokenizer = (getattr(transformers, each) for each in TEXT_PARTS[name])
    text = _load_frozen(encoder, name_or_path, "text_encoder", dtype=dtype)
    parts = {"scheduler": None, "vae": None, "transformer": None}
    tokens = _load(tokenizer, name_or_path, "tokenizer")
    pipeline = getattr(diffusers, name)(text_encoder=text, tokenizer=tokens, **parts)
    words = getattr(pipeline.tokenizer, "tokenizer", pipeline.tokenizer)  # inside of Mistral's processor
    length = min(MAX_TEXT_TOKENS, words.model_max_length)
    return Encoders(vae, Flux2Text(pipeline, length), scheduler, bool(index.get("is_distilled", False)))


def load_transformer(
    name_or_path: str,
    dtype: torch.dtype,
    coat: COATConfig | None = None,
    device: torch.device | str = "cpu",
    *,
    trained: Callable[[nn.Module], Collection[str]] | None = None,
    log: Callable[[str], Any] | None = None,
) -> nn.Module:
    """The transformer of FLUX.1 or FLUX.2, frozen, in eval mode, on `device`, with codes as `coat` says.

    For full fine-tuning `trained` maps the model on the meta device to the full names of the linears to train. `log`
    gets one line on weights that the file has in 8 or 4 bits.
    ModelLoadError if it cannot be read, ConfigError if a pattern of `coat` matches no layer.
    """
    device = torch.device(device)
    with _explained(name_or_path, "transformer"):
        cls, config, weights = _find_transformer(name_or_path, whole=trained is not None)
        if weights is None:  # another library quantized it
            return _load_frozen(AutoModel, name_or_path, "transformer", torch_dtype=dtype)
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with init_empty_weights():  # parameters on the meta device, computed buffers on the CPU
                model: nn.Module = cls.from_config(config)
        finally:
            torch.set_default_dtype(default)
        model.register_to_config(_name_or_path=name_or_path)
        check_weights(model, weights, cls.__name__)
        linears = () if trained is None else trained(model)
        fill(model, weights, dtype, device, None if coat is None else convert_weights(model, coat, device, linears))
        if log is not None and (line := _describe_encodings(model, weights)):
            log(line)
    return model.requires_grad_(False).eval()


def _describe_encodings(model: nn.Module, weights: Weights) -> str:
    """One line on weights that the file has in 8 or 4 bits: what they became, and the error in dB; empty if none."""
    encodings = {name: place.encoding.format for name, place in weights.places.items() if place.encoding is not None}
    casts = [row for row in weight_rows(model) if f"{row.layer}.weight" in encodings]
    again = [row for row in casts if not math.isinf(row.sqnr_db)]
    text = f"{len(casts) - len(again)} are used unchanged, {len(again)} are quantized again"
    if again:
        noise = sum(row.elements * 10 ** (-row.sqnr_db / 10) for row in again) / sum(row.elements for row in again)
        text += f", which adds an error of {-decibels(noise):.1f} dB"
    held = ", ".join(f"{count} in {kind}" for kind, count in Counter(encodings.values()).items())
    return f"Weights of the file: {held}; {text}" if encodings else ""


def base_weights(name_or_path: str) -> Weights:
    """The transformer's original weights; ModelLoadError if missing, or quantized by another library."""
    with _explained(name_or_path, "transformer"):
        weights: Any = _find_transformer(name_or_path, whole=True)[2]
    return weights


def _find_transformer(name_or_path: str, *, whole: bool) -> tuple[Any, Mapping[str, Any], Weights | None]:
    """Class, config and weights, None if another library quantized them: CheckpointError if to be trained `whole`."""
    path = Path(name_or_path)
    if path.suffix.lower() in SUFFIXES and path.is_file():
        weights, config = original_weights(path)
        return FluxTransformer2DModel, config, weights
    folder = local_folder(name_or_path, "transformer")
    config = FluxTransformer2DModel.load_config(folder)
    name = config.get("_class_name", "FluxTransformer2DModel")
    if name not in TRANSFORMERS or not hasattr(diffusers, name):
        raise CheckpointError(f"transformer/ holds a {name}; give a FLUX.1 or FLUX.2 model")
    quantized = bool(config.get("quantization_config"))
    if quantized and whole:
        raise CheckpointError(QUANTIZED)
    return getattr(diffusers, name), config, None if quantized else folder_weights(folder)


def _load_frozen(cls: Any, name_or_path: str, subfolder: str, **keywords: Any) -> Any:
    """A model in eval mode, never from a pickle, which can run arbitrary code."""
    return _load(cls, name_or_path, subfolder, use_safetensors=True, **keywords).requires_grad_(False).eval()


def _load(cls: Any, name_or_path: str, subfolder: str, **keywords: Any) -> Any:
    with _explained(name_or_path, subfolder):
        return cls.from_pretrained(name_or_path, subfolder=subfolder, **keywords)


@contextmanager
def _explained(name_or_path: str, part: str) -> Iterator[None]:
    """Turn errors of a file, or of a library that reads it, into a ModelLoadError."""
    try:
        yield
    except CheckpointError as error:
        raise ModelLoadError(f"model.name_or_path={name_or_path}: {error}") from error
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"model.name_or_path={name_or_path}: {part} cannot be loaded ({error}); give a diffusers folder or a "
            "hub id you have access to (accept the model's terms on the hub and set HF_TOKEN)"
        ) from error
