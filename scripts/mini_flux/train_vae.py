"""Trains the mini-FLUX's VAE: L1 on pixels and on their differences, and a little KL."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor

from .models import build_vae
from .training_set import to_unit

__all__ = ["VAE_STEPS", "encode", "train_vae"]

VAE_STEPS = 3500
_BATCH, _LR, _KL = 16, 2e-3, 1e-6
_SHOWN_EVERY = 100


def train_vae(pixels: Tensor, steps: int, device: torch.device) -> AutoencoderKL:
    """Trains a VAE from the start.

    Args:
        pixels: uint8 [N, 3, H, W].
        steps: of 16 pictures.
        device: where.

    Returns:
        The VAE in eval mode, with the scaling and shift factor that give its latents mean 0 and variance 1.
    """
    torch.manual_seed(0)
    vae = build_vae().to(device)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=_LR, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LR, steps, pct_start=0.05)
    started = time.monotonic()
    for step in range(steps):
        x = to_unit(pixels[torch.randint(0, len(pixels), (_BATCH,))].to(device))
        with torch.autocast(device.type, torch.bfloat16):
            posterior = vae.encode(x).latent_dist
            y = vae.decode(posterior.sample()).sample
        loss = _loss(y.float(), x) + _KL * posterior.kl().float().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % _SHOWN_EVERY == 0:
            print(f"vae {step}/{steps}: loss {loss.item():.4f}, {time.monotonic() - started:.0f} s", flush=True)
    return _normalized(vae.eval(), pixels[:1024])


def _loss(y: Tensor, x: Tensor) -> Tensor:
    across = F.l1_loss(y.diff(dim=-1), x.diff(dim=-1))
    down = F.l1_loss(y.diff(dim=-2), x.diff(dim=-2))
    return F.l1_loss(y, x) + 0.5 * (across + down)


@torch.no_grad()
def _normalized(vae: AutoencoderKL, pixels: Tensor) -> AutoencoderKL:
    vae.register_to_config(shift_factor=0.0, scaling_factor=1.0)
    latents = encode(vae, pixels)
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1.0 / latents.std().item())
    return vae


@torch.no_grad()
def encode(vae: AutoencoderKL, pixels: Tensor) -> Tensor:
    """uint8 [N, 3, H, W] -> latents fp32 [N, 16, H/8, W/8] as the transformer sees them, on the CPU."""
    means = [vae.encode(to_unit(batch.to(vae.device))).latent_dist.mode().cpu() for batch in pixels.split(64)]
    return (torch.cat(means) - vae.config.shift_factor) * vae.config.scaling_factor
