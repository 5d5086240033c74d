"""Writes a FLUX.1 folder in diffusers layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn

from .vocabulary import write_clip_tokenizer, write_json, write_t5_tokenizer

FLUX_DEV_SCHEDULER_CONFIG = {
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}
MODEL_INDEX = {
    "_class_name": "FluxPipeline",
    "_diffusers_version": "0.30.0",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


class FluxParts(NamedTuple):
    """Models of any floating dtype, what goes into their config.json, and the longest prompt in tokens of T5."""

    transformer: nn.Module
    transformer_config: dict[str, Any]
    vae: nn.Module
    vae_config: dict[str, Any]
    clip: nn.Module
    clip_config: dict[str, Any]
    t5: nn.Module
    t5_config: dict[str, Any]
    t5_tokens: int = 512


def write_parts(folder: Path, parts: FluxParts) -> None:
    """Write weights in bf16, configs, both tokenizers, FLUX.1-dev's scheduler into a new folder."""
    folder.mkdir(parents=True)
    _write_diffusers(folder / "transformer", parts.transformer, parts.transformer_config)
    _write_diffusers(folder / "vae", parts.vae, parts.vae_config)
    _write_transformers(folder / "text_encoder", parts.clip, "clip_text_model", parts.clip_config)
    _write_transformers(folder / "text_encoder_2", parts.t5, "t5", parts.t5_config)
    (folder / "scheduler").mkdir()
    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", **FLUX_DEV_SCHEDULER_CONFIG}
    write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    write_clip_tokenizer(folder / "tokenizer")
    write_t5_tokenizer(folder / "tokenizer_2", parts.t5_tokens)
    write_json(folder / "model_index.json", MODEL_INDEX)


def _write_diffusers(folder: Path, model: nn.Module, config: dict[str, Any]) -> None:
    _write_weights(folder / "diffusion_pytorch_model.safetensors", model.state_dict())
    write_json(folder / "config.json", {"_class_name": type(model).__name__, **config})


def _write_transformers(folder: Path, model: nn.Module, model_type: str, config: dict[str, Any]) -> None:
    """Write a text encoder with the tensor names of the published FLUX.1 files.

    transformers' own `save_pretrained` writes the names of the running version, and CLIP's have changed: what 5.23
    saves (without `text_model.`) 5.5 loads as missing and fills with random weights, with a warning only.
    """
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("embed_tokens.weight")}
    if model_type == "clip_text_model":
        state = {"text_model." + name.removeprefix("text_model."): tensor for name, tensor in state.items()}
    _write_weights(folder / "model.safetensors", state)
    entries = {"architectures": [type(model).__name__], "model_type": model_type, "torch_dtype": "bfloat16"}
    write_json(folder / "config.json", {**entries, **config})


def _write_weights(path: Path, state: dict[str, torch.Tensor]) -> None:
    path.parent.mkdir()
    state = {name: tensor.bfloat16() for name, tensor in state.items() if tensor.is_floating_point()}
    save_file(state, path, metadata={"format": "pt"})
