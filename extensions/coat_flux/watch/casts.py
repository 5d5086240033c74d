"""Observes every cast to FP8 while it happens: a dispatch mode around one step.

Operators declare what they cast (`coat_core.casts`): values and codes are compared on the device, on evenly spaced rows
(`measure_cast`), and one read-back at the end fetches all results. Nothing is kept alive but a few numbers per cast,
and nothing changes: the operators run as they would without it. CUDA's backward thread inherits its
caller's mode.

A product declares which layer reads codes, by its weight, and in which pass. Codes that no product reads count as saved
for backward: so do GEMM inputs with 1×G groups, which only CPUs multiply as FP8. Their block is that of the linear that
ran last.

AdamW's moments are measured around its step: what the update makes of them in fp32, and what comes back from 8 bits.
The operator changes them in place, so a sample of blocks is read before it, and updated once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from .health import EXP_AVG, EXP_AVG_SQ, GRADIENTS, INPUTS, SAVED, CastHealth, Loss
from .precision import CastPrecision, merged

__all__ = ["CastProbe"]

WEIGHTS = "weights"  # of trainable linears, cast as they change: not reported
HEALTH_KINDS = {INPUT: INPUTS, GRADIENT: GRADIENTS, None: SAVED}
PRECISION_KINDS = {INPUTS: INPUT, GRADIENTS: GRADIENT, SAVED: "saved", EXP_AVG: EXP_AVG, EXP_AVG_SQ: EXP_AVG_SQ}
MOMENT_BLOCKS = 16  # measured per parameter and moment
FP8 = {fmt.dtype: fmt for fmt in FORMATS.values()}


class _Observed:
    """One cast: what it turns out to be, and fp32 [4] on the device, as `measure_cast` gives it.

    `where` is for messages: the first layer that reads it, or the parameter. `layers` are all that read it.
    """

    def __init__(self, kind: str, measures: Tensor, elements: int, where: str = "") -> None:
        self.kind, self.measures, self.elements, self.where = kind, measures, elements, where
        self.layers: list[str] = []
        self.block = ""


class CastProbe(TorchDispatchMode):
    """Context manager that observes the casts of one step.

    Args:
        model: the transformer, for the names of layers; None knows none.
        lora: name → parameter, for the names of moments.
    """

    def __init__(self, model: nn.Module | None, lora: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._casts: list[_Observed] = []
        self._latest: dict[int, _Observed] = {}  # by the address of the codes
        self._decoded: dict[int, Tensor] = {}  # address of decoded codes → the stored ones
        self._model = model
        self._layers = {} if model is None else _weights(model)
        self._sharded = {} if model is None else _sharded(model)
        self._parameters = {local_values(param).data_ptr(): name for name, param in lora.items()}
        self._block = ""
        self._found: list[tuple[_Observed, Measures]] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, and measure what it declares to have cast."""
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

    def health(self) -> CastHealth | None:
        """What the casts lost, read back from the device; None where nothing was cast."""
        found = self._read()
        if not found:
            return None
        return CastHealth(Loss(cast.kind, cast.where, *measures[:2]) for cast, measures in found)

    def rows(self, step: int) -> list[CastPrecision]:
        """The same by layer; a cast that several layers read is in the row of each.

        Args:
            step: number of the step that was observed.
        """
        return merged(
            step,
            [
                (layer, PRECISION_KINDS[cast.kind], cast.elements, measures)
                for cast, measures in self._read()
                for layer in cast.layers or [cast.block]
            ],
        )

    def _read(self) -> list[tuple[_Observed, Measures]]:
        if self._found is None:
            casts = [cast for cast in self._casts if cast.kind != WEIGHTS]
            numbers = torch.stack([cast.measures for cast in casts]).tolist() if casts else []
            self._found = [(cast, Measures(*four)) for cast, four in zip(casts, numbers, strict=True)]
        return self._found

    def _add(self, cast: Cast) -> None:
        rows, codes, scale = sampled(cast.values.detach(), cast.codes, cast.scale, cast.granularity)
        if cast.factors is not None:
            rows = rows.to(torch.float32) * cast.factors
        measures = measure_cast(rows, codes, scale, cast.granularity)
        address = _address(cast.values)
        # a weight that is cast at each use; one that FSDP2 has gathered is in other memory each time
        own = () if cast.kind else (*self._layers.get(address, ()), *self._sharded.get(cast.values.shape, ()))
        where = next((weight.layer for weight in own if weight.is_at(address)), "")
        observed = _Observed(HEALTH_KINDS[cast.kind], measures, cast.values.numel(), where)
        observed.block = self._block
        self._casts.append(observed)
        self._latest[_address(cast.codes)] = observed
        self._decoded.pop(_address(cast.codes), None)

    def _add_reader(self, product: Product) -> None:
        """Take from a product which layers read the codes, and as what."""
        address = _address(product.weight)
        decoded = self._decoded.get(address)
        layers = self._layers_of(product.weight if decoded is None else decoded)
        if product.codes is not None:
            cast = self._latest.get(_address(product.codes))
            weight = self._latest.get(address) if decoded is None else None  # decoded to memory that a cast had before
            if weight is not None and not layers and weight.kind == INPUTS:  # wgrad, whose other operand is x
                layers = tuple(weight.layers)
            elif weight is not None and (not layers or (weight.kind == SAVED and weight.where in layers)):
                weight.kind, layers = WEIGHTS, layers or (weight.where,)  # else it was in this memory before
            if cast is not None:
                cast.kind = HEALTH_KINDS[product.kind]
                cast.where = cast.where or (layers[0] if layers else "")
                cast.layers += [layer for layer in layers if layer not in ("", *cast.layers)]
        if layers and layers[0]:
            self._block = ".".join(layers[0].split(".")[:2])

    def _layers_of(self, codes: Tensor) -> tuple[str, ...]:
        """Layers whose weights these codes are now: a run's first forward pass joins weights, in other memory.

        One storage may hold the codes of a whole block, and those of other blocks at other times.
        """
        address, start = _address(codes), codes.data_ptr()
        found = self._layers.get(address, [])
        if self._model is not None and not (found and all(weight.is_at(address) for weight in found)):
            self._layers = _weights(self._model)
            found = self._layers.get(address, [])
        end = start + codes.numel() * codes.element_size()
        return tuple(weight.layer for weight in found if weight.is_there() and start <= weight.start < end)

    def _add_moments(self, update: MomentUpdate, precision: Tensor) -> None:
        for kind, moment, measured in zip(
            (EXP_AVG, EXP_AVG_SQ), (update.exp_avg, update.exp_avg_sq), precision, strict=True
        ):
            codes, numbers = moment
            if not len(numbers):  # in fp32
                continue
            for param, grad, first, two in zip(update.params, update.grads, update.first_blocks, measured, strict=True):
                flat = codes.view(-1)[first * codes.shape[1] :][: grad.numel()]
                whole = param.untyped_storage().data_ptr()  # of a part that is updated by itself
                where = self._parameters.get(param.data_ptr()) or self._parameters.get(whole, "")
                observed = _Observed(kind, torch.cat([_moment_losses(grad, flat), two]), grad.numel(), where)
                observed.layers = [layer_of(where)]
                self._casts.append(observed)


