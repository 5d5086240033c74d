"""Facts about models and cards that `plan` may not download: FLUX.1's configs, GPUs' memory and rates.

Sources: the models' published config.json files; NVIDIA's datasheets (dense rates, fp32 accumulation), those of the RTX
4070 Ti and 4080 from the RTX 4090's by cores and clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..tiny_flux.geometry import FLUX_DEV_TRANSFORMER_CONFIG

FLUX_VAE: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "act_fn": "silu",
    "latent_channels": 16,
    "norm_num_groups": 32,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "mid_block_add_attention": True,
}
CLIP_L: dict[str, Any] = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "projection_dim": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
}
T5_XXL: dict[str, Any] = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
    "is_encoder_decoder": False,
    "use_cache": False,
}
TEXT_TOKENS = 512
HUB_MODELS: dict[str, dict[str, Any]] = {
    "black-forest-labs/FLUX.1-dev": FLUX_DEV_TRANSFORMER_CONFIG,
    "black-forest-labs/FLUX.1-schnell": {**FLUX_DEV_TRANSFORMER_CONFIG, "guidance_embeds": False},
}


@dataclass(frozen=True)
class Card:
    """A size of GPU memory, and the rates of one GPU that has it.

    Attributes:
        gb: memory in 1e9 bytes, as cards are sold.
        name: of that GPU; empty where none is meant.
        bf16_tflops: dense bf16 matrix products with fp32 accumulation, 1e12 operations a second.
        fp8_tflops: the same in FP8; 0 where the GPU has none.
    """

    gb: float
    name: str = ""
    bf16_tflops: float = 0.0
    fp8_tflops: float = 0.0


CARDS = (
    Card(12, "RTX 4070 Ti", 80.2, 160.4),
    Card(16, "RTX 4080", 97.5, 194.9),
    Card(24, "RTX 4090", 165.2, 330.3),
    Card(32, "RTX 5090", 209.5, 419.0),
    Card(48, "L40S", 362.0, 733.0),
    Card(80, "H100", 989.4, 1978.9),
    Card(141, "H200", 989.4, 1978.9),
)
