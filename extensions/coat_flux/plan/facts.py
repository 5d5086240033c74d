"""Facts about models and cards that `plan` may not download: configs of FLUX models, GPUs' memory and rates.

Sources: the models' published config.json files; NVIDIA's datasheets and architecture papers (dense rates, fp32
accumulation); the RTX 4070 Ti and 4080 scaled from the RTX 4090 by cores and clock.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from ..base.errors import UserError
from ..config.findings import closest
from ..mini_flux.geometry import FLUX_DEV_TRANSFORMER_CONFIG

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
# FLUX.2 klein: of ai-toolkit's and of the text encoders' published configs
FLUX2_VAE: dict[str, Any] = {"block_out_channels": (128, 256, 512, 512), "latent_channels": 32, "layers_per_block": 2}


def _klein(heads: int, double: int, single: int, text: dict[str, int]) -> dict[str, dict[str, Any]]:
    transformer = {"in_channels": 128, "num_layers": double, "num_single_layers": single, "guidance_embeds": False}
    transformer |= {"attention_head_dim": 128, "num_attention_heads": heads, "axes_dims_rope": (32, 32, 32, 32)}
    qwen = {"model_type": "qwen3", "vocab_size": 151936, "num_hidden_layers": 36, "num_attention_heads": 32}
    qwen |= {"num_key_value_heads": 8, "head_dim": 128, **text}
    transformer["joint_attention_dim"] = 3 * text["hidden_size"]
    return {"transformer": transformer, "vae": FLUX2_VAE, "text_encoder": qwen}


_KLEIN_4B = _klein(24, 5, 20, {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True})
_KLEIN_9B = _klein(32, 8, 24, {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False})
TEXT_TOKENS = 512
_FLUX1 = {"vae": FLUX_VAE, "text_encoder": CLIP_L, "text_encoder_2": T5_XXL}
HUB_MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "black-forest-labs/FLUX.1-dev": {"transformer": FLUX_DEV_TRANSFORMER_CONFIG, **_FLUX1},
    "black-forest-labs/FLUX.1-schnell": {
        "transformer": {**FLUX_DEV_TRANSFORMER_CONFIG, "guidance_embeds": False},
        **_FLUX1,
    },
    **{f"black-forest-labs/FLUX.2-klein-{base}4B": _KLEIN_4B for base in ("", "base-")},
    **{f"black-forest-labs/FLUX.2-klein-{base}9B": _KLEIN_9B for base in ("", "base-")},
}


@dataclass(frozen=True)
class Card:
    """A GPU memory size in 1e9 bytes, as cards are sold, and the rates of one GPU that has it."""

    gb: float
    name: str = ""  # empty if no GPU is meant
    bf16_tflops: float = 0.0  # dense matrix products with fp32 accumulation, 1e12 operations a second
    fp8_tflops: float = 0.0  # 0 if the GPU has none
    copied_gb: float = 25.0  # 1e9 bytes a second from pinned CPU memory: four fifths of its PCIe link's rate
    gb_per_second: float = 0.0  # memory traffic; 0 if not needed
    multiprocessors: int = 0  # likewise


CARDS = (
    Card(8, "RTX 4060 Ti", 44.1, 88.3, 12.5),
    Card(10, "RTX 3080", 59.5),
    Card(12, "RTX 4070 Ti", 80.2, 160.4),
    Card(16, "RTX 4080", 97.5, 194.9),
    Card(24, "RTX 4090", 165.2, 330.3, gb_per_second=1008.0, multiprocessors=128),
    Card(32, "RTX 5090", 209.5, 419.0, 50.0, 1792.0, 170),
    Card(48, "L40S", 362.0, 733.0, gb_per_second=864.0),
    Card(80, "H100", 989.4, 1978.9, 50.0, 3350.0, 132),
    Card(141, "H200", 989.4, 1978.9, 50.0, 4800.0, 132),
)

_MOST_GB = 1000  # above it a bare number is a card's name
# GB → cards by name; of several sizes the smallest, since "A100 80GB" says more
_NAMES = {
    8: "4060ti 5060ti",
    10: "3080",
    11: "2080ti",
    12: "3060 3080ti 4070 4070super 4070ti 5070",
    16: "4070tisuper 4080 4080super 4090laptop 5070ti 5080 t4 v100 a4000",
    20: "4000ada",
    24: "3090 3090ti 4090 4090d 5090laptop a10 a10g a30 l4 p40 a5000 titan pro4000",
    32: "5090 5090d 5000ada pro4500",
    40: "a100 a800",
    48: "a40 l40 l40s a6000 6000ada pro5000",
    80: "h100 h800",
    96: "h20 gh200 pro6000",
    141: "h200",
    180: "b200",
}
_MEMORY = {name: gb for gb, names in _NAMES.items() for name in names.split()}
_RATED = (*CARDS, Card(24, "RTX 3090", 71.0), Card(40, "A100", 312.0))  # the last two multiply no FP8
_NO_NAME = re.compile(r"nvidia|geforce|rtx|quadro|tesla|generation|blackwell|gpu|vram|sxm\d?|pcie|nvl|hbm\w*|[^a-z0-9]")
_SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?) ?gi?b?\b")


def find_card(text: str) -> Card:
    """Parse memory in GB, a name or both, such as `24`, `24GB`, `RTX 4090`, `A100 80GB`; raises UserError."""
    low = text.casefold().strip()
    size, name = _SIZE.search(low), _NO_NAME.sub("", _SIZE.sub("", low))
    if re.fullmatch(r"\d+(\.\d+)?", low) and name not in _MEMORY:
        size, name = re.match(r"(.+)", low), ""
    gb = float(size[1]) if size else float(_MEMORY.get(name, 0))
    if (name and name not in _MEMORY) or not 0 < gb < _MOST_GB:
        near = closest(name, _MEMORY) if name else None
        remedy = f"did you mean {near}?" if near else "write a name, such as 4090"
        raise UserError(f"--gpu {text!r}: must be a card's memory in GB, above 0, such as 24, or its name; {remedy}")
    if not name:
        return next((card for card in CARDS if card.gb == gb), Card(gb))
    rated = next((card for card in _RATED if _NO_NAME.sub("", card.name.casefold()) == name), Card(gb, name.upper()))
    return replace(rated, gb=gb)
