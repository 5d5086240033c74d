"""Loads the parts of a FLUX model from a diffusers folder, a hub id or a file, each frozen, in one dtype.

VAE and text encoders are loaded by their libraries, on the CPU. The transformer is built on the meta device and filled
weight by weight (`weights`), on the device where it will run: it is never whole in CPU memory before it is quantized.
"""

from __future__ import annotations

import logging
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
from ...blocks.models.checkpoint import SUFFIXES, CheckpointError, base_model
from ...config.coat import COATConfig
from ...data.cache import TextEncoders
from ...data.flux2 import Flux2Text
from ..weights import Weights, check_weights, fill, folder_weights, local_folder, original_weights

__all__ = ["Encoders", "ModelLoadError", "base_weights", "load_encoders", "load_transformer"]

MAX_TEXT_TOKENS = 512
TRANSFORMERS = ("FluxTransformer2DModel", "Flux2Transformer2DModel")
# pipeline → classes of transformers for its text encoder and what prepares its prompts
TEXT_PARTS = {
    "Flux2KleinPipeline": ("Qwen3ForCausalLM", "AutoTokenizer"),
    "Flux2Pipeline": ("Mistral3ForConditionalGeneration", "AutoProcessor"),
}
QUANTIZED = "its weights are quantized and cannot be trained; give the original model, or add network to train a LoRA"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")

logger = logging.getLogger(__name__)


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


def load_transformer(
    name_or_path: str,
    dtype: torch.dtype,
    coat: COATConfig | None = None,
    device: torch.device | str = "cpu",
    *,
    trained: Callable[[nn.Module], Collection[str]] | None = None,
) -> nn.Module:
    """The transformer of FLUX.1 or FLUX.2, frozen, in eval mode, on `device`; never in CPU memory as a whole.

    Each weight is read from disk, cast to `dtype`, moved to `device` and, with `coat.weight.use_fp8`, quantized there
    before the next one is read, by the same functions as `apply_coat` uses on a model in memory.

    Args:
        name_or_path: a diffusers folder, hub id or checkpoint file.
        dtype: `train.dtype`.
        coat: the `coat:` block; None quantizes nothing.
        device: where it will run.
        trained: of full fine-tuning: gives, of the model on the meta device, the full names of the linears that are
            trained (`apply_coat`).

    Raises:
        ModelLoadError: missing, unreadable or of another model.
        ConfigError: an include/exclude pattern of `coat` matches no layer.
    """
    device = torch.device(device)
    try:
        cls, config, weights = _find_transformer(name_or_path)
        if weights is None and trained is not None:
            raise ModelLoadError(f"model.name_or_path={name_or_path}: {QUANTIZED}")
        if weights is None:  # another library quantized it
            return _load_weights(AutoModel, name_or_path, "transformer", torch_dtype=dtype).requires_grad_(False).eval()
        model = _on_meta(cls, config, dtype, name_or_path)
        check_weights(model, weights, cls.__name__)
        linears = () if trained is None else trained(model)
        fill(model, weights, dtype, device, None if coat is None else convert_weights(model, coat, device, linears))
    except CheckpointError as error:
        raise ModelLoadError(f"model.name_or_path={name_or_path}: {error}") from error
    return model.requires_grad_(False).eval()


def base_weights(name_or_path: str) -> Weights:
    """Where the transformer's original weights are.

    Raises:
        ModelLoadError: they are not there any more, or another library quantized them.
    """
    try:
        weights = _find_transformer(name_or_path)[2]
    except CheckpointError as error:
        raise ModelLoadError(f"model.name_or_path={name_or_path}: {error}") from error
    if weights is None:
        raise ModelLoadError(f"model.name_or_path={name_or_path}: {QUANTIZED}")
    return weights


def _find_transformer(name_or_path: str) -> tuple[Any, Mapping[str, Any], Weights | None]:
    """Its class, its config and its weights; no weights where another library (bitsandbytes, ...) quantized them.

    Raises:
        ModelLoadError: missing, unreadable or of another model.
        CheckpointError: a file is damaged.
    """
    path = Path(name_or_path)
    if path.suffix.lower() in SUFFIXES and path.is_file():
        weights, config = original_weights(path)
        return FluxTransformer2DModel, config, weights
    _check_folder(name_or_path, "transformer")
    with _explained(name_or_path, "transformer"):
        folder = local_folder(name_or_path, "transformer")
        config = FluxTransformer2DModel.load_config(folder)
    name = config.get("_class_name", "FluxTransformer2DModel")
    cls = getattr(diffusers, name, None)
    if name not in TRANSFORMERS or cls is None:
        found = f"transformer/ holds a {name}"
        raise ModelLoadError(f"model.name_or_path={name_or_path}: {found}; give a FLUX.1 or FLUX.2 model")
    return cls, config, None if config.get("quantization_config") else folder_weights(folder)


def _on_meta(cls: Any, config: Mapping[str, Any], dtype: torch.dtype, name_or_path: str) -> nn.Module:
    """The model with parameters on the meta device; what it computes for itself (buffers) is there."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with init_empty_weights():
            model: nn.Module = cls.from_config(config)
    finally:
        torch.set_default_dtype(default)
    model.register_to_config(_name_or_path=name_or_path)
    return model


def _load_weights(cls: Any, name_or_path: str, subfolder: str, **keywords: Any) -> Any:
    """Only from safetensors files."""
    return _load(cls, name_or_path, subfolder, use_safetensors=True, **keywords)


def _check_folder(name_or_path: str, subfolder: str) -> None:
    """Refuse a model without this part, or with a pickle of it, which can run code of whoever made it."""
    folder = Path(name_or_path, subfolder)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        if pickles:
            raise ModelLoadError(
                f"model.name_or_path={name_or_path}: {subfolder}/ has its weights only as a pickle ({pickles[0]}), "
                "which can run code when it is read; give a copy with .safetensors files, or convert it with "
                "diffusers' save_pretrained on a machine you can lose"
            )
    if Path(name_or_path).is_dir() and not folder.is_dir():
        raise ModelLoadError(
            f"model.name_or_path={name_or_path}: has no {subfolder}/; give a complete diffusers folder or a hub id"
        )


def _load(cls: Any, name_or_path: str, subfolder: str, **keywords: Any) -> Any:
    _check_folder(name_or_path, subfolder)
    with _explained(name_or_path, subfolder):
        return cls.from_pretrained(name_or_path, subfolder=subfolder, **keywords)


@contextmanager
def _explained(name_or_path: str, subfolder: str) -> Iterator[None]:
    """Errors of diffusers and the hub with what to do about them."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"model.name_or_path={name_or_path}: {subfolder} cannot be loaded ({error}); give a diffusers folder or a "
            "hub id you have access to (accept the model's terms on the hub and set HF_TOKEN)"
        ) from error
