"""Precision of the casts to FP8 by layer, observed by a dispatch mode around one step; `coat/precision.csv`.

Operators declare their casts (`coat_core.casts`). Values and codes are compared on the device, on evenly spaced rows
(`measure_cast`), and read back once at the end. Results do not change. CUDA's backward thread inherits the mode.

A product declares its codes' pass and, by its weight, the layer that reads them. Codes that no product reads count as
saved for backward, in the block of the linear that ran last. Casts of trained weights are not reported.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from coat_core.casts import GRADIENT, INPUT, Cast, Product, declarations
from coat_core.linear.function import CODES, TRANSPOSED
from coat_core.linear.module import FP8TrainableLinear
from coat_core.ops.adamw import Hyper, Moment, adamw_update_, read_moments
from coat_core.optim.sharded import local_values

from ..blocks.cast_loss import WEIGHT_PRECISION, decibels, measure_cast, noise_share, sampled
from ..blocks.models import layer_of
from ..config.coat import GuardOptions

SAVED, EXP_AVG, EXP_AVG_SQ = "saved", "exp_avg", "exp_avg_sq"
MOMENT_BLOCKS = 16  # measured per parameter and moment
PRECISION_FILE = Path("coat") / "precision.csv"
WEIGHT = "weight"
KINDS = {
    WEIGHT: "weights",
    INPUT: "linear inputs",
    GRADIENT: "gradients",
    SAVED: "saved activations",
    EXP_AVG: "exp_avg",
    EXP_AVG_SQ: "exp_avg_sq",
}
EXPANSION = "coat.optimizer.use_dynamic_range_expansion: true, or a smaller coat.optimizer.block_size"
REMEDIES = {
    WEIGHT: "coat.weight.granularity: per_row",
    INPUT: "coat.activation.linear_granularity: per_row, or coat.activation.format: e5m2",
    GRADIENT: "coat.activation.grad_format: e5m2 or bf16, or coat.activation.linear_granularity: per_row",
    SAVED: "coat.activation.nonlinear_granularity: per_group, a smaller group_size, or coat.activation.format: e5m2",
    EXP_AVG: EXPANSION,
    EXP_AVG_SQ: EXPANSION,
}


class CastPrecision(NamedTuple):
    """Losses of casts of one kind in one step (0: of weights), of one linear or of a block's saved activations."""

    step: int
    layer: str
    kind: str  # a key of `KINDS`
    sqnr_db: float  # local (`blocks.cast_loss`): inf for exact casts, nan where all values were zero
    underflow: float  # share of nonzero elements that became zero, in the worst cast
    saturation: float  # share beyond the largest code, in the worst cast
    elements: int


