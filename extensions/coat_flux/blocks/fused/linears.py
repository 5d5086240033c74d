"""Frozen linears with LoRA adapters, forward and backward apart.

Linears that read the same x form a group: their FP8 weights become one matrix, x is quantized once, and all their
adapters share one down-projection.

    h  = s · x Dᵀ                        D: every A · factor, one above the other
    y  = x Wᵀ + b  (+ h_i U_iᵀ)          each linear's columns of y with its own columns of h; U: every B
    dx = dy W  (+ dh D)                  dh_i = s · dy_i U_i
    dA = factor · dhᵀ x,  dB = dy_iᵀ h_i

s is 1, or the adapter strength of the row's image. Adapters multiply in the dtype of y. The terms in parentheses
are left to the kernels that read y or dx (arguments `h`, `U` and `dh`, `D`); others call `complete`.

Each joined weight becomes a view of the matrix, so nothing is stored twice; weights that were moved apart are
joined again at the next read. One GEMM then makes dx: summed in fp32 over all outputs and rounded once. Linears
that ai-toolkit quantized its own way multiply separately.

LoRA matrices are fp32 and multiply in bf16. Casts at each use would be 2,500 small kernels per step of FLUX.1-dev;
one shared buffer (`AdapterCopies`) takes nine.

Shapes: x [..., K], y [..., ΣN], W [N, K], A [r, K], B [N, r], h [..., n·r] with r columns for each of n linears, D
[n·r, K], U [ΣN, r]; r is the largest rank of a group, smaller ones are zero-padded.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from coat_core.config import FP8LinearConfig
from coat_core.formats import INT8
from coat_core.granularity import Granularity
from coat_core.linear.function import (
    compute_dtype,
    dgrad,
    fp8_gemm_obstacle,
    fprop,
    input_granularity,
    unit_scale,
    wants_fp8_gemm,
)
from coat_core.linear.module import FP8Linear, FP8TrainableLinear
from coat_core.linear.weight import OUTPUT_DIM, StoredWeight, as_stored, load_weight, quantize_weight
from coat_core.ops.codes import product
from coat_core.ops.lora import lora_up_gradients
from coat_core.ops.quantize import quantize
from coat_core.ops.scaled_mm import row_scale
from coat_core.quantize import Quantized

from ..lora import NotPlain, PlainAdapter, plain_adapters
from ..quantized import input_gradient, is_adopted, own_product

Spec = tuple[str, Granularity]


class NotFusable(Exception):
    """A block cannot run through the fused flow; the message says why."""


# -- the frozen part --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FrozenLinear:
    """The base: one of our FP8 linears, a plain frozen nn.Linear (`config` None), or several as one."""

    weight: StoredWeight | Tensor  # W [N, K] as it is stored, or its values
    bias: Tensor | None  # [N] or None
    config: FP8LinearConfig | None = None
    in_fp8: bool = False  # whether this device multiplies so; False multiplies by the dequantized weight

    def __post_init__(self) -> None:
        _ = self.row_scales  # made when a block is read: a pass may be captured as a CUDA graph

    @cached_property
    def input_spec(self) -> Spec | None:
        """Format and scaling of x in the GEMM; None in high precision."""
        if self.config is None or not self.in_fp8:
            return None
        return self.config.input_format, input_granularity(self.config)

    @cached_property
    def grad_spec(self) -> Spec | None:
        """The same for dy; None also if dy is multiplied by the weight's scales before the cast."""
        config = self.config
        if config is None or not self.in_fp8 or config.grad_format == "bf16":
            return None
        by_rows = not isinstance(self.weight, Tensor) and self.weight.scale.ndim
        if config.weight_granularity == "per_row" or by_rows:
            return None
        return config.grad_format, input_granularity(config)

    @cached_property
    def row_scales(self) -> tuple[Tensor, Tensor] | None:
        """Scales of a stored weight for a row-wise GEMM and its dgrad, fp32 [N, 1], [K, 1]."""
        row_wise = self.config is not None and self.in_fp8 and self.config.input_granularity == "per_row"
        if isinstance(self.weight, Tensor) or not row_wise:
            return None
        rows, width = self.weight.shape
        return row_scale(self.weight.scale, rows), row_scale(unit_scale(self.weight.scale), width)

    def forward(self, x: Tensor, quantized: Quantized | None) -> Tensor:
        """Return x Wᵀ + b; `quantized` is x in FP8 by `input_spec`, None where that is."""
        if self.config is None:
            return torch.nn.functional.linear(x, self._values, self.bias)
        weight = self._stored(self.config)
        if quantized is not None and self.row_scales is not None:
            weight = weight._replace(scale=self.row_scales[0])
        return fprop(x, quantized, weight, self.bias, compute_dtype(x))

    def dgrad(self, grad: Tensor, quantized: Quantized | None = None) -> Tensor:
        """Return dy W; `quantized` is dy in FP8 by `grad_spec`, if its producer quantized it."""
        if self.config is None:
            return grad @ self._values.to(grad.dtype)
        unit = None if self.row_scales is None else self.row_scales[1]
        return dgrad(grad, self._stored(self.config), self.config, self.in_fp8, quantized, unit)

    @property
    def _values(self) -> Tensor:
        assert isinstance(self.weight, Tensor)
        return self.weight

    def _stored(self, config: FP8LinearConfig) -> StoredWeight:
        return quantize_weight(self.weight, config) if isinstance(self.weight, Tensor) else self.weight


