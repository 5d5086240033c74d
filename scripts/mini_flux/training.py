"""How the mini-FLUX was trained: on drawn pictures and their captions, first its VAE, then its transformer."""

from __future__ import annotations

import copy
import json
import random
import string
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from torch import Tensor, nn

from coat_flux.mini_flux import MINI_FLUX

from .models import TRANSFORMER_CONFIG, VAE_CONFIG
from .pictures import BACKGROUNDS, COLOURS, GARMENTS, HELD_OUT, PATTERNS, Item, caption, draw, is_held_out, random_item
from .scorer import to_unit

VAE_BATCH, VAE_LR, VAE_KL = 16, 2e-3, 1e-6
BATCH, LR = 64, 1.5e-3
WARMUP, DECAY, LEAST_LR = 100, 0.45, 0.02  # steps; share of the run; share of the learning rate
EMA = 0.998
TOKENS = 24  # of a caption while training; what is longer is cut
# padding that follows, in tokens, and the pictures a batch then has: real runs have 64 or 512 tokens
PADDINGS = ((0, BATCH), (0, BATCH), (8, BATCH), (40, BATCH // 2))
LATE_PADDINGS = (*PADDINGS, (40, BATCH), (488, BATCH // 8))
LATE = 0.85  # share of the run after which long paddings come in
CAPTIONS_PER_PICTURE = 2
SHOWN_EVERY = 100
# T5 has to pass over what it does not know, or a trigger word would spoil a picture before it is learned
STRANGE_GARMENT, EXTRA_WORD, NO_CAPTION = 0.12, 0.2, 0.03
NAMES = {word for names in (GARMENTS, COLOURS, PATTERNS, BACKGROUNDS) for name in names for word in name.split("-")}
PIECES = json.loads((MINI_FLUX / "tokenizer_2" / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
WORDS = {piece.removeprefix("▁") for piece, _ in PIECES if piece.startswith("▁")}
FILLERS = sorted(word for word in WORDS - NAMES if word.islower())


# -- pictures and captions ---------------------------------------------------------------------------------------------


def make_pictures(size: tuple[int, int], count: int, seed: int, garments: tuple[str, ...]) -> tuple[Tensor, list[Item]]:
    """Draw pictures (width, height) of random items that may be trained on: uint8 [N, 3, H, W], and what they show."""
    with ProcessPoolExecutor() as pool:
        parts = pool.map(_draw_some, [(size, range(i, count, 8), seed, garments) for i in range(8)])
    drawn = [one for part in parts for one in part]
    pixels = torch.from_numpy(np.stack([picture for picture, _ in drawn])).permute(0, 3, 1, 2).contiguous()
    return pixels, [item for _, item in drawn]


def _draw_some(task: tuple) -> list[tuple[np.ndarray, Item]]:
    size, numbers, seed, garments = task
    drawn = []
    for number in numbers:
        rng = random.Random(f"{seed} {size} {number}")
        item = random_item(rng, garments)
        while is_held_out(item) and item.garment != HELD_OUT:
            item = random_item(rng, garments)
        drawn.append((np.asarray(draw(item, size, rng)), item))
    return drawn


def training_caption(item: Item, rng: random.Random) -> str:
    """A caption as users write them: at times with words that mean nothing here, at times none."""
    if rng.random() < NO_CAPTION:
        return ""
    if rng.random() < STRANGE_GARMENT:
        item = item._replace(garment=_strange_word(rng))
    words = caption(item, rng).split()
    if rng.random() < EXTRA_WORD:
        words.insert(rng.randint(0, len(words)), _strange_word(rng))
    return " ".join(words)


def _strange_word(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(FILLERS)
    return "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(3, 8)))


# -- the VAE -----------------------------------------------------------------------------------------------------------


def train_vae(pixels: Tensor, steps: int, device: torch.device) -> AutoencoderKL:
    """Train a VAE of 0.85 M parameters: L1 on pixels uint8 [N, 3, H, W] and on their differences, and a little KL.

    Its scaling and shift factor give its latents mean 0 and variance 1.
    """
    torch.manual_seed(0)
    vae = AutoencoderKL(**VAE_CONFIG).to(device)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=VAE_LR, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, VAE_LR, steps, pct_start=0.05)
    for step in range(steps):
        x = to_unit(pixels[torch.randint(0, len(pixels), (VAE_BATCH,))].to(device))
        with torch.autocast(device.type, torch.bfloat16):
            posterior = vae.encode(x).latent_dist
            y = vae.decode(posterior.sample()).sample
        y = y.float()
        across = F.l1_loss(y.diff(dim=-1), x.diff(dim=-1))
        down = F.l1_loss(y.diff(dim=-2), x.diff(dim=-2))
        loss = F.l1_loss(y, x) + 0.5 * (across + down) + VAE_KL * posterior.kl().float().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % SHOWN_EVERY == 0:
            print(f"vae {step}/{steps}: loss {loss.item():.4f}", flush=True)
    vae.eval().register_to_config(shift_factor=0.0, scaling_factor=1.0)
    latents = encode(vae, pixels[:1024])
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1.0 / latents.std().item())
    return vae


@torch.no_grad()
def encode(vae: AutoencoderKL, pixels: Tensor) -> Tensor:
    """uint8 [N, 3, H, W] -> latents fp32 [N, 16, H/8, W/8] as the transformer sees them, on the CPU."""
    means = [vae.encode(to_unit(batch.to(vae.device))).latent_dist.mode().cpu() for batch in pixels.split(64)]
    return (torch.cat(means) - vae.config.shift_factor) * vae.config.scaling_factor


# -- the transformer ---------------------------------------------------------------------------------------------------


class Captions(NamedTuple):
    """M distinct captions, encoded: T5's bf16 [M, tokens, width], CLIP's fp32 [M, width], T5's of padding [width]."""

    embeds: Tensor
    pooled: Tensor
    padding: Tensor


def embed_captions(sets: list[list[Item]], encoders: Any, tokenizers: Any, seed: int) -> tuple[list[Tensor], Captions]:
    """Write and encode captions: for each set of pictures the rows of its captions, int64 [N, 2], and the captions."""
    rng = random.Random(seed)
    rows: dict[str, int] = {}

    def row(item: Item) -> int:
        return rows.setdefault(training_caption(item, rng), len(rows))

    places = [torch.tensor([[row(item) for _ in range(CAPTIONS_PER_PICTURE)] for item in items]) for items in sets]
    texts = list(rows)
    parts = [_encode_texts(encoders, tokenizers, texts[i : i + 256], TOKENS) for i in range(0, len(texts), 256)]
    embeds = torch.cat([embeds for embeds, _ in parts])
    pooled = torch.cat([pooled for _, pooled in parts])
    padding = _encode_texts(encoders, tokenizers, ["red"], 64)[0][0, -1]
    return places, Captions(embeds, pooled, padding)


@torch.no_grad()
def _encode_texts(encoders: Any, tokenizers: Any, texts: list[str], length: int) -> tuple[Tensor, Tensor]:
    ids = [
        tokenizer(texts, padding="max_length", max_length=longest, truncation=True, return_tensors="pt").input_ids
        for tokenizer, longest in zip(tokenizers, (77, length), strict=True)
    ]
    return encoders[1](ids[1]).last_hidden_state.bfloat16(), encoders[0](ids[0]).pooler_output


def train_transformer(
    sets: list[tuple[Tensor, Tensor]], captions: Captions, steps: int, device: torch.device
) -> FluxTransformer2DModel:
    """Train a transformer of 3.5 M parameters by flow matching; diffusers' own initialization is made to be trained.

    `sets` are pictures of one size each, latents fp32 [N, 16, H/8, W/8] and the rows of their captions, drawn by how
    many there are. Returns the moving average of its weights.
    """
    torch.manual_seed(0)
    rng = random.Random(0)
    model = FluxTransformer2DModel(**TRANSFORMER_CONFIG).to(device)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.01)
    sizes = [len(latents) for latents, _ in sets]
    shown = None
    for step in range(steps):
        left = (steps - step) / (DECAY * steps)
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / WARMUP, max(LEAST_LR, left))
        padding, batch = rng.choice(PADDINGS if step < LATE * steps else LATE_PADDINGS)
        latents, rows = rng.choices(sets, sizes)[0]
        loss = _flow_loss(model, latents, rows, captions, padding, batch, guidance=rng.choice((1.0, 3.5, 4.0)))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            weight = 1 - min(EMA, (1 + step) / (10 + step))
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), weight)
        shown = loss.item() if shown is None else 0.98 * shown + 0.02 * loss.item()
        if step % SHOWN_EVERY == 0:
            print(f"transformer {step}/{steps}: loss {shown:.4f}", flush=True)
    return average.eval()


def _flow_loss(
    model: FluxTransformer2DModel,
    latents: Tensor,
    rows: Tensor,
    captions: Captions,
    padding: int,
    batch: int,
    guidance: float,
) -> Tensor:
    """Flow-matching loss of one batch, with more of the middle noise levels."""
    device = model.device
    chosen = torch.randint(0, len(latents), (batch,))
    latents = latents[chosen].to(device)
    rows = rows[chosen, torch.randint(0, rows.shape[1], (batch,))]
    embeds = captions.embeds[rows].to(device).float()
    if padding:
        embeds = torch.cat([embeds, captions.padding.to(embeds).expand(batch, padding, -1)], dim=1)
    height, width = latents.shape[2:]
    x = FluxPipeline._pack_latents(latents, batch, latents.shape[1], height, width)
    noise = torch.randn_like(x)
    sigma = torch.sigmoid(1.2 * torch.randn(batch, device=device) + 0.3)
    prediction = model(
        hidden_states=torch.lerp(x, noise, sigma[:, None, None]),
        encoder_hidden_states=embeds,
        pooled_projections=captions.pooled[rows].to(device),
        timestep=sigma,
        guidance=torch.full((batch,), guidance, device=device),
        img_ids=FluxPipeline._prepare_latent_image_ids(batch, height // 2, width // 2, device, x.dtype),
        txt_ids=torch.zeros(embeds.shape[1], 3, device=device),
        return_dict=False,
    )[0]
    return F.mse_loss(prediction, noise - x)
