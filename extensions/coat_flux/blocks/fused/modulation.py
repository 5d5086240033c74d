"""adaLN's linears: one row per image, kept in high precision.

Modulations depend on the time step and the prompt alone, so those of all blocks are computed at the start of a
forward pass: frozen weights one by one, adapters of equal shape as one batched product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coat_core.autograd import first_order_only, without_autocast
from coat_core.ops.codes import product
from coat_core.ops.quantize import quantize

from .block import Kept, leaves_of, returned
from .linears import LinearGroup, as_dtype, times_factors

__all__ = ["Modulation", "gradient_of_vectors", "modulate_ahead"]


@dataclass
class Ahead:
    """Vectors computed at the start of the pass, and their temb."""

    temb: Tensor | None = None
    vectors: Tensor | None = None


@dataclass(frozen=True)
class Modulation:
    """The linear of an adaLN."""

    linear: LinearGroup  # to its vectors
    silu: bool = True  # whether that of temb goes into it, or temb itself; the same in all blocks of a model
    ahead: Ahead = field(default_factory=Ahead)  # what `modulate_ahead` has made

    def __call__(self, temb: Tensor) -> Tensor:
        """Return the adaLN vectors of a block, side by side [B, n·D], for temb [B, D]."""
        vectors, made_of = self.ahead.vectors, self.ahead.temb
        self.ahead.vectors = self.ahead.temb = None
        if vectors is not None and made_of is temb:
            return vectors
        result: Tensor = _Rows.apply(self.input_of(temb), self.linear, *leaves_of(self.linear.parameters))
        return result

    def input_of(self, temb: Tensor) -> Tensor:
        """What the linear reads."""
        return torch.nn.functional.silu(temb) if self.silu else temb

    def _key(self) -> tuple[int, int, torch.dtype] | None:
        """Modulations with equal keys are batched; None: never."""
        adapters = self.linear.all_adapters
        alone = len(adapters) != 1 or adapters[0].strengths is not None or self.linear.input_spec is not None
        return None if alone else (self.linear.widths[0], self.linear.rank, adapters[0].down.dtype)


def modulate_ahead(modulations: Sequence[Modulation], temb: Tensor) -> None:
    """Compute the vectors that these modulations return if their next call is for this temb [B, D].

    Only for blocks that are not recomputed, since the graph is built here, and a temb without a gradient.
    """
    groups: dict[Any, list[Modulation]] = {}
    if not temb.requires_grad:
        for modulation in modulations:
            groups.setdefault(modulation._key(), []).append(modulation)
    x = modulations[0].input_of(temb) if groups else temb
    for key, alike in groups.items():
        if key is None:
            continue
        linears = [modulation.linear for modulation in alike]
        parameters = [parameter for linear in linears for parameter in linear.parameters]
        for modulation, vectors in zip(alike, _Together.apply(x, linears, *leaves_of(parameters)), strict=True):
            modulation.ahead.temb, modulation.ahead.vectors = temb, vectors


def gradient_of_vectors(vectors: Tensor, *parts: Tensor | None) -> Tensor | None:
    """Gradients of shift, scale and gate side by side [B, n·D]; None if one is missing."""
    gradients = [part.flatten(1) for part in parts if part is not None]
    return as_dtype(torch.cat(gradients, dim=1), vectors.dtype) if len(gradients) == len(parts) else None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: LinearGroup, *leaves: Tensor) -> Tensor:
        spec = linear.input_spec
        y, h = linear.forward(x, quantize(x, *spec) if spec else None)
        kept = Kept()
        kept.add("rows", x)
        kept.add("h", h)
        kept.save(ctx, linear.parameters)
        ctx.linear, ctx.leaves = linear, len(leaves)
        return linear.complete(y, h)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        with without_autocast(grad.device):
            kept, linear, dx = Kept.of(ctx), ctx.linear, None
            (x,) = kept["rows"]
            dh, parameter_grads = linear.adapter_gradients(
                grad, lambda dh: linear.down_gradient(dh, x), kept.first("h")
            )
            if ctx.needs_input_grad[0]:
                dx = linear.complete_dx(linear.dgrad(grad), dh).to(x.dtype)
        return dx, None, *returned(ctx.leaves, linear.parameters, parameter_grads)


class _Together(torch.autograd.Function):
    """Modulations of one shape, each with one adapter: x [B, D] (no gradient), h [n, B, r], U [n, N, r], D [n·r, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linears: Sequence[LinearGroup], *leaves: Tensor) -> tuple[Tensor, ...]:
        y = torch.stack([linear.bases[0].forward(x, None) for linear in linears])
        copies = [linear.copies(y.dtype) for linear in linears]
        rows, rank = as_dtype(x, y.dtype), linears[0].rank
        h = (rows @ torch.cat([copy.down for copy in copies]).t()).unflatten(1, (-1, rank)).transpose(0, 1)
        kept = Kept()
        kept.add("rows", x)
        kept.add("h", h)
        parameters = [parameter for linear in linears for parameter in linear.parameters]
        kept.save(ctx, parameters)
        ctx.linears, ctx.parameters, ctx.leaves = linears, parameters, len(leaves)
        ups = torch.stack([copy.up for copy in copies])
        return torch.baddbmm(y, h, ups.transpose(1, 2)).unbind()

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        with without_autocast(grads[0].device):
            kept, linears = Kept.of(ctx), ctx.linears
            (x,), (h,) = kept["rows"], kept["h"]
            dtype = linears[0].all_adapters[0].down.dtype
            dy = torch.stack(grads).to(h.dtype)
            ups = torch.stack([linear.copies(h.dtype).up for linear in linears])
            dh = (dy @ ups).transpose(0, 1).flatten(1)
            downs = product(dh.t(), x.to(h.dtype), dtype).split(linears[0].rank)
            of_ups = product(dy.transpose(1, 2), h, dtype)
            gradients = []
            for linear, down, up in zip(linears, downs, of_ups, strict=True):
                (adapter,) = linear.all_adapters
                gradients += [
                    times_factors(as_dtype(down, adapter.down.dtype), adapter),
                    as_dtype(up, adapter.up.dtype),
                ]
        return None, None, *returned(ctx.leaves, ctx.parameters, gradients)
