"""A linear, its gate and the residual; the linear's result is kept where the gate is trained, and the adapters' h.

    y = residual + gate·(x Wᵀ + b),   or   residual + gate·RMSNorm(x Wᵀ + b), which always needs the result

x is what its maker keeps: attention's out, or what the activation read.
Source: arXiv 2410.19313, section 5, carried over to FLUX's blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from coat_core.ops.gate import gated_sum, gated_sum_backward
from coat_core.ops.gelu import mlp_activation
from coat_core.ops.mlp_down import mlp_activation_down
from coat_core.quantize import Quantized

from .attention import Projected
from .frozen import in_passing, quantized_by
from .kept import NOT_SAVED, Kept, Saving
from .linears import LinearGroup


class GatedGradients(NamedTuple):
    """What `GatedLinear.backward` returns.

    Attributes:
        dx: of x without the adapters' part [B, S, K], in the dtype of the linear's result.
        dh: of h; None without adapters.
        dgate: fp32 [B, D]; None where the gate is not trained.
        adapters: [dA, dB] of each.
    """

    dx: Tensor
    dh: Tensor | None
    dgate: Tensor | None
    adapters: list[Tensor]


@dataclass(frozen=True)
class GatedLinear:
    """A linear whose result goes through a gate.

    Attributes:
        linear: which.
        norm: weight [D] and eps of an RMSNorm before the gate; empty without.
    """

    linear: LinearGroup
    norm: tuple[Tensor, float] | tuple[()] = ()

    def forward(
        self,
        kept: Kept,
        name: str,
        residual: Tensor,
        gate: Tensor,
        x: Tensor,
        quantized: Quantized | None,
        product: Tensor | None,
        saving: Saving,
        trains_gate: bool,
    ) -> Tensor:
        """Return residual + gate·linear(x).

        Args:
            kept: takes what backward needs.
            name: under which.
            residual: [B, S, D].
            gate: [B, D].
            x: [B, S, K]; like the next two as `LinearGroup.forward` takes it.
            quantized: x in FP8 by the linear's `input_spec`, or None.
            product: x Dᵀ, where the maker of x has it.
            saving: of the linear's result.
            trains_gate: whether the gate has a gradient.

        Returns:
            Tensor [B, S, D].
        """
        result, h = self.linear.forward(x, quantized, product)
        keeps = trains_gate or bool(self.norm)
        fmt, group_size = saving.in_passing if keeps else NOT_SAVED
        whole = h is None or (keeps and fmt == "none")  # what is kept as it is
        low_rank = (None, None) if whole else self.linear.low_rank(h, 0, 1, result.dtype)
        if whole:
            self.linear.complete(result, h)
        y, *saved = gated_sum(residual, gate, result, *low_rank, fmt, group_size, *self.norm)
        kept.facts[f"{name}result"] = result.dtype
        kept.add(f"{name}result", *(saving.keep(result, saved[0], saved[1]) if keeps else ()))
        kept.add(f"{name}h", h)
        return y

    def again(self, kept: Kept, name: str, residual: Tensor, gate: Tensor, saving: Saving) -> Tensor:
        """In backward, what `forward` returned, from the result that it kept."""
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
        """Return gradients; that of the residual is `grad` itself.

        Args:
            kept: from forward.
            name: likewise.
            grad: of y [B, S, D].
            gate: as in forward.
            down_gradient: as `LinearGroup.adapter_gradients` takes it.
            saving: as in forward.
        """
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
) -> tuple[Tensor, Quantized | None, Tensor | None]:
    """[out | act(mlp)] of what a group of linears made, as `GatedLinear.forward` takes it.

    Values are made only where its reader multiplies by them. Keeps out and mlp for backward; mlp is what the linears
    made, behind q, k and v where attention's out is given.
    """
    linears, y, h = projected
    first, attends, spec = 0 if out is None else 3, saving.of_attention, reader.input_spec
    mlp, fmt = y[..., sum(linears.parts[:first]) :], saving.in_passing[0]
    if fmt == "none":
        linears.complete(y, h, first)
    whole, last = h is None or fmt == "none", len(linears.parts)
    low_rank = (None, None) if whole else linears.low_rank(h, first, last, y.dtype)
    how = (*in_passing(spec), *saving.in_passing, y.dtype, activation)
    if how[1] != "none" and reader.rank:
        found = mlp_activation_down(out, mlp, *low_rank, reader.copies(y.dtype).down, *how)
        product, values = found[0], y.new_empty(0)
    else:
        found, product = mlp_activation(out, None, mlp, None, *low_rank, *how), None
        values = found[0]
    _, codes, scale, *saved = found
    if out is not None:
        kept.add(f"{name}out", *attends.keep(out, saved[0], saved[1]))
    kept.add(f"{name}mlp", *saving.keep(mlp.contiguous() if fmt == "none" else mlp, saved[2], saved[3]))
    kept.facts[f"{name}mlp"] = y.dtype
    return values, quantized_by(spec, values, codes, scale), product