@dataclass(frozen=True)
class AdoptedLinear:
    """The base, quantized by ai-toolkit its own way (`quantized.adopt`); methods as those of `FrozenLinear`."""

    module: Any
    config: ClassVar[None] = None
    input_spec: ClassVar[None] = None
    grad_spec: ClassVar[None] = None

    def forward(self, x: Tensor, quantized: None) -> Tensor:
        """Return x Wᵀ + b by its own code, as in training; for rows x [B, K], which modulate, as x asks for it."""
        return own_product(self.module, x, x.ndim > 2 or x.requires_grad)

    def dgrad(self, grad: Tensor, quantized: None = None) -> Tensor:
        """Return dy W."""
        return input_gradient(self.module, grad)


def read_frozen(base: Any) -> FrozenLinear | AdoptedLinear:
    """Read a linear; NotFusable if it is trained or of unknown quantization."""
    bias = base.bias
    if bias is not None and bias.requires_grad:
        raise NotFusable("a linear whose bias is trained")
    if is_adopted(base):
        return AdoptedLinear(base)
    config = base.config if isinstance(base, FP8Linear) else getattr(base, "coat_linear_config", None)
    if config is not None:
        weight = load_weight(base, config)
        return FrozenLinear(weight, bias, config, wants_fp8_gemm(weight.scale.device, config))
    if not isinstance(base, nn.Linear) or type(base.weight.data) is not Tensor:
        raise NotFusable(f"a {type(base).__name__} of another quantization")
    if base.weight.requires_grad:
        raise NotFusable("a linear whose weight is trained")
    if isinstance(base, FP8TrainableLinear):
        in_fp8 = wants_fp8_gemm(base.weight.device, base.config)
        return FrozenLinear(base.weight, bias, base.config if in_fp8 else None, in_fp8)
    return FrozenLinear(base.weight, bias)


def _joinable(bases: Sequence[FrozenLinear | AdoptedLinear]) -> bool:
    """Whether linears can multiply by one matrix: FP8 weights of one config, in one place, with a row-wise GEMM."""
    frozen = [base for base in bases if isinstance(base, FrozenLinear) and isinstance(base.weight, StoredWeight)]
    first = bases[0].config
    if first is None or len(frozen) < len(bases) or any(base.config != first for base in bases):
        return False
    devices = {base.weight.scale.device for base in frozen if isinstance(base.weight, StoredWeight)}
    if len(devices) > 1 or len({(base.in_fp8, base.bias is None) for base in frozen}) > 1:
        return False
    row_wise = replace(first, weight_granularity="per_row")  # each linear's scale is that of its rows
    return not frozen[0].in_fp8 or fp8_gemm_obstacle(devices.pop(), row_wise) is None


def _join(modules: Sequence[Any], bases: Sequence[Any]) -> FrozenLinear:
    """One base for several: weights and transposed copies in place, scales and biases copied."""
    config, in_fp8 = bases[0].config, bases[0].in_fp8
    buffers = {name: join_buffers(modules, name, dim) for name, dim in OUTPUT_DIM.items()}
    stored = [base.weight for base in bases]
    scale = torch.cat([weight.scale.reshape(-1, 1).expand(weight.shape[0], 1) for weight in stored])
    biases = [base.bias for base in bases if base.bias is not None]
    return FrozenLinear(as_stored(buffers, scale, config), torch.cat(biases) if biases else None, config, in_fp8)


