"""A frozen linear with its LoRA adapters, forward and backward apart, for the autograd functions of this package.

    y  = x Wᵀ + b + Σ h Bᵀ          h = x Aᵀ · factor
    dx = dy W + Σ dh A               dh = dy B · factor
    dA = dhᵀ x,  dB = dyᵀ h

Shapes: x [..., K], y [..., N], A [r, K], B [N, r], h [..., r].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coat_core.config import FP8LinearConfig
from coat_core.linear.function import dgrad, fp8_linear, quantize_weight, wants_fp8_gemm
from coat_core.linear.module import FP8Linear, FP8TrainableLinear, load_weight

from ..lora.plain import NotPlain, PlainAdapter, plain_adapters


class NotFusable(Exception):
    """A block cannot run through the fused flow; the message says why."""


@dataclass(frozen=True)
class FrozenLinear:
    """The base: an FP8 linear of ours, in either host's shape, or a plain frozen nn.Linear.

    Attributes:
        module: holds weight and bias.
        config: how it multiplies; None for a plain nn.Linear.
        read_weight: returns (codes, scale) for `config`.
    """

    module: Any
    config: FP8LinearConfig | None = None
    read_weight: Callable[[], tuple[Tensor, Tensor]] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b."""
        if self.config is None or self.read_weight is None:
            return torch.nn.functional.linear(x, self.module.weight, self.module.bias)
        return fp8_linear(x, *self.read_weight(), self.module.bias, self.config)

    def dgrad(self, grad: Tensor) -> Tensor:
        """Return dy W for dy [..., N]."""
        if self.config is None or self.read_weight is None:
            return grad @ self.module.weight.to(grad.dtype)
        return dgrad(grad, *self.read_weight(), self.config, wants_fp8_gemm(grad.device, self.config))


@dataclass(frozen=True)
class AdaptedLinear:
    """A frozen linear with its adapters."""

    base: FrozenLinear
    adapters: tuple[PlainAdapter, ...]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """A and B of each adapter in turn."""
        return [matrix for adapter in self.adapters for matrix in (adapter.down, adapter.up)]

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return y and each adapter's h, which backward needs."""
        base = self.base.forward(x)
        total, middles = base, []
        for adapter in self.adapters:
            h = torch.nn.functional.linear(_as_adapter_input(x, adapter), adapter.down)
            for factor in adapter.factors:
                h = h * factor
            up = torch.nn.functional.linear(h, adapter.up)
            total = total + (up.to(base.dtype) if adapter.joins_in_base_dtype else up)
            middles.append(h)
        return total.to(base.dtype), tuple(middles)

    def parameter_gradients(
        self, grad: Tensor, x: Tensor | None, middles: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return [dA, dB] of each adapter, and each adapter's dh for `input_gradient`.

        Args:
            grad: dy [..., N].
            x: what the forward pass read, or its FP8 round trip; None without adapters.
            middles: each adapter's h.
        """
        gradients: list[Tensor] = []
        middle_grads: list[Tensor] = []
        for adapter, h in zip(self.adapters, middles, strict=True):
            assert x is not None
            dy = grad.to(h.dtype)
            dh = dy @ adapter.up.to(h.dtype)
            for factor in adapter.factors:
                dh = (dh * factor).to(h.dtype)
            gradients += [_weight_gradient(dh, x, adapter.down), _weight_gradient(dy, h, adapter.up)]
            middle_grads.append(dh)
        return gradients, middle_grads

    def input_gradient(self, grad: Tensor, middle_grads: Sequence[Tensor]) -> Tensor:
        """Return dx [..., K] in fp32.

        Args:
            grad: dy [..., N].
            middle_grads: each adapter's dh.
        """
        dx = self.base.dgrad(grad).to(torch.float32)
        rows = dx.view(-1, dx.shape[-1])
        for adapter, dh in zip(self.adapters, middle_grads, strict=True):
            rows.addmm_(dh.flatten(0, -2).to(torch.float32), adapter.down.to(torch.float32))
        return dx


def _as_adapter_input(x: Tensor, adapter: PlainAdapter) -> Tensor:
    """Both hosts cast x to the adapter's dtype; autocast would cast it back."""
    device = x.device.type
    autocasts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)  # meta has none
    return x if autocasts else x.to(adapter.down.dtype)


def _weight_gradient(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """gradᵀ x over all tokens, in the weight's dtype."""
    return (grad.flatten(0, -2).t() @ x.to(grad.dtype).flatten(0, -2)).to(weight.dtype)


def read_linear(module: nn.Module) -> AdaptedLinear:
    """Read a linear of a block, with whatever LoRA sits on it.

    Raises:
        NotFusable: it is trained itself, quantized by someone else, or its adapter is more than two matrices.
    """
    try:
        base, adapters = plain_adapters(module)
    except NotPlain as error:
        raise NotFusable(str(error)) from error
    return AdaptedLinear(_read_base(base), adapters)


def _read_base(base: Any) -> FrozenLinear:
    if base.bias is not None and base.bias.requires_grad:
        raise NotFusable("a linear whose bias is trained")
    config = base.config if isinstance(base, FP8Linear) else getattr(base, "coat_linear_config", None)
    if config is not None:
        return FrozenLinear(base, config, lambda: load_weight(base, config))
    if not isinstance(base, nn.Linear) or type(base.weight.data) is not Tensor:
        raise NotFusable(f"a {type(base).__name__} of another quantization")
    if base.weight.requires_grad:
        raise NotFusable("a linear whose weight is trained")
    if isinstance(base, FP8TrainableLinear):
        return FrozenLinear(base, base.config, lambda: quantize_weight(base.weight, base.config)[:2])
    return FrozenLinear(base)
