"""QK-RMSNorm, rotary embedding and attention as one autograd function that keeps q, k, v and out.

    out = attention(rotate(RMSNorm(q)), rotate(RMSNorm(k)), v)       over the tokens of one or two streams

q and k are kept as the linears made them and normed and rotated again in backward. With them, attention's log-sum-exp
is kept, exactly. out is kept once, for attention's backward and for the adapter of the linear that reads it.

Shapes: q, k, v [B, S_i, H·d] per stream, joint ones [B, H, S, d]; cos, sin [S, d].
Source: arXiv 2410.19313, section 5, carried over to FLUX's blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coat_core.activation import PackingConfig
from coat_core.autograd import first_order_only, without_autocast
from coat_core.kernels.attention import AttentionContext, attention_backward, attention_forward
from coat_core.kernels.norm import rms_norm_rope, rms_norm_rope_backward

from .kept import Kept, Packed, pack, unpack

HeadNorms = tuple[Tensor, float, Tensor, float]  # weight and eps of norm_q, weight and eps of norm_k
KeptOut = tuple[Tensor, Packed]  # attention's out, and how it is kept


def attention(
    heads: int,
    norms: Sequence[HeadNorms],
    rotary: tuple[Tensor, Tensor],
    streams: Sequence[Tensor],
    config: PackingConfig | None,
) -> list[KeptOut]:
    """QK-RMSNorm, rotary embedding and attention over one or two streams of tokens together.

    Args:
        heads: H.
        norms: one per stream.
        rotary: cos and sin [S, d] over the tokens of all streams.
        streams: q, k, v [B, S_i, H·d] of each stream in turn.
        config: how q, k, v and out are kept; None, or `config.attention` "bf16", keeps them as they are.

    Returns:
        For each stream, out [B, S_i, H·d] and what is kept of it, for `gated_linear`.
    """
    count = len(norms)
    found = _Attention.apply(heads, norms, rotary, config, *streams)
    outs, kept = found[:count], found[count:]
    return [(out, kept[2 * i : 2 * i + 2] if kept else (out,)) for i, out in enumerate(outs)]


class _Attention(torch.autograd.Function):
    """Returns out per stream, then (FP8) the codes and scales of each."""

    @staticmethod
    def forward(
        ctx: Any,
        heads: int,
        norms: Sequence[HeadNorms],
        rotary: tuple[Tensor, Tensor],
        config: PackingConfig | None,
        *streams: Tensor,
    ) -> tuple[Tensor, ...]:
        store = config if config is not None and config.attention == "fp8" else None
        q, k, v, lengths = _joined(heads, norms, rotary, streams)
        out, context = attention_forward(q, k, v)
        joined = out.transpose(1, 2).flatten(2).to(streams[0].dtype)
        parts = [part.contiguous() for part in joined.split(lengths, dim=1)]
        kept_parts = [pack(part, store) for part in parts]
        if any(ctx.needs_input_grad):
            kept = Kept()
            for i, stream in enumerate(streams):
                kept.add(f"stream{i}", *pack(stream, store))
            for i, packed in enumerate(kept_parts):
                kept.add(f"out{i}", *packed)
            kept.add("attention", *context.tensors)
            kept.save(ctx)
        ctx.heads, ctx.norms, ctx.rotary, ctx.config, ctx.lengths = heads, norms, rotary, config, lengths
        ctx.kernel, ctx.sizes, ctx.dtype = context.kernel, context.sizes, streams[0].dtype
        ctx.mark_non_differentiable(*(tensor for packed in kept_parts for tensor in packed if len(packed) > 1))
        ctx.set_materialize_grads(False)  # of codes there are none
        flat = [tensor for packed in kept_parts for tensor in packed] if store else []
        return *parts, *flat

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        count = len(ctx.lengths)
        with without_autocast(next(grad for grad in grads if grad is not None).device):
            kept = Kept.of(ctx)
            streams = [unpack(kept[f"stream{i}"], ctx.config, ctx.dtype) for i in range(3 * count)]
            outs = [unpack(kept[f"out{i}"], ctx.config, ctx.dtype) for i in range(count)]
            q, k, v, _ = _joined(ctx.heads, ctx.norms, ctx.rotary, streams)
            context = AttentionContext(ctx.kernel, kept["attention"], ctx.sizes)
            pairs = zip(outs, grads[:count], strict=True)
            of_outs = [torch.zeros_like(out) if grad is None else grad for out, grad in pairs]
            out, grad = (_by_head(_together(parts), ctx.heads) for parts in (outs, of_outs))
            joint = attention_backward(grad.to(q.dtype), q, k, v, out.to(q.dtype), context)
            gradients = _split_back(joint, ctx.norms, ctx.rotary, streams, ctx.lengths)
        return None, None, None, None, *gradients


def _together(parts: Sequence[Tensor]) -> Tensor:
    """Tokens of all streams, one after the other; of one stream the tensor itself."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """[B, S, H·d] as [B, H, S, d]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _rotary_parts(rotary: tuple[Tensor, Tensor], lengths: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    cos, sin = (table.split(list(lengths)) for table in rotary)
    return list(zip(cos, sin, strict=True))


def _joined(
    heads: int,
    norms: Sequence[HeadNorms],
    rotary: tuple[Tensor, Tensor],
    streams: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Normed, rotated q and k, and v, of all streams [B, H, S, d]; and the streams' lengths."""
    lengths = [x.shape[1] for x in streams[::3]]
    parts: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for i, (norm, angles) in enumerate(zip(norms, _rotary_parts(rotary, lengths), strict=True)):
        q, k, v = (x.unflatten(-1, (heads, -1)) for x in streams[3 * i : 3 * i + 3])
        parts[0].append(rms_norm_rope(q, norm[0], *angles, norm[1]))
        parts[1].append(rms_norm_rope(k, norm[2], *angles, norm[3]))
        parts[2].append(v)
    q, k, v = (_together(part).transpose(1, 2) for part in parts)
    return q, k, v, lengths


def _split_back(
    joint: Sequence[Tensor],
    norms: Sequence[HeadNorms],
    rotary: tuple[Tensor, Tensor],
    streams: Sequence[Tensor],
    lengths: Sequence[int],
) -> list[Tensor]:
    """Gradients of each stream's q, k, v [B, S_i, H·d] from those of the joint, rotated ones [B, H, S, d]."""
    dq, dk, dv = (grad.transpose(1, 2).split(list(lengths), dim=1) for grad in joint)
    gradients = []
    for i, (norm, angles) in enumerate(zip(norms, _rotary_parts(rotary, lengths), strict=True)):
        q, k = (x.unflatten(-1, dq[i].shape[2:]) for x in streams[3 * i : 3 * i + 2])
        gradients += [
            rms_norm_rope_backward(dq[i], q, norm[0], *angles, norm[1]).flatten(2),
            rms_norm_rope_backward(dk[i], k, norm[2], *angles, norm[3]).flatten(2),
            dv[i].flatten(2),
        ]
    return gradients
