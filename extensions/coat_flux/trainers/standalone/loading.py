"""Loads the parts of a FLUX model from a diffusers folder, a hub id or a file, each frozen, in one dtype, on the CPU.

A file holds the transformer in Black Forest Labs' layout (`config.checkpoint_file`), which fuses what diffusers has as
q, k, v and MLP of a block. diffusers' own reader of such files has FLUX.1-dev's width written into it; here the table
of names that LoRAs are exported by takes them apart, whatever their width.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import AutoModel, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

from ...base.errors import UserError
from ...blocks.architectures import FLUX
from ...config.checkpoint_file import SUFFIXES, CheckpointError, base_model, flux_config, read_header, transformer_keys
from ...data.cache import TextEncoders
from ...data.flux2 import Flux2Text
from ...export.layouts import original_linear

__all__ = ["Encoders", "ModelLoadError", "load_encoders", "load_transformer"]

MAX_TEXT_TOKENS = 512
TRANSFORMERS = ("FluxTransformer2DModel", "Flux2Transformer2DModel")
# pipeline → classes of transformers for its text encoder and what prepares its prompts
TEXT_PARTS = {
    "Flux2KleinPipeline": ("Qwen3ForCausalLM", "AutoTokenizer"),
    "Flux2Pipeline": ("Mistral3ForConditionalGeneration", "AutoProcessor"),
}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# next to a weight in FP8, as ComfyUI writes it: its scale, and what concerns inputs and formats
SCALES = (".scale_weight", ".weight_scale")
NOT_WEIGHTS = ("scaled_fp8", ".scale_input", ".input_scale", ".comfy_quant", *SCALES)


class ModelLoadError(UserError, RuntimeError):
    """A part of the model cannot be loaded."""


@dataclass
class Encoders:
    """The parts that turn images and prompts into training data, and latents into images.

    Attributes:
        vae: AutoencoderKL or AutoencoderKLFlux2.
        text: None once it is not needed any more.
        scheduler: the model's.
        distilled: FLUX.2 klein without "base" in its name, which is sampled without a negative prompt.
    """

    vae: nn.Module
    text: TextEncoders | Flux2Text | None
    scheduler: FlowMatchEulerDiscreteScheduler
    distilled: bool = False


def load_encoders(name_or_path: str, dtype: torch.dtype, extras: str | None = None) -> Encoders:
    """VAE, text encoders, their tokenizers and the scheduler, of FLUX.1 or FLUX.2, whichever the VAE belongs to.

    Args:
        name_or_path: a diffusers folder, hub id or checkpoint file (`model.name_or_path`).
        extras: `model.extras_name_or_path`; see `base_model`.
        dtype: `train.dtype`, as ai-toolkit uses for all of them.

    Raises:
        ModelLoadError: a part is missing or cannot be read.
    """
    name_or_path = base_model(name_or_path, extras)
    vae = _load_weights(AutoModel, name_or_path, "vae", torch_dtype=dtype).requires_grad_(False).eval()
    scheduler = _load(FlowMatchEulerDiscreteScheduler, name_or_path, "scheduler")
    if type(vae).__name__ == "AutoencoderKLFlux2":
        return _flux2_encoders(name_or_path, dtype, vae, scheduler)
    clip = _load_weights(CLIPTextModel, name_or_path, "text_encoder", dtype=dtype)
    t5 = _load_weights(T5EncoderModel, name_or_path, "text_encoder_2", dtype=dtype)
    clip_tokenizer = _load(AutoTokenizer, name_or_path, "tokenizer")
    t5_tokenizer = _load(AutoTokenizer, name_or_path, "tokenizer_2")
    for module in (clip, t5):
        module.requires_grad_(False).eval()
    length = min(MAX_TEXT_TOKENS, t5_tokenizer.model_max_length)
    return Encoders(vae, TextEncoders(clip, t5, clip_tokenizer, t5_tokenizer, length), scheduler)


def _flux2_encoders(
    name_or_path: str, dtype: torch.dtype, vae: nn.Module, scheduler: FlowMatchEulerDiscreteScheduler
) -> Encoders:
    """Those of FLUX.2: dev has Mistral 3, klein has Qwen 3, and the pipeline's class says which."""
    index = _load(_Index, name_or_path, "")
    pipeline = getattr(diffusers, name := index.get("_class_name", ""), None)
    if pipeline is None or name not in TEXT_PARTS:
        wanted = " or ".join(TEXT_PARTS)
        known = f"; diffusers {diffusers.__version__} has none of that name, update it" if name in TEXT_PARTS else ""
        raise ModelLoadError(
            f"model.name_or_path={name_or_path}: is a {name or 'folder of no pipeline'}, not {wanted}{known}"
        )
    encoder, tokenizer = (getattr(transformers, each) for each in TEXT_PARTS[name])
    text = _load_weights(encoder, name_or_path, "text_encoder", dtype=dtype).requires_grad_(False).eval()
    parts = {"scheduler": None, "vae": None, "transformer": None}
    made = pipeline(text_encoder=text, tokenizer=_load(tokenizer, name_or_path, "tokenizer"), **parts)
    words = getattr(made.tokenizer, "tokenizer", made.tokenizer)  # inside of Mistral's processor
    length = min(MAX_TEXT_TOKENS, words.model_max_length)
    return Encoders(vae, Flux2Text(made, length), scheduler, bool(index.get("is_distilled", False)))


