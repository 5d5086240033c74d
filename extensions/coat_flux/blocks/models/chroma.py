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

from ..fused.forms import DoubleBlock, Reader, SingleBlock
from ..fused.linears import NotFusable
from ..fused.parts import Call, Shared
from ..fused.reading import (
    OncePerPass,
    Outside,
    ToolkitDouble,
    ToolkitSingle,
    feed_forward,
    read_double,
    read_single,
    toolkit_rotary,
)
from .family import BlockList, Family

# --- diffusers' class ---

OPTIONAL = ("image_rotary_emb", "attention_mask", "joint_attention_kwargs")


# the mask of pairs of tokens [B, 1, S, S] of a mask of tokens [B, S], multiplied as diffusers does
_pairs = OncePerPass(lambda mask, dtype: additive_mask(mask[:, None, None, :] * mask[:, None, :, None], dtype))


class _Reader(Reader):
    processor = "FluxAttnProcessor"

    def shared(self, image: Tensor, rotary: Any = None, mask: Tensor | None = None, kwargs: Any = None) -> Shared:
        self.check_call(rotary, kwargs)
        return Shared(*rotary, None if mask is None else _pairs(mask, compute_dtype(image)))


class _Double(_Reader):
    arguments = ("hidden_states", "encoder_hidden_states", "temb", *OPTIONAL)

    def call(self, image: Tensor, text: Tensor, temb: Tensor, *others: Any) -> Call:
        of_image, of_text = temb.flatten(1, 2).chunk(2, dim=1)
        return Call(image, text, self.shared(image, *others), None, (of_text, of_image))

    def read(self, block: Any, join: bool) -> DoubleBlock:
        if block.norm1.emb is not None or block.norm1_context.emb is not None:
            raise NotFusable("class embeddings in adaLN")
        text = Outside(None, block.norm1_context.norm, block.norm2_context, feed_forward(block.ff_context))
        image = Outside(None, block.norm1.norm, block.norm2, feed_forward(block.ff))
        return read_double(block.attn, text, image, join)


class _Single(_Reader):
    arguments = ("hidden_states", "temb", *OPTIONAL)

    def call(self, x: Tensor, temb: Tensor, *others: Any) -> Call:
        return Call(x, None, self.shared(x, *others), None, (temb.flatten(1, 2),))

    def read(self, block: Any, join: bool) -> SingleBlock:
        return read_single(block, None, join)


# --- ai-toolkit's class ---


# the additive mask of the first head, of a mask [B, H, S, S] that the model repeats for all of them
_one_head = OncePerPass(lambda mask, dtype: additive_mask(mask[:, :1], dtype))


def _toolkit_shared(image: Tensor, pe: Tensor, mask: Tensor | None) -> Shared:
    return Shared(*toolkit_rotary(pe), None if mask is None else _one_head(mask, compute_dtype(image)))


def _vectors(*found: Any) -> Tensor:
    """Shift, scale and gate [B, 1, D] of each ModulationOut, side by side [B, n·D]."""
    return torch.cat([part for each in found for part in (each.shift, each.scale, each.gate)], dim=1).flatten(1)


class _ToolkitDouble(ToolkitDouble):
    arguments = ("img", "txt", "pe", "distill_vec", "mask")

    def call(self, image: Tensor, text: Tensor, pe: Tensor, modulations: Any, mask: Any) -> Call:
        of_image, of_text = modulations
        return Call(image, text, _toolkit_shared(image, pe, mask), None, (_vectors(*of_text), _vectors(*of_image)))


class _ToolkitSingle(ToolkitSingle):
    arguments = ("x", "pe", "distill_vec", "mask")

    def call(self, x: Tensor, pe: Tensor, modulation: Any, mask: Any) -> Call:
        return Call(x, None, _toolkit_shared(x, pe, mask), None, (_vectors(modulation),))


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
