"""What is measured of a run between its steps: the loss with fixed noise, and sample images.

The training loss of single steps is mostly the luck of the drawn sigma. The loss here is comparable between steps: the
same photos get the same noise each time, those of `validation.hold_out`, or up to 8 of those trained on.

Samples are drawn with diffusers' pipeline of the model and the LoRA in training. Prompts are encoded once at the start,
so the text encoders can go. Files are named as ai-toolkit's, `samples/<milliseconds>__<9-digit step>_<number>.jpg`; a
prompt has the same start noise, from its seed, at every step.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
from PIL.Image import Image
from torch import Tensor, nn

from ...base.files import replacing
from ...blocks.models.flux2 import Flux2Text
from ...config.job import JobConfig
from ...data.buckets import Sample
from ...data.cache import decode_latents, on_device
from ...data.captions import inject_trigger
from ...data.fidelity import Redrawn, Subject, evenly
from ...data.hold_out import FixedNoise, choose_hold_out
from ...data.loader import LatentDataset, picture_of
from ...data.masks import normalized
from .flow_matching import losses_of, predict_velocity
from .loading import Encoders

TRAINED_PHOTOS = 8
FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}
JPEG_QUALITY = 95


def held_out_of(job: JobConfig) -> tuple[tuple[Path, ...], ...]:
    """The held-out photos of each dataset: `choose_hold_out`; none of regularization."""
    folders = [entry.folder_path for entry in job.datasets if not entry.is_reg]
    chosen = iter(choose_hold_out(folders, job.validation.hold_out, job.training_seed))
    return tuple(() if entry.is_reg else next(chosen) for entry in job.datasets)


def fixed_noise(dataset: LatentDataset, held_out: Sequence[Sample], trained: Sequence[Sample]) -> FixedNoise:
    """The photos of a run's validation loss: `held_out`, or else `trained` ones at one noise level.

    Each held-out photo counts once, not mirrored, photo i at its (i modulo how many)-th resolution.
    """
    samples = _one_each(held_out)
    levels = None
    if not held_out:
        count, n = len(trained), TRAINED_PHOTOS
        samples = [trained[i * count // n if count >= n else i % count] for i in range(n)]
        levels = 1
    photos = [dataset.encoded(sample, sample.caption) for sample in samples]
    for photo in photos:
        if "mask" in photo:
            photo["mask"] = normalized(photo["mask"])
    return FixedNoise(photos, levels)


def subjects_of(dataset: LatentDataset, held_out: Sequence[Sample]) -> list[Subject]:
    """The held-out photos that are redrawn, as `fixed_noise` takes them."""
    chosen = evenly(_one_each(held_out))
    return [Subject(*picture_of(x, dataset.ground(x)), dataset.encoded(x, x.caption)) for x in chosen]


def _one_each(held_out: Sequence[Sample]) -> list[Sample]:
    by_photo: dict[Path, list[Sample]] = {}
    for sample in dict.fromkeys(sample for sample in held_out if not sample.flip):
        by_photo.setdefault(sample.image_path.resolve(), []).append(sample)
    return [sizes[i % len(sizes)] for i, sizes in enumerate(by_photo.values())]


def loss_of(
    transformer: nn.Module, noise: FixedNoise, at_once: int, *, dtype: torch.dtype, device: torch.device
) -> float:
    """`FixedNoise.mean_loss` of a transformer in eval mode."""

    def losses(photos: list[Mapping[str, Any]], sigmas: Tensor, drawn: Tensor) -> Tensor:
        batch = {part: torch.stack([photo[part] for photo in photos]).to(device) for part in photos[0]}
        return losses_of(transformer, {**batch, "sigmas": sigmas.to(device), "noise": drawn.to(device)}, dtype)

    return noise.mean_loss(losses, at_once)


def redraw(
    redrawn: Redrawn, step: int, transformer: nn.Module, vae: nn.Module, *, dtype: torch.dtype, device: torch.device
) -> None:
    """`Redrawn.measure` with a transformer in eval mode, and a VAE that is on `device` meanwhile."""

    def velocity(photo: Mapping[str, Any], x: Tensor, sigmas: Tensor) -> Tensor:
        embeds, pooled = (photo[name][None].to(device) for name in ("prompt_embeds", "pooled"))
        return predict_velocity(transformer, x.to(device), sigmas.to(device), embeds, pooled, dtype=dtype)

    with on_device([vae], device):
        redrawn.measure(step, velocity, functools.partial(decode_latents, vae))


class ImageSampler:
    """Draws the images of the `sample` block; the VAE is on `device` only while drawing, text encoders are not kept."""

    def __init__(self, job: JobConfig, encoders: Encoders, device: torch.device):
        self.items = job.sample.items()
        self._vae = encoders.vae
        self._scheduler = encoders.scheduler
        self._device = device
        self._extension = job.sample.format
        self._pipeline: Callable[..., Any]  # without its encoders, and its arguments for each prompt in place of them
        self._calls: list[dict[str, Tensor]]
        text: Any = encoders.text
        prompts = [inject_trigger(item.prompt, job.trigger_word, add_if_missing=False) for item in self.items]
        encoded = [tuple(x.cpu() for x in text.encode([prompt])) for prompt in prompts]
        if not isinstance(text, Flux2Text):
            none = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
            self._pipeline = functools.partial(FluxPipeline, **none)
            self._calls = []
            for embeds, pooled in encoded:
                self._calls.append({"prompt_embeds": embeds, "pooled_prompt_embeds": pooled})
            return
        self._pipeline = functools.partial(type(text.pipeline), text_encoder=None, tokenizer=None)
        self._calls = [{"prompt_embeds": embeds} for embeds, _ in encoded]
        if type(text.pipeline).__name__ == "Flux2Pipeline":
            return
        self._pipeline = functools.partial(self._pipeline, is_distilled=encoders.distilled)
        if not encoders.distilled:
            negative = text.encode([""])[0].cpu()
            for call in self._calls:
                call["negative_prompt_embeds"] = negative

    @torch.no_grad()
    def image(self, transformer: nn.Module, number: int) -> Image:
        """Draw the image of one item."""
        item = self.items[number]
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(self._scheduler.config)
        pipeline = self._pipeline(scheduler=scheduler, vae=self._vae, transformer=transformer)
        pipeline.set_progress_bar_config(disable=True)
        with on_device([self._vae], self._device):
            result = pipeline(
                **{name: x.to(self._device, self._vae.dtype) for name, x in self._calls[number].items()},
                width=item.width,
                height=item.height,
                guidance_scale=item.guidance_scale,
                num_inference_steps=item.sample_steps,
                generator=torch.Generator("cpu").manual_seed(item.seed),
            )
        image: Image = result.images[0]
        return image

    def draw(self, transformer: nn.Module, step: int, folder: Path | None) -> list[Path]:
        """Draw and write all images; returns the files. Without a folder, draw only, for other processes' sake."""
        # draw all before writing: if that fails, no other process waits
        images = [self.image(transformer, number) for number in range(len(self.items))]
        paths = []
        for number, image in enumerate(images if folder is not None else []):
            path = folder / f"{int(time.time() * 1000)}__{step:09d}_{number}.{self._extension}"
            with replacing(path) as temp:
                image.save(temp, format=FORMATS[self._extension], quality=JPEG_QUALITY)
            paths.append(path)
        return paths
