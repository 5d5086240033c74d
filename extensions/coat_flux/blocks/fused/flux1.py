"""FLUX.1's reader: what diffusers calls the parts of its double and single blocks, and hands to them.

Source: diffusers models/transformers/transformer_flux.py, whose arithmetic the fused blocks follow to the rounding.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from coat_core.activation import PackingConfig

from .attention import Attention, Shared
from .block import Call
from .double_block import DoubleBlock, Stream
from .frozen import NotFusable
from .gated_linear import GatedLinear
from .kept import Saving
from .linears import read_group, read_linear
from .norm_linears import NormLinears
from .reading import (
    Reader,
    check_attention,
    check_dropout,
    check_gelu,
    check_norm,
    clipped,
    qk_norm,
    read_modulation,
)
from .single_block import SingleBlock

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
    attn, eps = block.attn, check_norm(block.norm.norm)
    check_attention(attn, PROCESSOR)
    check_gelu(block.act_mlp)
    return SingleBlock(
        Saving(config),
        read_modulation(block.norm),
        NormLinears(eps, read_group((attn.to_q, attn.to_k, attn.to_v, block.proj_mlp), join)),
        Attention(attn.head_dim, *qk_norm(attn.norm_q, attn.norm_k)),
        GatedLinear(read_linear(block.proj_out)),
    )


def _read_double(block: Any, config: PackingConfig | None, join: bool) -> DoubleBlock:
    attn = block.attn
    check_attention(attn, PROCESSOR)
    if len(attn.to_out) != 2:
        raise NotFusable("an attention output of more than a linear and a dropout")
    check_dropout(attn.to_out[1])
    text = _read_stream(
        block.norm1_context,
        block.norm2_context,
        block.ff_context,
        (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj, attn.to_add_out),
        join,
    )
    image = _read_stream(
        block.norm1,
        block.norm2,
        block.ff,
        (attn.to_q, attn.to_k, attn.to_v, attn.to_out[0]),
        join,
    )
    if text.output.linear.input_spec != image.output.linear.input_spec:
        raise NotFusable("the outputs of attention want it in different formats")
    eps, norms = qk_norm(attn.norm_added_q, attn.norm_added_k, attn.norm_q, attn.norm_k)
    return DoubleBlock(Saving(config), Attention(attn.head_dim, eps, norms), text, image)


def _read_stream(norm1: Any, norm2: Any, ff: Any, linears: tuple[Any, ...], join: bool) -> Stream:
    if len(ff.net) != 3:
        raise NotFusable("a feed-forward of more than GELU, dropout and a linear")
    check_gelu(ff.net[0])
    check_dropout(ff.net[1])
    output, up, down = (read_linear(module) for module in (linears[3], ff.net[0].proj, ff.net[2]))
    inputs = NormLinears(check_norm(norm1.norm), read_group(linears[:3], join))
    return Stream(
        read_modulation(norm1), inputs, GatedLinear(output), NormLinears(check_norm(norm2), up), GatedLinear(down)
    )


DOUBLE = Reader(ARGUMENTS, _heads, _call, _read_double, _of_double)
SINGLE = Reader(ARGUMENTS, _heads, _call, _read_single, _of_single)
