"""FLUX.1's reader: what diffusers calls the parts of its double and single blocks, and hands to them.

Source: diffusers models/transformers/transformer_flux.py, whose arithmetic the fused blocks follow to the rounding.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from coat_core.activation import PackingConfig

from ..fused.attention import Shared
from ..fused.block import Call
from ..fused.double_block import DoubleBlock
from ..fused.frozen import NotFusable
from ..fused.reading import Outside, Reader, check_attention, clipped, read_double, read_modulation, read_single
from ..fused.single_block import SingleBlock

ARGUMENTS = ("hidden_states", "encoder_hidden_states", "temb", "image_rotary_emb", "joint_attention_kwargs")
PROCESSOR = "FluxAttnProcessor"


def _call(args: tuple[Any, ...]) -> Call:
    if len(args) > 4 and args[4]:
        raise NotFusable(f"joint_attention_kwargs {', '.join(map(str, args[4]))}")
    if len(args) < 4 or args[3] is None:
        raise NotFusable("no rotary embedding is given")
    return Call(args[0], args[1], Shared(*args[3]), args[2])


def _heads(block: Any) -> tuple[int, int]:
    return block.attn.heads, block.attn.head_dim


def _of_single(text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    return clipped(text), clipped(image)


def _of_double(text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    return clipped(text), image


def _read_single(block: Any, config: PackingConfig | None, join: bool) -> SingleBlock:
    check_attention(block.attn, PROCESSOR)
    return read_single(block, read_modulation(block.norm), config, join)


def _read_double(block: Any, config: PackingConfig | None, join: bool) -> DoubleBlock:
    check_attention(block.attn, PROCESSOR)
    norm, of_text = block.norm1, block.norm1_context
    text = Outside(read_modulation(of_text), of_text.norm, block.norm2_context, block.ff_context)
    image = Outside(read_modulation(norm), norm.norm, block.norm2, block.ff)
    return read_double(block.attn, block.attn.head_dim, text, image, config, join)


DOUBLE = Reader(ARGUMENTS, _heads, _call, _read_double, _of_double)
SINGLE = Reader(ARGUMENTS, _heads, _call, _read_single, _of_single)
