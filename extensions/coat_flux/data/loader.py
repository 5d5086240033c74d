"""Batches of latents and embeddings, cached or encoded one at a time, so that both give the same bits."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from tqdm import tqdm

from ..base.files import file_sha256
from ..base.run_log import bar_options
from .buckets import fit_to_bucket
from .cache import TensorCache, encode_latents, latent_key, model_identity, on_device, text_key
from .captions import shuffle_tokens
from .dataset import Batch, Sample
from .files import CACHE_FOLDER, DatasetError, printable
from .images import Photo, read_photo, rgb, to_tensor


class LatentDataset:
    """Samples as tensors.

    Args:
        samples: from `scan`.
        dataset_configs: their settings (folder_path, cache_latents, cache_latents_to_disk, cache_text_embeddings,
            caption_dropout_rate, shuffle_tokens).
        device: for batches, and for encoding in `fill`.
        seed: of caption dropout and token shuffling.
        cache_folder: None is `_coat_cache` in each dataset's folder.
        transparency: `mask` adds a loss mask from the photos' transparency to batches; else `background`.
        room: bytes that text encoders may take on `device`; None: any.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        dataset_configs: Sequence[Any],
        vae: nn.Module,
        encoders: Any,
        device: torch.device | str = "cpu",
        *,
        seed: int = 0,
        cache_folder: Path | str | None = None,
        background: str = "white",
        transparency: str = "background",
        room: float | None = None,
    ) -> None:
        self.room = room
        self.background, self.masked = background, transparency == "mask"
        self.samples, self.configs = list(samples), list(dataset_configs)
        self.vae: nn.Module | None = vae
        self.encoders: Any = encoders  # TextEncoders, or a family's counterpart; None once released
        self.device, self.seed = torch.device(device), seed
        self._vae_identity, self._text_identity = model_identity(vae), encoders.identity
        self._digests: dict[Path, str] = {}
        self._latents, self._texts = [], []
        for config in self.configs:
            root = Path(cache_folder) if cache_folder is not None else Path(config.folder_path) / CACHE_FOLDER
            on_disk = root / "latents" if config.cache_latents_to_disk else None
            self._latents.append(TensorCache(on_disk, config.cache_latents))
            self._texts.append(TensorCache(root / "text" if config.cache_text_embeddings else None, False))

    @property
    def needs_vae(self) -> bool:
        """Whether training reads images that are not cached."""
        return not all(cache.enabled for cache in self._latents)

    @property
    def needs_encoders(self) -> bool:
        """Whether training encodes prompts that are not cached."""
        return not all(cache.enabled for cache in self._texts)

    def fill(self, progress: bool = True) -> None:
        """Encode whatever the caches lack, then release the models that training no longer needs.

        A model is moved to `device` only if something is missing, and back afterwards. With several processes, call it
        on one first, so that the others find everything cached.
        """
        distinct = list(dict.fromkeys(s for s in self.samples if self._latents[s.dataset_index].enabled))
        missing = [s for s in _bar(distinct, "Checking cached latents", progress) if self._load_image(s) is None]
        if missing and self.vae is not None:
            with on_device([self.vae], self.device):
                for sample in _bar(missing, "Caching latents", progress):
                    self._make_image(sample)
        prompts = [p for p in self._cached_prompts() if self._load_text(*p) is None]
        if prompts and self.encoders is not None:
            with on_device(self.encoders.models, self.device, self.room):
                for index, prompt in _bar(prompts, "Caching text embeddings", progress):
                    self._make_text(index, prompt)
        if not self.needs_vae:
            self.vae = None
        if not self.needs_encoders:
            self.encoders = None

    def latents(self, sample: Sample) -> Tensor:
        """Latents [C, h, w] of a sample, fp32 on the CPU; raises DatasetError if unavailable or not finite."""
        return self._image(sample)["latents"]

    def mask(self, sample: Sample) -> Tensor | None:
        """Loss weights [1, h, w] of the latents, fp32 on the CPU, mean 1, or None; raises DatasetError as `latents`."""
        return self._image(sample)["mask"] if self.masked else None

    def _image(self, sample: Sample) -> dict[str, Tensor]:
        found = self._load_image(sample)
        return found if found is not None else self._make_image(sample)

    def _make_image(self, sample: Sample) -> dict[str, Tensor]:
        if self.vae is None:
            raise _cache_gone(printable(sample.image_path), "latents")
        photo = read_photo(sample.image_path, self.background)
        latents = encode_latents(self.vae, to_tensor(_cut(photo.image, sample))[None])[0].cpu()
        if not torch.isfinite(latents).all():
            raise DatasetError(
                f"{printable(sample.image_path)}: the VAE returns NaN or inf for it; run the VAE in bf16 or fp32"
            )
        entry = {"latents": latents}
        if self.masked:
            entry["mask"] = _mask_of(photo, sample, latents)
        cache = self._latents[sample.dataset_index]
        if cache.enabled:
            cache.store(self._latent_key(sample), entry, about=sample.image_path.name)
        return entry

    def text(self, dataset_index: int, prompt: str) -> tuple[Tensor, Tensor]:
        """T5 embeddings [T, D] and CLIP pooled [P] of a prompt, bf16 on the CPU; raises DatasetError as `latents`."""
        found = self._load_text(dataset_index, prompt)
        return found if found is not None else self._make_text(dataset_index, prompt)

    def _make_text(self, dataset_index: int, prompt: str) -> tuple[Tensor, Tensor]:
        if self.encoders is None:
            raise _cache_gone(f"caption {prompt!r}", "text embeddings")
        embeds, pooled = self.encoders.encode([prompt])
        entry = {"prompt_embeds": embeds[0].cpu(), "pooled": pooled[0].cpu()}
        if not all(torch.isfinite(value).all() for value in entry.values()):
            raise DatasetError(f"caption {prompt!r}: the text encoders return NaN or inf; run them in bf16 or fp32")
        cache = self._texts[dataset_index]
        if cache.enabled:
            cache.store(text_key(prompt, self._text_identity), entry, about=prompt)
        return entry["prompt_embeds"], entry["pooled"]

    def batch(self, batch: Batch) -> dict[str, Tensor]:
        """Tensors of a batch on `device`; indices [B] int64, the sample of each row, on the CPU.

        latents [B, C, h, w] fp32, prompt_embeds [B, T, D] and pooled [B, P] bf16; with `transparency="mask"` mask [B,
        1, h, w] fp32.
        """
        rows = [
            (self.samples[i], self._prompt(self.samples[i], batch.draw, row)) for row, i in enumerate(batch.indices)
        ]
        texts = [self.text(sample.dataset_index, prompt) for sample, prompt in rows]
        images = [self._image(sample) for sample, _ in rows]
        return {
            **{name: to_device(torch.stack([image[name] for image in images]), self.device) for name in images[0]},
            "prompt_embeds": to_device(torch.stack([embeds for embeds, _ in texts]), self.device),
            "pooled": to_device(torch.stack([pooled for _, pooled in texts]), self.device),
            "indices": torch.tensor(batch.indices),
        }

    def _prompt(self, sample: Sample, draw: int, row: int) -> str:
        """Caption for one draw; its randomness depends on (seed, draw, row) only, so a resumed run repeats it."""
        config = self.configs[sample.dataset_index]
        rng = random.Random(f"{self.seed}/{draw}/{row}")
        if rng.random() < config.caption_dropout_rate:
            return sample.dropped_caption
        if config.shuffle_tokens and not config.cache_text_embeddings:
            return shuffle_tokens(sample.caption, rng)
        return sample.caption

    def _cached_prompts(self) -> list[tuple[int, str]]:
        pairs: dict[tuple[int, str], None] = {}
        for sample in self.samples:
            index = sample.dataset_index
            if self._texts[index].enabled:
                pairs[index, sample.caption] = None
                if self.configs[index].caption_dropout_rate > 0:
                    pairs[index, sample.dropped_caption] = None
        return list(pairs)

    def _latent_key(self, sample: Sample) -> str:
        path = sample.image_path
        if path not in self._digests:
            self._digests[path] = file_sha256(path)
        ground = rgb(self.background)
        return latent_key(self._digests[path], sample.bucket, sample.flip, self._vae_identity, ground, self.masked)

    def _load_image(self, sample: Sample) -> dict[str, Tensor] | None:
        cache = self._latents[sample.dataset_index]
        return cache.load(self._latent_key(sample)) if cache.enabled else None

    def _load_text(self, dataset_index: int, prompt: str) -> tuple[Tensor, Tensor] | None:
        cache = self._texts[dataset_index]
        entry = cache.load(text_key(prompt, self._text_identity)) if cache.enabled else None
        return None if entry is None else (entry["prompt_embeds"], entry["pooled"])


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device without synchronizing."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def cache_all(
    samples: Sequence[Sample],
    vae: nn.Module,
    encoders: Any,
    device: torch.device | str = "cpu",
    progress: bool = True,
    *,
    dataset_configs: Sequence[Any],
    **settings: Any,
) -> LatentDataset:
    """Create a LatentDataset and fill its caches; its `needs_vae` and `needs_encoders` are then valid."""
    dataset = LatentDataset(samples, dataset_configs, vae, encoders, device, **settings)
    dataset.fill(progress)
    return dataset


def _cut(image: Image.Image, sample: Sample) -> Image.Image:
    return fit_to_bucket(ImageOps.mirror(image) if sample.flip else image, sample.bucket)


def _mask_of(photo: Photo, sample: Sample, latents: Tensor) -> Tensor:
    """Mean opacity of the pixels of each latent, [1, h, w], divided by its mean so that the loss keeps its size."""
    height, width = latents.shape[-2:]
    if photo.alpha is None:
        return torch.ones(1, height, width)
    small = _cut(photo.alpha, sample).resize((width, height), Image.Resampling.BOX)
    mask = torch.from_numpy(np.array(small, dtype=np.float32))[None]
    return mask / mask.mean()  # not 0: `inspect_datasets` refuses photos of which nothing visible is left


def _cache_gone(what: Path | str, kind: str) -> DatasetError:
    return DatasetError(
        f"{what}: its cached {kind} were removed or damaged after the start, and the encoder is no longer loaded; "
        "start the run again to recompute them"
    )


def _bar(items: list[Any], description: str, progress: bool) -> Iterable[Any]:
    return tqdm(items, desc=description, disable=not progress, leave=False, **bar_options())