class _MomentSample:
    """A sample of the blocks of both moments; made before the operator changes them. Each block is a segment."""

    def __init__(self, update: MomentUpdate) -> None:
        self._moments = Moment(*update.exp_avg), Moment(*update.exp_avg_sq)
        block_size = self._moments[0].codes.shape[1]
        blocks, owners, values = [], [], []
        for owner, (grad, first) in enumerate(zip(update.grads, update.first_blocks, strict=True)):
            rows, picked = _blocks_of(grad, block_size)
            values.append(rows)
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
        """Return fp32 [2 moments, parameters, 2], noise and range used as in `Measures`; call it after the step."""
        found = []
        for moment, expected, got in zip(self._moments, self._expected, self._read(), strict=True):
            # relative to the block's largest: squares of small moments would be zero in fp32
            high = expected.abs().amax(-1, keepdim=True)
            values, errors = expected / high, (expected - got) / high
            noise = (errors.square().sum(-1) / values.square().sum(-1)).clamp(max=1.0)
            fmt = FP8.get(moment.codes.dtype)
            wanted = -torch.log2(low_end(values.abs()))
            used = torch.full_like(noise, torch.nan) if fmt is None else wanted / octaves(fmt)
            found.append(torch.stack([self._mean(noise), self._mean(used)], dim=-1))
        return torch.stack(found)

    def _read(self) -> tuple[Tensor, Tensor]:
        taken = (Moment(_rows(codes, self._rows), numbers[:, self._rows]) for codes, numbers in self._moments)
        return read_moments(*taken, slice(None))

    def _mean(self, per_block: Tensor) -> Tensor:
        """Mean over the blocks of each parameter, of those that are not nan; [blocks] to [parameters]."""
        known = ~per_block.isnan()
        sums = per_block.new_zeros(2, self._count)
        sums[0].index_add_(0, self._owners, torch.where(known, per_block, 0.0))
        sums[1].index_add_(0, self._owners, known.to(per_block.dtype))
        return sums[0] / sums[1]


