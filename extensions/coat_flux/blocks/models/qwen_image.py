"""Qwen-Image and its editing models: double blocks alone, with their own modulations.

Rotations come as complex numbers, image and text apart, and the mask is one of text tokens.
Source: diffusers models/transformers/transformer_qwenimage.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from coat_core.linear.function import compute_dtype
from coat_core.ops.attention import additive_mask

from ..fused.forms import DoubleBlock, Reader, shared_of
from ..fused.linears import NotFusable, read_linear
from ..fused.parts import Call, Modulation
from ..fused.reading import Outside, complex_rotary, feed_forward, once_per_pass, read_double
from .family import BlockList, Family


@once_per_pass
def _mask(seen: Tensor, unmasked: int, dtype: torch.dtype) -> Tensor | None:
    """The additive mask [B, 1, 1, T + S] of a mask of its first tokens; None where it hides none, which is faster."""
    if seen.device.type != "meta" and bool(seen.all()):
        return None
    keys = torch.cat([seen.flatten(1).bool(), seen.new_ones(len(seen), unmasked, dtype=torch.bool)], dim=1)
    return additive_mask(keys[:, None, None, :], dtype)


def _modulation(layers: Any) -> Modulation:
    if len(layers) != 2 or type(layers[0]) is not nn.SiLU:
        raise NotFusable("a modulation of more than SiLU and a linear")
    return Modulation(read_linear(layers[1]))


class _Block(Reader):
    processor = "QwenDoubleStreamAttnProcessor2_0"
    arguments = (
        "hidden_states", "encoder_hidden_states", "encoder_hidden_states_mask", "temb", "image_rotary_emb",
        "joint_attention_kwargs", "modulate_index",
    )  # fmt: skip

    def call(
        self,
        image: Tensor,
        text: Tensor,
        seen: Any,
        temb: Tensor,
        rotary: Any = None,
        kwargs: Any = None,
        index: Any = None,
    ) -> Call:
        unmasked, kwargs = image.shape[1], dict(kwargs or {})
        if seen is None and "attention_mask" in kwargs:  # of diffusers 0.37 and 0.38
            seen, unmasked = kwargs.pop("attention_mask"), 0
        if index is not None:
            raise NotFusable("image tokens of one block with different modulations (zero_cond_t)")
        mask = _mask(seen, unmasked, compute_dtype(image))
        of_image, of_text = rotary or (None, None)
        return Call(image, text, shared_of(complex_rotary(of_text, of_image), kwargs, mask), temb)

    def read(self, block: Any, join: bool) -> DoubleBlock:
        if getattr(block, "zero_cond_t", False):
            raise NotFusable("image tokens of one block with different modulations (zero_cond_t)")
        mlps = feed_forward(block.txt_mlp), feed_forward(block.img_mlp)
        text = Outside(_modulation(block.txt_mod), block.txt_norm1, block.txt_norm2, mlps[0])
        image = Outside(_modulation(block.img_mod), block.img_norm1, block.img_norm2, mlps[1])
        return read_double(block.attn, text, image, join)


class _BlockOf36(_Block):
    """Of diffusers 0.36, which hands in the mask of text tokens and attends to all."""

    arguments = _Block.arguments[:-1]

    def call(self, image: Tensor, text: Tensor, seen: Any, *others: Any) -> Call:
        return super().call(image, text, None, *others)


QWEN_IMAGE = Family(
    "QwenImageTransformer2DModel",
    (BlockList("transformer_blocks", "QwenImageTransformerBlock", _Block(), (_BlockOf36(),), fused_bytes=12.5),),
    archs=("qwen_image", "qwen_image_edit", "qwen_image_edit_plus"),
    one_row=("img_mod.1", "txt_mod.1"),
    pipelines={"QwenImagePipeline": ("qwen_image",), "QwenImageEditPipeline": ("qwen_image_edit",)},
)
