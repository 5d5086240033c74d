"""The flow-matching objective of FLUX, as ai-toolkit trains it: the loss of a micro-batch, and its random draws.

    x_t = (1 - sigma) x0 + sigma · noise,  target = noise - x0,  loss = mean over elements of (prediction - target)²

`train.timestep_type` names a table of 1000 descending sigmas from which an index is drawn uniformly; `content_or_style`
bends that draw towards high or low noise. Guidance-distilled models are trained with the guidance embedding at 1.0.
All of this runs in fp32; only the transformer's inputs are cast.

Shapes: B samples, C latent channels, H×W latent size (image/8), T = H·W/4 packed tokens, L text tokens.
Source: ai-toolkit's set_train_timesteps and calculate_loss (behaviour), diffusers' FluxPipeline (input layout).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from ...base.rng import Stream, mixed_seed
from ...blocks.fused.parts import written_gradients
from ...config.job_sections import TrainSection
from ...data.loader import to_device

TABLE_SIZE = 1000
TRAIN_GUIDANCE = 1.0
HUBER_WIDTH = 0.01
FIXED_STEPS = {"one_step": 1, "two_step": 2, "four_step": 4, "eight_step": 8}
# index into the linear table → weight, straight lines between: a fit to the curve ai-toolkit measured on Flex.1-alpha
WEIGHTED = (
    *((0, 0.904), (5, 0.958), (12, 1.091), (20, 1.174), (30, 1.263), (45, 1.355), (65, 1.442), (90, 1.499)),
    *((124, 1.522), (160, 1.503), (220, 1.410), (300, 1.263), (390, 1.099), (470, 0.968), (540, 0.870), (610, 0.793)),
    *((680, 0.740), (740, 0.716), (785, 0.713), (830, 0.723), (870, 0.734), (890, 0.727), (910, 0.703), (934, 0.641)),
    *((960, 0.544), (986, 0.456), (999, 0.444)),
)


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
        self._transformer = transformer
        self._train = train
        self._scheduler = scheduler
        self._seed = seed
        self._dtype = dtype

    def __call__(self, batch: Mapping[str, Tensor], draw: int) -> Tensor:
        """The mean loss of a batch, the `draw`-th of the run, with gradient: a scalar, fp32.

        Batches have latents (B, C, H, W), prompt_embeds (B, L, D), pooled (B, P), on the transformer's device; where
        photos are masked also mask (B, 1, H, W) with mean 1, with regularization photos weights (B,) fp32.
        """
        drawn = self.draw(batch, draw)
        torch.manual_seed(mixed_seed(self._seed, Stream.MODEL, draw))  # LoRA dropout
        return self.loss(drawn)

    def draw(self, batch: Mapping[str, Tensor], draw: int) -> dict[str, Tensor]:
        """Inputs of a batch's loss: `batch`, noise, sigmas (B,), and weights (B,) fp32 if any, on the device."""
        train, latents = self._train, batch["latents"]
        seed = mixed_seed(self._seed, Stream.NOISE, draw)
        generator = torch.Generator().manual_seed(seed)
        kind = "linear" if train.linear_timesteps or train.linear_timesteps2 else train.timestep_type
        tokens = latents.shape[2] * latents.shape[3] // 4
        table = sigma_table(kind, tokens=tokens, scheduler=self._scheduler, generator=generator)
        indices = draw_indices(train, latents.shape[0], generator)
        if latents.is_cuda:  # drawn there, from the same counter
            torch.manual_seed(seed)
            noise = torch.randn(latents.shape, device=latents.device)
        else:
            noise = torch.randn(latents.shape, generator=generator).to(latents.device)
        drawn = {**batch, "noise": noise, "sigmas": to_device(table[indices], latents.device)}
        weights = timestep_weights(train)
        if weights is not None:
            drawn["weights"] = drawn.get("weights", 1.0) * to_device(weights[indices], latents.device)
        return drawn

    def loss(self, drawn: Mapping[str, Tensor]) -> Tensor:
        """The mean loss of `draw`'s result, with gradient; a scalar, fp32. Only dropout draws here."""
        bypass = self._train.bypass_guidance_embedding
        with written_gradients(), bypassed_guidance(self._transformer, bypass):
            return losses_of(self._transformer, drawn, self._dtype, self._train.loss_type).mean()


