"""INT8 as operators: rotate and quantize, and rotate back; the references are `coat_core.int8`.

Shapes: x [..., K].
"""

from __future__ import annotations

import torch
from torch import Tensor

from coat_core.casts import Cast, declares
from coat_core.granularity import PER_ROW
from coat_core.int8 import check_rotation
from coat_core.int8 import quantize_int8 as quantize_reference
from coat_core.int8 import rotate as rotate_reference
from coat_core.ops.dispatch import run_by_triton
from coat_core.ops.operators import operator


@operator("coat::quantize_int8")
def quantize_int8(x: Tensor, size: int, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return INT8 codes of x H, like x, and their scale fp32 [..., 1]; all else as `coat_core.int8.quantize_int8`."""
    codes, scale, _ = quantize_reference(x, size, factors)
    return codes.contiguous(), scale.contiguous()


@quantize_int8.register_fake
def _(x: Tensor, size: int, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    check_rotation(x, size)
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@declares(quantize_int8)
def _(out: tuple[Tensor, Tensor], x: Tensor, size: int, factors: Tensor | None) -> Cast:
    values = x if factors is None else x.to(torch.float32) * factors
    return Cast(None, rotate_reference(values, size), *out, PER_ROW)


@operator("coat::rotate")
def rotate(x: Tensor, size: int) -> Tensor:
    """Return x H [..., K] in the dtype of x; all else as `coat_core.int8.rotate`."""
    return rotate_reference(x, size).to(x.dtype, memory_format=torch.contiguous_format, copy=True)


@rotate.register_fake
def _(x: Tensor, size: int) -> Tensor:
    check_rotation(x, size)
    return x.new_empty(x.shape)


run_by_triton(quantize_int8, "int8.quantize_int8")
run_by_triton(rotate, "int8.rotate")
