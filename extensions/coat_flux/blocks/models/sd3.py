"""SD3.5: double blocks with a norm of q and k and no rotary embedding; in the last one the text ends.

Source: diffusers models/attention.py (JointTransformerBlock) and models/attention_processor.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..fused.forms import NO_ROTATION, DoubleBlock, shared_of
from ..fused.linears import NotFusable
from ..fused.parts import Call, Modulation
from ..fused.reading import DiffusersDouble, Outside, feed_forward, read_double, read_modulation
from .family import BlockList, Family, Rates


class _ScaleFirst(Modulation):
    """Makes scale and shift in this order, and returns them as all others."""

    def __call__(self, temb: Tensor) -> Tensor:
        scale, shift = super().__call__(temb).chunk(2, dim=1)
        return torch.cat([shift, scale], dim=1)


class _Block(DiffusersDouble):
    processor = "JointAttnProcessor2_0"
    arguments = ("hidden_states", "encoder_hidden_states", "temb", "joint_attention_kwargs")

    def call(self, image: Tensor, text: Tensor, temb: Tensor, kwargs: Any = None) -> Call:
        return Call(image, text, shared_of(NO_ROTATION, kwargs), temb)

    def read(self, block: Any, join: bool) -> DoubleBlock:
        if block._chunk_size is not None:
            raise NotFusable("its feed-forward runs in chunks")
        if block.use_dual_attention:
            raise NotFusable("its image tokens attend to themselves a second time (use_dual_attention)")
        if not block.context_pre_only:
            return super().read(block, join)
        norm, of_text = block.norm1, block.norm1_context
        text = Outside(read_modulation(of_text, _ScaleFirst), of_text.norm)
        image = Outside(read_modulation(norm), norm.norm, block.norm2, feed_forward(block.ff))
        return read_double(block.attn, text, image, join)


SD3 = Family(
    "SD3Transformer2DModel",
    (BlockList("transformer_blocks", "JointTransformerBlock", _Block(), fused_bytes=12.5),),
    archs=("sd3",),
    one_row=("norm1.linear", "norm1_context.linear"),
    pipelines={"StableDiffusion3Pipeline": ("sd3",)},
    rates={"JointTransformerBlock": Rates(95.7, 30.7, 37.6)},
)
