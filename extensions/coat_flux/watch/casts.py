"""Observes every cast to FP8 while it happens: a dispatch mode around one step.

Operators declare their casts (`coat_core.casts`). Values and codes are compared on the device, on evenly spaced rows
(`measure_cast`), and read back once at the end. Results do not change. CUDA's backward thread inherits the mode.

A product declares, by its weight, which layer reads the codes and in which pass. Codes that no product reads count as
saved for backward, in the block of the linear that ran last. Casts of trained weights are not reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from coat_core.casts import INPUT, Cast, Product, declarations
from coat_core.linear.function import CODES, TRANSPOSED
from coat_core.linear.module import FP8TrainableLinear
from coat_core.ops.adamw import Hyper, Moment, adamw_update_, read_moments
from coat_core.optim.sharded import local_values

from ..blocks.cast_loss import decibels, measure_cast, noise_share, sampled
from ..blocks.models import layer_of

SAVED, EXP_AVG, EXP_AVG_SQ = "saved", "exp_avg", "exp_avg_sq"
MOMENT_BLOCKS = 16  # measured per parameter and moment


class CastPrecision(NamedTuple):
    """Losses of casts of one kind, in one step (0: weights), of a linear, or of a block's saved activations."""

    step: int
    layer: str
    kind: str  # a key of `precision.KINDS`
    sqnr_db: float  # local (`blocks.cast_loss`): inf for exact casts, nan where all values were zero
    underflow: float  # share of nonzero elements that became zero, in the worst cast
    saturation: float  # share beyond the largest code, in the worst cast
    elements: int


@dataclass
class _Observed:
    kind: str
    losses: Tensor  # of `measure_cast`
    elements: int
    block: str  # or layer, for codes that no product reads
    layers: list[str] = field(default_factory=list)  # that multiply the codes