@dataclass
class _Observed:
    kind: str  # of the product that reads the codes, or `SAVED`
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
        self._latest: dict[int, _Observed | None] = {}  # address of codes → their cast
        self._weights: dict[int, list[str]] = {}  # address of a weight's new codes → its layers
        self._block = ""  # of the linear that ran last

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        declare = declarations.get(func.name())
        if declare is None:
            out = func(*args, **kwargs)
            # with several images, a product reads a copy of its rows of an attention's joint codes
            if func is torch.ops.aten.clone.default and out.itemsize == 1:
                self._latest[_address(out)] = self._latest.get(_address(args[0]))
            return out
        if func._schema.is_mutable:  # the optimizer's
            return self._observe_update(declare(None, *args, **kwargs), partial(func, *args, **kwargs))
        out = func(*args, **kwargs)
        declared = declare(out, *args, **kwargs)
        if isinstance(declared, Product):
            self._add_product(declared)
            return out
        for cast in [declared] if isinstance(declared, Cast) else declared:
            self._add(cast)
        return out

    def rows(self, step: int) -> list[CastPrecision]:
        """All casts by layer and kind; one read by several layers is in the row of each."""
        if not self._casts:
            return []
        groups: dict[tuple[str, str], list[tuple[list[float], int]]] = {}
        values = torch.stack([cast.losses for cast in self._casts]).tolist()
        for cast, losses in zip(self._casts, values, strict=True):
            for layer in cast.layers or [cast.block]:
                groups.setdefault((layer, cast.kind), []).append((losses, cast.elements))
        return [row_of(step, layer, kind, group) for (layer, kind), group in groups.items()]

    def _add(self, cast: Cast) -> None:
        address = _address(cast.codes)
        self._weights.pop(address, None)
        if cast.kind is None:
            layers = self._layers_of(cast.values)
            if layers or not cast.values.is_floating_point():  # a weight, or its stored bytes
                self._weights[address] = layers
                return
        values, codes, scale = sampled(cast.values.detach(), cast.codes, cast.scale)
        if cast.factors is not None:
            values = values.to(torch.float32) * cast.factors
        losses = measure_cast(values, codes, scale, cast.granularity)
        observed = _Observed(cast.kind or SAVED, losses, cast.values.numel(), self._block)
        self._latest[address] = observed
        self._casts.append(observed)

    def _add_product(self, product: Product) -> None:
        layers = self._layers_of(product.weight) or self._weights.get(_address(product.weight), [])
        operand = self._latest.get(_address(product.weight))
        if not layers and operand is not None and operand.kind == INPUT:  # wgrad, where x takes the weight's place
            layers = operand.layers
        cast = None if product.codes is None else self._latest.get(_address(product.codes))
        if cast is not None:
            cast.kind = product.kind
            cast.layers += [layer for layer in layers if layer not in cast.layers]
        if layers:
            self._block = ".".join(layers[0].split(".")[:2])

    def _layers_of(self, weight: Tensor) -> list[str]:
        """Layers whose weight or codes are in `weight`, several if the first pass joined them."""
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
        """Do AdamW's step on packed moments, and in fp32 on sampled blocks, to compare both."""
        moments = Moment(update.exp_avg, update.exp_avg_numbers), Moment(update.exp_avg_sq, update.exp_avg_sq_numbers)
        rows, counts, grads = _sampled_blocks(update)
        exact = _read(moments, rows)
        adamw_update_(torch.zeros_like(grads), grads, *exact, Hyper(*update.hyper))
        out = step()
        has_gradient = (grads != 0).split(counts)
        results = zip((EXP_AVG, EXP_AVG_SQ), moments, exact, _read(moments, rows), strict=True)
        for kind, moment, expected, stored in results:
            if not len(moment.numbers):  # in fp32
                continue
            noise = noise_share(expected, expected - stored).split(counts)
            is_zero = (stored == 0).split(counts)
            for i, param in enumerate(update.params):
                underflow = (has_gradient[i] & is_zero[i]).sum() / has_gradient[i].sum().clamp(min=1)
                losses = torch.stack([torch.zeros_like(underflow), underflow, noise[i].nanmean()])
                whole = param.untyped_storage().data_ptr()  # of a part that is updated separately
                name = self._parameters.get(param.data_ptr()) or self._parameters.get(whole, "")
                self._casts.append(_Observed(kind, losses, update.grads[i].numel(), layer_of(name)))
        return out