def _blocks_of(grad: Tensor, size: int) -> tuple[Tensor, range]:
    """Evenly spaced whole blocks of a gradient [n, size], and their numbers; the one there is where none is whole."""
    flat, whole = grad.detach().reshape(-1), grad.numel() // size
    if not whole:
        return torch.nn.functional.pad(flat, (0, size - flat.numel()))[None], range(1)
    picked = range(0, whole, -(-whole // MOMENT_BLOCKS))
    return flat[: whole * size].view(whole, size)[:: picked.step], picked


def _rows(codes: Tensor, rows: Tensor) -> Tensor:
    return codes[rows] if codes.dtype == torch.float32 else codes.view(torch.uint8)[rows].view(codes.dtype)


def _moment_losses(grad: Tensor, codes: Tensor) -> Tensor:
    """Share of elements with a gradient whose moment is zero after the step; no moment exceeds its own scale."""
    step = -(-grad.numel() // SAMPLE)
    moved = grad.detach().reshape(-1)[::step] != 0
    lost = moved & (codes[::step].to(torch.float32) == 0)
    share = lost.sum() / moved.sum().clamp(min=1)
    return torch.stack([torch.zeros_like(share), share])


def _address(tensor: Tensor) -> int:
    return local_values(tensor).untyped_storage().data_ptr()


class _Weight(NamedTuple):
    """Where a layer's frozen FP8 weight is held, its transposed copy, or a trained weight and its codes."""

    layer: str
    held_by: Mapping[str, Tensor | None]
    name: str
    is_there: Callable[[], bool]

    @property
    def start(self) -> int:
        """Where its own part of the storage begins."""
        weight = self.held_by.get(self.name)
        return -1 if weight is None else weight.data_ptr()

    def is_at(self, address: int) -> bool:
        """Whether it is still there."""
        weight = self.held_by.get(self.name)
        return weight is not None and _address(weight) == address


def _always() -> bool:
    return True


def _sharded(model: nn.Module) -> dict[torch.Size, list[_Weight]]:
    """Trained weights that FSDP2 has sharded, by the shape they are gathered to."""
    found: dict[torch.Size, list[_Weight]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FP8TrainableLinear) and is_sharded(module.weight):
            found.setdefault(module.weight.shape, []).append(_Weight(name, module._parameters, "weight", _always))
    return found


def _weights(model: nn.Module) -> dict[int, list[_Weight]]:
    """All of them by address; those that multiply as one matrix have the same."""
    found: dict[int, list[_Weight]] = {}
    for name, module in model.named_modules():
        layer, is_there = name.removesuffix(".base_layer"), vars(module).get("codes_are_here") or _always
        held = [_Weight(layer, module._buffers, buffer, is_there) for buffer in (CODES, TRANSPOSED)]
        if isinstance(module, FP8TrainableLinear):
            held.append(_Weight(layer, module._parameters, "weight", is_there))
            held.append(_Weight(layer, vars(module.trained_codes), "codes", is_there))
        for weight in held:
            tensor = weight.held_by.get(weight.name)
            if tensor is not None:
                found.setdefault(_address(tensor), []).append(weight)
    return found
