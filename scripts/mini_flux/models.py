"""The parts of the mini-FLUX before training: FLUX.1's real classes, small.

The text encoders are not trained. CLIP is random; T5 is random but for its attention, which is set by hand so that each
of its four heads reads one neighbour of a token. An adjective thereby colours the embedding of its noun, at any
position and whatever padding follows.
"""

from __future__ import annotations

import json
import math
import zlib
from typing import Any

import torch
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from coat_flux.blocks.models.family import own_entries
from coat_flux.mini_flux import MINI_FLUX

CLIP_WIDTH, T5_WIDTH = 64, 128
T5_TOKENS = 64  # the tokenizer's limit; a caption has about 15
VAE_CONFIG = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (16, 32, 48, 64),
    "layers_per_block": 1,
    "act_fn": "silu",
    "latent_channels": 16,
    "norm_num_groups": 8,
    "sample_size": 64,
    "scaling_factor": 0.3611,  # this and the next one are measured after training
    "shift_factor": 0.1159,
    "force_upcast": True,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "mid_block_add_attention": False,
}
TRANSFORMER_CONFIG = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 3,
    "num_single_layers": 6,
    "attention_head_dim": 32,
    "num_attention_heads": 4,
    "joint_attention_dim": T5_WIDTH,
    "pooled_projection_dim": CLIP_WIDTH,
    "guidance_embeds": True,
    "axes_dims_rope": (8, 12, 12),
}
# gain of a linear by the end of its name, 1.0 elsewhere: time, prompt and guidance each visible in their sum
_GAINS = {
    "timestep_embedder.linear_1": 1.5,
    "text_embedder.linear_2": 0.8,
    "guidance_embedder.linear_2": 0.5,
}
_NEIGHBOURS = (-1, -2, 1, 2)  # one for each head


def build_clip(seed: int) -> CLIPTextModel:
    """Returns the tiny CLIP text encoder in fp32; its pooled output is the state of the first end-of-text token."""
    return initialise(CLIPTextModel(CLIPTextConfig(**clip_config())), f"text_encoder-{seed}").eval()


def clip_config() -> dict[str, Any]:
    """Returns the settings of the CLIP text encoder, without transformers' own entries."""
    return _settings("text_encoder")


def t5_config(width: int = T5_WIDTH, heads: int = 4) -> dict[str, Any]:
    """Returns the settings of the T5 encoder, without transformers' own entries."""
    return {**_settings("text_encoder_2"), "d_model": width, "d_ff": 2 * width, "num_heads": heads}


def _settings(part: str) -> dict[str, Any]:
    return own_entries(json.loads((MINI_FLUX / part / "config.json").read_text(encoding="utf-8")))


def initialise(model: nn.Module, key: str) -> nn.Module:
    """Fills `model` in place: linears N(0, gain²/fan-in), embeddings N(0, 1), norms 1, biases 0.

    Each tensor draws from a generator seeded by `key` and its own name, so neither the order of the modules nor the
    library's version changes a weight.
    """
    with torch.no_grad():
        for name, module in model.named_modules():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{key}.{name.removeprefix('text_model.')}".encode()))
            if isinstance(module, nn.Linear):
                gain = next((gain for end, gain in _GAINS.items() if name.endswith(end)), 1.0)
                module.weight.normal_(0.0, gain / math.sqrt(module.in_features), generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, nn.Embedding):
                module.weight.normal_(0.0, 1.0, generator=generator)
    return model


def build_text_encoders() -> tuple[CLIPTextModel, T5EncoderModel]:
    """CLIP and T5, frozen."""
    t5 = initialise(T5EncoderModel(T5Config(**t5_config())), "mini-text_encoder_2")
    with torch.no_grad():
        for block in t5.encoder.block:
            attention = block.layer[0].SelfAttention
            attention.q.weight.zero_()  # only the bias decides what is read
            attention.k.weight.zero_()
            attention.o.weight.mul_(2.0)
        attention = t5.encoder.block[0].layer[0].SelfAttention
        attention.relative_attention_bias.weight.fill_(-30.0)  # what a head does not read
        for head, offset in enumerate(_NEIGHBOURS):
            bucket = attention._relative_position_bucket(
                torch.tensor(offset),
                bidirectional=True,
                num_buckets=attention.relative_attention_num_buckets,
                max_distance=attention.relative_attention_max_distance,
            )
            attention.relative_attention_bias.weight[bucket, head] = 0.0
    return build_clip(0).requires_grad_(False), t5.eval().requires_grad_(False)
