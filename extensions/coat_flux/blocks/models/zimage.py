"""Z-Image: one stream, RMSNorms before and after linears, gates through tanh, SwiGLU of two linears.

Rotations come as complex numbers of each image, and the mask is one of tokens, there where images of a batch have
different lengths. Blocks of the text alone (`context_refiner`) have no modulation.
Source: diffusers models/transformers/transformer_z_image.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coat_core.linear.function import compute_dtype
from coat_core.ops.attention import additive_mask

from ..fused.forms import SWIGLU, Reader, Stream, StreamBlock, shared_of
from ..fused.linears import NotFusable, read_group, read_linear
from ..fused.parts import Attention, Call, GatedLinear, Modulation, NormLinears
from ..fused.reading import check_dropout, complex_rotary, once_per_pass, qk_norm
from .family import BlockList, Family

# the additive mask [B, 1, 1, S] of a mask of tokens [B, S]
_mask = once_per_pass(lambda seen, dtype: additive_mask(seen[:, None, None, :], dtype))


def _norm(norm: Any) -> tuple[Tensor, float]:
    eps, (weight,) = qk_norm(norm, name="norm")
    return weight, eps


class _TanhGates(Modulation):
    """Makes scale and gate before tanh, of attention and MLP; there is no shift."""

    def __call__(self, temb: Tensor) -> Tensor:
        scale, gate, scale_mlp, gate_mlp = super().__call__(temb).chunk(4, dim=1)
        zeros = torch.zeros_like(scale)
        return torch.cat([scale, zeros, gate.tanh(), scale_mlp, zeros, gate_mlp.tanh()], dim=1)


class _Block(Reader):
    processor = "ZSingleStreamAttnProcessor"
    arguments = ("x", "attn_mask", "freqs_cis", "adaln_input", "noise_mask", "adaln_noisy", "adaln_clean")
    heads = ("attention.heads", "attention.inner_dim")

    def call(self, x: Tensor, seen: Any, rotations: Any, temb: Any = None, of_tokens: Any = None, *_: Any) -> Call:
        if of_tokens is not None:
            raise NotFusable("tokens of one block with different modulations (noise_mask)")
        mask = _mask(seen, compute_dtype(x))
        return Call(x, None, shared_of(complex_rotary(rotations), mask=mask), temb)

    def read(self, block: Any, join: bool) -> StreamBlock:
        attn, ff = block.attention, block.feed_forward
        if len(attn.to_out) > 1:
            check_dropout(attn.to_out[1])
        modulation = None
        if block.modulation:
            if len(block.adaLN_modulation) != 1:
                raise NotFusable("a modulation of more than a linear")
            modulation = _TanhGates(read_linear(block.adaLN_modulation[0]), silu=False)
        (before, eps) = _norm(block.attention_norm1)
        (before_mlp, eps_mlp) = _norm(block.ffn_norm1)
        stream = Stream(
            modulation,
            NormLinears(eps, read_group((attn.to_q, attn.to_k, attn.to_v), join), before),
            GatedLinear(read_linear(attn.to_out[0]), _norm(block.attention_norm2)),
            NormLinears(eps_mlp, read_group((ff.w1, ff.w3), join), before_mlp),
            GatedLinear(read_linear(ff.w2), _norm(block.ffn_norm2)),
            SWIGLU,
        )
        return StreamBlock(Attention(block.head_dim, *qk_norm(attn.norm_q, attn.norm_k)), stream)


class _BlockOf36(_Block):
    """Of diffusers 0.36, without the omni mode."""

    arguments = _Block.arguments[:4]


Z_IMAGE = Family(
    "ZImageTransformer2DModel",
    tuple(
        BlockList(name, "ZImageTransformerBlock", _Block(), (_BlockOf36(),), fused_bytes=12.8)
        for name in ("noise_refiner", "context_refiner", "layers")
    ),
    archs=("zimage", "zimage_l2p"),
    one_row=("adaLN_modulation.0",),
    pipelines={"ZImagePipeline": ("zimage",)},
)
