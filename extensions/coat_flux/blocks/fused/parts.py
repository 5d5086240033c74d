"""The parts of fused blocks, forward and backward: norm and linears, attention, a linear with its gate.

    NormLinears    n = norm(x)·(1 + scale) + shift,   y = n Wᵀ + b                  saves x, and the adapters' h
    Attention      out = attention(rotate(RMSNorm(q)), rotate(RMSNorm(k)), v)       saves q, k, v and its statistics
    GatedLinear    y = residual + gate·(x Wᵀ + b), or gate·RMSNorm(x Wᵀ + b)        saves the linear's result

n is quantized on the fly; backward recomputes it from the FP8 x for dA and the norm's gradient. q, k and v are
saved before norm and rotation; attention's log-sum-exp exactly. A gated linear saves its result only if the gate
is trained or a norm follows; its x is saved by the producer.

Shapes: per stream y [B, S_i, 3·H·d], q, k and v side by side; joint q, k, v [B, S, H, d], out [B, S, H·d]; cos,
sin [S, d], or [B, S, d] per image; shift, scale and gate [B, D]. Source: arXiv 2410.19313, section 5, carried over
to FLUX's blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from coat_core.ops.attention import AttentionContext, attention_backward, attention_forward
from coat_core.ops.gate import gated_sum, gated_sum_backward
from coat_core.ops.gelu import mlp_activation
from coat_core.ops.mlp_down import mlp_activation_down
from coat_core.ops.norm import norm_modulate, norm_modulate_backward, norm_modulate_quantize
from coat_core.ops.qkv import qkv_rope
from coat_core.quantize import Quantized

from .block import NOT_SAVED, Kept, Saving, Shared
from .linears import LinearGroup, LowRank, as_dtype, in_passing, quantized_by


class Projected(NamedTuple):
    """Outputs of one stream's linears, the first three for q, k and v."""

    linears: LinearGroup  # a group
    y: Tensor  # [B, S_i, ΣN] without the adapters' part
    h: Tensor | None  # of the adapters; None without

    @property
    def qkv(self) -> Tensor:
        """Their columns of y [B, S_i, 3·H·d]."""
        return self.y[..., : sum(self.linears.parts[:3])]


@dataclass(frozen=True)
class NormLinears:
    """A norm with its eps, and all linears that read its modulated result: RMSNorm with a weight, else LayerNorm."""

    eps: float
    linears: LinearGroup
    weight: Tensor | None = None

    def forward(
        self, kept: Kept, name: str, x: Tensor, scale: Tensor, shift: Tensor | None, saving: Saving
    ) -> Projected:
        """Run them on x [B, S, D], which is saved under this name; shift None stands for zeros."""
        spec = self.linears.input_spec
        n, codes, code_scale, *saved = norm_modulate_quantize(
            x, scale, shift, self.eps, *in_passing(spec), *saving.in_passing, self.weight
        )
        kept.facts[f"{name}x"] = x.dtype
        kept.add(f"{name}x", *saving.keep(x, saved[0], saved[1]))
        y, h = self.linears.forward(n, quantized_by(spec, n, codes, code_scale))
        kept.add(f"{name}h", h)
        return Projected(self.linears, y, h)

    def backward(
        self,
        kept: Kept,
        name: str,
        dy: Tensor,
        residual: Tensor | None,
        scale: Tensor,
        shift: Tensor | None,
        saving: Saving,
        needs_dx: bool,
    ) -> tuple[Tensor | None, Tensor | None, list[Tensor]]:
        """Return dx [B, S, D] in the dtype of x; those of shift and scale, fp32 [B, 2, D]; each adapter's [dA, dB].

        `dy` [B, S, ΣN] includes the adapters' part; `residual` [B, S, D] is added to dx.
        """
        dtype = kept.facts[f"{name}x"]
        x, x_scale = saving.read(kept[f"{name}x"], dtype)
        group_size, h = saving.in_passing[1], kept.first(f"{name}h")

        def down_gradient(dh: Tensor) -> Tensor:
            n = norm_modulate(x, x_scale, group_size, scale, shift, self.eps, dtype, self.weight)
            return self.linears.down_gradient(dh, n)

        dh, gradients = self.linears.adapter_gradients(dy, down_gradient, h)
        if not needs_dx:
            return None, None, gradients
        dn = self.linears.complete_dx(self.linears.dgrad(dy), dh)
        dx, dmodulation = norm_modulate_backward(
            dn, x, x_scale, group_size, scale, self.eps, residual, dtype, self.weight
        )
        return dx, dmodulation, gradients

    def saved_x(self, kept: Kept, name: str, saving: Saving) -> Tensor:
        """The x of `forward`, in backward."""
        return saving.unpack(kept[f"{name}x"], kept.facts[f"{name}x"])


