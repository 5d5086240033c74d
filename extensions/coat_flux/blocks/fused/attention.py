"""QK-RMSNorm, rotary embedding and attention, over the tokens of one or two streams together.

    out = attention(rotate(RMSNorm(q)), rotate(RMSNorm(k)), v)

q, k and v are kept as the linears made them, and q and k are normed and rotated again in backward. With them,
attention's log-sum-exp is kept, exactly. out is kept by whoever reads it.

Shapes: per stream y [B, S_i, 3·H·d], q, k and v side by side; joint q, k, v [B, S, H, d], out [B, S, H·d]; cos, sin
[S, d], or [B, S, d] where images have their own.
Source: arXiv 2410.19313, section 5, carried over to FLUX's blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from coat_core.ops.attention import AttentionContext, attention_backward, attention_forward
from coat_core.ops.qkv import qkv_rope

from .kept import Kept, Saving
from .linears import LinearGroup, LowRank, as_dtype

Rotary = tuple[Tensor, Tensor]


class Shared(NamedTuple):
    """What the attention of all blocks of a pass shares.

    Attributes:
        cos: fp32 [S, d] or [B, S, d].
        sin: likewise.
        mask: added to q kᵀ / sqrt(d), broadcast to [B, H, S, S], in the dtype of q (`additive_mask`); None without.
    """

    cos: Tensor
    sin: Tensor
    mask: Tensor | None = None


class Projected(NamedTuple):
    """What the linears of one stream made; the first three are to q, k and v.

    Attributes:
        linears: which.
        y: [B, S_i, ΣN] without the adapters' part.
        h: of the adapters; None without.
    """

    linears: LinearGroup
    y: Tensor
    h: Tensor | None

    @property
    def qkv(self) -> Tensor:
        """Their columns of y [B, S_i, 3·H·d]."""
        return self.y[..., : sum(self.linears.parts[:3])]


class AttentionGradients(NamedTuple):
    """What `Attention.backward` returns, as `qkv_rope_backward` takes it.

    Attributes:
        joint: dq, dk and dv [B, S, H, d].
        ys: q, k and v of each stream, as codes or values.
        y_scales: of the codes; empty for values.
    """

    joint: list[Tensor]
    ys: list[Tensor]
    y_scales: list[Tensor]


@dataclass(frozen=True)
class Attention:
    """Attention of a block.

    Attributes:
        head_dim: d.
        eps: of the RMSNorms.
        norms: weights [d] of norm_q and norm_k of each stream in turn.
    """

    head_dim: int
    eps: float
    norms: tuple[Tensor, ...]

    def forward(self, kept: Kept, streams: Sequence[Projected], shared: Shared, saving: Saving) -> Tensor:
        """Return out [B, S, H·d].

        Args:
            kept: takes what backward needs.
            streams: text first; where the kernels cannot, y is completed in place.
            shared: over the tokens of all streams.
            saving: of q, k and v.
        """
        fmt, group_size = saving.in_passing
        low_ranks: list[LowRank] = []
        adapted = [(linears, y, h) for linears, y, h in streams if h is not None]
        for linears, y, h in adapted:
            if fmt != "none" and len(adapted) == len(streams):
                low_ranks.append(linears.low_rank(h, 0, 3, y.dtype))
            else:
                linears.complete(y, h, 0, 3)
        ys = [stream.qkv for stream in streams]
        hs, ups = [part.rows for part in low_ranks], [part.matrix for part in low_ranks]
        norms, rotary = list(self.norms), (shared.cos, shared.sin)
        q, k, v, *saved = qkv_rope(ys, [], hs, ups, norms, *rotary, self.eps, fmt, group_size, ys[0].dtype)
        for i, y in enumerate(ys):
            kept.add(f"qkv{i}", *(saved[2 * i : 2 * i + 2] if saved else _apart(y, saving)))
        kept.facts["qkv"] = ys[0].dtype
        out, context = attention_forward(*(x.transpose(1, 2) for x in (q, k, v)), shared.mask)
        kept.add("statistics", *context.tensors)
        kept.facts["attention"] = context.kernel, context.sizes
        return as_dtype(out.transpose(1, 2).flatten(2), ys[0].dtype)

    def backward(self, kept: Kept, grad: Tensor, out: Tensor, shared: Shared, saving: Saving) -> AttentionGradients:
        """Return the gradients of q, k and v after norm and rotation.

        Args:
            kept: from forward.
            grad: of out [B, S, H·d].
            out: from forward, or its FP8 round trip.
            shared: as in forward.
            saving: likewise.
        """
        dtype = kept.facts["qkv"]
        read = [saving.read(kept[f"qkv{i}"], dtype) for i in range(len(self.norms) // 2)]
        ys, y_scales = [y for y, _ in read], [scale for _, scale in read if scale is not None]
        size, norms, rotary = saving.in_passing[1], list(self.norms), (shared.cos, shared.sin)
        q, k, v = (
            x.transpose(1, 2) for x in qkv_rope(ys, y_scales, [], [], norms, *rotary, self.eps, "none", size, dtype)
        )
        context = AttentionContext(kept.facts["attention"][0], kept["statistics"], kept.facts["attention"][1])
        grad, out = (as_dtype(x.view(*x.shape[:-1], -1, self.head_dim), q.dtype).transpose(1, 2) for x in (grad, out))
        joint = attention_backward(grad, q, k, v, out, context, shared.mask)
        return AttentionGradients([x.transpose(1, 2) for x in joint], ys, y_scales)


def _apart(y: Tensor, saving: Saving) -> tuple[Tensor, ...]:
    """What is kept of a stream's y: packed here, or as it is, in memory of its own."""
    return saving.keep(y.contiguous(), y, y)
