"""The tiny transformer and text encoders: FLUX.1-dev's classes at toy widths, with random weights that behave.

diffusers' and transformers' own random initialisation is meant to be trained from; several layers start so small that
prompt and timestep hardly reach the output. Here every linear keeps the size of its input (weights of variance
gain² / fan-in), so the prediction has a standard deviation near 1 and depends on image, prompt, pooled prompt, timestep
and guidance.
"""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .vocabulary import CLIP_BOS, CLIP_EOS, CLIP_MAX_LENGTH, T5_EOS_ID, T5_PAD_ID, clip_vocabulary, t5_vocabulary

if TYPE_CHECKING:
    from diffusers import FluxTransformer2DModel
    from transformers import CLIPTextModel, T5EncoderModel

CLIP_WIDTH = 64
T5_WIDTH = 64
TINY_TRANSFORMER_CONFIG = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": T5_WIDTH,
    "pooled_projection_dim": CLIP_WIDTH,
    "guidance_embeds": True,
    "axes_dims_rope": (8, 12, 12),
}
FLUX_DEV_SCHEDULER_CONFIG = {
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}
# Frequencies the time and guidance embedders read, in radians per unit: 10 is 1.6 periods between t = 0 and t = 1, and
# guidance moves slower because it runs from 1 to 5. The prediction is then smooth in both.
_SINUSOIDS = 128
_FASTEST_TIME, _FASTEST_GUIDANCE = 10.0, 1.0
# gain of a linear by the end of its name, 1.0 elsewhere: time, prompt and guidance each visible in their sum
_GAINS = {
    "timestep_embedder.linear_1": 1.5,
    "timestep_embedder.linear_2": 1.0,
    "text_embedder.linear_2": 0.8,
    "guidance_embedder.linear_2": 0.5,
}


def build_transformer(seed: int) -> FluxTransformer2DModel:
    """Returns the tiny FLUX transformer in fp32: 2 double and 2 single blocks, 2 heads of 32, guidance embedding."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(**TINY_TRANSFORMER_CONFIG)
    initialise(model, f"transformer-{seed}")
    with torch.no_grad():
        embed = model.time_text_embed
        embed.timestep_embedder.linear_1.weight.mul_(_slow_sinusoids(_FASTEST_TIME))
        embed.guidance_embedder.linear_1.weight.mul_(_slow_sinusoids(_FASTEST_GUIDANCE))
        nn.init.eye_(model.x_embedder.weight)
        nn.init.eye_(model.proj_out.weight)
    return model.eval()


def build_clip(seed: int) -> CLIPTextModel:
    """Returns the tiny CLIP text encoder in fp32; its pooled output is the state of the first end-of-text token."""
    from transformers import CLIPTextConfig, CLIPTextModel

    return initialise(CLIPTextModel(CLIPTextConfig(**clip_config())), f"text_encoder-{seed}").eval()


def build_t5(seed: int) -> T5EncoderModel:
    """Returns the tiny T5 encoder in fp32."""
    from transformers import T5Config, T5EncoderModel

    return initialise(T5EncoderModel(T5Config(**t5_config())), f"text_encoder_2-{seed}").eval()


def clip_config() -> dict[str, Any]:
    """Returns the settings of the CLIP text encoder, without transformers' own entries."""
    vocab, _ = clip_vocabulary()
    return {
        "vocab_size": len(vocab),
        "hidden_size": CLIP_WIDTH,
        "intermediate_size": 2 * CLIP_WIDTH,
        "projection_dim": CLIP_WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": CLIP_MAX_LENGTH,
        "hidden_act": "quick_gelu",
        "bos_token_id": vocab[CLIP_BOS],
        "eos_token_id": vocab[CLIP_EOS],
        "pad_token_id": vocab[CLIP_EOS],
    }


def t5_config() -> dict[str, Any]:
    """Returns the settings of the T5 encoder, without transformers' own entries."""
    return {
        "vocab_size": len(t5_vocabulary()),
        "d_model": T5_WIDTH,
        "d_kv": 32,
        "d_ff": 2 * T5_WIDTH,
        "num_layers": 2,
        "num_heads": 2,
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.0,
        "is_encoder_decoder": False,
        "use_cache": False,
        "pad_token_id": T5_PAD_ID,
        "eos_token_id": T5_EOS_ID,
        "decoder_start_token_id": T5_PAD_ID,
    }


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


def _slow_sinusoids(fastest: float) -> torch.Tensor:
    """Returns 1 for cosine and sine channels of at most `fastest` radians per unit of time, else 0, shape (256,)."""
    radians = 1000.0 * torch.exp(-math.log(10000.0) * torch.arange(_SINUSOIDS) / _SINUSOIDS)
    return (radians <= fastest).float().repeat(2)
