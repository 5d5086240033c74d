"""Trains the mini-FLUX's transformer by flow matching, on latents and captions."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from diffusers import FluxPipeline, FluxTransformer2DModel
from torch import Tensor, nn

from .models import build_transformer
from .training_set import training_caption

__all__ = ["TRANSFORMER_STEPS", "Shape", "Texts", "embed_captions", "train_transformer"]

TRANSFORMER_STEPS = 3000
_BATCH, _LR = 64, 1.5e-3
_WARMUP, _DECAY, _LEAST_LR = 100, 0.45, 0.02  # steps; share of the run; share of the learning rate
_EMA = 0.998
_TOKENS = 24  # of a caption while training; what is longer is cut
# padding that follows, in tokens, and the pictures a batch then has: real runs have 64 or 512 tokens
_PADDINGS = ((0, _BATCH), (0, _BATCH), (8, _BATCH), (40, _BATCH // 2))
_LATE_PADDINGS = (*_PADDINGS, (40, _BATCH), (488, _BATCH // 8))
_LATE = 0.85  # share of the run after which long paddings come in
_CAPTIONS_PER_PICTURE = 2
_SHOWN_EVERY, _KEPT_EVERY = 50, 500


class Shape(NamedTuple):
    """Pictures of one size.

    Attributes:
        latents: fp32 [N, 16, H/8, W/8].
        captions: int64 [N, captions a picture has], rows of `Texts`.
    """

    latents: Tensor
    captions: Tensor


class Texts(NamedTuple):
    """Distinct captions, encoded.

    Attributes:
        embeds: T5's, bf16 [M, tokens, width].
        pooled: CLIP's, fp32 [M, width].
        padding: T5's embedding of padding far behind the caption, [width].
    """

    embeds: Tensor
    pooled: Tensor
    padding: Tensor


def embed_captions(items: list[list[Any]], encoders: Any, tokenizers: Any, seed: int) -> tuple[list[Tensor], Texts]:
    """Writes and encodes the captions of several picture sets.

    Args:
        items: what the pictures of each set show.
        encoders: CLIP and T5.
        tokenizers: of both.
        seed: of the captions.

    Returns:
        For each set the rows of its pictures' captions, int64 [N, 2], and the captions.
    """
    rng, rows = random.Random(seed), {}

    def row(item: Any) -> int:
        return rows.setdefault(training_caption(item, rng), len(rows))

    places = [torch.tensor([[row(item) for _ in range(_CAPTIONS_PER_PICTURE)] for item in one]) for one in items]
    texts = list(rows)
    parts = [_encode(encoders, tokenizers, texts[i : i + 256], _TOKENS) for i in range(0, len(texts), 256)]
    padding = _encode(encoders, tokenizers, ["red"], 64)[0][0, -1]
    return places, Texts(
        torch.cat([embeds for embeds, _ in parts]), torch.cat([pooled for _, pooled in parts]), padding
    )


@torch.no_grad()
def _encode(encoders: Any, tokenizers: Any, texts: list[str], length: int) -> tuple[Tensor, Tensor]:
    ids = [
        tokenizer(texts, padding="max_length", max_length=longest, truncation=True, return_tensors="pt").input_ids
        for tokenizer, longest in zip(tokenizers, (77, length), strict=True)
    ]
    return encoders[1](ids[1]).last_hidden_state.bfloat16(), encoders[0](ids[0]).pooler_output


def train_transformer(
    shapes: list[Shape],
    texts: Texts,
    steps: int,
    device: torch.device,
    keep: Callable[[FluxTransformer2DModel], None],
) -> FluxTransformer2DModel:
    """Trains a transformer from the start; shapes are drawn by how many pictures they have.

    Args:
        shapes: what is learnt.
        texts: its captions.
        steps: of 64 pictures.
        device: where.
        keep: called with the moving average now and then.

    Returns:
        The moving average of its weights, in eval mode.
    """
    torch.manual_seed(0)
    rng = random.Random(0)
    model = build_transformer().to(device)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, betas=(0.9, 0.99), weight_decay=0.01)
    sizes = [len(shape.latents) for shape in shapes]
    started, shown = time.monotonic(), None
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _LR * _schedule(step, steps)
        padding, batch = rng.choice(_PADDINGS if step < _LATE * steps else _LATE_PADDINGS)
        loss = _loss(model, rng.choices(shapes, sizes)[0], texts, padding, batch, rng.choice((1.0, 3.5, 4.0)))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        _follow(average, model, min(_EMA, (1 + step) / (10 + step)))
        shown = loss.item() if shown is None else 0.98 * shown + 0.02 * loss.item()
        if step % _KEPT_EVERY == _KEPT_EVERY - 1:
            keep(average)
        if step % _SHOWN_EVERY == 0:
            seconds = time.monotonic() - started
            print(f"transformer {step}/{steps}: loss {shown:.4f}, {seconds:.0f} s", flush=True)
    return average.eval()


def _schedule(step: int, steps: int) -> float:
    left = (steps - step) / (_DECAY * steps)
    return min(1.0, (step + 1) / _WARMUP, max(_LEAST_LR, left))


def _loss(
    model: FluxTransformer2DModel, shape: Shape, texts: Texts, padding: int, batch: int, guidance: float
) -> Tensor:
    """Flow-matching loss of one batch, with more of the middle noise levels."""
    device = model.device
    chosen = torch.randint(0, len(shape.latents), (batch,))
    latents = shape.latents[chosen].to(device)
    rows = shape.captions[chosen, torch.randint(0, shape.captions.shape[1], (batch,))]
    embeds = texts.embeds[rows].to(device).float()
    if padding:
        embeds = torch.cat([embeds, texts.padding.to(embeds).expand(batch, padding, -1)], dim=1)
    height, width = latents.shape[2:]
    x = FluxPipeline._pack_latents(latents, batch, latents.shape[1], height, width)
    noise = torch.randn_like(x)
    sigma = torch.sigmoid(1.2 * torch.randn(batch, device=device) + 0.3)
    prediction = model(
        hidden_states=torch.lerp(x, noise, sigma[:, None, None]),
        encoder_hidden_states=embeds,
        pooled_projections=texts.pooled[rows].to(device),
        timestep=sigma,
        guidance=torch.full((batch,), guidance, device=device),
        img_ids=FluxPipeline._prepare_latent_image_ids(batch, height // 2, width // 2, device, x.dtype),
        txt_ids=torch.zeros(embeds.shape[1], 3, device=device),
        return_dict=False,
    )[0]
    return F.mse_loss(prediction, noise - x)


@torch.no_grad()
def _follow(average: nn.Module, model: nn.Module, decay: float) -> None:
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)
