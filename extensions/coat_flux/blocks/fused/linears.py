"""Frozen linears with LoRA adapters, forward and backward apart, for the blocks of this package.

Linears that read the same x go together: their weights are one matrix, x is quantized once, and all their adapters
share one down-projection.

    h  = s · x Dᵀ                        D: every A · factor, one above the other
    y  = x Wᵀ + b  (+ h_i U_iᵀ)          each linear's columns of y with its own columns of h; U: every B
    dx = dy W  (+ dh D)                  dh_i = s · dy_i U_i
    dA = factor · dhᵀ x,  dB = dy_iᵀ h_i

s is 1, or the strength of the row's image where images have different ones. Adapters multiply in the dtype of y (their
own precision is the optimizer's). What is in parentheses is left to whoever reads y or dx: kernels add it while they
read (`h`, `U` and `dh`, `D` are their arguments), others call `complete`.

Shapes: x [..., K], y [..., ΣN], A [r, K], B [N, r], h [..., n·r] with r columns for each of n linears, D [n·r, K],
U [ΣN, r]; r is the largest rank of a group, smaller ones are filled up with zeros.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coat_core.ops.codes import product
from coat_core.ops.lora import lora_up_gradients
from coat_core.quantize import Quantized

from ..lora import NotPlain, PlainAdapter, plain_adapters
from .frozen import AdoptedLinear, FrozenLinear, NotFusable, join_frozen, joinable, read_frozen


class Copies(NamedTuple):
    """The matrices of a group's adapters, in the dtype that its linears multiply in: D [n·r, K] and U [ΣN, r]."""

    down: Tensor
    up: Tensor


class LowRank(NamedTuple):
    """A product of two matrices that is still to be added: of x and D, or dy and U, with the other one.

    Attributes:
        rows: h [..., r] or dh [..., n·r].
        matrix: U [N, r] or D [n·r, K].
    """

    rows: Tensor
    matrix: Tensor


