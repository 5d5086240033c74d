"""INT8 as operators: rotate and quantize, and rotate back; the references are `coat_core.int8`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coat_core.casts import Cast, declares
from coat_core.granularity import PER_ROW
from coat_core.int8 import quantize_int8 as quantize_reference
from coat_core.int8 import rotate as rotate_reference
from coat_core.ops.operators import operator


@operator("coat::quantize_int8")
def quantize_int8(x: Tensor, size: int, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return INT8 codes of x H [..., K] and their scale fp32 [..., 1]: `coat_core.int8.quantize_int8`."""
    codes, scale, _ = quantize_reference(x, size, factors)
    return codes.contiguous(), scale.contiguous()


@declares(quantize_int8)
def _(out: Any, a: Any) -> Cast:
    values = a.x if a.factors is None else a.x.to(torch.float32) * a.factors
    return Cast(None, rotate_reference(values, a.size), out[0], out[1], PER_ROW)


@operator("coat::rotate")
def rotate(x: Tensor, size: int) -> Tensor:
    """Return x H [..., K] in the dtype of x: `coat_core.int8.rotate`."""
    return rotate_reference(x, size).to(x.dtype, memory_format=torch.contiguous_format, copy=True)
