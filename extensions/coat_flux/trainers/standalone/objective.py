"""The loss of one micro-batch, with every random draw tied to the number of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from ...config.job_sections import TrainSection
from .flow_matching import (
    bypassed_guidance,
    draw_sigmas,
    noisy_latents,
    predict_velocity,
    sample_losses,
    sigma_table,
    timestep_weights,
    weighted_timesteps,
)
from .seeding import Stream, generator_for, seed_global

__all__ = ["Objective"]


class Objective:
    """FLUX's flow-matching loss under the settings of the `train` block.

    The transformer runs without autocast in its own dtype, its LoRA in fp32, as in ai-toolkit's loop.

    Args:
        transformer: with adapters.
        train: the `train` block.
        scheduler: the model's, for the shifted sigma tables.
        seed: the run's seed.
        dtype: of the transformer's inputs.
    """

    def __init__(
        self,
        transformer: nn.Module,
        train: TrainSection,
        scheduler: FlowMatchEulerDiscreteScheduler,
        seed: int,
        dtype: torch.dtype,
    ):
        self._transformer = transformer
        self._train = train
        self._scheduler = scheduler
        self._seed = seed
        self._dtype = dtype

    def __call__(self, batch: Mapping[str, Tensor], draw: int) -> Tensor:
        """The mean loss of a batch, with gradient.

        Args:
            batch: latents (B, C, H, W), prompt_embeds (B, L, D), pooled (B, P), on the transformer's device; and, where
                transparent parts of photos do not count, mask (B, 1, H, W) with mean 1 over each sample.
            draw: the number of the batch in the run's global order.

        Returns:
            A scalar, fp32.
        """
        latents = batch["latents"]
        generator = generator_for(self._seed, Stream.NOISE, draw)
        seed_global(self._seed, Stream.MODEL, draw)
        indices, sigmas = self._sigmas(latents.shape, generator)
        noise = torch.randn(latents.shape, generator=generator).to(latents.device)
        sigmas = sigmas.to(latents.device)
        x_t = noisy_latents(latents, noise, sigmas)
        bypass = self._train.bypass_guidance_embedding
        with bypassed_guidance(self._transformer) if bypass else nullcontext():
            prediction = predict_velocity(
                self._transformer, x_t, sigmas, batch["prompt_embeds"], batch["pooled"], dtype=self._dtype
            )
        weights = self._weights(indices)
        weights = None if weights is None else weights.to(latents.device)
        kind = self._train.loss_type
        return sample_losses(prediction, latents, noise, weights, batch.get("mask"), kind).mean()

    def _sigmas(self, shape: torch.Size, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        train = self._train
        bell = train.linear_timesteps or train.linear_timesteps2
        kind = "linear" if bell else train.timestep_type
        tokens = shape[2] * shape[3] // 4
        table = sigma_table(kind, tokens=tokens, scheduler=self._scheduler, generator=generator)
        return draw_sigmas(
            table,
            shape[0],
            timestep_type=train.timestep_type,
            content_or_style=train.content_or_style,
            min_step=train.min_denoising_steps,
            max_step=train.max_denoising_steps,
            generator=generator,
        )

    def _weights(self, indices: Tensor) -> Tensor | None:
        if self._train.timestep_type == "weighted":
            return weighted_timesteps(indices)
        if not (self._train.linear_timesteps or self._train.linear_timesteps2):
            return None
        return timestep_weights(indices, half_bell=self._train.linear_timesteps2)
