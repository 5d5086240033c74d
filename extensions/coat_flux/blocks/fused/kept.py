"""What one autograd function keeps for backward: named tensors, the large ones in FP8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coat_core.activation import PackingConfig
from coat_core.kernels.quantize import dequantize, quantize

Packed = tuple[Tensor, ...]  # (codes, scale), or (values,) where a tensor is kept as it is


def pack(x: Tensor, config: PackingConfig | None) -> Packed:
    """Return x as FP8 codes and scales, or (None) x itself; `unpack` reverses it."""
    if config is None:
        return (x,)
    quantized = quantize(x, config.format, config.granularity)
    return quantized.codes, quantized.scale


def unpack(packed: Packed, config: PackingConfig | None, dtype: torch.dtype) -> Tensor:
    """Return what `pack` was given, in `dtype`."""
    if config is None or len(packed) == 1:
        return packed[0]
    return dequantize(packed[0], packed[1], config.granularity, dtype)


class Kept:
    """Collects tensors by name for `ctx.save_for_backward`, and finds them again in backward."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._places: dict[str, tuple[int, int]] = {}

    def add(self, name: str, *tensors: Tensor) -> None:
        """Keep these tensors under one name."""
        self._places[name] = (len(self._tensors), len(self._tensors) + len(tensors))
        self._tensors.extend(tensors)

    def save(self, ctx: Any) -> None:
        """Hand everything to autograd, which also watches over in-place changes."""
        ctx.save_for_backward(*self._tensors)
        ctx.kept_places = self._places

    @staticmethod
    def of(ctx: Any) -> dict[str, Packed]:
        """Return name → tensors, in backward."""
        saved = ctx.saved_tensors
        return {name: saved[start:stop] for name, (start, stop) in ctx.kept_places.items()}
