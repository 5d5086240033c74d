"""The parts of the mini-FLUX before training: FLUX.1's real classes, small.

The text encoders are not trained. CLIP is random; T5 is random but for its attention, which is set by hand so that each
of its four heads reads one neighbour of a token. An adjective thereby colours the embedding of its noun, at any
position and whatever padding follows.
"""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from transformers import CLIPTextModel, T5Config, T5EncoderModel

from coat_flux.mini_flux import vae
from coat_flux.mini_flux.models import TINY_TRANSFORMER_CONFIG, build_clip, initialise, t5_config

__all__ = [
    "T5_TOKENS",
    "T5_WIDTH",
    "TRANSFORMER_CONFIG",
    "VAE_CONFIG",
    "build_text_encoders",
    "build_transformer",
    "build_vae",
    "t5_settings",
]  # fmt: skip

T5_WIDTH = 128
T5_TOKENS = 64  # the tokenizer's limit; a caption has about 15
VAE_CONFIG = {
    **vae.VAE_CONFIG,  # scaling and shift factor are measured after training
    "block_out_channels": (16, 32, 48, 64),
    "norm_num_groups": 8,
    "sample_size": 64,
    "mid_block_add_attention": False,
}
TRANSFORMER_CONFIG = {
    **TINY_TRANSFORMER_CONFIG,
    "num_layers": 3,
    "num_single_layers": 6,
    "num_attention_heads": 4,
    "joint_attention_dim": T5_WIDTH,
}
_SILENT = -30.0  # attention bias of what a head does not read
_NEIGHBOURS = (-1, -2, 1, 2)  # one for each head


def build_vae() -> AutoencoderKL:
    """The untrained VAE, 0.85 M parameters."""
    return AutoencoderKL(**VAE_CONFIG)


def build_transformer() -> FluxTransformer2DModel:
    """The untrained transformer, 3.5 M parameters: diffusers' own initialization is made to be trained."""
    return FluxTransformer2DModel(**TRANSFORMER_CONFIG)


def t5_settings() -> dict[str, object]:
    """The T5 encoder's config."""
    return {**t5_config(), "d_model": T5_WIDTH, "d_kv": T5_WIDTH // 4, "num_heads": 4, "d_ff": 2 * T5_WIDTH}


def build_text_encoders() -> tuple[CLIPTextModel, T5EncoderModel]:
    """CLIP and T5, frozen."""
    t5 = initialise(T5EncoderModel(T5Config(**t5_settings())), "mini-text_encoder_2")
    with torch.no_grad():
        for block in t5.encoder.block:
            attention = block.layer[0].SelfAttention
            attention.q.weight.zero_()  # only the bias decides what is read
            attention.k.weight.zero_()
            attention.o.weight.mul_(2.0)
        _read_neighbours(t5.encoder.block[0].layer[0].SelfAttention)
    return build_clip(0).requires_grad_(False), t5.eval().requires_grad_(False)


def _read_neighbours(attention: torch.nn.Module) -> None:
    attention.relative_attention_bias.weight.fill_(_SILENT)
    for head, offset in enumerate(_NEIGHBOURS):
        bucket = attention._relative_position_bucket(
            torch.tensor(offset),
            bidirectional=True,
            num_buckets=attention.relative_attention_num_buckets,
            max_distance=attention.relative_attention_max_distance,
        )
        attention.relative_attention_bias.weight[bucket, head] = 0.0