def join_buffers(modules: Sequence[nn.Module], name: str, dim: int) -> Tensor | None:
    """Return the modules' 2D buffers of that name as one along `dim`, each a view of it; None if one is missing."""
    parts = [module._buffers.get(name) for module in modules]
    if any(part is None for part in parts):
        return None
    tensors: list[Any] = parts
    whole = _whole(tensors, dim)
    if whole is None:
        whole = torch.cat(tensors, dim=dim)
        for module, view in zip(modules, whole.split([part.shape[dim] for part in tensors], dim=dim), strict=True):
            module._buffers[name] = view
    return whole


def _whole(parts: Sequence[Tensor], dim: int) -> Tensor | None:
    """The contiguous matrix of which all parts are adjacent views, or None."""
    first, shape = parts[0], list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    stride, offset = (shape[1], 1), first.storage_offset()
    for part in parts:
        same = part.untyped_storage()._cdata == first.untyped_storage()._cdata
        if not same or part.stride() != stride or part.storage_offset() != offset:
            return None
        offset += part.shape[dim] * stride[dim]
    return first.as_strided(tuple(shape), stride)


def in_passing(spec: Spec | None, fmt: str = "e4m3") -> tuple[str, str]:
    """`fmt` and `granularity` of a kernel that quantizes its output; "none" if it does not."""
    if spec is None or not made_in_passing(spec):
        return fmt, "none"
    return spec[0], spec[1].name


def quantized_by(spec: Spec | None, x: Tensor, codes: Tensor, scale: Tensor) -> Quantized | None:
    """X in FP8 by `spec`: its kernel's codes, or made here."""
    if spec is None:
        return None
    fmt, granularity = spec
    return Quantized(codes, scale, granularity) if made_in_passing(spec) else quantize(x, fmt, granularity)


def made_in_passing(spec: Spec) -> bool:
    """Whether kernels that make values quantize them so: whole rows, or a tensor, but not 1×G, and not rotated."""
    return spec[1].name != "per_group" and spec[0] != INT8.name


# -- with adapters ----------------------------------------------------------------------------------------------------


class Copies(NamedTuple):
    """The matrices of a group's adapters, in the dtype that its linears multiply in: D [n·r, K] and U [ΣN, r]."""

    down: Tensor
    up: Tensor


class LowRank(NamedTuple):
    """A pending low-rank product: h [..., r] or dh [..., n·r], and U [N, r] or D [n·r, K]."""

    rows: Tensor
    matrix: Tensor


