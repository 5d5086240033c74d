"""Frozen linears with LoRA adapters, forward and backward apart, for the autograd functions of this package.

Linears that read the same x go together: x is quantized once, and all their adapters share one down-projection.

    h  = s · x Dᵀ                            D: every A · factor, one above the other
    y  = x Wᵀ + b + h Bᵀ                     of each linear, with its own adapters' part of h
    dx = Σ dy W + dh D                       dh = s · dy B
    dA = factor · dhᵀ x,  dB = dyᵀ h

s is 1, or the strength of the row's image where images have different ones. Adapters multiply in the dtype of y (their
own precision is the optimizer's) and are added to y by the GEMM itself.

Shapes: x [..., K], y [..., N], A [r, K], B [N, r], h [..., Σr].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from coat_core.autograd import first_order_only, without_autocast
from coat_core.config import FP8LinearConfig
from coat_core.granularity import Granularity
from coat_core.kernels.quantize import quantize
from coat_core.linear.function import (
    compute_dtype,
    dgrad,
    fprop,
    input_granularity,
    quantize_weight,
    wants_fp8_gemm,
)
from coat_core.linear.module import FP8Linear, FP8TrainableLinear, load_transposed, load_weight
from coat_core.quantize import Quantized

from ..lora import NotPlain, PlainAdapter, plain_adapters
from .kept import Kept

Spec = tuple[str, Granularity]


class NotFusable(Exception):
    """A block cannot run through the fused flow; the message says why."""


@dataclass(frozen=True)
class FrozenLinear:
    """The base: an FP8 linear of ours, in either trainer's shape, or a plain frozen nn.Linear.

    Attributes:
        weight: FP8 codes, or values [N, K].
        scale: of the codes, fp32 [] or [N, 1]; None where `weight` has values.
        bias: [N] or None.
        config: how it multiplies; None for a plain nn.Linear. Values with a config are quantized at each use.
        in_fp8: whether this device multiplies so; False multiplies by the dequantized weight.
        transposed: the codes as a contiguous [K, N] for dgrad, where there is such a copy.
    """

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None
    config: FP8LinearConfig | None = None
    in_fp8: bool = False
    transposed: Tensor | None = None

    def forward(self, x: Tensor, quantized: Quantized | None) -> Tensor:
        """Return x Wᵀ + b.

        Args:
            x: [..., K].
            quantized: x in FP8 by `input_spec`; None where that is.
        """
        if self.config is None:
            return torch.nn.functional.linear(x, self.weight, self.bias)
        return fprop(x, quantized, *self._codes(self.config), self.bias, compute_dtype(x))

    def dgrad(self, grad: Tensor, quantized: Quantized | None = None) -> Tensor:
        """Return dy W.

        Args:
            grad: dy [..., N].
            quantized: dy in FP8, where whoever made it has quantized it by `grad_spec`.
        """
        if self.config is None:
            return grad @ self.weight.to(grad.dtype)
        return dgrad(grad, *self._codes(self.config), self.config, self.in_fp8, self.transposed, quantized)

    @property
    def input_spec(self) -> Spec | None:
        """Format and scaling of x in the GEMM; None where it multiplies in high precision."""
        if self.config is None or not self.in_fp8:
            return None
        return self.config.input_format, input_granularity(self.config)

    @property
    def grad_spec(self) -> Spec | None:
        """The same of dy; None also where dy is multiplied by the weight's scales before the cast."""
        if self.config is None or not self.in_fp8 or self.config.grad_format == "bf16":
            return None
        if self.config.weight_granularity == "per_row":
            return None
        return self.config.grad_format, input_granularity(self.config)

    def _codes(self, config: FP8LinearConfig) -> tuple[Tensor, Tensor]:
        return (self.weight, self.scale) if self.scale is not None else quantize_weight(self.weight, config)[:2]


@dataclass(frozen=True)
class AdaptedLinear:
    """A frozen linear with its adapters."""

    base: FrozenLinear
    adapters: tuple[PlainAdapter, ...]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """A and B of each adapter in turn."""
        return [matrix for adapter in self.adapters for matrix in (adapter.down, adapter.up)]


