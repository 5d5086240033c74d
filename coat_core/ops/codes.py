"""What operators share that quantize their results, read codes, and add adapters.

Such an operator takes `fmt` and `granularity` and returns (values, codes, code_scale), where codes, code_scale =
quantize(values, fmt, granularity) to the bit, per_row or per_tensor, or "int8" per_row of the rotated values. With
granularity "none" both have shape [0].

An operator that also saves its input x for backward takes `saved_format` and `group_size` and returns (x_codes,
x_scale) of 1×G groups, to the bit; with saved_format "none" both have shape [0]. Operators of the backward pass take x
as values, in their dtype, or as such codes with their scale.

An operator that completes the result y of a linear adds its LoRA: y + h upᵀ, h [..., r], up [N, r], rounded once.
Where y is of n linears of equal width, h has n·r columns: r for each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coat_core.autograd import without_autocast
from coat_core.casts import Cast
from coat_core.formats import E4M3, INT8, Format, product_format
from coat_core.granularity import PER_TENSOR, Granularity, per_group
from coat_core.int8 import quantize_int8, rotate, rotation_size
from coat_core.quantize import dequantize, quantize


def code_format(fmt: str) -> Format:
    """The format of that name; for "none" the one that codes of shape [0] have."""
    return E4M3 if fmt == "none" else product_format(fmt)


def codes_of(
    values: Tensor, fmt: str, granularity: str, group_size: int = 128, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes and scale of values [..., K], rotated in INT8, times `factors` fp32 [K]; with "none" of shape [0]."""
    if "none" in (fmt, granularity):
        return values.new_empty(0, dtype=code_format(fmt).dtype), values.new_empty(0, dtype=torch.float32)
    if fmt == INT8.name:
        codes, scale, _ = quantize_int8(values, rotation_size(values.shape[-1]), factors)
    else:
        values = values if factors is None else values.to(torch.float32) * factors
        codes, scale, _ = quantize(values, fmt, Granularity(granularity, group_size))
    return codes.contiguous(), scale.contiguous()


def cast_of(
    kind: str | None,
    values: Tensor,
    quantized: tuple[Tensor, ...],
    granularity: str,
    group_size: int = 128,
    factors: Tensor | None = None,
) -> tuple[Cast, ...]:
    """Declare the cast of values to `quantized`, the result of `codes_of`; () if that has shape [0]."""
    codes, scale = quantized
    if codes.dtype == INT8.dtype:
        values = rotate(values, rotation_size(values.shape[-1]))
    if not codes.numel():
        return ()
    return (Cast(kind, values, codes, scale, Granularity(granularity, group_size), factors),)


def values_of(x: Tensor, scale: Tensor | None, group_size: int, dtype: torch.dtype) -> Tensor:
    """Return x [..., K] in `dtype`, dequantized if it has a scale: one per 1×G group, or one for all."""
    if scale is None:
        return x.to(dtype)
    return dequantize(x, scale, per_group(group_size) if scale.ndim else PER_TENSOR, dtype)


def with_adapter(y: Tensor, h: Tensor | None, up: Tensor | None) -> Tensor:
    """Return y [..., N] + h upᵀ, all of one dtype; y itself without an adapter.

    h [..., n·r] and up [N, r] are those of n adapters, each on an equal share of y's columns.
    """
    if h is None or up is None:
        return y
    parts = h.shape[-1] // up.shape[-1]
    completed = []
    with without_autocast(y.device):
        for y_part, h_part, up_part in zip(y.chunk(parts, -1), h.chunk(parts, -1), up.chunk(parts), strict=True):
            y_rows, h_rows = y_part.reshape(-1, y_part.shape[-1]), h_part.reshape(-1, h_part.shape[-1])
            completed.append(torch.addmm(y_rows, h_rows, up_part.t()).view(y_part.shape))
    return completed[0] if parts == 1 else torch.cat(completed, dim=-1)


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of two matrices, or of batches of them, in `dtype`; on a GPU straight from its fp32 sums."""
    with without_autocast(a.device):
        if a.device.type == "cpu" or dtype != torch.float32 or a.dtype == dtype:
            result = a @ b
            return result if result.dtype == dtype else result.to(dtype)
        return torch.bmm(a, b, out_dtype=dtype) if a.ndim == 3 else torch.mm(a, b, out_dtype=dtype)
