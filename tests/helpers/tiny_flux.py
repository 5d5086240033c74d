"""A tiny FLUX.1: its real classes at toy widths, with random weights that behave.

diffusers' own initialization starts so small that prompt and timestep hardly reach the output. Here every linear keeps
the size of its input, so the prediction has a standard deviation near 1 and depends on all inputs.
"""

import functools
import math
import shutil
import tempfile
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from torch import nn
from transformers import T5Config, T5EncoderModel

from coat_flux.mini_flux import MINI_FLUX
from scripts.mini_flux.folder import write_flux
from scripts.mini_flux.models import TRANSFORMER_CONFIG, VAE_CONFIG, build_clip, clip_config, initialise, t5_config

T5_WIDTH = 64
TINY_TRANSFORMER_CONFIG = {
    **TRANSFORMER_CONFIG, "num_layers": 2, "num_single_layers": 2, "num_attention_heads": 2,
    "joint_attention_dim": T5_WIDTH,
}  # fmt: skip
# Frequencies the time and guidance embedders read, in radians per unit: 10 is 1.6 periods between t = 0 and t = 1, and
# guidance moves slower because it runs from 1 to 5. The prediction is then smooth in both.
SINUSOIDS = 128
FASTEST_TIME, FASTEST_GUIDANCE = 10.0, 1.0


def build_transformer(seed: int) -> nn.Module:
    """The transformer in fp32: 2 double and 2 single blocks, 2 heads of 32, guidance embedding."""
    model = FluxTransformer2DModel(**TINY_TRANSFORMER_CONFIG)
    initialise(model, f"transformer-{seed}")
    with torch.no_grad():
        embed = model.time_text_embed
        embed.timestep_embedder.linear_1.weight.mul_(_slow_sinusoids(FASTEST_TIME))
        embed.guidance_embedder.linear_1.weight.mul_(_slow_sinusoids(FASTEST_GUIDANCE))
        nn.init.eye_(model.x_embedder.weight)
        nn.init.eye_(model.proj_out.weight)
    return model.eval()


def make_tiny_flux(folder: Path | str, seed: int = 0) -> Path:
    """Write the model in diffusers layout, about 2 MB; the same seed gives the same bytes."""
    folder = Path(folder).resolve()
    if not folder.exists():
        shutil.copytree(Path(_made(seed).name) / "model", folder)
    return folder


@functools.cache
def _made(seed: int) -> tempfile.TemporaryDirectory[str]:
    texts = t5_config(T5_WIDTH, 2)
    t5 = initialise(T5EncoderModel(T5Config(**texts)), f"text_encoder_2-{seed}").eval()
    vae = AutoencoderKL.from_pretrained(MINI_FLUX, subfolder="vae")
    scratch = tempfile.TemporaryDirectory(prefix="tiny-flux-")
    write_flux(
        Path(scratch.name) / "model",
        transformer=(build_transformer(seed), TINY_TRANSFORMER_CONFIG),
        vae=(vae, {key: vae.config[key] for key in VAE_CONFIG}),
        clip=(build_clip(seed), clip_config()),
        t5=(t5, texts),
    )
    return scratch


def _slow_sinusoids(fastest: float) -> torch.Tensor:
    """1 for cosine and sine channels of at most `fastest` radians per unit of time, else 0, shape (256,)."""
    radians = 1000.0 * torch.exp(-math.log(10000.0) * torch.arange(SINUSOIDS) / SINUSOIDS)
    return (radians <= fastest).float().repeat(2)