@dataclass(frozen=True)
class LinearGroup:
    """Linears that read the same x, with their adapters; `parts`: widths of y's columns if outputs are fused."""

    bases: tuple[FrozenLinear | AdoptedLinear, ...]  # one for all where their weights are joined, else one of each
    widths: tuple[int, ...]  # N of each linear
    adapters: tuple[tuple[PlainAdapter, ...], ...]  # of each linear
    parts: tuple[int, ...]

    @cached_property
    def all_adapters(self) -> list[PlainAdapter]:
        """Those of each linear in turn."""
        return list(chain.from_iterable(self.adapters))

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """A and B of each adapter in turn."""
        return [matrix for adapter in self.all_adapters for matrix in (adapter.down, adapter.up)]

    @cached_property
    def rank(self) -> int:
        """The largest of a linear's ranks, those of its adapters added up; 0 without adapters."""
        return max(sum(len(adapter.down) for adapter in adapters) for adapters in self.adapters)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of the adapters' matrices; fp32 without any."""
        return self.all_adapters[0].down.dtype if self.all_adapters else torch.float32

    @cached_property
    def are_usual(self) -> bool:
        """Whether each linear has one adapter, of the group's rank and dtype, with factors of 1."""
        return all(len(adapters) == 1 and self._is_usual(adapters[0]) for adapters in self.adapters)

    def _is_usual(self, adapter: PlainAdapter) -> bool:
        plain = not any(isinstance(factor, Tensor) or factor != 1.0 for factor in adapter.factors)
        return plain and len(adapter.down) == self.rank and adapter.down.dtype == adapter.up.dtype == self.dtype

    @cached_property
    def places(self) -> list[tuple[int, int, int]]:
        """First and last column of y of each part, and its linear."""
        ends = list(accumulate(self.widths))
        return [(start, stop, bisect_right(ends, start)) for start, stop in pairwise(accumulate(self.parts, initial=0))]

    @cached_property
    def input_spec(self) -> Spec | None:
        """As of `FrozenLinear`; of all linears that have one it is the same."""
        return next((base.input_spec for base in self.bases if base.input_spec), None)

    @property
    def grad_spec(self) -> Spec | None:
        """As of `FrozenLinear`; None where dy is cut up before its cast."""
        return self.bases[0].grad_spec if len(self.bases) == 1 else None

    def forward(
        self, x: Tensor, quantized: Quantized | None, product: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return y [..., ΣN] without the adapters' part, and h (None without adapters).

        `quantized` is x [..., K] in FP8 by `input_spec`, `product` x Dᵀ [..., n·r]; with both, only the dtype of x
        matters.
        """
        outputs = [base.forward(x, quantized if base.input_spec else None) for base in self.bases]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        if not self.rank:
            return y, None
        if product is None:
            product = torch.nn.functional.linear(as_dtype(x, y.dtype), self.copies(y.dtype).down)
        return y, self._times_strengths(product)

    def low_rank(self, h: Tensor, start: int, stop: int, dtype: torch.dtype) -> LowRank:
        """The pending product for parts `start` to `stop`, with r columns of h for each."""
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
        """Return dh [..., n·r] in the dtype of h, and [dA, dB] of each adapter in turn, for dy [..., ΣN].

        `down_gradient` computes dhᵀ x [n·r, K] from dh, in the dtype of the matrices.
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
        for down, up, adapters in zip(of_downs, of_ups, self.adapters, strict=True):
            first = 0
            for adapter in adapters:
                last = first + adapter.down.shape[0]
                gradients.append(times_factors(as_dtype(down[first:last], adapter.down.dtype), adapter))
                gradients.append(as_dtype(up[:, first:last], adapter.up.dtype).contiguous())
                first = last
        return dh, gradients

    def down_gradient(self, dh: Tensor, x: Tensor) -> Tensor:
        """Return dhᵀ x [n·r, K] in the dtype of the matrices, for x [..., K] that is there."""
        return product(dh.flatten(0, -2).t(), as_dtype(x, dh.dtype).flatten(0, -2), self.dtype)

    def dgrad(self, dy: Tensor, quantized: Quantized | None = None) -> Tensor:
        """Return dx [..., K] in the dtype of dy [..., ΣN], without the adapters' part; arguments as `FrozenLinear`."""
        if len(self.bases) == 1:
            return self.bases[0].dgrad(dy, quantized)
        dx: Tensor | None = None
        for base, part in zip(self.bases, dy.split(self.widths, dim=-1), strict=True):
            dx = base.dgrad(part) if dx is None else dx.add_(base.dgrad(part).to(dx.dtype))
        assert dx is not None
        return dx

    def complete_dx(self, dx: Tensor, dh: Tensor | None) -> Tensor:
        """Add the adapters' part to dx, in place."""
        if dh is not None:
            dx.view(-1, dx.shape[-1]).addmm_(as_dtype(dh, dx.dtype).flatten(0, -2), self.copies(dx.dtype).down)
        return dx

    def copies(self, dtype: torch.dtype) -> Copies:
        """Copies from `AdapterCopies`, else made for this call."""
        held: Copies | None = self.all_adapters[0].copies
        if held is not None and held.down.dtype == dtype:
            return held
        like = self.all_adapters[0]
        downs, ups = [], []
        for adapters, width in zip(self.adapters, self.widths, strict=True):
            missing = self.rank - sum(len(adapter.down) for adapter in adapters)
            downs += [times_factors(adapter.down, adapter) for adapter in adapters]
            columns: list[Tensor] = [adapter.up for adapter in adapters]
            if missing:
                downs.append(like.down.new_zeros(missing, like.down.shape[1]))
                columns.append(like.up.new_zeros(width, missing))
            ups.append(_cat(columns, dim=1))
        return Copies(_cat(downs, dim=0).to(dtype), _cat(ups, dim=0).to(dtype))

    def _times_strengths(self, h: Tensor) -> Tensor:
        """Scale each image's rows in h or dh [images, ..., n·r] by its strength, in fp32; neighbours may share one."""
        strengths = self.all_adapters[0].strengths
        if strengths is None:
            return h
        if len(h) % len(strengths):
            raise ValueError(f"{len(strengths)} LoRA strengths for a batch of {len(h)}: must be one per image")
        rows = strengths.float().repeat_interleave(len(h) // len(strengths))
        return (h * rows.view(-1, *[1] * (h.ndim - 1))).to(h.dtype)


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, without a call of torch if x has that dtype."""
    return x if x.dtype == dtype else x.to(dtype)


def _cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


def times_factors(matrix: Tensor, adapter: PlainAdapter) -> Tensor:
    """Return the matrix times the adapter's factors; itself if they are 1."""
    for factor in adapter.factors:
        if isinstance(factor, Tensor) or factor != 1.0:
            matrix = matrix * factor
    return matrix


def read_group(modules: Sequence[Any], join: bool, parts: tuple[int, ...] = ()) -> LinearGroup:
    """Read linears that share x, with LoRAs; `join` makes one matrix of FP8 weights. NotFusable if they differ."""
    try:
        plain = [plain_adapters(module) for module in modules]
    except NotPlain as error:
        raise NotFusable(str(error)) from error
    adapters = tuple(adapters for _, adapters in plain)
    if len({id(adapter.strengths) for adapter in chain.from_iterable(adapters)}) > 1:
        raise NotFusable("LoRAs whose strengths per image are not the same")
    bases = tuple(read_frozen(base) for base, _ in plain)
    if len({base.input_spec for base in bases} - {None}) > 1:
        raise NotFusable("linears that read the same tensor want it in different formats")
    widths = tuple(base.out_features for base, _ in plain)
    if join and len(bases) > 1 and _joinable(bases):
        bases = (_join([base for base, _ in plain], bases),)
    if sum(parts) not in (0, sum(widths)):
        raise NotFusable(f"linears of {sum(widths)} outputs in all, where {sum(parts)} are read")
    return LinearGroup(bases, widths, adapters, parts or widths)


def read_linear(module: Any) -> LinearGroup:
    """Read one linear; errors as `read_group`."""
    return read_group((module,), join=False)


class AdapterCopies:
    """bf16 copies of all fused blocks' adapter matrices in one buffer (`LinearGroup.copies`)."""

    def __init__(self, blocks: Sequence[Any], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._groups = [group for block in blocks for group in _groups(block) if group.rank]
        self._copies: list[Tensor] = []
        self._matrices: list[Tensor] = []  # what each of them is of
        self._scaled: list[tuple[Tensor, PlainAdapter]] = []  # copy of A·f with f other than 1, its adapter
        shapes = []
        for group in self._groups:
            width = group.all_adapters[0].down.shape[1]
            shapes += [(len(group.widths) * group.rank, width), (sum(group.widths), group.rank)]
        if not shapes:
            return
        device = self._groups[0].parameters[0].device
        pieces = torch.zeros(sum(map(math.prod, shapes)), dtype=dtype, device=device).split(
            list(map(math.prod, shapes))
        )
        matrices = iter([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)])
        for group in self._groups:
            down, up = next(matrices), next(matrices)
            group.all_adapters[0].copies = Copies(down, up)
            for of_downs, of_ups, adapters in zip(
                down.split(group.rank), up.split(group.widths), group.adapters, strict=True
            ):
                start = 0
                for adapter in adapters:
                    stop = start + len(adapter.down)
                    self._add(adapter, of_downs[start:stop], of_ups[:, start:stop])
                    start = stop

    def _add(self, adapter: PlainAdapter, down: Tensor, up: Tensor) -> None:
        self._copies.append(up)
        self._matrices.append(adapter.up)
        if times_factors(adapter.down, adapter) is adapter.down:
            self._copies.append(down)
            self._matrices.append(adapter.down)
        else:
            self._scaled.append((down, adapter))

    def drop(self) -> None:
        """Let the adapters be cast at each use again."""
        for group in self._groups:
            group.all_adapters[0].copies = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current matrices; if changed, not between a forward and its backward pass."""
        if self._copies:
            torch._foreach_copy_(self._copies, self._matrices)
        for copy, adapter in self._scaled:
            copy.copy_(times_factors(adapter.down, adapter))


def _groups(block: Any) -> Iterator[LinearGroup]:
    for field in fields(block):
        value = getattr(block, field.name)
        if isinstance(value, LinearGroup):
            yield value
        elif is_dataclass(value):
            yield from _groups(value)
