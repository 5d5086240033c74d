"""Samples images during training, with diffusers' pipeline of the model and the LoRA in training.

Prompts are encoded once at the start, so the text encoders can go. Files are named as ai-toolkit's,
`samples/<milliseconds>__<9-digit step>_<number>.jpg`; a prompt has the same start noise, from its seed, at every step.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
from PIL.Image import Image
from torch import Tensor, nn

from ...base.files import replacing
from ...blocks.models.flux2 import Flux2Text
from ...config.job_sections import SampleItem
from ...data.captions import inject_trigger
from .loading import Encoders

__all__ = ["ImageSampler"]

FORMATS = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "webp": "WEBP"}
JPEG_QUALITY = 95


class ImageSampler:
    """Draws the images of the `sample` block; the VAE is on `device` only while drawing, text encoders are not kept."""

    def __init__(
        self,
        items: Sequence[SampleItem],
        trigger_word: str | None,
        encoders: Encoders,
        device: torch.device,
        extension: str = "jpg",
    ):
        self.items = list(items)
        self._vae, self._scheduler = encoders.vae, encoders.scheduler
        self._device, self._extension = device, extension
        prompts = [inject_trigger(item.prompt, trigger_word, add_if_missing=False) for item in self.items]
        self._pipeline, self._embeds = _encode(encoders, prompts)

    @torch.no_grad()
    def draw(self, transformer: nn.Module, step: int, folder: Path | None) -> list[Path]:
        """Draw and write all images; returns the files. Without a folder, draw only, for other processes' sake."""
        was_training, home = transformer.training, self._vae.device
        transformer.eval()
        self._vae.to(self._device)
        try:
            # draw all before writing: if that fails, no other process waits
            images = [self._draw_one(transformer, number) for number in range(len(self.items))]
        finally:
            self._vae.to(home)
            transformer.train(was_training)
        paths = []
        for number, image in enumerate(images if folder is not None else []):
            path = folder / f"{int(time.time() * 1000)}__{step:09d}_{number}.{self._extension}"
            with replacing(path) as temp:
                image.save(temp, format=FORMATS[self._extension], quality=JPEG_QUALITY)
            paths.append(path)
        return paths

    def _draw_one(self, transformer: nn.Module, number: int) -> Image:
        item = self.items[number]
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(self._scheduler.config)
        pipeline = self._pipeline(scheduler=scheduler, vae=self._vae, transformer=transformer)
        pipeline.set_progress_bar_config(disable=True)
        image: Image = pipeline(
            **{name: x.to(self._device, self._vae.dtype) for name, x in self._embeds[number].items()},
            width=item.width,
            height=item.height,
            guidance_scale=item.guidance_scale,
            num_inference_steps=item.sample_steps,
            generator=torch.Generator("cpu").manual_seed(item.seed),
        ).images[0]
        return image


def _encode(encoders: Encoders, prompts: Sequence[str]) -> tuple[Callable[..., Any], list[dict[str, Tensor]]]:
    text = encoders.text
    assert text is not None
    encoded = [tuple(x.cpu() for x in text.encode([prompt])) for prompt in prompts]
    if not isinstance(text, Flux2Text):
        none = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
        calls = [{"prompt_embeds": embeds, "pooled_prompt_embeds": pooled} for embeds, pooled in encoded]
        return functools.partial(FluxPipeline, **none), calls
    make = functools.partial(type(text.pipeline), text_encoder=None, tokenizer=None)
    calls = [{"prompt_embeds": embeds} for embeds, _ in encoded]
    if type(text.pipeline).__name__ == "Flux2Pipeline":
        return make, calls
    negative = {} if encoders.distilled else {"negative_prompt_embeds": text.encode([""])[0].cpu()}
    return functools.partial(make, is_distilled=encoders.distilled), [{**call, **negative} for call in calls]
