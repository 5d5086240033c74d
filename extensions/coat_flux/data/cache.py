"""Encoding images and prompts with FLUX's frozen models, and caching the results on disk or in memory.

A cache key is a hash of everything that determines a tensor, such as the image file's bytes, but not of a file's name
or date: a replaced photo or edited caption is never stale, and a renamed one is not encoded twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from ..base.files import replacing
from .files import DatasetError, printable

logger = logging.getLogger(__name__)

PROMPT_BYTES = 3e8  # upper bound for encoding one prompt, besides the weights; T5-XXL needs 0.1 GB
_VERSION = 2  # raise it when the content of entries changes
_PROBED_ELEMENTS = 16  # of each tensor, in a model's identity
_CHECKSUM = "crc32"  # its key in a file's metadata


class TextEncoders:
    """FLUX's frozen text encoders; captions longer than `max_length` T5 tokens are cut, with a warning."""

    def __init__(
        self,
        clip: nn.Module,
        t5: nn.Module,
        clip_tokenizer: Any,
        t5_tokenizer: Any,
        max_length: int = 512,
    ) -> None:
        self.clip = clip
        self.t5 = t5
        self.models = [clip, t5]
        self.clip_tokenizer = clip_tokenizer
        self.t5_tokenizer = t5_tokenizer
        self.max_length = max_length

    @property
    def identity(self) -> str:
        """A hash that changes whenever the embeddings of a prompt would."""
        return _digest([*map(model_identity, self.models), self.max_length])

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """T5 embeddings [B, T, D] and CLIP pooled [B, P] in bf16, as FluxPipeline.encode_prompt computes them.

        Prompts are encoded one by one, so that batching changes no bit.
        """
        clip_length = min(self.clip_tokenizer.model_max_length, self.clip.config.max_position_embeddings)
        options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        embeds, pooled = [], []
        for prompt in prompts:
            length = len(self.t5_tokenizer(prompt, truncation=False).input_ids)
            if length > self.max_length:
                text = "caption of %d tokens: the last %d are cut (limit %d): %.60s..."
                logger.warning(text, length, length - self.max_length, self.max_length, prompt)
            clip_ids = self.clip_tokenizer([prompt], max_length=clip_length, **options).input_ids
            t5_ids = self.t5_tokenizer([prompt], max_length=self.max_length, **options).input_ids
            pooled.append(self.clip(clip_ids.to(input_device(self.clip))).pooler_output)
            embeds.append(self.t5(t5_ids.to(input_device(self.t5))).last_hidden_state)
        return torch.cat(embeds).bfloat16(), torch.cat(pooled).bfloat16()


def input_device(model: nn.Module) -> torch.device:
    """The device of a model's inputs."""
    device = next(model.parameters()).device
    return torch.device("cpu") if device.type == "meta" else device  # meta: accelerate moves its layers one by one


def by_layer(sizes: Sequence[int], room: float | None) -> list[bool]:
    """Whether each model's layers must move to the device one by one, as models of `sizes` bytes exceed `room`.

    Small models are moved whole first; None is unlimited room.
    """
    free = math.inf if room is None else room - PROMPT_BYTES
    one_by_one = [False] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: sizes[index]):
        if sizes[index] > free:
            one_by_one[index] = True
        else:
            free -= sizes[index]
    return one_by_one


@contextlib.contextmanager
def on_device(
    models: Sequence[nn.Module],
    device: torch.device,
    room: float | None = None,
    *,
    last: bool = False,
) -> Iterator[None]:
    """Move models to `device` for the block and, unless it is their `last` use, back; `room` as in `by_layer`."""
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    homes = [next(model.parameters()).device for model in models]
    sizes = [sum(x.numel() * x.element_size() for x in model.parameters()) for model in models]
    one_by_one = by_layer(sizes, room)
    try:
        for model, by_layers in zip(models, one_by_one, strict=True):
            if by_layers:
                cpu_offload(model, device)
            else:
                model.to(device)
        yield
    finally:
        for model, by_layers, home in zip(models, one_by_one, homes, strict=True):
            if by_layers:
                remove_hook_from_submodules(model)
            if not last:
                model.to(home)