class _Index:
    """`model_index.json`, loaded as the parts are."""

    @staticmethod
    def from_pretrained(name_or_path: str, **_: Any) -> dict[str, Any]:
        found: dict[str, Any] = diffusers.DiffusionPipeline.load_config(name_or_path)
        return found


def load_transformer(name_or_path: str, dtype: torch.dtype) -> nn.Module:
    """The transformer of FLUX.1 or FLUX.2, frozen, in eval mode, on the CPU.

    Raises:
        ModelLoadError: missing, unreadable or of another model.
    """
    if Path(name_or_path).suffix.lower() in SUFFIXES and Path(name_or_path).is_file():
        try:
            model = _load_file(Path(name_or_path), dtype)
        except CheckpointError as error:
            raise ModelLoadError(f"model.name_or_path={name_or_path}: {error}") from error
    else:
        model = _load_weights(AutoModel, name_or_path, "transformer", torch_dtype=dtype)
    if type(model).__name__ not in TRANSFORMERS:
        found = f"transformer/ holds a {type(model).__name__}"
        raise ModelLoadError(f"model.name_or_path={name_or_path}: {found}; give a FLUX.1 or FLUX.2 model")
    return model.requires_grad_(False).eval()


def _load_file(path: Path, dtype: torch.dtype) -> nn.Module:
    """The transformer in a file of Black Forest Labs' layout, tensor by tensor: the file is never in memory whole."""
    header = read_header(path)
    config, keys = flux_config(header), transformer_keys(header)
    hidden = config["num_attention_heads"] * config["attention_head_dim"]
    state: dict[str, Tensor] = {}
    with safe_open(path, framework="pt") as file:
        for name, key in keys.items():
            if name.endswith(NOT_WEIGHTS):
                continue
            tensor = file.get_tensor(key)
            if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
                stem = name.removesuffix(".weight")
                scale = next((file.get_tensor(keys[stem + end]) for end in SCALES if stem + end in keys), None)
                tensor = (
                    tensor.float()
                    if scale is None
                    else tensor.float() * scale.float().reshape(-1, *[1] * (tensor.ndim - 1))
                )
            state |= {part: rows.to(dtype, copy=True) for part, rows in _parts(name, tensor, hidden).items()}
    with torch.device("meta"):
        model = FluxTransformer2DModel.from_config(config)
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    if missing or unexpected:
        what = f"lacks {missing[0]}" if missing else f"has {unexpected[0]}, which FLUX.1 does not have"
        raise CheckpointError(f"{what}; download it again, or give another checkpoint")
    return model


def _parts(name: str, tensor: Tensor, hidden: int) -> dict[str, Tensor]:
    """A tensor of the original as diffusers has it: by name, the rows of each linear that it fuses.

    Raises:
        CheckpointError: FLUX.1 has no such tensor.
    """
    if name.endswith(".scale"):
        blocks, number, rest = name.split(".", 2)
        ours = next(found for found in FLUX.lists if found.original == blocks)
        return {f"{ours.pattern}.{number}.{dict(ours.norms)[rest]}": tensor}
    stem, _, kind = name.rpartition(".")
    try:
        linear = original_linear(stem)
    except KeyError as error:
        raise CheckpointError(f"has a tensor {name}, which FLUX.1 does not have; give another checkpoint") from error
    if linear.swapped:
        tensor = torch.cat(tensor.chunk(2)[::-1])
    heights = [height * hidden for height in linear.heights] if len(linear.members) > 1 else [tensor.shape[0]]
    return {f"{member}.{kind}": rows for member, rows in zip(linear.members, tensor.split(heights), strict=True)}


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
