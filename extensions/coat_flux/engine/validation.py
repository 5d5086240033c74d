"""Fixed-noise validation loss: the one number of a short run that can be compared before and after.

The training loss of single steps is mostly the luck of the drawn sigma. Here up to 8 training samples meet the same
noise and the same even grid of sigmas each time, so a difference is what the LoRA learned.
"""

from __future__ import annotations

import torch
from torch import nn

from ..data.loader import LatentDataset
from .flow_matching import noisy_latents, predict_velocity, sample_losses
from .seeding import Stream, generator_for

__all__ = ["MAX_SAMPLES", "fixed_noise_loss"]

MAX_SAMPLES = 8


@torch.no_grad()
def fixed_noise_loss(
    transformer: nn.Module, dataset: LatentDataset, n: int = MAX_SAMPLES, *, dtype: torch.dtype, seed: int = 0
) -> float:
    """Mean loss of `n` forwards with fixed noise.

    Forward i takes sample i (evenly spread over the data set, repeated where there are fewer), sigma (i + 1/2)/n and
    noise drawn from (seed, i). Captions are not dropped; the transformer is in eval mode meanwhile.

    Args:
        transformer: with its adapters.
        dataset: the training samples.
        n: number of forwards, at least 1.
        dtype: of the transformer's inputs.
        seed: of the noise.

    Returns:
        The mean squared error.
    """
    was_training = transformer.training
    transformer.eval()
    try:
        return sum(_one(transformer, dataset, i, n, dtype, seed) for i in range(n)) / n
    finally:
        transformer.train(was_training)


def _one(transformer: nn.Module, dataset: LatentDataset, i: int, n: int, dtype: torch.dtype, seed: int) -> float:
    count = len(dataset.samples)
    sample = dataset.samples[i * count // n if count >= n else i % count]
    device = dataset.device
    latents = dataset.latents(sample)[None].to(device)
    embeds, pooled = dataset.text(sample.dataset_index, sample.caption)
    noise = torch.randn(latents.shape, generator=generator_for(seed, Stream.VALIDATION, i)).to(device)
    sigmas = torch.tensor([(i + 0.5) / n], device=device)
    x_t = noisy_latents(latents, noise, sigmas)
    prediction = predict_velocity(transformer, x_t, sigmas, embeds[None], pooled[None], dtype=dtype)
    mask = dataset.mask(sample)
    return sample_losses(prediction, latents, noise, mask=None if mask is None else mask[None].to(device)).item()
