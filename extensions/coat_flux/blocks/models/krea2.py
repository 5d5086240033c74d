"""Krea 2: one stream, RMSNorms times 1 + w, grouped heads, a sigmoid gate on attention's out, SwiGLU of two linears.

The model makes scale, shift and gate for all blocks, and each adds a table of its own. Before them, blocks of the text
alone attend over the layers of the text encoder and then over its tokens, without modulation and rotary embedding.
There are two classes of each: diffusers', and ai-toolkit's own.
Sources: diffusers models/transformers/transformer_krea2.py; ai-toolkit
extensions_built_in/diffusion_models/krea2/src/mmdit.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coat_core.linear.function import compute_dtype
from coat_core.ops.attention import additive_mask

from ..fused.forms import NO_ROTATION, SWIGLU, Reader, Stream, StreamBlock, shared_of
from ..fused.linears import NotFusable, read_group, read_linear
from ..fused.parts import Attention, Call, GatedLinear, NormLinears, Rotary
from ..fused.reading import check_dropout, once_per_pass
from .family import BlockList, Family


@once_per_pass
def _mask(seen: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The additive mask of one of pairs of tokens or of keys [B, 1, S or 1, S]; None where it hides none."""
    if seen.device.type != "meta" and bool(seen.all()):
        return None
    return additive_mask(seen, dtype)


def _call(x: Tensor, rotary: Rotary, seen: Tensor | None, *vectors: Tensor) -> Call:
    shared = shared_of(rotary, mask=_mask(seen, compute_dtype(x)))
    return Call(x, None, shared, vectors=tuple(each.flatten(1) for each in vectors))


def _read(
    linears: Sequence[Any], weights: Sequence[Tensor], eps: float, table: Tensor | None, head_dim: int, join: bool
) -> StreamBlock:
    """Read a block; `weights` w are those of the norms before attention, before the MLP, of q and of k.

    `linears`: for q, k, v and the gate; the projection; SwiGLU's gate and up; down.
    """
    if any(each is not None and each.requires_grad for each in (*weights, table)):
        raise NotFusable("a norm or a table of the modulation is trained")
    dtype = (linears[0].weight if table is None else table).dtype
    before, before_mlp, *of_heads = ((weight.float() + 1).to(dtype) for weight in weights)
    inputs = read_group(linears[:4], join)
    stream = Stream(
        None,
        NormLinears(eps, inputs, before),
        GatedLinear(read_linear(linears[4])),
        NormLinears(eps, read_group(linears[5:7], join), before_mlp),
        GatedLinear(read_linear(linears[7])),
        SWIGLU,
    )
    attention = Attention(head_dim, eps, tuple(of_heads), inputs.widths[0] // inputs.widths[1])
    return StreamBlock(attention, stream, None if table is None else table.detach().flatten())


# --- diffusers' class ---


class _Text(Reader):
    processor = "Krea2AttnProcessor"
    arguments = ("hidden_states", "attention_mask")
    heads = ("attn.num_heads", "attn.hidden_size")
    of_text = True

    def call(self, x: Tensor, seen: Tensor | None = None) -> Call:
        return _call(x, NO_ROTATION, seen)

    def read(self, block: Any, join: bool) -> StreamBlock:
        attn, ff = block.attn, block.ff
        check_dropout(attn.to_out[1])
        linears = (attn.to_q, attn.to_k, attn.to_v, attn.to_gate, attn.to_out[0], ff.gate, ff.up, ff.down)
        weights = [norm.weight for norm in (block.norm1, block.norm2, attn.norm_q, attn.norm_k)]
        table = getattr(block, "scale_shift_table", None)
        return _read(linears, weights, block.norm1.eps, table, attn.head_dim, join)


class _Block(_Text):
    arguments = ("hidden_states", "temb", "image_rotary_emb", "attention_mask")
    of_text = False

    def call(self, x: Tensor, temb: Tensor, rotary: Any, seen: Tensor | None = None) -> Call:  # type: ignore[override]
        return _call(x, rotary, seen, temb)


# --- ai-toolkit's class ---


@once_per_pass
def _rotary(table: Tensor) -> Rotary:
    """Cos and sin [B, S, d], of one image [S, d], of rotations [B, S, d / 2, 2, 2]."""
    table = table[0] if len(table) == 1 else table
    return table[..., 0, 0].repeat_interleave(2, dim=-1), table[..., 1, 0].repeat_interleave(2, dim=-1)


class _ToolkitText(_Text):
    processor = ""
    arguments = ("x", "mask")
    heads = ("attn.heads", "attn.wq.out_features")

    def read(self, block: Any, join: bool) -> StreamBlock:
        attn, mlp = block.attn, block.mlp
        linears = (attn.wq, attn.wk, attn.wv, attn.gate, attn.wo, mlp.gate, mlp.up, mlp.down)
        weights = [norm.scale for norm in (block.prenorm, block.postnorm, attn.qknorm.qnorm, attn.qknorm.knorm)]
        table = block.mod.lin if hasattr(block, "mod") else None
        return _read(linears, weights, block.prenorm.eps, table, attn.headdim, join)


class _ToolkitBlock(_ToolkitText):
    arguments = ("x", "vec", "freqs", "mask", "ref_span", "kv_capture", "kv_cache")
    of_text = False

    def call(self, x: Tensor, vec: Any, rotations: Tensor, seen: Tensor | None = None, *of_sampling: Any) -> Call:  # type: ignore[override]
        if isinstance(vec, tuple):
            raise NotFusable("tokens of one block with different modulations (reference images)")
        if any(each is not None for each in of_sampling):
            raise NotFusable("k and v of reference images are kept between calls (kv_cache)")
        return _call(x, _rotary(rotations), seen, vec)


def _lists(
    text: str, text_block: str, blocks: str, block: str, readers: tuple[Reader, Reader]
) -> tuple[BlockList, ...]:
    lists = (f"{text}.layerwise_blocks", f"{text}.refiner_blocks")
    of_text = (BlockList(name, text_block, readers[0], fused_bytes=12.9) for name in lists)
    return (*of_text, BlockList(blocks, block, readers[1], fused_bytes=13.3))


KREA2 = Family(
    "Krea2Transformer2DModel",
    _lists("text_fusion", "Krea2TextFusionBlock", "transformer_blocks", "Krea2TransformerBlock", (_Text(), _Block())),
)
KREA2_OF_TOOLKIT = Family(
    "SingleStreamDiT",
    _lists("txtfusion", "TextFusionBlock", "blocks", "SingleStreamBlock", (_ToolkitText(), _ToolkitBlock())),
    archs=("krea2",),
    files={"krea2": "*.safetensors"},
)
