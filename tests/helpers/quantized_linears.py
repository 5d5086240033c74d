"""Linears that a trainer quantized its own way, in the two forms that ai-toolkit's have, on torch alone.

codes      a class swapped in place, whose backend holds the weight; casts x to 8 bits where x requires a gradient
subclass   an nn.Linear whose weight is a tensor subclass
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class RotatedCodes:
    """A backend like ai-toolkit's: W in 8 bits and in another basis, straight through the cast of x."""

    qtype = "turned8"

    def quantize_(self, module: nn.Module, weight: Tensor) -> None:
        scale = weight.abs().amax(1, keepdim=True) / 127
        module.register_buffer("codes", (weight.flip(1) / scale).round().to(torch.int8), persistent=False)
        module.register_buffer("scale_bits", scale.float().view(torch.int32), persistent=False)

    def turned(self, module: Any) -> Tensor:
        return module.codes.float() * module.scale_bits.view(torch.float32)

    def dequantize(self, module: Any) -> Tensor:
        raise AssertionError("a weight that reads another basis than x")

    def dequantize_folded(self, module: Any) -> Tensor:
        return self.turned(module).flip(1)

    def forward(self, module: Any, x: Tensor) -> Tensor:
        turned = x.flip(-1)
        if x.requires_grad:
            step = turned.detach().abs().amax(-1, keepdim=True) / 127
            turned = turned + ((turned / step).round() * step - turned).detach()
        return linear(turned, self.turned(module).to(x.dtype), module.bias)


class OstrisLinear(nn.Linear):
    """Of ai-toolkit's name."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        quantizer: Any = self.ostris_quantizer
        weight: Tensor = quantizer.dequantize_folded(self)
        return weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.ostris_quantizer.forward(self, x)  # type: ignore[operator,union-attr]
        return y


class HalvedWeight(Tensor):
    """A weight kept as something else, which torch's own linear accepts."""

    @staticmethod
    def __new__(cls, kept: Tensor, dtype: torch.dtype) -> HalvedWeight:
        wrapper = Tensor._make_wrapper_subclass
        return wrapper(cls, kept.shape, dtype=dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, kept: Tensor, dtype: torch.dtype) -> None:
        self.kept = kept

    def dequantize(self) -> Tensor:
        return self.kept.to(self.dtype) * 2

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return HalvedWeight(args[0].kept, args[0].dtype)
        return func(*[x.dequantize() if isinstance(x, HalvedWeight) else x for x in args], **(kwargs or {}))


@torch.no_grad()
def quantize_linear(module: Any, form: str) -> None:
    """Quantize a plain nn.Linear in place."""
    weight = module.weight.detach()
    if form == "subclass":
        module.weight = nn.Parameter(HalvedWeight((weight / 2).to(torch.float16), weight.dtype), requires_grad=False)
        return
    module.ostris_quantizer = RotatedCodes()
    module.ostris_quantizer.quantize_(module, weight)
    del module.weight
    module.__class__ = OstrisLinear


FORMS = ("codes", "subclass")