class CastProbe(TorchDispatchMode):
    """Observes the casts of one step; layers are named by `model`, moments by `lora`."""

    def __init__(self, model: nn.Module | None, lora: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._linears = []  # with codes of their weight, which is frozen or trained
        for name, module in () if model is None else model.named_modules():
            if CODES in module._buffers or isinstance(module, FP8TrainableLinear):
                self._linears.append((name.removesuffix(".base_layer"), module))
        self._parameters = {local_values(param).data_ptr(): name for name, param in lora.items()}
        self._casts: list[_Observed] = []
        self._latest: dict[int, _Observed | None] = {}  # by address of the codes
        self._weights: dict[int, list[str]] = {}  # address of codes made for a product → layers
        self._block = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        declare = declarations.get(func.name())
        if declare is None:
            out = func(*args, **kwargs)
            # products read rows of an attention's joint codes in one piece, a copy with two images and more
            if func is torch.ops.aten.clone.default and out.itemsize == 1:
                self._latest[_address(out)] = self._latest.get(_address(args[0]))
            return out
        if func._schema.is_mutable:
            return self._observe_update(declare(None, *args, **kwargs), partial(func, *args, **kwargs))
        out = func(*args, **kwargs)
        declared = declare(out, *args, **kwargs)
        if isinstance(declared, Product):
            self._add_product(declared)
        else:
            for cast in [declared] if isinstance(declared, Cast) else declared:
                self._add(cast)
        return out

    def rows(self, step: int) -> list[CastPrecision]:
        """All casts by layer and kind; one read by several layers is in the row of each."""
        if not self._casts:
            return []
        groups: dict[tuple[str, str], list[tuple[list[float], int]]] = {}
        numbers = torch.stack([cast.losses for cast in self._casts]).tolist()
        for cast, losses in zip(self._casts, numbers, strict=True):
            for layer in cast.layers or [cast.block]:
                groups.setdefault((layer, cast.kind), []).append((losses, cast.elements))
        return [row_of(step, layer, kind, group) for (layer, kind), group in groups.items()]

    def _add(self, cast: Cast) -> None:
        codes = _address(cast.codes)
        self._weights.pop(codes, None)
        if cast.kind is None:
            layers = self._layers_of(cast.values)
            if layers or not cast.values.is_floating_point():
                self._weights[codes] = layers
                return
        sample, taken, scale = sampled(cast.values.detach(), cast.codes, cast.scale)
        if cast.factors is not None:
            sample = sample.to(torch.float32) * cast.factors
        losses = measure_cast(sample, taken, scale, cast.granularity)
        observed = _Observed(cast.kind or SAVED, losses, cast.values.numel(), self._block)
        self._latest[codes] = observed
        self._casts.append(observed)

    def _add_product(self, product: Product) -> None:
        layers = self._layers_of(product.weight) or self._weights.get(_address(product.weight), [])
        other = self._latest.get(_address(product.weight))
        if not layers and other is not None and other.kind == INPUT:  # wgrad: the second operand is x
            layers = other.layers
        cast = None if product.codes is None else self._latest.get(_address(product.codes))
        if cast is not None:
            cast.kind = product.kind
            cast.layers += [layer for layer in layers if layer not in cast.layers]
        if layers:
            self._block = ".".join(layers[0].split(".")[:2])

    def _layers_of(self, weight: Tensor) -> list[str]:
        """Layers with this weight or its codes now: the first pass joins weights, blocks may share storage."""
        start, end = weight.data_ptr(), weight.data_ptr() + weight.nbytes
        layers = []
        for layer, module in self._linears:
            parts = [module._buffers.get(CODES), module._buffers.get(TRANSPOSED)]
            if isinstance(module, FP8TrainableLinear):
                parts = [module.trained_codes.codes, local_values(module.weight)]
            is_inside = any(part is not None and start <= part.data_ptr() < end for part in parts)
            is_here = vars(module).get("codes_are_here")  # of a storage that several blocks share
            if is_inside and (is_here is None or is_here()):
                layers.append(layer)
        return layers

    def _observe_update(self, update: Any, step: Callable[[], Any]) -> Any:
        """Do AdamW's step on packed moments, and in fp32 on sampled blocks of them to compare with."""
        moments = Moment(update.exp_avg, update.exp_avg_numbers), Moment(update.exp_avg_sq, update.exp_avg_sq_numbers)
        rows, counts, grads = _sampled_blocks(update)
        exact = _read(moments, rows)
        adamw_update_(torch.zeros_like(grads), grads, *exact, Hyper(*update.hyper))
        out = step()
        moved = (grads != 0).split(counts)
        results = zip((EXP_AVG, EXP_AVG_SQ), moments, exact, _read(moments, rows), strict=True)
        for kind, moment, expected, stored in results:
            if not len(moment.numbers):  # in fp32
                continue
            noise = noise_share(expected, expected - stored).split(counts)
            zero = (stored == 0).split(counts)
            for i, param in enumerate(update.params):
                underflow = (moved[i] & zero[i]).sum() / moved[i].sum().clamp(min=1)
                losses = torch.stack([torch.zeros_like(underflow), underflow, noise[i].nanmean()])
                whole = param.untyped_storage().data_ptr()  # of a part that is updated separately
                name = self._parameters.get(param.data_ptr()) or self._parameters.get(whole, "")
                self._casts.append(_Observed(kind, losses, update.grads[i].numel(), layer_of(name)))
        return out


def _sampled_blocks(update: Any) -> tuple[Tensor, list[int], Tensor]:
    """Some blocks of every parameter: their rows, how many each has, gradients fp32 [n, B]."""
    size = update.exp_avg.shape[1]
    rows: list[int] = []
    counts, grads = [], []
    for grad, first in zip(update.grads, update.first_blocks, strict=True):
        flat = grad.detach().reshape(-1)
        if flat.numel() < size:
            flat = nn.functional.pad(flat, (0, size - flat.numel()))
        blocks = flat[: flat.numel() // size * size].view(-1, size)
        step = -(-len(blocks) // MOMENT_BLOCKS)
        rows += range(first, first + len(blocks), step)
        grads.append(blocks[::step].to(torch.float32))
        counts.append(len(grads[-1]))
    sign = -1.0 if update.maximize else 1.0
    return torch.tensor(rows, device=grads[0].device), counts, sign * torch.cat(grads)


def _read(moments: Sequence[Moment], rows: Tensor) -> tuple[Tensor, Tensor]:
    stored = []
    for codes, numbers in moments:
        bits = codes if codes.dtype == torch.float32 else codes.view(torch.uint8)  # FP8 cannot be indexed everywhere
        stored.append(Moment(bits[rows].view(codes.dtype), numbers[:, rows]))
    return read_moments(*stored, slice(None))


def _address(tensor: Tensor) -> int:
    return local_values(tensor).untyped_storage().data_ptr()


def row_of(step: int, layer: str, kind: str, casts: Sequence[tuple[Sequence[float], int]]) -> CastPrecision:
    """Casts, each with its elements, as one row: noise is the mean by elements."""
    saturation = max(losses[0] for losses, _ in casts)
    underflow = max(losses[1] for losses, _ in casts)
    total, measured = 0.0, 0
    for (_, _, noise), elements in casts:
        if not math.isnan(noise):
            total, measured = total + noise * elements, measured + elements
    sqnr_db = decibels(total / measured) if measured else math.nan
    return CastPrecision(step, layer, kind, sqnr_db, underflow, saturation, sum(elements for _, elements in casts))