def run_linears(
    x: Tensor, quantized: Quantized | None, linears: Sequence[AdaptedLinear]
) -> tuple[list[Tensor], Tensor | None]:
    """Run linears that read the same x.

    Args:
        x: [..., K].
        quantized: x in FP8 by the linears' common `input_spec`, or None.
        linears: some of them with adapters.

    Returns:
        y of each, and h, which backward needs; None without adapters.
    """
    outputs = [linear.base.forward(x, quantized if linear.base.input_spec else None) for linear in linears]
    adapters = [adapter for linear in linears for adapter in linear.adapters]
    if not adapters:
        return outputs, None
    dtype = outputs[0].dtype
    copies = _copies(adapters, dtype)
    h = _times_strengths(torch.nn.functional.linear(x.to(dtype), copies.down), adapters)
    parts, ups = iter(h.flatten(0, -2).split(_ranks(adapters), dim=1)), iter(copies.ups)
    for linear, y in zip(linears, outputs, strict=True):
        for _ in linear.adapters:
            y.view(-1, y.shape[-1]).addmm_(next(parts), next(ups).t())
    return outputs, h


def linears_backward(
    grads: Sequence[Tensor],
    make_x: Callable[[], Tensor],
    h: Tensor | None,
    linears: Sequence[AdaptedLinear],
    needs_dx: bool,
    quantized: Quantized | None = None,
) -> tuple[Tensor | None, list[Tensor]]:
    """Return dx [..., K] in the dtype of the first dy, or None, and [dA, dB] of each adapter in turn.

    Args:
        grads: dy of each linear.
        make_x: gives what the linears read, or its FP8 round trip; called where there are adapters, and dropped before
            dx, which is as large, is there.
        h: from `run_linears`.
        linears: likewise.
        needs_dx: whether anything before x is trained.
        quantized: the first dy in FP8, where its maker has quantized it.
    """
    adapters = [adapter for linear in linears for adapter in linear.adapters]
    dh, gradients = None, []
    if h is not None:
        dh, gradients = _adapter_gradients(grads, make_x, h, linears)
    if not needs_dx:
        return None, gradients
    dx = linears[0].base.dgrad(grads[0], quantized)
    for linear, grad in zip(linears[1:], grads[1:], strict=True):
        dx += linear.base.dgrad(grad).to(dx.dtype)
    if dh is not None:
        dx.view(-1, dx.shape[-1]).addmm_(dh.to(dx.dtype), _copies(adapters, dx.dtype).down)
    return dx, gradients


