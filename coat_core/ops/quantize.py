"""Codes and back, as operators: FP8, INT8 of rotated rows, decoded NVFP4 weights, transposed codes.

The references are `quantize.py`, `int8.py` and `nvfp4.py`.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from coat_core import int8, nvfp4
from coat_core.casts import Cast, declares
from coat_core.formats import E4M3, INT8
from coat_core.granularity import PER_ROW, PER_TENSOR, Granularity, Storage
from coat_core.ops.codes import cast_of, codes_of
from coat_core.ops.dispatch import operator
from coat_core.quantize import Quantized
from coat_core.quantize import dequantize as dequantize_reference


@operator("coat::quantize")
def _quantize(x: Tensor, fmt: str, granularity: str, group_size: int, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    return codes_of(x, fmt, granularity, group_size, factors)


declares(_quantize)(lambda out, a: Cast(None, a.x, out[0], out[1], Granularity(a.granularity, a.group_size), a.factors))


@operator("coat::quantize_and_save")
def quantize_and_save(
    x: Tensor, fmt: str, granularity: str, saved_format: str, group_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The codes of x for a linear and those saved for backward, reading x once; all as in `ops.codes`.

    x is floating [..., K] at any stride, K at most 16384. Returns codes, like x,
    and their scale; saved codes, like x, and their scale [..., ceil(K/G)].
    """
    return *codes_of(x, fmt, granularity), *codes_of(x, saved_format, "per_group", group_size)


@declares(quantize_and_save)
def _(out: Any, a: Any) -> tuple[Cast, ...]:
    saved = cast_of(None, a.x, out[2:], "per_group", a.group_size)
    return *cast_of(None, a.x, out[:2], a.granularity), *saved


@operator("coat::dequantize")
def _dequantize(codes: Tensor, scale: Tensor, granularity: str, group_size: int, dtype: torch.dtype) -> Tensor:
    return dequantize_reference(codes, scale, Granularity(granularity, group_size), dtype).contiguous()


@operator("coat::transpose_codes")
def transpose_codes(codes: Tensor) -> Tensor:
    """Return FP8 codes [N, K] as a contiguous [K, N], for dgrad."""
    bits = codes.view(torch.uint8).t()
    return bits.clone(memory_format=torch.contiguous_format).view(codes.dtype)  # one row's transpose is a view already


@operator("coat::quantize_int8")
def quantize_int8(x: Tensor, size: int, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return INT8 codes of x H·factors [..., K] and their scale fp32 [..., 1]: `int8.quantize_int8`."""
    codes, scale, _ = int8.quantize_int8(x, size, factors)
    return codes.contiguous(), scale.contiguous()


@declares(quantize_int8)
def _(out: Any, a: Any) -> Cast:
    return Cast(None, int8.rotate(a.x, a.size), out[0], out[1], PER_ROW, a.factors)


@operator("coat::rotate")
def rotate(x: Tensor, size: int) -> Tensor:
    """Return x H [..., K] in the dtype of x: `int8.rotate`."""
    return int8.rotate(x, size).to(x.dtype, memory_format=torch.contiguous_format, copy=True)


@operator("coat::decode_nvfp4")
def decode_nvfp4(codes: Tensor, block_scales: Tensor, transposed: bool) -> Tensor:
    """Decode codes uint8 [N, K/2] with block scales uint8 [N, K/16] to a contiguous e4m3 [N, K], or [K, N]."""
    blocks = nvfp4.unpack(codes).unflatten(-1, (-1, nvfp4.BLOCK))
    bits = nvfp4.decode(blocks, block_scales).view(torch.uint8).flatten(-2)
    return (bits.t() if transposed else bits).contiguous().view(E4M3.dtype)


declares(decode_nvfp4)(lambda out, a: Cast(None, a.codes, out, a.block_scales, PER_TENSOR))


def quantize(
    x: Tensor, fmt: str = "e4m3", granularity: Granularity = PER_TENSOR, factors: Tensor | None = None
) -> Quantized:
    """`quantize.quantize` to the bit by the device's kernel, or "int8"; factors fp32 [K] multiply x, or x H."""
    if x.ndim == 0 or x.numel() == 0 or not x.is_floating_point():
        rule = "must be floating, non-empty, with a last dimension"
        raise ValueError(f"x of shape {tuple(x.shape)} and {x.dtype}: {rule}")
    if fmt == INT8.name:
        return Quantized(*quantize_int8(x.detach(), int8.rotation_size(x.shape[-1]), factors), PER_ROW)
    codes, scale = _quantize(x.detach(), fmt, granularity.name, granularity.group_size, factors)
    return Quantized(codes, scale, granularity)


def quantize_once(x: Tensor, storage: Storage) -> Quantized:
    """`quantize`, once per result of an operator in a graph: q, k, v and their adapters share one copy.

    Other tensors are cast at each call: fused optimizers, `.data`, NumPy and collectives make no new version.
    """
    if x.grad_fn is None or torch.compiler.is_compiling():
        return quantize(x, storage.format, storage.granularity)
    key = (storage, x._version)
    copy = _copies.get(x)
    if copy is None or copy[0] != key:
        copy = _copies[x] = key, quantize(x, storage.format, storage.granularity)
    return copy[1]


def saved_input(x: Tensor, storage: Storage) -> tuple[Tensor, ...]:
    """What is saved of x for wgrad: the shared codes and scale; of a parameter or an input x itself."""
    if x.grad_fn is None:
        return (x,)
    codes, scale, _ = quantize_once(x, storage)
    return codes, scale


def read_saved_input(saved: Sequence[Tensor], storage: Storage) -> Quantized:
    """The `saved_input` as codes."""
    if len(saved) == 1:
        return quantize(saved[0], storage.format, storage.granularity)
    codes, scale = saved
    return Quantized(codes, scale, PER_ROW if storage.format == INT8.name else storage.granularity)


# a dictionary and not an attribute of the tensors, which torch.save and copy.deepcopy would take along
_copies: MutableMapping[Tensor, tuple[tuple[Storage, int], Quantized]] = WeakTensorKeyDictionary()


def dequantize(
    codes: Tensor, scale: Tensor, granularity: Granularity = PER_TENSOR, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`quantize.dequantize`, by the device's kernel."""
    values: Tensor = _dequantize(codes, scale, granularity.name, granularity.group_size, dtype)
    return values
