"""Linears that ai-toolkit quantized its own way (its own code, quanto or torchao).

    y  = their own forward in training
    dx = dy W          W dequantized at each use, in the basis of x: rotations and scales of x folded in

Their own backward is the same product, but most of them save the dequantized W for it. Here nothing is saved.

Shapes: x [..., K], W [N, K], y and dy [..., N].
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from coat_core.config import FP8LinearConfig
from coat_core.linear.module import hand_over_input

from ..base.names import COAT_QTYPE


def quantization_of(module: nn.Module) -> str | None:
    """Name how someone else quantized a linear ("uint4", "qfloat8_e4m3fn"); None where it is plain or ours."""
    quantizer = getattr(module, "ostris_quantizer", None)
    if quantizer is not None:
        return None if quantizer.qtype == COAT_QTYPE else str(quantizer.qtype or type(quantizer).__name__)
    weight = module._parameters.get("weight") if isinstance(module, nn.Linear) else None
    kind = type(None if weight is None else weight.data)
    if weight is None or getattr(kind, "dequantize", None) is Tensor.dequantize:
        return None
    of_quanto = getattr(module, "weight_qtype", None)
    return f"{kind.__module__.partition('.')[0]} {kind.__name__}" if of_quanto is None else str(of_quanto.name)


# qtype → bits of a weight with its share of a group's scale, bytes for each row, and of what in_features is a multiple
HELD_AS: dict[str, tuple[float, int, int]] = {
    **dict.fromkeys(("qfloat8", "qfloat8_e4m3fn", "qfloat8_e5m2", "qint8", "float8"), (8, 2, 1)),
    "int8": (8, 10, 1),
    **{f"uint{bits}": (bits + 24 / 64, 0, 64) for bits in range(2, 8)},
    **{f"orbit{bits}": (bits, 2, 64) for bits in range(2, 5)},
    "convrot8": (8, 4, 16),
    "convrot4": (5, 0, 16),
    "nvfp4": (4.5, 0, 16),
}


def held_bytes(qtype: str, linear: nn.Linear) -> int | None:
    """Bytes of a weight that ai-toolkit quantizes; None if it leaves it, or for a qtype that is not known here."""
    bits, of_row, multiple = HELD_AS.get(qtype, (0, 0, linear.in_features + 1))
    if linear.in_features % multiple:
        return None
    return int(linear.out_features * (linear.in_features * bits / 8 + of_row))


def adopt(module: Any, config: FP8LinearConfig) -> None:
    """Let a quantized linear save nothing for backward, and hand x to its adapter; idempotent but for the config."""
    module.coat_input_config = config
    if is_adopted(module):
        return
    adapter, forward = None, vars(module).get("forward")
    while hasattr(owner := getattr(forward, "__self__", None), "org_forward"):
        adapter, forward = owner, owner.org_forward
    own = type(module).forward
    module.__class__ = _adopted(type(module))
    if adapter is not None and getattr(forward, "__func__", None) is own:
        adapter.org_forward = type(module).forward.__get__(module)


def is_adopted(module: nn.Module) -> bool:
    """Whether `adopt` was called with it."""
    return hasattr(type(module), "adopted_from")


@torch.no_grad()
def own_product(module: Any, x: Tensor, trains: bool) -> Tensor:
    """Return y of an adopted linear by its own code, without a graph; `trains`: x is quantized as in training."""
    y: Tensor = type(module).adopted_from.forward(module, x.detach().requires_grad_(trains))
    return y


@torch.no_grad()
def input_gradient(module: Any, grad: Tensor) -> Tensor:
    """Return dx = dy W in the dtype of dy."""
    quantizer = getattr(module, "ostris_quantizer", None)
    if quantizer is None:
        weight: Tensor = module.weight.dequantize()
    else:
        weight = getattr(quantizer, "dequantize_folded", quantizer.dequantize)(module)
    return grad @ weight.to(grad.device, grad.dtype)


@functools.cache
def _adopted(kind: type) -> type:
    def forward(self: Any, x: Tensor) -> Tensor:
        hand_over_input(self, x, self.coat_input_config)
        y: Tensor = _OwnProduct.apply(x, self)
        return y

    own = {"forward": forward, "adopted_from": kind, "__doc__": kind.__doc__, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), own)


class _OwnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module, ctx.x_dtype = module, x.dtype
        return own_product(module, x, x.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return input_gradient(ctx.module, grad).to(ctx.x_dtype), None
