"""FLUX.1's reader: its double and single blocks, put together from the fused functions.

Source: diffusers models/transformers/transformer_flux.py, whose arithmetic this follows to the rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coat_core.activation import PackingConfig

from .attention import HeadNorms, KeptOut, attention
from .gated_linear import gated_linear
from .linears import AdaptedLinear, NotFusable, read_group, read_linear
from .norm_linears import norm_linears
from .reading import (
    Reader,
    check_attention,
    check_dropout,
    check_gelu,
    check_norm,
    clipped,
    modulate,
    qk_norm,
    read_modulation,
)
from .streams import join, split

ARGUMENTS = ("hidden_states", "encoder_hidden_states", "temb", "image_rotary_emb", "joint_attention_kwargs")
PROCESSOR = "FluxAttnProcessor"


def _check_arguments(args: tuple[Any, ...]) -> None:
    if len(args) > 4 and args[4]:
        raise NotFusable(f"joint_attention_kwargs {', '.join(map(str, args[4]))}")
    if len(args) < 4 or args[3] is None:
        raise NotFusable("no rotary embedding is given")


@dataclass(frozen=True)
class SingleBlock:
    """A FluxSingleTransformerBlock as it was read.

    Attributes:
        config: how kept tensors are stored; None keeps them as they are.
        modulation: makes shift, scale and gate.
        eps: LayerNorm's.
        head_dim: d of one head.
        qk_norm: RMSNorms of q and k.
        inputs: to_q, to_k, to_v, proj_mlp.
        output: proj_out.
    """

    config: PackingConfig | None
    modulation: AdaptedLinear
    eps: float
    head_dim: int
    qk_norm: HeadNorms
    inputs: tuple[AdaptedLinear, ...]
    output: AdaptedLinear

    def __call__(self, hidden: Tensor, text: Tensor, temb: Tensor, rotary: Any, _: Any = None) -> tuple[Tensor, Tensor]:
        """Return the text and the image stream; arguments as diffusers' block."""
        x = join(text, hidden)
        shift, scale, gate = modulate(self.modulation, temb, 3)
        *qkv, mlp = norm_linears(x, scale, shift, self.eps, self.inputs, self.config)
        (out,) = attention(qkv[0].shape[-1] // self.head_dim, [self.qk_norm], rotary, qkv, self.config)
        y = clipped(gated_linear(x, gate, self.output, self.config, out, mlp))
        return split(y, text.shape[1])

    def apart(self, hidden: Tensor, text: Tensor, temb: Tensor, rotary: Any) -> tuple[Tensor, Tensor]:
        """The same, in streams that share no memory, as compiled code returns them."""
        text, hidden = (x.clone(memory_format=torch.contiguous_format) for x in self(hidden, text, temb, rotary))
        return text, hidden


@dataclass(frozen=True)
class DoubleBlock:
    """A FluxTransformerBlock as it was read: two streams and their common attention."""

    config: PackingConfig | None
    head_dim: int
    text: Stream
    image: Stream

    def __call__(
        self, hidden: Tensor, encoder: Tensor, temb: Tensor, rotary: Any, _: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Return the text and the image stream; arguments as diffusers' block."""
        image_modulation, text_modulation = (modulate(s.modulation, temb, 6) for s in (self.image, self.text))
        qkv = [
            *self.text.qkv(encoder, text_modulation, self.config),
            *self.image.qkv(hidden, image_modulation, self.config),
        ]
        norms = [self.text.qk_norm, self.image.qk_norm]
        text_out, image_out = attention(qkv[0].shape[-1] // self.head_dim, norms, rotary, qkv, self.config)
        hidden = self.image.rest(hidden, image_out, image_modulation, self.config)
        return clipped(self.text.rest(encoder, text_out, text_modulation, self.config)), hidden

    def apart(self, hidden: Tensor, encoder: Tensor, temb: Tensor, rotary: Any) -> tuple[Tensor, Tensor]:
        """The same, in streams that share no memory, as compiled code returns them."""
        return self(hidden, encoder, temb, rotary)


@dataclass(frozen=True)
class Stream:
    """One of a double block's two streams.

    Attributes:
        modulation: makes shift, scale and gate of attention, then of the MLP.
        eps: of the two LayerNorms.
        qk_norm: RMSNorms of q and k.
        inputs: to q, k and v.
        output: attention's projection.
        up: the MLP's first linear.
        down: the MLP's second linear.
    """

    modulation: AdaptedLinear
    eps: tuple[float, float]
    qk_norm: HeadNorms
    inputs: tuple[AdaptedLinear, ...]
    output: AdaptedLinear
    up: AdaptedLinear
    down: AdaptedLinear

    def qkv(self, x: Tensor, modulation: tuple[Tensor, ...], config: PackingConfig | None) -> tuple[Tensor, ...]:
        """q, k and v before their norms."""
        return norm_linears(x, modulation[1], modulation[0], self.eps[0], self.inputs, config)

    def rest(self, x: Tensor, out: KeptOut, modulation: tuple[Tensor, ...], config: PackingConfig | None) -> Tensor:
        """The stream after attention: projection, gate and residual, then the MLP with its own."""
        _, _, gate, shift_mlp, scale_mlp, gate_mlp = modulation
        x = gated_linear(x, gate, self.output, config, out=out)
        (mlp,) = norm_linears(x, scale_mlp, shift_mlp, self.eps[1], (self.up,), config)
        return gated_linear(x, gate_mlp, self.down, config, mlp=mlp)


def _read_single(block: Any, config: PackingConfig | None) -> SingleBlock:
    attn, eps = block.attn, check_norm(block.norm.norm)
    check_attention(attn, PROCESSOR)
    check_gelu(block.act_mlp)
    return SingleBlock(
        config,
        read_modulation(block.norm),
        eps,
        attn.head_dim,
        qk_norm(attn.norm_q, attn.norm_k),
        read_group((attn.to_q, attn.to_k, attn.to_v, block.proj_mlp)),
        read_linear(block.proj_out),
    )


def _read_double(block: Any, config: PackingConfig | None) -> DoubleBlock:
    attn = block.attn
    check_attention(attn, PROCESSOR)
    if len(attn.to_out) != 2:
        raise NotFusable("an attention output of more than a linear and a dropout")
    check_dropout(attn.to_out[1])
    text = _read_stream(
        block.norm1_context,
        block.norm2_context,
        block.ff_context,
        qk_norm(attn.norm_added_q, attn.norm_added_k),
        (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj, attn.to_add_out),
    )
    image = _read_stream(
        block.norm1,
        block.norm2,
        block.ff,
        qk_norm(attn.norm_q, attn.norm_k),
        (attn.to_q, attn.to_k, attn.to_v, attn.to_out[0]),
    )
    return DoubleBlock(config, attn.head_dim, text, image)


def _read_stream(norm1: Any, norm2: Any, ff: Any, qk_norm: HeadNorms, linears: tuple[Any, ...]) -> Stream:
    eps = (check_norm(norm1.norm), check_norm(norm2))
    if len(ff.net) != 3:
        raise NotFusable("a feed-forward of more than GELU, dropout and a linear")
    check_gelu(ff.net[0])
    check_dropout(ff.net[1])
    output, up, down = (read_linear(module) for module in (linears[3], ff.net[0].proj, ff.net[2]))
    return Stream(read_modulation(norm1), eps, qk_norm, read_group(linears[:3]), output, up, down)


DOUBLE = Reader(ARGUMENTS, _check_arguments, _read_double)
SINGLE = Reader(ARGUMENTS, _check_arguments, _read_single)
