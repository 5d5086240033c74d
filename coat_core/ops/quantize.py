"""Quantize, dequantize and transpose as operators; the references of the first ones are `coat_core.quantize`.

Shapes: x [..., K]; codes like x; scale as `Granularity.scale_shape` says.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from coat_core.casts import Cast, declares
from coat_core.formats import INT8, Format, get_format
from coat_core.granularity import PER_ROW, PER_TENSOR, Granularity
from coat_core.int8 import rotation_size
from coat_core.ops.codes import no_codes, saved_cast_of, saved_codes_of
from coat_core.ops.int8 import quantize_int8
from coat_core.ops.operators import operator
from coat_core.quantize import Quantized, check_input
from coat_core.quantize import dequantize as dequantize_reference
from coat_core.quantize import quantize as quantize_reference


@operator("coat::quantize")
def _quantize(x: Tensor, fmt: str, granularity: str, group_size: int, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    x = x if factors is None else x.to(torch.float32) * factors
    codes, scale, _ = quantize_reference(x, fmt, Granularity(granularity, group_size))
    return codes.contiguous(), scale.contiguous()


@declares(_quantize)
def _(out: Any, a: Any) -> Cast:
    return Cast(None, a.x, out[0], out[1], Granularity(a.granularity, a.group_size), a.factors)


@operator("coat::quantize_and_save")
def quantize_and_save(
    x: Tensor, fmt: str, granularity: str, group_size_in: int, saved_format: str, group_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the codes of x that a linear reads, and those that are saved for backward, with one reading of x.

    Args:
        x: floating [..., K], rows of at most 16384, at any stride.
        fmt: of the linear's codes, "e4m3" or "e5m2"; any where there are none.
        granularity: of the linear's codes, or "none".
        group_size_in: G of the linear's codes where they are per_group.
        saved_format: of the saved codes, "e4m3", "e5m2" or "none".
        group_size: G of the saved codes.

    Returns:
        codes, like x, and their scale; saved codes, like x, and their scale [..., ceil(K/G)]; those that were not asked
        for have shape [0].

    Raises:
        ValueError: unknown format, granularity or group size.

    Numerics: the codes and scales of `coat_core.quantize.quantize`, to the bit.
    """
    if granularity == "none":
        return *no_codes(x, fmt), *saved_codes_of(x, saved_format, group_size)
    codes, scale, _ = quantize_reference(x, fmt, Granularity(granularity, group_size_in))
    return codes.contiguous(), scale.contiguous(), *saved_codes_of(x, saved_format, group_size)


@declares(quantize_and_save)
def _(out: Any, a: Any) -> tuple[Cast, ...]:
    saved = saved_cast_of(a.x, out[2:], a.group_size)
    if a.granularity == "none":
        return saved
    return Cast(None, a.x, out[0], out[1], Granularity(a.granularity, a.group_size_in)), *saved


@operator("coat::dequantize")
def _dequantize(codes: Tensor, scale: Tensor, granularity: str, group_size: int, dtype: torch.dtype) -> Tensor:
    return dequantize_reference(codes, scale, Granularity(granularity, group_size), dtype).contiguous()


@operator("coat::transpose_codes")
def transpose_codes(codes: Tensor) -> Tensor:
    """Return the FP8 codes [N, K] as a contiguous [K, N]: the layout dgrad multiplies by."""
    bits = codes.view(torch.uint8).t()
    return bits.clone(memory_format=torch.contiguous_format).view(codes.dtype)  # one row's transpose is a view already


def quantize(
    x: Tensor, fmt: str | Format = "e4m3", granularity: Granularity = PER_TENSOR, factors: Tensor | None = None
) -> Quantized:
    """Quantize to FP8 with just-in-time scales, by the device's kernel; "int8" is rotated first: `coat_core.int8`.

    Arguments, result and errors as `coat_core.quantize.quantize`; `factors`, fp32 [K], multiply x first, in fp32.

    Numerics: the codes and scales of `coat_core.quantize.quantize`, to the bit.
    """
    check_input(x)
    if fmt == INT8.name:
        return Quantized(*quantize_int8(x.detach(), rotation_size(x.shape[-1]), factors), PER_ROW)
    name = get_format(fmt).name if isinstance(fmt, str) else fmt.name
    codes, scale = _quantize(x.detach(), name, granularity.name, granularity.group_size, factors)
    return Quantized(codes, scale, granularity)


def quantize_once(x: Tensor, fmt: str, granularity: Granularity) -> Quantized:
    """Quantize x once for all that read this very tensor; arguments, result and errors as `quantize`.

    The result lives as long as the tensor object, so that q, k, v and their adapters share one copy. A change of x in
    place invalidates it.
    """
    if torch.compiler.is_compiling() or x.is_inference():  # such tensors count no in-place changes
        return quantize(x, fmt, granularity)
    key = (fmt, granularity, x._version)
    copy = _copies.get(x)
    if copy is None or copy[0] != key:
        copy = _copies[x] = key, quantize(x, fmt, granularity)
    return copy[1]


# a dictionary and not an attribute of the tensors, which torch.save and copy.deepcopy would take along
_copies: MutableMapping[Tensor, tuple[tuple[str, Granularity, int], Quantized]] = WeakTensorKeyDictionary()


def dequantize(
    codes: Tensor, scale: Tensor, granularity: Granularity = PER_TENSOR, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`coat_core.quantize.dequantize`, by the device's kernel."""
    values: Tensor = _dequantize(codes, scale, granularity.name, granularity.group_size, dtype)
    return values