def _sampled_blocks(update: Any) -> tuple[Tensor, list[int], Tensor]:
    """Sampled blocks: rows, their number by parameter, gradients fp32 [n, B]."""
    size = update.exp_avg.shape[1]
    rows: list[int] = []
    counts, grads = [], []
    for grad, first in zip(update.grads, update.first_blocks, strict=True):
        flat = grad.detach().reshape(-1)
        if flat.numel() < size:
            flat = nn.functional.pad(flat, (0, size - flat.numel()))
        blocks = flat[: flat.numel() // size * size].view(-1, size)  # whole ones
        step = math.ceil(len(blocks) / MOMENT_BLOCKS)
        rows += range(first, first + len(blocks), step)
        grads.append(blocks[::step].to(torch.float32))
        counts.append(len(grads[-1]))
    sign = -1.0 if update.maximize else 1.0
    return torch.tensor(rows, device=grads[0].device), counts, sign * torch.cat(grads)


def _read(moments: Sequence[Moment], rows: Tensor) -> tuple[Tensor, Tensor]:
    """The values of both moments in these blocks, fp32 [n, B]."""
    chosen = []
    for codes, numbers in moments:
        bits = codes if codes.dtype == torch.float32 else codes.view(torch.uint8)  # FP8 cannot be indexed everywhere
        chosen.append(Moment(bits[rows].view(codes.dtype), numbers[:, rows]))
    return read_moments(*chosen, slice(None))


def _address(tensor: Tensor) -> int:
    return local_values(tensor).untyped_storage().data_ptr()


def row_of(step: int, layer: str, kind: str, casts: Sequence[tuple[Sequence[float], int]]) -> CastPrecision:
    """Casts, each with its elements, as one row: worst shares, mean noise by elements."""
    saturation = underflow = noise_sum = 0.0
    elements = measured = 0
    for (saturated, underflown, noise), size in casts:
        saturation, underflow = max(saturation, saturated), max(underflow, underflown)
        elements += size
        if not math.isnan(noise):
            noise_sum += noise * size
            measured += size
    sqnr_db = decibels(noise_sum / measured) if measured else math.nan
    return CastPrecision(step, layer, kind, sqnr_db, underflow, saturation, elements)


COLUMNS = CastPrecision._fields


def weight_rows(model: nn.Module) -> list[CastPrecision]:
    """Rows of all measured weights of a model."""
    rows = []
    for name, module in model.named_modules():
        text = vars(module).get(WEIGHT_PRECISION)
        if text is not None:
            losses = [float(word) for word in text.split()]
            elements = module.in_features * module.out_features
            rows.append(row_of(0, name.removesuffix(".base_layer"), WEIGHT, [(losses, elements)]))
    return rows


def as_cells(row: CastPrecision) -> list[str]:
    """The row's cells in the file; nan is empty."""
    sqnr = "" if math.isnan(row.sqnr_db) else f"{row.sqnr_db:.3f}"
    underflow, saturation = f"{row.underflow:.6g}", f"{row.saturation:.6g}"
    return [str(row.step), row.layer, row.kind, sqnr, underflow, saturation, str(row.elements)]


def read_rows(path: Path) -> list[CastPrecision]:
    """Rows of `precision.csv`, if there is one; OSError if unreadable, ValueError (with its line) if malformed."""
    rows: list[CastPrecision] = []
    if not path.exists():
        return rows
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        try:
            for cells in reader:
                underflow, saturation = float(cells["underflow"]), float(cells["saturation"])
                losses = (float(cells["sqnr_db"] or math.nan), underflow, saturation)
                step, elements = int(cells["step"]), int(cells["elements"])
                rows.append(CastPrecision(step, cells["layer"], cells["kind"], *losses, elements))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: line {reader.line_num} is not a row of precision.csv ({error!r})") from error
    return rows


def health_line(rows: Sequence[CastPrecision]) -> str:
    """One line: per kind the share cast to zero, mean and worst, and any saturation."""
    texts = []
    for kind, name in KINDS.items():
        of_kind = [row for row in rows if row.kind == kind]
        if of_kind:
            zeroed = max(of_kind, key=attrgetter("underflow"))
            clipped = max(of_kind, key=attrgetter("saturation"))
            text = f"{name} {fmean(row.underflow for row in of_kind):.2%}"
            if zeroed.underflow:
                text += f" ({zeroed.underflow:.2%} in {zeroed.layer})"
            if clipped.saturation:
                text += f", {clipped.saturation:.2%} saturated in {clipped.layer}"
            texts.append(text)
    return f"FP8 casts, mean share cast to zero (worst): {', '.join(texts)}"


def health_verdict(rows: Sequence[CastPrecision], options: GuardOptions) -> str | None:
    """The worst cast and what to change, if a share exceeds its limit; else None."""
    for loss, limit in (("saturation", options.max_saturation), ("underflow", options.max_underflow)):
        worst = max(rows, key=attrgetter(loss))
        share = getattr(worst, loss)
        if share <= limit:
            continue
        text = f"{share:.1%} of the {KINDS[worst.kind]} of {worst.layer}"
        if loss == "saturation":
            text += (
                f" lie beyond the largest FP8 code (limit: {limit}); lower train.lr and check that train.dtype is bf16"
            )
        else:
            text += f" that are not zero became zero in FP8 (limit: {limit}); set {REMEDIES[worst.kind]}"
        if worst.kind in (INPUT, GRADIENT) and worst.layer:
            text += f", or take the layer out of FP8 with coat.activation.exclude: [{worst.layer}]"
        return text
    return None
