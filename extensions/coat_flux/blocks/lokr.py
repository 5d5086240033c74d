"""The stand-alone trainer's LoKr: ai-toolkit's matrices, names and start, in a module around the linear.

    y = linear(x) + (W1 ⊗ W2) x,   W1 [a, c], W2 [b, d] or w2_a [b, r] · w2_b [r, d];   a·b outputs, c·d inputs

W1 is uniform in ±1/sqrt(c) and W2, or its second factor, zero. The Kronecker product is not formed. Alpha is the rank,
so the scale is 1. Behaviour: ai-toolkit's toolkit/models/lokr.py, which is LyCORIS's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .lora import KroneckerAdapter


def split_width(width: int, factor: int) -> tuple[int, int]:
    """`factor` and the rest where it divides the width, else the largest divisor up to it and the root (-1: no limit).

    ai-toolkit's and LyCORIS's rule.
    """
    if factor > 0 and width % factor == 0:
        return factor, width // factor
    small = max(m for m in range(1, math.isqrt(width) + 1) if width % m == 0 and not 0 < factor < m)
    return small, width // small


def lokr_shapes(outputs: int, inputs: int, factor: int, rank: int | None) -> dict[str, tuple[int, int]]:
    """Shape of each matrix by its name in a file; W2 is whole without a rank, or where that saves nothing."""
    (a, b), (c, d) = split_width(outputs, factor), split_width(inputs, factor)
    if rank is None or 2 * rank >= max(b, d):
        return {"lokr_w1": (a, c), "lokr_w2": (b, d)}
    return {"lokr_w1": (a, c), "lokr_w2_a": (b, rank), "lokr_w2_b": (rank, d)}


class LokrLinear(nn.Module):
    """A linear with a LoKr, made on `device`, drawn by `generator`."""

    def __init__(
        self, base: Any, factor: int, rank: int | None, device: torch.device, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.base_layer = base
        self.in_features, self.out_features = base.in_features, base.out_features
        shapes = lokr_shapes(base.out_features, base.in_features, factor, rank)
        for name, shape in shapes.items():
            start = torch.zeros(shape)
            if name in ("lokr_w1", "lokr_w2_a"):
                nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
            self.register_parameter(name, nn.Parameter(start.to(device)))

    @property
    def adapter(self) -> KroneckerAdapter:
        """Its matrices, as the fused flow reads them."""
        first, *second = self.parameters(recurse=False)
        return KroneckerAdapter((first,), tuple(second), 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return y [..., a·b] for x [..., c·d]."""
        y: Tensor = self.base_layer(x)
        first, second = self.adapter.matrices(y.dtype)
        z = x.to(y.dtype).unflatten(-1, (first.shape[1], second.shape[1])) @ second.t()
        return y + (first @ z).flatten(-2)
