"""Observes every cast to FP8 while it happens: a dispatch mode around one step.

Operators that quantize return their codes along with the values they cast, or take both; they are compared on the
device, on evenly spaced rows (`precision.measure`), and one read-back at the end brings all results to the CPU. Nothing
is kept alive but a few numbers per cast, and nothing changes: the operators run as they would without it. Compiled
blocks run eager inside a dispatch mode (blocks/fused/compiled.py); CUDA's backward thread inherits its caller's mode.

    coat::quantize                                           a linear's input, dy, or what is kept for backward
    coat::layer_norm_modulate_quantize, gelu_concat_quantize a linear's input
    coat::gate_residual_backward                             dy
    coat::scaled_mm                                          shows what codes are for, and the layer, by its weight
    coat::fp8_adamw_step                                     the moments

What no GEMM reads counts as kept for backward: so do GEMM inputs with 1×G groups, which only CPUs multiply as FP8. Its
block is that of the linear that ran last (coat::weight_only_linear shows those that multiply in bf16).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from coat_core.granularity import Granularity
from coat_core.linear.module import FP8TrainableLinear

from ..blocks.architectures import layer_of
from ..blocks.cast_loss import SAMPLE, Measures, measure_cast, sampled
from .health import EXP_AVG, EXP_AVG_SQ, GRADIENTS, INPUTS, SAVED, CastHealth, Loss
from .moments import MomentSample
from .precision import Row, merged

__all__ = ["CastProbe"]

WEIGHT_BUFFERS = ("weight_codes", "weight_codes_transposed")
WEIGHTS = "weights"  # of trainable linears, cast in every forward pass: not reported
FUSED = {
    "coat::layer_norm_modulate_quantize": INPUTS,
    "coat::gelu_concat_quantize": INPUTS,
    "coat::gate_residual_backward": GRADIENTS,
}


# how `precision` calls the kinds
PRECISION_KINDS = {INPUTS: "input", GRADIENTS: "gradient", SAVED: "saved", EXP_AVG: EXP_AVG, EXP_AVG_SQ: EXP_AVG_SQ}


class _Cast:
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
        self._casts: list[_Cast] = []
        self._latest: dict[int, _Cast] = {}  # by the address of the codes
        self._layers = {} if model is None else _weight_addresses(model)
        self._parameters = {param.data_ptr(): name for name, param in lora.items()}
        self._block = ""
        self._found: list[tuple[_Cast, Measures]] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, and look at what it cast."""
        name = func.name()
        moments = MomentSample(args) if name == "coat::fp8_adamw_step" else None
        out = func(*args, **(kwargs or {}))
        if name == "coat::quantize":
            self._see_quantize(out, *args)
        elif name in FUSED:
            granularity = args[-1]
            if granularity != "none":
                values, codes, scale = out[:3]
                self._add(FUSED[name], values, codes, scale, Granularity(granularity))
        elif name == "coat::scaled_mm":
            self._see_gemm(*args)
        elif name == "coat::weight_only_linear":
            self._see_layer(self._layers.get(_address(args[1]), ""))
        elif moments is not None:
            self._see_moments(moments.measure(), *args[:7])
        return out

    def health(self) -> CastHealth | None:
        """What was seen, read back from the device; None where nothing was cast."""
        found = self._read()
        if not found:
            return None
        return CastHealth(Loss(cast.kind, cast.where, *measures[:2]) for cast, measures in found)

    def rows(self, step: int) -> list[Row]:
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

    def _read(self) -> list[tuple[_Cast, Measures]]:
        if self._found is None:
            casts = [cast for cast in self._casts if cast.kind != WEIGHTS]
            numbers = torch.stack([cast.measures for cast in casts]).tolist() if casts else []
            self._found = [(cast, Measures(*four)) for cast, four in zip(casts, numbers, strict=True)]
        return self._found

    def _see_quantize(
        self,
        out: tuple[Tensor, Tensor],
        x: Tensor,
        fmt: str,
        granularity: str,
        group_size: int,
        factors: Tensor | None = None,
    ) -> None:
        cast = self._add(SAVED, x, *out, Granularity(granularity, group_size), factors)
        cast.where = self._layers.get(_address(x), "")  # a trainable weight that is cast at each use

    def _add(
        self,
        kind: str,
        x: Tensor,
        codes: Tensor,
        scale: Tensor,
        granularity: Granularity,
        factors: Tensor | None = None,
    ) -> _Cast:
        rows, row_codes, row_scale = sampled(x.detach(), codes, scale, granularity)
        if factors is not None:
            rows = rows.to(torch.float32) * factors
        cast = _Cast(kind, measure_cast(rows, row_codes, row_scale, granularity), x.numel())
        cast.block = self._block
        self._casts.append(cast)
        self._latest[_address(codes)] = cast
        return cast

    def _see_gemm(
        self,
        a: Tensor,
        a_scale: Tensor,
        b: Tensor,
        b_scale: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        fast_accum: bool = False,
    ) -> None:
        cast, weight = self._latest.get(_address(a)), self._latest.get(_address(b))
        layer = self._layers.get(_address(b), "")
        if weight is not None:
            weight.kind, layer = WEIGHTS, weight.where
        if cast is not None:
            cast.kind = INPUTS if fast_accum else GRADIENTS  # fprop alone accumulates fast
            cast.where = cast.where or layer
            cast.layers += [layer] * (layer not in ("", *cast.layers))
        self._see_layer(layer)

    def _see_layer(self, layer: str) -> None:
        self._block = ".".join(layer.split(".")[:2]) or self._block

    def _see_moments(
        self,
        precision: Tensor,
        params: list[Tensor],
        grads: list[Tensor],
        exp_avg: Tensor,
        exp_avg_numbers: Tensor,
        exp_avg_sq: Tensor,
        exp_avg_sq_numbers: Tensor,
        first_blocks: list[int],
    ) -> None:
        for kind, codes, numbers, measured in (
            (EXP_AVG, exp_avg, exp_avg_numbers, precision[0]),
            (EXP_AVG_SQ, exp_avg_sq, exp_avg_sq_numbers, precision[1]),
        ):
            if not len(numbers):  # in fp32
                continue
            for param, grad, first, two in zip(params, grads, first_blocks, measured, strict=True):
                flat = codes.view(-1)[first * codes.shape[1] :][: grad.numel()]
                where = self._parameters.get(param.data_ptr(), "")
                cast = _Cast(kind, torch.cat([_moment_losses(grad, flat), two]), grad.numel(), where)
                cast.layers = [layer_of(where)]
                self._casts.append(cast)


def _moment_losses(grad: Tensor, codes: Tensor) -> Tensor:
    """Share of elements with a gradient whose moment is zero after the step; no moment is beyond its own scale."""
    step = -(-grad.numel() // SAMPLE)
    moved = grad.detach().reshape(-1)[::step] != 0
    lost = moved & (codes[::step].to(torch.float32) == 0)
    share = lost.sum() / moved.sum().clamp(min=1)
    return torch.stack([torch.zeros_like(share), share])


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _weight_addresses(model: nn.Module) -> dict[int, str]:
    """Address of each frozen FP8 weight, of its transposed copy, and of weights that are cast at each use → layer."""
    found = {
        _address(module._buffers[buffer]): name.removesuffix(".base_layer")
        for name, module in model.named_modules()
        for buffer in WEIGHT_BUFFERS
        if module._buffers.get(buffer) is not None
    }
    for name, module in model.named_modules():
        if isinstance(module, FP8TrainableLinear):
            found[_address(module.weight)] = name.removesuffix(".base_layer")
    return found
