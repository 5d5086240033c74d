"""Chroma: FLUX.1's blocks, whose modulation the model makes for all of them, with a mask of padded text.

There are two classes of them: diffusers', and ai-toolkit's own in the layout of the original, where one linear makes q,
k and v (and what the MLP reads) and streams come in another order.
Sources: diffusers models/transformers/transformer_chroma.py; ai-toolkit
extensions_built_in/diffusion_models/chroma/src/layers.py, also in Chroma Radiance.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coat_core.linear.function import compute_dtype
from coat_core.ops.attention import additive_mask

from ..fused.forms import shared_of
from ..fused.parts import Call
from ..fused.reading import (
    DiffusersDouble,
    DiffusersSingle,
    ToolkitDouble,
    ToolkitSingle,
    once_per_pass,
    toolkit_rotary,
)
from .family import BlockList, Family

# --- diffusers' class ---

OPTIONAL = ("image_rotary_emb", "attention_mask", "joint_attention_kwargs")


# the mask of pairs of tokens [B, 1, S, S] of a mask of tokens [B, S], multiplied as diffusers does
_pairs = once_per_pass(lambda mask, dtype: additive_mask(mask[:, None, None, :] * mask[:, None, :, None], dtype))


class _Double(DiffusersDouble):
    processor = "FluxAttnProcessor"
    arguments = ("hidden_states", "encoder_hidden_states", "temb", *OPTIONAL)

    def call(
        self, image: Tensor, text: Tensor, temb: Tensor, rotary: Any = None, mask: Any = None, kwargs: Any = None
    ) -> Call:
        of_image, of_text = temb.flatten(1, 2).chunk(2, dim=1)
        shared = shared_of(rotary, kwargs, _pairs(mask, compute_dtype(image)))
        return Call(image, text, shared, None, (of_text, of_image))


class _Single(DiffusersSingle):
    processor = "FluxAttnProcessor"
    arguments = ("hidden_states", "temb", *OPTIONAL)

    def call(self, x: Tensor, temb: Tensor, rotary: Any = None, mask: Any = None, kwargs: Any = None) -> Call:
        shared = shared_of(rotary, kwargs, _pairs(mask, compute_dtype(x)))
        return Call(x, None, shared, None, (temb.flatten(1, 2),))


# --- ai-toolkit's class ---


# the additive mask of the first head, of a mask [B, H, S, S] that the model repeats for all of them
_one_head = once_per_pass(lambda mask, dtype: additive_mask(mask[:, :1], dtype))


def _vectors(*found: Any) -> Tensor:
    """Shift, scale and gate [B, 1, D] of each ModulationOut, side by side [B, n·D]."""
    return torch.cat([part for each in found for part in (each.shift, each.scale, each.gate)], dim=1).flatten(1)


class _ToolkitDouble(ToolkitDouble):
    arguments = ("img", "txt", "pe", "distill_vec", "mask")

    def call(self, image: Tensor, text: Tensor, pe: Tensor, modulations: Any, mask: Any) -> Call:
        of_image, of_text = modulations
        shared = shared_of(toolkit_rotary(pe), None, _one_head(mask, compute_dtype(image)))
        return Call(image, text, shared, None, (_vectors(*of_text), _vectors(*of_image)))


class _ToolkitSingle(ToolkitSingle):
    arguments = ("x", "pe", "distill_vec", "mask")

    def call(self, x: Tensor, pe: Tensor, modulation: Any, mask: Any) -> Call:
        shared = shared_of(toolkit_rotary(pe), None, _one_head(mask, compute_dtype(x)))
        return Call(x, None, shared, None, (_vectors(modulation),))


CHROMA = Family(
    "ChromaTransformer2DModel",
    (
        BlockList("transformer_blocks", "ChromaTransformerBlock", _Double(), fused_bytes=12.5),
        BlockList("single_transformer_blocks", "ChromaSingleTransformerBlock", _Single(), fused_bytes=10.4),
    ),
    pipelines={"ChromaPipeline": ("chroma",)},
)
CHROMA_OF_TOOLKIT = Family(
    "Chroma",
    (
        BlockList("double_blocks", "DoubleStreamBlock", _ToolkitDouble(), fused_bytes=12.5),
        BlockList("single_blocks", "SingleStreamBlock", _ToolkitSingle(), fused_bytes=10.4),
    ),
    archs=("chroma", "chroma_radiance"),
)
