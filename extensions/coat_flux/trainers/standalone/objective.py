"""The loss of a micro-batch under the settings of the `train` block, and its random draws."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from ...blocks.fused.parts import written_gradients
from ...config.job_sections import TrainSection
from ...data.loader import to_device
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
    """The loss of one micro-batch under the `train` block; transformer in its own dtype, LoRA in fp32, no autocast."""

    def __init__(
        self,
        transformer: nn.Module,
        train: TrainSection,
        scheduler: FlowMatchEulerDiscreteScheduler,
        seed: int,
        dtype: torch.dtype,
    ):
        self._transformer, self._train, self._scheduler = transformer, train, scheduler
        self._seed, self._dtype = seed, dtype

    def __call__(self, batch: Mapping[str, Tensor], draw: int) -> Tensor:
        """The mean loss of a batch, the `draw`-th of the run, with gradient: a scalar, fp32.

        Batches have latents (B, C, H, W), prompt_embeds (B, L, D), pooled (B, P), on the transformer's device; with
        transparent parts of photos also mask (B, 1, H, W) with mean 1 over each sample.
        """
        drawn = self.draw(batch, draw)
        seed_global(self._seed, Stream.MODEL, draw)
        return self.loss(drawn)

    def draw(self, batch: Mapping[str, Tensor], draw: int) -> dict[str, Tensor]:
        """Inputs of a batch's loss: `batch` on the device, noise, sigmas (B,), and weights (B,) fp32 if weighted."""
        train, latents = self._train, batch["latents"]
        generator = generator_for(self._seed, Stream.NOISE, draw)
        bell = train.linear_timesteps or train.linear_timesteps2
        tokens = latents.shape[2] * latents.shape[3] // 4
        kind = "linear" if bell else train.timestep_type
        table = sigma_table(kind, tokens=tokens, scheduler=self._scheduler, generator=generator)
        indices, sigmas = draw_sigmas(
            table,
            latents.shape[0],
            timestep_type=train.timestep_type,
            content_or_style=train.content_or_style,
            min_step=train.min_denoising_steps,
            max_step=train.max_denoising_steps,
            generator=generator,
        )
        if latents.is_cuda:  # drawn there, from the same counter
            seed_global(self._seed, Stream.NOISE, draw)
            noise = torch.randn(latents.shape, device=latents.device)
        else:
            noise = torch.randn(latents.shape, generator=generator).to(latents.device)
        drawn = {name: x for name, x in batch.items() if name != "indices"}
        drawn |= {"noise": noise, "sigmas": to_device(sigmas, latents.device)}
        if train.timestep_type == "weighted":
            drawn["weights"] = to_device(weighted_timesteps(indices), latents.device)
        elif bell:
            weights = timestep_weights(indices, half_bell=train.linear_timesteps2)
            drawn["weights"] = to_device(weights, latents.device)
        return drawn

    def loss(self, drawn: Mapping[str, Tensor]) -> Tensor:
        """The mean loss of `draw`'s result, with gradient; a scalar, fp32. Only dropout draws here."""
        latents, noise, sigmas = drawn["latents"], drawn["noise"], drawn["sigmas"]
        x_t = noisy_latents(latents, noise, sigmas)
        bypass = self._train.bypass_guidance_embedding
        with written_gradients(), bypassed_guidance(self._transformer) if bypass else nullcontext():
            prediction = predict_velocity(
                self._transformer, x_t, sigmas, drawn["prompt_embeds"], drawn["pooled"], dtype=self._dtype
            )
        kind = self._train.loss_type
        return sample_losses(prediction, latents, noise, drawn.get("weights"), drawn.get("mask"), kind).mean()
