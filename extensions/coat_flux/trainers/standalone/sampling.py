"""Sample images during training, with the LoRA in training and diffusers' own FluxPipeline.

Prompts are encoded once at the start, so the text encoders need not stay. Files are named as ai-toolkit's,
`samples/<milliseconds>__<9-digit step>_<number>.jpg`, from the seeds of the config: the same prompt has the same start
noise at every step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
from torch import nn

from ...base.files import replacing
from ...config.job_sections import SampleItem
from ...data.cache import encode_prompts
from ...data.captions import inject_trigger
from .loading import Encoders

__all__ = ["ImageSampler"]

FORMATS = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "webp": "WEBP"}
JPEG_QUALITY = 95


class ImageSampler:
    """Draws the images of the `sample` block with a given transformer.

    Args:
        items: what to draw, with size, seed, guidance and steps filled in (`SampleSection.items`).
        trigger_word: replaces `[trigger]` in the prompts.
        encoders: the text encoders encode the prompts now and are not kept; the VAE decodes, and is on `device` only
            while drawing; of the scheduler a fresh copy is used.
        device: where the transformer is.
        extension: jpg, png or webp.
    """

    def __init__(
        self,
        items: Sequence[SampleItem],
        trigger_word: str | None,
        encoders: Encoders,
        device: torch.device,
        extension: str = "jpg",
    ):
        self.items = list(items)
        self._vae = encoders.vae
        self._scheduler = encoders.scheduler
        self._device = device
        self._extension = extension
        prompts = [inject_trigger(item.prompt, trigger_word, add_if_missing=False) for item in self.items]
        text = encoders.text
        models, tokenizers = (text.clip, text.t5), (text.clip_tokenizer, text.t5_tokenizer)
        encoded = (encode_prompts(models, tokenizers, [prompt], text.max_length) for prompt in prompts)
        self._embeds = [(embeds.cpu(), pooled.cpu()) for embeds, pooled in encoded]

    @torch.no_grad()
    def draw(self, transformer: nn.Module, step: int, folder: Path) -> list[Path]:
        """Draw and write all images.

        Args:
            transformer: with its adapters; in eval mode meanwhile.
            step: optimizer steps done, for the names.
            folder: the run's `samples`.

        Returns:
            The files.
        """
        was_training, home = transformer.training, self._vae.device
        transformer.eval()
        self._vae.to(self._device)
        try:
            return [self._draw_one(transformer, number, step, folder) for number in range(len(self.items))]
        finally:
            self._vae.to(home)
            transformer.train(was_training)

    def _draw_one(self, transformer: nn.Module, number: int, step: int, folder: Path) -> Path:
        item, (embeds, pooled) = self.items[number], self._embeds[number]
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(self._scheduler.config)
        pipeline = FluxPipeline(scheduler, self._vae, None, None, None, None, transformer)
        pipeline.set_progress_bar_config(disable=True)
        image = pipeline(
            prompt_embeds=embeds.to(self._device, self._vae.dtype),
            pooled_prompt_embeds=pooled.to(self._device, self._vae.dtype),
            width=item.width,
            height=item.height,
            guidance_scale=item.guidance_scale,
            num_inference_steps=item.sample_steps,
            generator=torch.Generator("cpu").manual_seed(item.seed),
        ).images[0]
        path = folder / f"{int(time.time() * 1000)}__{step:09d}_{number}.{self._extension}"
        with replacing(path) as temp:
            image.save(temp, format=FORMATS[self._extension], quality=JPEG_QUALITY)
        return path