class AttentionGradients(NamedTuple):
    """What `Attention.backward` returns, as `qkv_rope_backward` takes it."""

    joint: list[Tensor]  # dq, dk and dv [B, S, H, d]
    ys: list[Tensor]  # q, k and v of each stream, as codes or values
    y_scales: list[Tensor]  # of the codes; empty for values


@dataclass(frozen=True)
class Attention:
    """Attention over the tokens of one or two streams together."""

    head_dim: int  # d
    eps: float  # of the RMSNorms
    norms: tuple[Tensor, ...]  # weights [d] of norm_q and norm_k of each stream in turn

    def forward(self, kept: Kept, streams: Sequence[Projected], shared: Shared, saving: Saving) -> Tensor:
        """Return out [B, S, H·d] of streams, text first; y is completed in place if the kernels cannot."""
        fmt, group_size = saving.in_passing
        low_ranks: list[LowRank] = []
        adapted = [stream for stream in streams if stream.h is not None]
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
            packed = saved[2 * i : 2 * i + 2] if saved else saving.keep(y.contiguous(), y, y)
            kept.add(f"qkv{i}", *packed)
        kept.facts["qkv"] = ys[0].dtype
        out, context = attention_forward(*(x.transpose(1, 2) for x in (q, k, v)), shared.mask)
        kept.add("statistics", *context.tensors)
        kept.facts["attention"] = context.kernel, context.sizes
        return as_dtype(out.transpose(1, 2).flatten(2), ys[0].dtype)

    def backward(self, kept: Kept, grad: Tensor, out: Tensor, shared: Shared, saving: Saving) -> AttentionGradients:
        """Return the gradients of q, k and v after norm and rotation, for `grad` of out; out may be its FP8 copy."""
        dtype = kept.facts["qkv"]
        read = [saving.read(kept[f"qkv{i}"], dtype) for i in range(len(self.norms) // 2)]
        ys, y_scales = [y for y, _ in read], [scale for _, scale in read if scale is not None]
        size, norms, rotary = saving.in_passing[1], list(self.norms), (shared.cos, shared.sin)
        made = qkv_rope(ys, y_scales, [], [], norms, *rotary, self.eps, "none", size, dtype)
        q, k, v = (x.transpose(1, 2) for x in made)
        context = AttentionContext(kept.facts["attention"][0], kept["statistics"], kept.facts["attention"][1])
        grad, out = (as_dtype(x.view(*x.shape[:-1], -1, self.head_dim), q.dtype).transpose(1, 2) for x in (grad, out))
        joint = attention_backward(grad, q, k, v, out, context, shared.mask)
        return AttentionGradients([x.transpose(1, 2) for x in joint], ys, y_scales)


class GatedGradients(NamedTuple):
    """What `GatedLinear.backward` returns."""

    dx: Tensor  # of x without the adapters' part [B, S, K], in the dtype of the linear's result
    dh: Tensor | None  # of h; None without adapters
    dgate: Tensor | None  # fp32 [B, D]; None where the gate is not trained
    adapters: list[Tensor]  # [dA, dB] of each


class Activated(NamedTuple):
    """What a gate's linear reads, as `LinearGroup.forward` takes it."""

    x: Tensor  # [B, S, K]; empty where the other two are there
    quantized: Quantized | None  # x in FP8 by the linear's `input_spec`, or None
    product: Tensor | None = None  # x Dᵀ, where the maker of x has it


@dataclass(frozen=True)
class GatedLinear:
    """A linear whose result goes through a gate, and before it through an RMSNorm of this weight [D] and eps."""

    linear: LinearGroup
    norm: tuple[Tensor, float] | tuple[()] = ()

    def forward(
        self,
        kept: Kept,
        name: str,
        residual: Tensor,
        gate: Tensor,
        read: Activated,
        saving: Saving,
        trains_gate: bool,
    ) -> Tensor:
        """Return residual + gate·linear(x) [B, S, D]; the result is saved by `saving`."""
        result, h = self.linear.forward(*read)
        saves = trains_gate or bool(self.norm)
        fmt, group_size = saving.in_passing if saves else NOT_SAVED
        low_rank = None
        if h is not None and saves and fmt == "none":  # what is saved as it is, is saved whole
            self.linear.complete(result, h)
        elif h is not None:
            low_rank = self.linear.low_rank(h, 0, 1, result.dtype)
        y, *saved = gated_sum(residual, gate, result, *(low_rank or (None, None)), fmt, group_size, *self.norm)
        kept.facts[f"{name}result"] = result.dtype
        kept.add(f"{name}result", *(saving.keep(result, saved[0], saved[1]) if saves else ()))
        kept.add(f"{name}h", h)
        return y

    def again(self, kept: Kept, name: str, residual: Tensor, gate: Tensor, saving: Saving) -> Tensor:
        """Recompute in backward what `forward` returned, from its saved result."""
        result = saving.unpack(kept[f"{name}result"], kept.facts[f"{name}result"])
        return gated_sum(residual, gate, result, None, None, *NOT_SAVED, *self.norm)[0]

    def backward(
        self,
        kept: Kept,
        name: str,
        grad: Tensor,
        gate: Tensor,
        down_gradient: Callable[[Tensor], Tensor],
        saving: Saving,
    ) -> GatedGradients:
        """Return gradients for `grad` of y [B, S, D], which is the residual's too."""
        spec, dtype = self.linear.grad_spec, kept.facts[f"{name}result"]
        packed = kept[f"{name}result"]
        result, scale = saving.read(packed, dtype) if packed else (None, None)
        fused = in_passing(spec, "e5m2")
        dy, codes, code_scale, dgate = gated_sum_backward(
            grad, gate, result, scale, saving.in_passing[1], dtype, *fused, *self.norm
        )
        quantized = quantized_by(spec, dy, codes, code_scale) if fused[1] != "none" else None
        dh, adapters = self.linear.adapter_gradients(dy, down_gradient, kept.first(f"{name}h"))
        return GatedGradients(self.linear.dgrad(dy, quantized), dh, dgate if packed else None, adapters)


def activate(
    kept: Kept,
    projected: Projected,
    out: Tensor | None,
    reader: LinearGroup,
    activation: str,
    saving: Saving,
    name: str = "",
) -> Activated:
    """Compute [out | act(mlp)] from a group's outputs, and save out and mlp; values only if `reader` needs them."""
    linears, y, h = projected
    first, attends, spec = 0 if out is None else 3, saving.of_attention, reader.input_spec
    mlp, fmt = y[..., sum(linears.parts[:first]) :], saving.in_passing[0]
    low_rank = None
    if fmt == "none":
        linears.complete(y, h, first)
    elif h is not None:
        low_rank = linears.low_rank(h, first, len(linears.parts), y.dtype)
    rows, up = low_rank or (None, None)
    granularity = in_passing(spec)
    options = (*granularity, *saving.in_passing, y.dtype, activation)
    product = None
    if granularity[1] != "none" and reader.rank:
        down = reader.copies(y.dtype).down
        product, *packed = mlp_activation_down(out, mlp, rows, up, down, *options)
        values = y.new_empty(0)
    else:
        values, *packed = mlp_activation(out, None, mlp, None, rows, up, *options)
    codes, scale, out_codes, out_scale, mlp_codes, mlp_scale = packed
    if out is not None:
        kept.add(f"{name}out", *attends.keep(out, out_codes, out_scale))
    kept.add(f"{name}mlp", *saving.keep(mlp.contiguous() if fmt == "none" else mlp, mlp_codes, mlp_scale))
    kept.facts[f"{name}mlp"] = y.dtype
    return Activated(values, quantized_by(spec, values, codes, scale), product)