def sigma_table(
    timestep_type: str,
    *,
    tokens: int,
    scheduler: FlowMatchEulerDiscreteScheduler | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The 1000 sigmas that one micro-batch draws from: (1000,) fp32 in [0, 1], descending.

    `shift` and its synonyms need `tokens`, T, and the model's scheduler, random tables the generator.
    """
    if timestep_type in ("linear", "weighted", *FIXED_STEPS):
        return torch.linspace(1.0, 1.0 / TABLE_SIZE, TABLE_SIZE)
    if timestep_type == "sigmoid":
        return (1 - torch.sigmoid(torch.randn(TABLE_SIZE, generator=generator))).sort(descending=True).values
    if timestep_type == "lognorm_blend":
        draws = torch.exp(0.333 * torch.randn(TABLE_SIZE * 3 // 4, generator=generator))
        linear = torch.linspace(1.0, 1.0 / TABLE_SIZE, TABLE_SIZE // 4)
        table = torch.cat([1 - draws / draws.max(), linear]).sort(descending=True).values
        return (table * TABLE_SIZE).floor() / TABLE_SIZE
    assert scheduler is not None
    own = FlowMatchEulerDiscreteScheduler.from_config(scheduler.config)
    config = own.config
    mu = calculate_shift(
        tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", 1.15),
    )
    own.set_timesteps(TABLE_SIZE, mu=mu if config.use_dynamic_shifting else None)
    return own.sigmas[:TABLE_SIZE].float()


def draw_indices(train: TrainSection, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw an index into the table for each of `count` samples, int64 (B,).

    The `…_step` types draw from that many evenly spaced ones, others from `min_denoising_steps` up to, without,
    `max_denoising_steps`; `content` favours high noise (u³), `style` low noise (1 - u³).
    """
    low = max(train.min_denoising_steps, 0)
    high = min(train.max_denoising_steps, TABLE_SIZE - 1)
    if train.timestep_type in FIXED_STEPS:
        places = FIXED_STEPS[train.timestep_type]
        choices = torch.arange(places) * TABLE_SIZE // places
        return choices[torch.randint(places, (count,), generator=generator)]
    if train.content_or_style == "balanced":
        return torch.randint(low, max(high, low + 1), (count,), generator=generator)
    cubed = torch.rand(count, generator=generator) ** 3
    place = cubed if train.content_or_style == "content" else 1 - cubed
    return (low + place * TABLE_SIZE / (TABLE_SIZE - 1) * (high - low)).long().clamp(low, high)


def timestep_weights(train: TrainSection) -> Tensor | None:
    """Weights of the loss at each index, (1000,) fp32 with mean 1; None where all are 1.

    `timestep_type: weighted` is high where FLUX's loss is small but matters, `linear_timesteps` a bell,
    w(i) = exp(-2 (i/1000 - 1/2)²) shifted to minimum 0, `linear_timesteps2` the same, flat on its low-noise half.

    Numerics: `weighted` is within 1.5 % of ai-toolkit's at each index, 0.2 % on average.
    """
    if train.timestep_type == "weighted":
        at, values = zip(*WEIGHTED, strict=True)
        return torch.from_numpy(np.interp(np.arange(TABLE_SIZE), at, values)).float()
    if not (train.linear_timesteps or train.linear_timesteps2):
        return None
    place = torch.arange(TABLE_SIZE, dtype=torch.float32) / TABLE_SIZE
    bell = torch.exp(-2 * (place - 0.5) ** 2)
    bell = bell - bell.min()
    bell = bell / bell.mean()
    if train.linear_timesteps2:
        bell[TABLE_SIZE // 2 :] = bell.max()
    return bell


@contextmanager
def bypassed_guidance(transformer: nn.Module, bypass: bool = True) -> Iterator[None]:
    """Leave the guidance embedding out of the conditioning (`train.bypass_guidance_embedding`): it embeds zeros."""
    embed = getattr(transformer, "time_guidance_embed", None) or getattr(transformer, "time_text_embed", None)
    embedder = getattr(embed, "guidance_embedder", None)
    if embedder is None or not bypass:
        yield
        return
    with embedder.register_forward_hook(lambda *call: torch.zeros_like(call[-1])):  # removed at the end
        yield


def losses_of(
    transformer: nn.Module, drawn: Mapping[str, Tensor], dtype: torch.dtype, loss_type: str = "mse"
) -> Tensor:
    """The loss of each sample of `Objective.draw`'s result, (B,) fp32."""
    latents, noise, sigmas = drawn["latents"], drawn["noise"], drawn["sigmas"]
    sigma = sigmas.view(-1, 1, 1, 1)
    x_t = (1.0 - sigma) * latents + sigma * noise
    embeds, pooled = drawn["prompt_embeds"], drawn["pooled"]
    prediction = predict_velocity(transformer, x_t, sigmas, embeds, pooled, dtype=dtype)
    return sample_losses(prediction, latents, noise, drawn.get("weights"), drawn.get("mask"), loss_type)


@functools.cache  # the same for all steps of a bucket; captured steps need fixed addresses
@torch.inference_mode(False)
def _position_ids(
    flux2: bool,
    text: int,
    rows: int,
    columns: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Positions of text [L, n] and image tokens [T, n], fp32: FLUX.1 n = 3; FLUX.2 n = 4, time, row, column, text."""
    if not flux2:
        image = FluxPipeline._prepare_latent_image_ids(1, rows, columns, torch.device("cpu"), torch.float32)
        return torch.zeros(text, 3, device=device), to_device(image, device)
    image = torch.cartesian_prod(*map(torch.arange, (1, rows, columns, 1)))
    words = torch.zeros(text, 4)
    words[:, 3] = torch.arange(text)
    return to_device(words, device), to_device(image.float(), device)


def predict_velocity(
    transformer: nn.Module,
    x_t: Tensor,
    sigmas: Tensor,
    prompt_embeds: Tensor,
    pooled_embeds: Tensor,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """Run a transformer of FLUX.1 or FLUX.2 on noisy latents; returns the predicted noise - x0, (B, C, H, W) fp32.

    x_t is (B, C, H, W), H and W even; sigmas (B,); prompt_embeds (B, L, D); pooled_embeds (B, P), not in FLUX.2.
    """
    batch, channels, height, width = x_t.shape
    device = x_t.device
    flux2 = type(transformer).__name__ == "Flux2Transformer2DModel"
    text_ids, image_ids = _position_ids(flux2, prompt_embeds.shape[1], height // 2, width // 2, device)
    embedded = transformer.config.get("guidance_embeds", True) if flux2 else transformer.config.guidance_embeds
    inputs = {
        "timestep": sigmas,
        "encoder_hidden_states": prompt_embeds.to(device, dtype),
        "txt_ids": text_ids,
        "img_ids": image_ids,
        "guidance": torch.full((batch,), TRAIN_GUIDANCE, device=device) if embedded else None,
        "return_dict": False,
    }
    if flux2:
        patches = pixel_unshuffle(x_t, 2)
        packed = patches.flatten(2).transpose(1, 2).to(dtype)
        out = transformer(hidden_states=packed, **inputs)[0]
        return pixel_shuffle(out.transpose(1, 2).reshape(patches.shape), 2).float()
    packed = FluxPipeline._pack_latents(x_t.to(dtype), batch, channels, height, width)
    out = transformer(hidden_states=packed, pooled_projections=pooled_embeds.to(device, dtype), **inputs)[0]
    return FluxPipeline._unpack_latents(out, height, width, vae_scale_factor=1).float()


def sample_losses(
    prediction: Tensor,
    latents: Tensor,
    noise: Tensor,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    loss_type: str = "mse",
) -> Tensor:
    """The mean error of each sample, (B,) fp32, times its weight; the training loss is their mean.

    prediction, latents and noise are (B, C, H, W), weights (B,), mask (B, 1, H, W) with mean 1. Of
    d = prediction - target `mse` is d², `mae` |d|, `pseudo_huber` sqrt(d² + c²) - c with c = 0.01.
    """
    difference = prediction.float() - (noise.float() - latents.float())
    if loss_type == "mse":
        errors = difference.square()
    elif loss_type == "mae":
        errors = difference.abs()
    else:
        errors = (difference.square() + HUBER_WIDTH**2).sqrt() - HUBER_WIDTH
    loss = (errors if mask is None else errors * mask).mean(dim=(1, 2, 3))
    return loss if weights is None else loss * weights
