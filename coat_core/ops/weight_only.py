"""y = x Wᵀ + b with W in FP8 and x in high precision, for one row per image: time is reading W, one byte an element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coat_core.autograd import without_autocast
from coat_core.casts import Product, declares
from coat_core.ops.operators import operator
from coat_core.quantize import dequantize


@operator("coat::weight_only_linear")
def weight_only_linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x Wᵀ + b [..., N] of `dtype`, W = codes · scale; x [..., K], codes FP8 [N, K], scale fp32 [] or [N, 1].

    Numerics: the reference rounds W to `dtype`; the kernel multiplies by the exact codes and scales the fp32 sum.
    """
    weight = dequantize(codes, scale, dtype=dtype)
    with without_autocast(x.device):
        return torch.nn.functional.linear(x.to(dtype), weight, None if bias is None else bias.to(dtype))


@declares(weight_only_linear)
def _(out: Any, a: Any) -> Product:
    return Product(a.codes)