def _adapter_gradients(
    grads: Sequence[Tensor], make_x: Callable[[], Tensor], h: Tensor, linears: Sequence[AdaptedLinear]
) -> tuple[Tensor, list[Tensor]]:
    """Return dh [rows, Σr] of all adapters, and [dA, dB] of each in turn."""
    pairs = [
        (grad.to(h.dtype).flatten(0, -2), adapter)
        for grad, linear in zip(grads, linears, strict=True)
        for adapter in linear.adapters
    ]
    adapters = [adapter for _, adapter in pairs]
    ranks = _ranks(adapters)
    parts = [dy @ up for (dy, _), up in zip(pairs, _copies(adapters, h.dtype).ups, strict=True)]
    dh = _times_strengths(_joined(parts, dim=1).view(h.shape), adapters).flatten(0, -2)
    downs = _product(dh.t(), make_x().to(h.dtype).flatten(0, -2), adapters[0].down.dtype).split(ranks)
    gradients = []
    for (dy, adapter), down, part in zip(pairs, downs, h.flatten(0, -2).split(ranks, dim=1), strict=True):
        gradients.append(_times_factors(down.to(adapter.down.dtype), adapter))
        gradients.append(_product(dy.t(), part, adapter.up.dtype))
    return dh, gradients


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix product of a and b in `dtype`; on a GPU straight from its fp32 sums."""
    if a.device.type == "cpu" or dtype != torch.float32 or a.dtype == dtype:
        return (a @ b).to(dtype)
    return torch.mm(a, b, out_dtype=dtype)


class Copies(NamedTuple):
    """Matrices of the adapters that read one x, in the dtype that their linears multiply in.

    Attributes:
        down: D [Σr, K].
        ups: B [N, r] of each.
    """

    down: Tensor
    ups: tuple[Tensor, ...]


def _copies(adapters: Sequence[PlainAdapter], dtype: torch.dtype) -> Copies:
    """Those that `LoraShadow` keeps, else made for this call."""
    kept: Copies | None = adapters[0].copies
    if kept is not None and kept.down.dtype == dtype:
        return kept
    down = _joined([scaled_down(adapter) for adapter in adapters], dim=0)
    return Copies(down.to(dtype), tuple(adapter.up.to(dtype) for adapter in adapters))


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


def scaled_down(adapter: PlainAdapter) -> Tensor:
    """A · factors [r, K]; A itself where they are 1."""
    return _times_factors(adapter.down, adapter)


def _times_factors(matrix: Tensor, adapter: PlainAdapter) -> Tensor:
    for factor in adapter.factors:
        if isinstance(factor, Tensor) or factor != 1.0:
            matrix = matrix * factor
    return matrix


def _times_strengths(h: Tensor, adapters: Sequence[PlainAdapter]) -> Tensor:
    """Return h [images, ..., Σr], or dh, with the rows of each image times its strength, in fp32.

    With more images than strengths (guidance doubles the batch) neighbours share one, as in ai-toolkit.
    """
    strengths = adapters[0].strengths
    if strengths is None:
        return h
    if len(h) % len(strengths):
        raise ValueError(f"{len(strengths)} LoRA strengths for a batch of {len(h)}: must be one per image")
    rows = strengths.float().repeat_interleave(len(h) // len(strengths))
    return (h * rows.view(-1, *[1] * (h.ndim - 1))).to(h.dtype)


def _ranks(adapters: Sequence[PlainAdapter]) -> list[int]:
    return [adapter.down.shape[0] for adapter in adapters]


def read_linear(module: nn.Module) -> AdaptedLinear:
    """Read a linear of a block, with whatever LoRA sits on it.

    Raises:
        NotFusable: it is trained itself, quantized by someone else, or its adapter is more than two matrices.
    """
    return read_group((module,))[0]


def read_group(modules: Sequence[nn.Module]) -> tuple[AdaptedLinear, ...]:
    """Read linears that read the same x; arguments and errors as `read_linear`."""
    try:
        plain = [plain_adapters(module) for module in modules]
    except NotPlain as error:
        raise NotFusable(str(error)) from error
    if len({id(adapter.strengths) for _, adapters in plain for adapter in adapters}) > 1:
        raise NotFusable("LoRAs whose strengths per image are not the same")
    group = tuple(AdaptedLinear(_read_base(base), adapters) for base, adapters in plain)
    if len({linear.base.input_spec for linear in group} - {None}) > 1:
        raise NotFusable("linears that read the same tensor want it in different formats")
    return group


def adapted_linear(x: Tensor, linear: AdaptedLinear) -> Tensor:
    """Return y [..., N] for the few rows of x [..., K], which are kept as they are."""
    result: Tensor = _AdaptedLinear.apply(x, linear, *linear.parameters)
    return result


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: AdaptedLinear, *parameters: Tensor) -> Tensor:
        spec = linear.base.input_spec
        (y,), h = run_linears(x, quantize(x, *spec) if spec else None, [linear])
        kept = Kept()
        kept.add("rows", x)
        kept.add("h", *(() if h is None else (h,)))
        kept.add("parameters", *parameters)
        kept.save(ctx)
        ctx.linear = linear
        return y

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        with without_autocast(grad.device):
            kept = Kept.of(ctx)
            (x,), h = kept["rows"], next(iter(kept["h"]), None)
            dx, parameter_grads = linears_backward([grad], lambda: x, h, [ctx.linear], ctx.needs_input_grad[0])
        return None if dx is None else dx.to(x.dtype), None, *parameter_grads


def _read_base(base: Any) -> FrozenLinear:
    bias = base.bias
    if bias is not None and bias.requires_grad:
        raise NotFusable("a linear whose bias is trained")
    config = base.config if isinstance(base, FP8Linear) else getattr(base, "coat_linear_config", None)
    if config is not None:
        codes, scale = load_weight(base, config)
        in_fp8 = wants_fp8_gemm(codes.device, config)
        return FrozenLinear(codes, scale, bias, config, in_fp8, load_transposed(base, config))
    if not isinstance(base, nn.Linear) or type(base.weight.data) is not Tensor:
        raise NotFusable(f"a {type(base).__name__} of another quantization")
    if base.weight.requires_grad:
        raise NotFusable("a linear whose weight is trained")
    if isinstance(base, FP8TrainableLinear):
        in_fp8 = wants_fp8_gemm(base.weight.device, base.config)
        return FrozenLinear(base.weight, None, bias, base.config if in_fp8 else None, in_fp8)
    return FrozenLinear(base.weight, None, bias)