def model_identity(model: Any) -> str:
    """A hash of a model's class and config, and of name, shape, dtype and some elements of each tensor."""
    config = model.config.to_dict() if hasattr(model.config, "to_dict") else dict(model.config)
    settings = {key: str(value) for key, value in config.items() if key[0] != "_" and key != "transformers_version"}
    parts: list[Any] = [type(model).__name__, settings]
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().reshape(-1)
        probed = flat[:: max(1, flat.numel() // _PROBED_ELEMENTS)].to("cpu", torch.float64)
        parts.append([name, list(tensor.shape), str(tensor.dtype), probed.tolist()])
    return _digest(parts)


def cache_key(kind: str, *parts: Any) -> str:
    """Key of an entry; `parts` are all that determines it."""
    return _digest([kind, _VERSION, *parts])


def _digest(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("utf-8")).hexdigest()[:40]


class TensorCache:
    """Named tensors by key, in memory or as safetensors with a checksum, or both, or neither."""

    def __init__(self, folder: Path | None, keep_in_memory: bool) -> None:
        self.folder, self.keep_in_memory = folder, keep_in_memory
        self.enabled = keep_in_memory or folder is not None
        self._memory: dict[str, dict[str, Tensor]] = {}

    def load(self, key: str) -> dict[str, Tensor] | None:
        """The entry, or None if it is absent, or damaged (with a warning)."""
        if key in self._memory:
            return self._memory[key]
        if self.folder is None:
            return None
        path = self.folder / f"{key}.safetensors"
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
                expected = (file.metadata() or {}).get(_CHECKSUM)
            if expected != str(_checksum(tensors)):
                raise ValueError("checksum differs")
        except (SafetensorError, OSError, ValueError) as error:
            logger.warning("%s: damaged cache file (%s); it is made again", path, error)
            return None
        if self.keep_in_memory:
            self._memory[key] = tensors
        return tensors

    def store(self, key: str, tensors: dict[str, Tensor], about: str) -> None:
        """Store CPU tensors; `about` names their source in the file; raises DatasetError."""
        if self.keep_in_memory:
            self._memory[key] = tensors
        if self.folder is None:
            return
        metadata = {"about": printable(about), _CHECKSUM: str(_checksum(tensors))}
        try:
            with replacing(self.folder / f"{key}.safetensors", sync=False) as temp:
                save_file(tensors, temp, metadata=metadata)
        except (OSError, SafetensorError) as error:
            raise DatasetError(
                f"{self.folder}: the cache cannot be written ({error}); make the folder writable and free some disk, "
                "or set cache_latents_to_disk: false and cache_text_embeddings: false"
            ) from error


def _checksum(tensors: dict[str, Tensor]) -> int:
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(name.encode(), value)
        value = zlib.crc32(tensors[name].contiguous().view(torch.uint8).numpy(), value)
    return value


@torch.no_grad()
def encode_latents(vae: nn.Module, pixels_BCHW: Tensor) -> Tensor:
    """Training latents [B, C, H/8, W/8] fp32 of pixels [B, 3, H, W] in [-1, 1].

    They are the mode of the VAE's posterior, of which ai-toolkit draws a sample: the same in every run.
    """
    parameter = next(vae.parameters())
    mode = vae.encode(pixels_BCHW.to(parameter.device, parameter.dtype)).latent_dist.mode().float()
    if hasattr(vae, "bn"):  # FLUX.2: mean 0 and variance 1 at each position in a 2 x 2 patch
        mean, deviation = _patch_statistics(vae)
        return pixel_shuffle((pixel_unshuffle(mode, 2) - mean) / deviation, 2)
    return (mode - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor


@torch.no_grad()
def decode_latents(vae: nn.Module, latents_BCHW: Tensor) -> Tensor:
    """Pixels [B, 3, 8·H, 8·W] fp32 from -1 to 1 of training latents [B, C, H, W]: the inverse of `encode_latents`."""
    parameter = next(vae.parameters())
    latents = latents_BCHW.to(parameter.device, torch.float32)
    if hasattr(vae, "bn"):
        mean, deviation = _patch_statistics(vae)
        latents = pixel_shuffle(pixel_unshuffle(latents, 2) * deviation + mean, 2)
    else:
        latents = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
    return vae.decode(latents.to(parameter.dtype), return_dict=False)[0].float().clamp(-1, 1)


def _patch_statistics(vae: nn.Module) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of FLUX.2's latents in 2 x 2 patches, fp32 [1, 4·C, 1, 1]."""
    mean = vae.bn.running_mean.float().view(1, -1, 1, 1)
    variance = vae.bn.running_var.float().view(1, -1, 1, 1)
    return mean, (variance + vae.config.batch_norm_eps).sqrt()
