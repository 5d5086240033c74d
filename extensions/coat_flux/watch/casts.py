"""Observes every cast to FP8 while it happens: a dispatch mode around one step.

Operators declare their casts (`coat_core.casts`). Values and codes are compared on the device, on evenly spaced rows
(`measure_cast`), and read back once at the end. Results do not change. CUDA's backward thread inherits the mode.

A product declares, by its weight, which layer reads the codes and in which pass. Codes that no product reads count as
saved for backward, in the block of the linear that ran last; so do GEMM inputs with 1×G groups, FP8 only on CPUs.

AdamW's moments are measured around its step: the fp32 update against the 8-bit one. The operator works in place, so a
sample of blocks is copied before it and updated once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from coat_core.casts import GRADIENT, INPUT, Cast, Decoded, MomentUpdate, Product, declarations
from coat_core.formats import FORMATS
from coat_core.linear.module import FP8TrainableLinear
from coat_core.linear.weight import CODES, TRANSPOSED
from coat_core.ops.adamw import Hyper, Moment, adamw_update_, read_moments
from coat_core.optim.sharded import is_sharded, local_values

from ..blocks.cast_loss import SAMPLE, Measures, low_end, measure_cast, octaves, sampled
from ..blocks.lookup import layer_of
from ..config.coat import GuardOptions

__all__ = ["CastPrecision", "CastProbe", "ObservedCast", "health_line", "health_verdict", "rows_of"]

SAVED, EXP_AVG, EXP_AVG_SQ = "saved", "exp_avg", "exp_avg_sq"
TRAINED_WEIGHT = "trained weight"  # changes at every step: not reported
MOMENT_BLOCKS = 16  # measured per parameter and moment
FP8 = {fmt.dtype: fmt for fmt in FORMATS.values()}
SMALLEST_SHOWN = 1e-4
NAMES = {
    INPUT: "linear inputs",
    GRADIENT: "gradients",
    SAVED: "saved activations",
    EXP_AVG: "exp_avg",
    EXP_AVG_SQ: "exp_avg_sq",
}
EXPANSION = "set coat.optimizer.use_dynamic_range_expansion: true, or coat.optimizer.{}: e5m2"
REMEDIES = {
    INPUT: "set coat.activation.linear_granularity: per_row, or where it is so already coat.activation.format: e5m2",
    GRADIENT: "set coat.activation.grad_format: e5m2 or bf16, or coat.activation.linear_granularity: per_row",
    SAVED: "set coat.activation.format: e5m2, or nonlinear_granularity: per_group with a smaller group_size",
    EXP_AVG: EXPANSION.format("m1_format"),
    EXP_AVG_SQ: EXPANSION.format("m2_format"),
}


class ObservedCast:
    """One cast: `kind` is a key of `NAMES`, `where` its first reader or parameter; `measures` stay on the device."""

    def __init__(self, kind: str, measures: Any, elements: int, where: str = "", block: str = "") -> None:
        self.kind, self.measures, self.elements = kind, measures, elements
        self.where, self.block = where, block
        self.layers: list[str] = []


class CastPrecision(NamedTuple):
    """Losses of the casts of one kind, in one step (0 for weights), by linear, or by block for saved activations.

    `sqnr_db` is local (`blocks.cast_loss`): inf for exact casts, nan where all values were zero. `underflow` is the
    share of nonzero elements that became zero, `saturation` the share beyond the largest code, `range_used` the share
    of the format's octaves needed (nan where undefined).
    """

    step: int
    layer: str
    kind: str
    sqnr_db: float
    underflow: float
    saturation: float
    range_used: float
    elements: int


class _Weight(NamedTuple):
    layer: str
    tensor: Callable[[], Tensor | None]
    is_there: Callable[[], bool]  # of a storage that several blocks share

    def is_at(self, address: int) -> bool:
        weight = self.tensor()
        return weight is not None and _address(weight) == address

    def starts_in(self, start: int, end: int) -> bool:
        weight = self.tensor()
        return weight is not None and self.is_there() and start <= weight.data_ptr() < end


class CastProbe(TorchDispatchMode):
    """Context manager that observes the casts of one step."""

    def __init__(self, model: nn.Module | None, lora: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._casts: list[ObservedCast] = []
        self._latest: dict[int, ObservedCast] = {}  # by address of the codes
        self._decoded: dict[int, Tensor] = {}  # address of decoded codes → the stored ones
        self._model = model
        self._layers, self._sharded = _weights(model)
        self._parameters = {local_values(param).data_ptr(): name for name, param in lora.items()}
        self._block = ""
        self._is_read = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        declare = declarations.get(func.name())
        if declare is None:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            update = declare(None, *args, **kwargs)
            sample = _MomentSample(update)
            out = func(*args, **kwargs)
            self._add_moments(update, sample.measure())
            return out
        out = func(*args, **kwargs)
        declared = declare(out, *args, **kwargs)
        if isinstance(declared, Product):
            self._add_reader(declared)
        elif isinstance(declared, Decoded):
            self._decoded[_address(declared.codes)] = declared.stored
        elif declared is not None:
            for cast in (declared,) if isinstance(declared, Cast) else declared:
                self._add(cast)
        return out

    def read(self) -> list[ObservedCast]:
        """All casts of the step except those of trained weights, with `Measures`, in one read-back."""
        casts = [cast for cast in self._casts if cast.kind != TRAINED_WEIGHT]
        if casts and not self._is_read:
            for cast, numbers in zip(casts, torch.stack([cast.measures for cast in casts]).tolist(), strict=True):
                cast.measures = Measures(*numbers)
        self._is_read = True
        return casts

    def rows(self, step: int) -> list[CastPrecision]:
        """`read` by layer: `rows_of`."""
        return rows_of(step, self.read())

    def _add(self, cast: Cast) -> None:
        rows, codes, scale = sampled(cast.values.detach(), cast.codes, cast.scale, cast.granularity)
        if cast.factors is not None:
            rows = rows.to(torch.float32) * cast.factors
        measures = measure_cast(rows, codes, scale, cast.granularity)
        address = _address(cast.values)
        # weights cast at each use, and those gathered by FSDP2, change address
        own = () if cast.kind else (*self._layers.get(address, ()), *self._sharded.get(cast.values.shape, ()))
        where = next((weight.layer for weight in own if weight.is_at(address)), "")
        observed = ObservedCast(cast.kind or SAVED, measures, cast.values.numel(), where, self._block)
        self._casts.append(observed)
        self._latest[_address(cast.codes)] = observed
        self._decoded.pop(_address(cast.codes), None)

    def _add_reader(self, product: Product) -> None:
        address = _address(product.weight)
        decoded = self._decoded.get(address)
        layers = self._layers_of(product.weight if decoded is None else decoded)
        if product.codes is not None:
            cast = self._latest.get(_address(product.codes))
            weight = self._latest.get(address) if decoded is None else None  # decoded into memory reused from a cast
            if weight is not None and not layers and weight.kind == INPUT:  # wgrad, whose other operand is x
                layers = tuple(weight.layers)
            elif weight is not None and (not layers or (weight.kind == SAVED and weight.where in layers)):
                weight.kind, layers = TRAINED_WEIGHT, layers or (weight.where,)  # else a stale entry at this address
            if cast is not None:
                cast.kind = product.kind
                cast.where = cast.where or (layers[0] if layers else "")
                cast.layers += [layer for layer in layers if layer not in ("", *cast.layers)]
        if layers and layers[0]:
            self._block = ".".join(layers[0].split(".")[:2])

    def _layers_of(self, codes: Tensor) -> tuple[str, ...]:
        """Layers whose weights these codes are now: the first forward pass joins weights, blocks may share storage."""
        address, start = _address(codes), codes.data_ptr()
        weights = self._layers.get(address, [])
        if self._model is not None and not (weights and all(weight.is_at(address) for weight in weights)):
            self._layers, _ = _weights(self._model)
            weights = self._layers.get(address, [])
        end = start + codes.numel() * codes.element_size()
        return tuple(weight.layer for weight in weights if weight.starts_in(start, end))

    def _add_moments(self, update: MomentUpdate, precision: Tensor) -> None:
        moments = ((EXP_AVG, update.exp_avg), (EXP_AVG_SQ, update.exp_avg_sq))
        for (kind, (codes, numbers)), measured in zip(moments, precision, strict=True):
            if not len(numbers):  # in fp32
                continue
            for param, grad, first, two in zip(update.params, update.grads, update.first_blocks, measured, strict=True):
                flat = codes.view(-1)[first * codes.shape[1] :][: grad.numel()]
                whole = param.untyped_storage().data_ptr()  # of a part that is updated separately
                where = self._parameters.get(param.data_ptr()) or self._parameters.get(whole, "")
                losses = torch.cat([_moment_losses(grad, flat), two])
                self._casts.append(ObservedCast(kind, losses, grad.numel(), where, layer_of(where)))


class _MomentSample:
    """Sampled blocks of both moments, copied before the operator changes them. Each block is a segment."""

    def __init__(self, update: MomentUpdate) -> None:
        self._moments = Moment(*update.exp_avg), Moment(*update.exp_avg_sq)
        size = self._moments[0].codes.shape[1]
        blocks, owners, values = [], [], []
        for owner, (grad, first) in enumerate(zip(update.grads, update.first_blocks, strict=True)):
            flat, whole = grad.detach().reshape(-1), grad.numel() // size
            picked = range(0, max(whole, 1), max(1, -(-whole // MOMENT_BLOCKS)))
            if whole:
                values.append(flat[: whole * size].view(whole, size)[:: picked.step])
            else:
                values.append(nn.functional.pad(flat, (0, size - flat.numel()))[None])
            blocks += [first + number for number in picked]
            owners += [owner] * len(picked)
        device = update.grads[0].device
        self._count, self._owners = len(update.params), torch.tensor(owners, device=device)
        self._rows = torch.tensor(blocks, device=device)
        self._expected = tuple(moment.clone() for moment in self._read())
        grad = torch.cat(values).to(torch.float32)
        if update.maximize:
            grad = -grad
        adamw_update_(torch.zeros_like(grad), grad, *self._expected, Hyper(*update.hyper))

    def measure(self) -> Tensor:
        """Noise and range used after the step, as in `Measures`: fp32 [2 moments, parameters, 2]."""
        measured = []
        for moment, expected, got in zip(self._moments, self._expected, self._read(), strict=True):
            # relative to the block's largest: squares of small moments would be zero in fp32
            high = expected.abs().amax(-1, keepdim=True)
            values, errors = expected / high, (expected - got) / high
            noise = (errors.square().sum(-1) / values.square().sum(-1)).clamp(max=1.0)
            fmt = FP8.get(moment.codes.dtype)
            wanted = -torch.log2(low_end(values.abs()))
            used = torch.full_like(noise, torch.nan) if fmt is None else wanted / octaves(fmt)
            measured.append(torch.stack([self._mean(noise), self._mean(used)], dim=-1))
        return torch.stack(measured)

    def _read(self) -> tuple[Tensor, Tensor]:
        taken = []
        for codes, numbers in self._moments:
            whole = codes if codes.dtype == torch.float32 else codes.view(torch.uint8)
            taken.append(Moment(whole[self._rows].view(codes.dtype), numbers[:, self._rows]))
        return read_moments(*taken, slice(None))

    def _mean(self, per_block: Tensor) -> Tensor:
        known = ~per_block.isnan()
        sums = per_block.new_zeros(2, self._count)
        sums[0].index_add_(0, self._owners, torch.where(known, per_block, 0.0))
        sums[1].index_add_(0, self._owners, known.to(per_block.dtype))
        return sums[0] / sums[1]


def _moment_losses(grad: Tensor, codes: Tensor) -> Tensor:
    """Share of elements with a gradient whose moment is zero after the step; moments never saturate."""
    step = -(-grad.numel() // SAMPLE)
    moved = grad.detach().reshape(-1)[::step] != 0
    lost = moved & (codes[::step].to(torch.float32) == 0)
    share = lost.sum() / moved.sum().clamp(min=1)
    return torch.stack([torch.zeros_like(share), share])


def _address(tensor: Tensor) -> int:
    return local_values(tensor).untyped_storage().data_ptr()


def _always() -> bool:
    return True


def _weights(model: nn.Module | None) -> tuple[dict[int, list[_Weight]], dict[torch.Size, list[_Weight]]]:
    by_address: dict[int, list[_Weight]] = {}
    sharded: dict[torch.Size, list[_Weight]] = {}
    for name, module in () if model is None else model.named_modules():
        layer, is_there = name.removesuffix(".base_layer"), vars(module).get("codes_are_here") or _always
        sources = [(module._buffers, CODES), (module._buffers, TRANSPOSED)]
        if isinstance(module, FP8TrainableLinear):
            sources += [(module._parameters, "weight"), (vars(module.trained_codes), "codes")]
            if is_sharded(module.weight):
                weight = _Weight(layer, partial(module._parameters.get, "weight"), _always)
                sharded.setdefault(module.weight.shape, []).append(weight)
        for holder, key in sources:
            if holder.get(key) is not None:
                weight = _Weight(layer, partial(holder.get, key), is_there)
                by_address.setdefault(_address(holder[key]), []).append(weight)
    return by_address, sharded


# -- the losses of a step -------------------------------------------------------------------------------------


def rows_of(step: int, casts: Iterable[ObservedCast]) -> list[CastPrecision]:
    """Casts of a step by layer, means weighted by elements; a cast read by several layers is in the row of each."""
    groups: dict[tuple[str, str], list[ObservedCast]] = {}
    for cast in casts:
        for layer in cast.layers or [cast.block]:
            groups.setdefault((layer, cast.kind), []).append(cast)
    rows = []
    for (layer, kind), group in groups.items():
        means = Measures(*(_mean(group, name) for name in Measures._fields))
        elements = sum(cast.elements for cast in group)
        losses = (means.sqnr_db, means.underflow, means.saturation, means.range_used)
        rows.append(CastPrecision(step, layer, kind, *losses, elements))
    return rows


def _mean(casts: Sequence[ObservedCast], name: str) -> float:
    values = [(cast.elements, getattr(cast.measures, name)) for cast in casts]
    known = [(weight, value) for weight, value in values if not math.isnan(value)]
    total = sum(weight for weight, _ in known)
    return sum(weight * value for weight, value in known) / total if total else math.nan


def health_line(casts: Iterable[ObservedCast]) -> str:
    """One line: per kind the share cast to zero, mean and worst, and any saturation."""
    by_kind: dict[str, list[ObservedCast]] = {}
    for cast in casts:
        by_kind.setdefault(cast.kind, []).append(cast)
    texts = []
    for kind in sorted(by_kind, key=list(NAMES).index):
        lost, mean_lost = _worst(by_kind[kind], "underflow")
        beyond, mean_beyond = _worst(by_kind[kind], "saturation")
        text = f"{NAMES[kind]} {_percent(mean_lost)}"
        if lost.measures.underflow:
            text += f" ({_percent(lost.measures.underflow)}{_in(lost)})"
        if beyond.measures.saturation:
            text += f", {_percent(mean_beyond)} saturated ({_percent(beyond.measures.saturation)}{_in(beyond)})"
        texts.append(text)
    return "FP8 casts, mean share cast to zero (worst): " + ", ".join(texts)


def health_verdict(casts: Sequence[ObservedCast], options: GuardOptions) -> str | None:
    """The worst cast and what to change, where a share exceeds its threshold."""
    beyond, _ = _worst(casts, "saturation")
    if beyond.measures.saturation > options.max_saturation:
        return (
            f"{beyond.measures.saturation:.1%} of {_tensor(beyond)} lie beyond the largest FP8 code "
            f"(limit: {options.max_saturation}): they overflowed before the cast; "
            f"lower train.lr and check that train.dtype is bf16{_exclusion(beyond)}"
        )
    lost, _ = _worst(casts, "underflow")
    if lost.measures.underflow > options.max_underflow:
        return (
            f"{lost.measures.underflow:.1%} of {_tensor(lost)} that are not zero became zero in FP8 "
            f"(limit: {options.max_underflow}): a few large values set the scale of all; "
            f"{REMEDIES[lost.kind]}{_exclusion(lost)}"
        )
    return None


def _worst(casts: Sequence[ObservedCast], loss: str) -> tuple[ObservedCast, float]:
    losses = [getattr(cast.measures, loss) for cast in casts]
    return casts[losses.index(max(losses))], sum(losses) / len(losses)


def _percent(share: float) -> str:
    if 0 < share < SMALLEST_SHOWN:
        return "<0.01%"
    return f"{share:.2%}" if share else "0%"


def _in(cast: ObservedCast) -> str:
    return f" in {cast.where}" if cast.where else ""


def _tensor(cast: ObservedCast) -> str:
    return f"the {NAMES[cast.kind]} of {cast.where}" if cast.where else f"the {NAMES[cast.kind]}"


def _exclusion(cast: ObservedCast) -> str:
    layer = cast.where and cast.kind in (INPUT, GRADIENT)
    return f", or take the layer out of FP8 with coat.activation.exclude: [{cast.where}]" if layer else ""
