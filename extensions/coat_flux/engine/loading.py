"""Loads the parts of a FLUX model from a diffusers folder or a hub id, each frozen, in one dtype, on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from torch import nn
from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

from ..data.cache import TextEncoders
from ..errors import UserError

__all__ = ["Encoders", "ModelLoadError", "load_encoders", "load_transformer"]

MAX_TEXT_TOKENS = 512
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class ModelLoadError(UserError, RuntimeError):
    """A part of the model cannot be loaded."""


@dataclass
class Encoders:
    """The parts that turn images and prompts into training data, and latents into images."""

    vae: AutoencoderKL
    text: TextEncoders | None
    scheduler: FlowMatchEulerDiscreteScheduler


def load_encoders(name_or_path: str, dtype: torch.dtype) -> Encoders:
    """VAE, CLIP, T5, their tokenizers and the scheduler.

    Args:
        name_or_path: a diffusers folder or hub id (`model.name_or_path`).
        dtype: `train.dtype`, as ai-toolkit uses for all of them.

    Raises:
        ModelLoadError: a part is missing or cannot be read.
    """
    vae = _load_weights(AutoencoderKL, name_or_path, "vae", torch_dtype=dtype)
    clip = _load_weights(CLIPTextModel, name_or_path, "text_encoder", dtype=dtype)
    t5 = _load_weights(T5EncoderModel, name_or_path, "text_encoder_2", dtype=dtype)
    clip_tokenizer = _load(AutoTokenizer, name_or_path, "tokenizer")
    t5_tokenizer = _load(AutoTokenizer, name_or_path, "tokenizer_2")
    scheduler = _load(FlowMatchEulerDiscreteScheduler, name_or_path, "scheduler")
    for module in (vae, clip, t5):
        module.requires_grad_(False).eval()
    length = min(MAX_TEXT_TOKENS, t5_tokenizer.model_max_length)
    return Encoders(vae, TextEncoders(clip, t5, clip_tokenizer, t5_tokenizer, length), scheduler)


def load_transformer(name_or_path: str, dtype: torch.dtype) -> nn.Module:
    """The FLUX transformer, frozen, in eval mode, on the CPU.

    Raises:
        ModelLoadError: missing or unreadable.
    """
    model = _load_weights(FluxTransformer2DModel, name_or_path, "transformer", torch_dtype=dtype)
    return model.requires_grad_(False).eval()


def _load_weights(cls: Any, name_or_path: str, subfolder: str, **keywords: Any) -> Any:
    """Only from safetensors files: a pickle can run code of whoever made it."""
    folder = Path(name_or_path, subfolder)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        if pickles:
            raise ModelLoadError(
                f"model.name_or_path={name_or_path}: {subfolder}/ has its weights only as a pickle ({pickles[0]}), "
                "which can run code when it is read; give a copy with .safetensors files, or convert it with "
                "diffusers' save_pretrained on a machine you can lose"
            )
    return _load(cls, name_or_path, subfolder, use_safetensors=True, **keywords)


def _load(cls: Any, name_or_path: str, subfolder: str, **keywords: Any) -> Any:
    folder = Path(name_or_path)
    if folder.is_dir() and not (folder / subfolder).is_dir():
        raise ModelLoadError(
            f"model.name_or_path={name_or_path}: has no {subfolder}/; give a complete diffusers folder or a hub id"
        )
    try:
        return cls.from_pretrained(name_or_path, subfolder=subfolder, **keywords)
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"model.name_or_path={name_or_path}: {subfolder} cannot be loaded ({error}); give a diffusers folder or a "
            "hub id you have access to (accept the model's terms on the hub and set HF_TOKEN)"
        ) from error
