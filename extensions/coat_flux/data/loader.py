"""From samples to batches: a resumable order, and tensors, with the same bits whether cached or encoded on the fly."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from ..base.files import file_sha256
from ..base.run_log import bar_options
from ..config.coat import DataOptions
from .buckets import Bucket, Sample, fit_to_bucket
from .cache import TensorCache, cache_key, encode_latents, model_identity, on_device
from .captions import shuffle_tokens
from .files import CACHE_FOLDER, DatasetError, printable
from .images import DEFAULTS, read_photo, rgb, to_tensor
from .masks import normalized

_CACHE_GONE = "{}: its cached {} were removed or damaged since the start; start the run again to recompute them"


@dataclass(frozen=True)
class Batch:
    """Indices of samples of one bucket size; `draw` is the batch's number since the start of training."""

    indices: tuple[int, ...]
    draw: int


class BucketBatchSampler:
    """Endless order of batches of equal image size, one shuffle per epoch.

    The order of epoch e depends on (samples, batch_size, seed, e) only. Rank r of `world_size` takes batches r, r +
    world_size, ... across epoch borders: N processes see what one sees with N accumulation steps. A bucket's last batch
    is filled up with its first samples.
    """

    def __init__(
        self, samples: Sequence[Sample], batch_size: int, seed: int = 0, rank: int = 0, world_size: int = 1
    ) -> None:
        self.batch_size, self.seed, self.rank, self.world_size = batch_size, seed, rank, world_size
        self._buckets: dict[Bucket, list[int]] = {}
        for index, sample in enumerate(samples):
            self._buckets.setdefault(sample.bucket, []).append(index)
        self.batches_per_epoch = sum(math.ceil(len(members) / batch_size) for members in self._buckets.values())
        self._position = 0  # rank 0's, in the sequence over all epochs and ranks
        self._epoch, self._order = -1, []  # the last epoch asked for, and its batches

    def epoch_batches(self, epoch: int) -> list[tuple[int, ...]]:
        """All batches of an epoch, of all ranks."""
        rng = random.Random(f"{self.seed}/{epoch}")
        batches = []
        for members in self._buckets.values():
            shuffled = rng.sample(members, len(members))
            for start in range(0, len(shuffled), self.batch_size):
                places = range(start, start + self.batch_size)
                batches.append(tuple(shuffled[place % len(shuffled)] for place in places))
        rng.shuffle(batches)
        return batches

    def __iter__(self) -> Iterator[Batch]:
        while True:
            draw = self._position + self.rank
            self._position += self.world_size
            epoch, position = divmod(draw, self.batches_per_epoch)
            if epoch != self._epoch:
                self._epoch, self._order = epoch, self.epoch_batches(epoch)
            yield Batch(self._order[position], draw)

    def state_dict(self) -> dict[str, int]:
        """The position of the next batch, the same on all ranks."""
        epoch, position = divmod(self._position, self.batches_per_epoch)
        return {"epoch": epoch, "position": position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from `state`; changed data or settings change the order, within the same epoch."""
        position = min(state["position"], self.batches_per_epoch)
        self._position = state["epoch"] * self.batches_per_epoch + position


class LatentDataset:
    """Samples as tensors; with `transparency: mask` batches have a loss mask from the photos' transparency."""

    def __init__(
        self,
        samples: Sequence[Sample],
        dataset_configs: Sequence[Any],
        vae: nn.Module,
        encoders: Any,  # TextEncoders, or a family's counterpart
        device: torch.device | str = "cpu",
        *,
        seed: int = 0,  # of caption dropout and token shuffling
        options: DataOptions = DEFAULTS,
        room: float | None = None,  # bytes that text encoders may take on `device`; None: any
        reg_weight: float = 1.0,  # of the loss on photos of datasets with `is_reg`
    ) -> None:
        self.samples, self.configs = list(samples), list(dataset_configs)
        self.vae: nn.Module | None = vae
        self.encoders: Any = encoders  # None once released
        self.device = torch.device(device)
        self.seed = seed
        self.room = room
        self.background = options.background
        self.masked = options.transparency == "mask"
        self.reg_weight = reg_weight
        self._own_masks = [bool(config.alpha_mask or config.mask_path) for config in self.configs]
        self._has_masks = any(self._own_masks)
        self._has_reg = any(config.is_reg for config in self.configs)
        self._levels: dict[Any, Tensor] = {}  # of masks, at the latents' size
        self._vae_identity = model_identity(vae)
        self._text_identity = encoders.identity
        self._digests: dict[Path, str] = {}
        self._latents, self._texts = [], []
        for config in self.configs:
            root = Path(config.folder_path) / CACHE_FOLDER
            latents_folder = root / "latents" if config.cache_latents_to_disk else None
            text_folder = root / "text" if config.cache_text_embeddings else None
            self._latents.append(TensorCache(latents_folder, config.cache_latents))
            self._texts.append(TensorCache(text_folder, False))
        # during training, for what is not cached
        self.needs_vae = not all(cache.enabled for cache in self._latents)
        self.needs_encoders = not all(cache.enabled for cache in self._texts)

    def fill(self, progress: bool = True) -> None:
        """Encode what the caches lack, then release the models that training does not need.

        With several processes, call it in one first: the others find everything cached.
        """
        bar = partial(tqdm, disable=not progress, leave=False, **bar_options())
        cacheable = [sample for sample in self.samples if self._latents[sample.dataset_index].enabled]
        missing = []
        for sample in bar(list(dict.fromkeys(cacheable)), desc="Checking cached latents"):
            if self._latents[sample.dataset_index].load(self._latent_key(sample)) is None:
                missing.append(sample)
        if missing and self.vae is not None:
            with on_device([self.vae], self.device):
                for sample in bar(missing, desc="Caching latents"):
                    self._encode_image(sample)

        prompts = []  # with the index of their data set
        for sample in self.samples:
            index = sample.dataset_index
            if self._texts[index].enabled:
                prompts.append((index, sample.caption))
                if self.configs[index].caption_dropout_rate > 0:
                    prompts.append((index, sample.dropped_caption))
        uncached = []
        for index, prompt in dict.fromkeys(prompts):
            if self._texts[index].load(cache_key("text", prompt, self._text_identity)) is None:
                uncached.append((index, prompt))
        if uncached and self.encoders is not None:
            with on_device(self.encoders.models, self.device, self.room):
                for index, prompt in bar(uncached, desc="Caching text embeddings"):
                    self._encode_text(index, prompt)
        if not self.needs_vae:
            self.vae = None
        if not self.needs_encoders:
            self.encoders = None

    def batch(self, batch: Batch) -> dict[str, Tensor]:
        """The rows of `encoded`, stacked, on `device`, masks of mean 1; with regularization also `weights` [B] fp32."""
        rows = []
        for place, index in enumerate(batch.indices):
            sample = self.samples[index]
            config = self.configs[sample.dataset_index]
            rng = random.Random(f"{self.seed}/{batch.draw}/{place}")
            prompt = sample.caption
            if rng.random() < config.caption_dropout_rate:
                prompt = sample.dropped_caption
            elif config.shuffle_tokens and not config.cache_text_embeddings:
                prompt = shuffle_tokens(prompt, rng)
            row = self.encoded(sample, prompt, blur=rng.random())
            if self._has_reg:
                row["weights"] = torch.tensor(self.reg_weight if config.is_reg else 1.0)
            rows.append(row)
        tensors = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        if self._has_masks:
            tensors["mask"] = normalized(tensors["mask"])
        return {name: to_device(tensor, self.device) for name, tensor in tensors.items()}

    def encoded(self, sample: Sample, prompt: str, *, blur: float = 0.0) -> dict[str, Tensor]:
        """One row of a batch, on the CPU: latents [C, h, w] fp32; prompt_embeds [T, D] and pooled [P] bf16.

        With masks also mask [1, h, w] fp32: by `transparency: mask` of mean 1; by the datasets' own, blurred by `blur`
        (`Mask.radius`), from 0 to 1, 0 where a photo has none. DatasetError if not finite, or not cached any more.
        """
        index = sample.dataset_index
        image = self._latents[index].load(self._latent_key(sample)) or self._encode_image(sample)
        text_key = cache_key("text", prompt, self._text_identity)
        text = self._texts[index].load(text_key) or self._encode_text(index, prompt)
        row = {**image, **text}
        if not self._has_masks:
            return row
        mask = sample.mask
        height, width = image["latents"].shape[1:]
        if not self._own_masks[index]:  # cached with the latents, or everything
            row.setdefault("mask", torch.ones(1, height, width))
        elif mask is None:
            row["mask"] = torch.zeros(1, height, width)
        else:
            radius = mask.radius(blur)
            view = (mask, sample.bucket, sample.flip, radius)
            if view not in self._levels:
                self._levels[view] = mask.levels(sample.bucket, (height, width), flip=sample.flip, radius=radius)
            row["mask"] = mask.weights(self._levels[view])
        return row

    def _encode_image(self, sample: Sample) -> dict[str, Tensor]:
        if self.vae is None:
            raise DatasetError(_CACHE_GONE.format(printable(sample.image_path), "latents"))
        image, alpha = read_photo(sample.image_path, self.ground(sample))
        crop = fit_to_bucket(image, sample.bucket, flip=sample.flip)
        latents = encode_latents(self.vae, to_tensor(crop)[None])[0].cpu()
        if not torch.isfinite(latents).all():
            name = printable(sample.image_path)
            raise DatasetError(f"{name}: the VAE returns NaN or inf for it; run the VAE in bf16 or fp32")
        entry = {"latents": latents}
        height, width = latents.shape[-2:]
        if self.masked and alpha is None:
            entry["mask"] = torch.ones(1, height, width)
        elif self.masked:  # mean opacity of each latent's pixels; of mean 1, so that the loss keeps its size
            crop = fit_to_bucket(alpha, sample.bucket, flip=sample.flip)
            opacity = crop.resize((width, height), Image.Resampling.BOX)
            mask = torch.from_numpy(np.array(opacity, dtype=np.float32))[None]
            entry["mask"] = mask / mask.mean()  # not 0: `DataReport` refuses such photos
        self._latents[sample.dataset_index].store(self._latent_key(sample), entry, about=sample.image_path.name)
        return entry

    def _latent_key(self, sample: Sample) -> str:
        path = sample.image_path
        if path not in self._digests:
            self._digests[path] = file_sha256(path)
        size = [sample.bucket.width, sample.bucket.height]
        colour = self.ground(sample)
        ground = None if colour is None else rgb(colour)
        return cache_key("latents", self._digests[path], size, sample.flip, self._vae_identity, ground, self.masked)

    def ground(self, sample: Sample) -> str | None:
        """The color that transparent parts become, or None: with `alpha_mask` they keep their own."""
        return None if self.configs[sample.dataset_index].alpha_mask else self.background

    def _encode_text(self, dataset_index: int, prompt: str) -> dict[str, Tensor]:
        if self.encoders is None:
            raise DatasetError(_CACHE_GONE.format(f"caption {prompt!r}", "text embeddings"))
        embeds, pooled = self.encoders.encode([prompt])
        entry = {"prompt_embeds": embeds[0].cpu(), "pooled": pooled[0].cpu()}
        if not all(torch.isfinite(value).all() for value in entry.values()):
            raise DatasetError(f"caption {prompt!r}: the text encoders return NaN or inf; run them in bf16 or fp32")
        self._texts[dataset_index].store(cache_key("text", prompt, self._text_identity), entry, about=prompt)
        return entry


def picture_of(sample: Sample, ground: str | None) -> tuple[np.ndarray, np.ndarray]:
    """A sample's crop, uint8 [H, W, 3], and where its subject is, bool [H, W], by its mask or else its opacity."""
    image, alpha = read_photo(sample.image_path, ground)
    picture = np.array(fit_to_bucket(image, sample.bucket, flip=sample.flip))
    if sample.mask is not None:
        levels = np.array(sample.mask.cut(sample.bucket, flip=sample.flip))
    elif alpha is not None:
        levels = np.array(fit_to_bucket(alpha, sample.bucket, flip=sample.flip))
    else:
        return picture, np.ones(picture.shape[:2], bool)
    return picture, levels > 127


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU tensor, made without synchronizing."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