@dataclass(frozen=True)
class LinearGroup:
    """Linears that read the same x, with their adapters.

    Attributes:
        bases: one for all where their weights are joined, else one of each.
        widths: N of each linear.
        adapters: of each linear.
        parts: widths of what readers of y cut it into, where linears make several at once (q, k and v); else `widths`.
        all_adapters: those of each linear in turn.
        parameters: A and B of each adapter in turn.
        dtype: of these; None without adapters.
        rank: the largest of a linear's ranks, those of its adapters added up; 0 without adapters.
        are_usual: whether each linear has one adapter, of the group's rank and dtype, with factors of 1.
        columns: of y, first and last of each linear.
        places: of each part, its first and last column of y, and which linear it is of.
        input_spec: as `FrozenLinear.input_spec`; of all linears that have one it is the same.
        grad_spec: as `FrozenLinear.grad_spec`; None where dy is cut up before its cast.
    """

    bases: tuple[FrozenLinear | AdoptedLinear, ...]
    widths: tuple[int, ...]
    adapters: tuple[tuple[PlainAdapter, ...], ...]
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        found = [adapter for adapters in self.adapters for adapter in adapters]
        ranks = [sum(len(adapter.down) for adapter in adapters) for adapters in self.adapters]
        specs = [base.input_spec for base in self.bases if base.input_spec]
        columns, parts = list(pairwise(accumulate(self.widths, initial=0))), self.parts or self.widths
        ends = [stop for _, stop in columns]
        # asked for many times in each pass; no fields, since they follow from those
        vars(self).update(
            all_adapters=found,
            parameters=[matrix for adapter in found for matrix in (adapter.down, adapter.up)],
            dtype=found[0].down.dtype if found else None,
            rank=max(ranks),
            are_usual=all(_is_usual(adapters, max(ranks), found[0].down.dtype) for adapters in self.adapters if found),
            columns=columns,
            parts=parts,
            places=[(*place, bisect_right(ends, place[0])) for place in pairwise(accumulate(parts, initial=0))],
            input_spec=specs[0] if specs else None,
            grad_spec=self.bases[0].grad_spec if len(self.bases) == 1 else None,
        )

    def forward(
        self, x: Tensor, quantized: Quantized | None, product: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Multiply by the weights, and x by D.

        Args:
            x: [..., K]; where both of the next are given, anything of its dtype.
            quantized: x in FP8 by `input_spec`, or None.
            product: x Dᵀ [..., n·r], where the maker of x has it.

        Returns:
            y [..., ΣN] without the adapters' part, and h; None without adapters.
        """
        outputs = [base.forward(x, quantized if base.input_spec else None) for base in self.bases]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        if not self.rank:
            return y, None
        if product is None:
            product = torch.nn.functional.linear(as_dtype(x, y.dtype), self.copies(y.dtype).down)
        return y, self._times_strengths(product)

    def low_rank(self, h: Tensor, start: int, stop: int, dtype: torch.dtype) -> LowRank:
        """What is to be added to the columns of parts `start` to `stop`, with r columns of h for each."""
        up, r = self.copies(dtype).up, self.rank
        if stop - start == len(self.widths) == len(self.parts):
            return LowRank(h, up)
        up = up[self.places[start][0] : self.places[stop - 1][1]]
        if len(self.parts) == len(self.widths):
            return LowRank(h[..., start * r : stop * r], up)
        return LowRank(torch.cat([h[..., i * r : (i + 1) * r] for *_, i in self.places[start:stop]], dim=-1), up)

    def complete(self, y: Tensor, h: Tensor | None, first: int = 0, last: int | None = None) -> Tensor:
        """Add the adapters' part of parts `first` to `last` to y, in place."""
        if h is not None:
            flat, r, up = y.view(-1, y.shape[-1]), self.rank, self.copies(y.dtype).up
            for start, stop, i in self.places[first:last]:
                if self.adapters[i]:
                    flat[:, start:stop].addmm_(h.flatten(0, -2)[:, i * r : (i + 1) * r], up[start:stop].t())
        return y

    def adapter_gradients(
        self, dy: Tensor, down_gradient: Callable[[Tensor], Tensor], h: Tensor | None
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Return dh [..., n·r] in the dtype of h, and [dA, dB] of each adapter in turn.

        Args:
            dy: [..., ΣN].
            down_gradient: dh → dhᵀ x [n·r, K] in the dtype of the matrices; called where there are adapters.
            h: from `forward`.
        """
        if h is None:
            return None, []
        dh, ups = lora_up_gradients(dy, h, self.copies(h.dtype).up, list(self.widths), self.dtype)
        dh = self._times_strengths(dh)
        downs, gradients = down_gradient(dh), []
        several = len(self.widths) > 1
        of_downs, of_ups = (downs.split(self.rank), ups.split(self.widths)) if several else ((downs,), (ups,))
        if self.are_usual:
            return dh, list(chain.from_iterable(zip(of_downs, of_ups, strict=True)))
        for down, up, found in zip(of_downs, of_ups, self.adapters, strict=True):
            first = 0
            for adapter in found:
                last = first + adapter.down.shape[0]
                gradients.append(times_factors(as_dtype(down[first:last], adapter.down.dtype), adapter))
                gradients.append(as_dtype(up[:, first:last], adapter.up.dtype).contiguous())
                first = last
        return dh, gradients

    def down_gradient(self, dh: Tensor, x: Tensor) -> Tensor:
        """Return dhᵀ x [n·r, K] in the dtype of the matrices, for x [..., K] that is there."""
        return product(dh.flatten(0, -2).t(), as_dtype(x, dh.dtype).flatten(0, -2), self.dtype)

    def dgrad(self, dy: Tensor, quantized: Quantized | None = None) -> Tensor:
        """Return dx [..., K] in the dtype of dy, without the adapters' part.

        Args:
            dy: [..., ΣN].
            quantized: dy in FP8, where its maker has quantized it by `grad_spec`.
        """
        if len(self.bases) == 1:
            return self.bases[0].dgrad(dy, quantized)
        parts = (base.dgrad(dy[..., start:stop]) for base, (start, stop) in zip(self.bases, self.columns, strict=True))
        dx = next(parts)
        for part in parts:
            dx += part.to(dx.dtype)
        return dx

    def complete_dx(self, dx: Tensor, dh: Tensor | None) -> Tensor:
        """Add the adapters' part to dx, in place."""
        if dh is not None:
            dx.view(-1, dx.shape[-1]).addmm_(as_dtype(dh, dx.dtype).flatten(0, -2), self.copies(dx.dtype).down)
        return dx

    def copies(self, dtype: torch.dtype) -> Copies:
        """Those that `LoraShadow` keeps, else made for this call; of a group with adapters."""
        kept: Copies | None = self.all_adapters[0].copies
        if kept is not None and kept.down.dtype == dtype:
            return kept
        down = _joined([matrix for i in range(len(self.widths)) for matrix in self._downs(i)], dim=0)
        up = _joined([self._up(i) for i in range(len(self.widths))], dim=0)
        return Copies(down.to(dtype), up.to(dtype))

    def _downs(self, i: int) -> Iterator[Tensor]:
        found = self.adapters[i]
        yield from map(scaled_down, found)
        missing = self.rank - sum(len(adapter.down) for adapter in found)
        if missing:
            like = self.all_adapters[0].down
            yield like.new_zeros(missing, like.shape[1])

    def _up(self, i: int) -> Tensor:
        parts: list[Tensor] = [adapter.up for adapter in self.adapters[i]]
        missing = self.rank - sum(part.shape[1] for part in parts)
        if missing:
            parts.append(self.all_adapters[0].up.new_zeros(self.widths[i], missing))
        return _joined(parts, dim=1)

    def _times_strengths(self, h: Tensor) -> Tensor:
        """Return h [images, ..., n·r], or dh, with the rows of each image times its strength, in fp32.

        With more images than strengths (guidance doubles the batch) neighbours share one, as in ai-toolkit.
        """
        strengths = self.all_adapters[0].strengths
        if strengths is None:
            return h
        if len(h) % len(strengths):
            raise ValueError(f"{len(strengths)} LoRA strengths for a batch of {len(h)}: must be one per image")
        rows = strengths.float().repeat_interleave(len(h) // len(strengths))
        return (h * rows.view(-1, *[1] * (h.ndim - 1))).to(h.dtype)


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`; where it has that dtype, without asking torch."""
    return x if x.dtype == dtype else x.to(dtype)


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


def scaled_down(adapter: PlainAdapter) -> Tensor:
    """A · factors [r, K]; A itself where they are 1."""
    return times_factors(adapter.down, adapter)


def _is_usual(adapters: tuple[PlainAdapter, ...], rank: int, dtype: torch.dtype) -> bool:
    if len(adapters) != 1:
        return False
    (adapter,) = adapters
    plain = not any(isinstance(factor, Tensor) or factor != 1.0 for factor in adapter.factors)
    return plain and len(adapter.down) == rank and adapter.down.dtype == adapter.up.dtype == dtype


def times_factors(matrix: Tensor, adapter: PlainAdapter) -> Tensor:
    """Return the matrix times the adapter's factors, itself where they are 1."""
    for factor in adapter.factors:
        if isinstance(factor, Tensor) or factor != 1.0:
            matrix = matrix * factor
    return matrix


def read_group(modules: Sequence[Any], join: bool, parts: tuple[int, ...] = ()) -> LinearGroup:
    """Read linears of a block that read the same x, with whatever LoRA sits on them.

    Args:
        modules: the linears.
        join: make their FP8 weights one matrix, of which theirs become views; False leaves them where they are.
        parts: as of `LinearGroup`; of linears that each make one, empty.

    Raises:
        NotFusable: one is trained itself, quantized by someone unknown, or its adapter is more than two matrices; or
            they do not go together.
    """
    try:
        plain = [plain_adapters(module) for module in modules]
    except NotPlain as error:
        raise NotFusable(str(error)) from error
    adapters = tuple(found for _, found in plain)
    if len({id(adapter.strengths) for found in adapters for adapter in found}) > 1:
        raise NotFusable("LoRAs whose strengths per image are not the same")
    bases = tuple(read_frozen(base) for base, _ in plain)
    if len({base.input_spec for base in bases} - {None}) > 1:
        raise NotFusable("linears that read the same tensor want it in different formats")
    widths = tuple(base.out_features for base, _ in plain)
    if join and len(bases) > 1 and joinable(bases):
        bases = (join_frozen([base for base, _ in plain], bases),)
    if sum(parts) not in (0, sum(widths)):
        raise NotFusable(f"linears of {sum(widths)} outputs in all, where {sum(parts)} are read")
    return LinearGroup(bases, widths, adapters, parts)


def read_linear(module: Any) -> LinearGroup:
    """Read one linear; errors as `read_group`."""
    return read_group((module,), join=False)
