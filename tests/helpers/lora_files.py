"""LoRA tensors of small FLUX shapes in diffusers' layout, as a run would save them."""

from collections.abc import Iterable

import torch
from torch import Tensor

from coat_flux.export.lora_files import height_of, place_of

HIDDEN = 64
OTHER_SIZE = 48  # of what is no multiple of the hidden size: embedders' inputs, the final layer's outputs

DOUBLE = (
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj")),
    *("attn.to_add_out", "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    *("norm1.linear", "norm1_context.linear"),
)
SINGLE = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp", "proj_out", "norm.linear")
OUTSIDE = (
    *("x_embedder", "context_embedder", "norm_out.linear", "proj_out"),
    *(f"time_text_embed.{kind}_embedder.linear_{i}" for kind in ("timestep", "text", "guidance") for i in (1, 2)),
)


def module_names(double: int = 1, single: int = 1) -> list[str]:
    """diffusers' names of the linears inside the blocks, in module order."""
    return [f"transformer_blocks.{i}.{name}" for i in range(double) for name in DOUBLE] + [
        f"single_transformer_blocks.{i}.{name}" for i in range(single) for name in SINGLE
    ]


def lora_tensors(
    modules: Iterable[str], rank: int = 2, dtype: torch.dtype = torch.float32, hidden: int = HIDDEN, seed: int = 0
) -> dict[str, Tensor]:
    """A nonzero LoRA: `transformer.<module>.lora_A.weight` [rank, in] and `.lora_B.weight` [out, rank]."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for module in modules:
        linear, part = place_of(module)
        width, height = linear.width * hidden or OTHER_SIZE, height_of(linear, part) * hidden or OTHER_SIZE
        tensors[f"transformer.{module}.lora_A.weight"] = torch.randn(rank, width, generator=draw).to(dtype)
        tensors[f"transformer.{module}.lora_B.weight"] = torch.randn(height, rank, generator=draw).to(dtype)
    return tensors
