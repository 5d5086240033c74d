"""Looks at every cast to FP8 while it happens: a dispatch mode around one step.

Operators that quantize return their codes beside, or are given, the values they cast; both are compared on the device,
on evenly spaced rows, and one read-back at the end brings all results to the host. Nothing is kept alive but a few
numbers per cast, and nothing changes: the operators run as they would without it. Compiled blocks run eager inside a
dispatch mode (flow/compiled.py), CUDA's backward thread takes the mode over from the thread that called it.

    coat::quantize                                           a linear's input, dy, or what is kept for backward
    coat::layer_norm_modulate_quantize, gelu_concat_quantize a linear's input
    coat::gate_residual_backward                             dy
    coat::scaled_mm                                          tells of codes what they are, and the layer, by its weight
    coat::fp8_adamw_step                                     the moments

What no GEMM reads counts as kept for backward: so do GEMM inputs with 1×G groups, which only CPUs multiply as FP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from coat_core.granularity import Granularity
from coat_core.metrics import cast_losses
from coat_core.quantize import dequantize

from .health import EXP_AVG, EXP_AVG_SQ, GRADIENTS, INPUTS, SAVED, CastHealth, Loss

__all__ = ["CastProbe"]

SAMPLE = 1 << 20  # elements looked at per cast
WEIGHT_BUFFERS = ("weight_codes", "weight_codes_transposed")
WEIGHTS = "weights"  # of trainable linears, cast in every forward pass: not reported
FUSED = {
    "coat::layer_norm_modulate_quantize": INPUTS,
    "coat::gelu_concat_quantize": INPUTS,
    "coat::gate_residual_backward": GRADIENTS,
}


class _Cast:
    """One cast: what it turns out to be, and fp32 [2] on the device, as `cast_losses` gives it."""

    def __init__(self, kind: str, losses: Tensor, where: str = "") -> None:
        self.kind, self.losses, self.where = kind, losses, where


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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, and look at what it cast."""
        out = func(*args, **(kwargs or {}))
        name = func.name()
        if name == "coat::quantize":
            self._see_quantize(out, *args)
        elif name in FUSED:
            granularity = args[-1]
            if granularity != "none":
                values, codes, scale = out[:3]
                self._add(FUSED[name], values, codes, scale, Granularity(granularity))
        elif name == "coat::scaled_mm":
            self._see_gemm(*args)
        elif name == "coat::fp8_adamw_step":
            self._see_moments(*args[:7])
        return out

    def health(self) -> CastHealth | None:
        """What was seen, read back from the device; None where nothing was cast."""
        casts = [cast for cast in self._casts if cast.kind != WEIGHTS]
        if not casts:
            return None
        shares = torch.stack([cast.losses for cast in casts]).tolist()
        return CastHealth(Loss(cast.kind, cast.where, *pair) for cast, pair in zip(casts, shares, strict=True))

    def _see_quantize(
        self,
        out: tuple[Tensor, Tensor],
        x: Tensor,
        fmt: str,
        granularity: str,
        group_size: int,
        factors: Tensor | None = None,
    ) -> None:
        self._add(SAVED, x, *out, Granularity(granularity, group_size), factors)

    def _add(
        self,
        kind: str,
        x: Tensor,
        codes: Tensor,
        scale: Tensor,
        granularity: Granularity,
        factors: Tensor | None = None,
    ) -> None:
        rows, row_codes, row_scale = _sampled(x.detach(), codes, scale, granularity)
        if factors is not None:
            rows = rows.to(torch.float32) * factors
        cast = _Cast(kind, cast_losses(rows, row_codes, dequantize(row_codes, row_scale, granularity)))
        self._casts.append(cast)
        self._latest[_address(codes)] = cast

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
        if weight is not None:
            weight.kind = WEIGHTS
        if cast is not None:
            cast.kind = INPUTS if fast_accum else GRADIENTS  # fprop alone accumulates fast
            cast.where = cast.where or self._layers.get(_address(b), "")

    def _see_moments(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        exp_avg: Tensor,
        exp_avg_numbers: Tensor,
        exp_avg_sq: Tensor,
        exp_avg_sq_numbers: Tensor,
        first_blocks: list[int],
    ) -> None:
        for kind, codes, numbers in (
            (EXP_AVG, exp_avg, exp_avg_numbers),
            (EXP_AVG_SQ, exp_avg_sq, exp_avg_sq_numbers),
        ):
            if not len(numbers):  # in fp32
                continue
            for param, grad, first in zip(params, grads, first_blocks, strict=True):
                flat = codes.view(-1)[first * codes.shape[1] :][: grad.numel()]
                where = self._parameters.get(param.data_ptr(), "")
                self._casts.append(_Cast(kind, _moment_losses(grad, flat), where))


def _moment_losses(grad: Tensor, codes: Tensor) -> Tensor:
    """Share of elements with a gradient whose moment is zero after the step; no moment lies beyond its own scale."""
    step = -(-grad.numel() // SAMPLE)
    moved = grad.detach().reshape(-1)[::step] != 0
    lost = moved & (codes[::step].to(torch.float32) == 0)
    share = lost.sum() / moved.sum().clamp(min=1)
    return torch.stack([torch.zeros_like(share), share])


def _sampled(x: Tensor, codes: Tensor, scale: Tensor, granularity: Granularity) -> tuple[Tensor, Tensor, Tensor]:
    """Evenly spaced rows of about `SAMPLE` elements, as views; the beginning of a tensor without rows."""
    step = -(-x.numel() // SAMPLE)
    if step == 1:
        return x, codes, scale
    if x.ndim == 1:
        groups = SAMPLE // granularity.group_size if granularity.name == "per_group" else None
        return x[:SAMPLE], codes[:SAMPLE], scale[:groups] if scale.ndim else scale
    return x[..., ::step, :], codes[..., ::step, :], scale[..., ::step, :] if scale.ndim else scale


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _weight_addresses(model: nn.Module) -> dict[int, str]:
    """Address of each frozen FP8 weight, and of its transposed copy → name of the layer, as the config writes it."""
    return {
        _address(module._buffers[buffer]): name.removesuffix(".base_layer")
        for name, module in model.named_modules()
        for buffer in WEIGHT_BUFFERS
        if module._buffers.get(buffer) is not None
    }
