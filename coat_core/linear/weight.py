"""A frozen weight W [N, K] as a module stores it, and the forms in which products read it.

All of it is in buffers whose dtype is uint8 or int32: `module.to(torch.bfloat16)`, which trainers call at will, casts
every floating buffer and would silently turn FP8 codes and fp32 scales into bf16. `BUFFERS` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from coat_core import nvfp4
from coat_core.config import FP8LinearConfig
from coat_core.formats import INT8, NVFP4, product_format
from coat_core.granularity import PER_ROW, PER_TENSOR
from coat_core.int8 import rotation_size
from coat_core.ops.int8 import rotate
from coat_core.ops.nvfp4 import decode_nvfp4
from coat_core.ops.quantize import dequantize, quantize, transpose_codes

CODES, SCALE, BLOCK_SCALES = "weight_codes", "weight_scale_bits", "weight_block_scales"
TRANSPOSED = "weight_codes_transposed"
BUFFERS = (CODES, SCALE, BLOCK_SCALES, TRANSPOSED)
# of those that several linears can have as one, the dimension along which their outputs follow each other
OUTPUT_DIM = {CODES: 0, BLOCK_SCALES: 0, TRANSPOSED: 1}


class StoredWeight(NamedTuple):
    """Views of a module's buffers: W, or of int8 W H, is (decoded) codes · scale."""

    codes: Tensor  # FP8 or INT8 [N, K]; of nvfp4, uint8 [N, K/2]
    scale: Tensor  # fp32 [] or [N, 1]
    transposed: Tensor | None = None  # FP8 codes as a contiguous [K, N] for dgrad, where there is such a copy
    block_scales: Tensor | None = None  # of nvfp4, uint8 [N, K/16]; else None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        n, k = self.codes.shape
        return n, k if self.block_scales is None else 2 * k

    @property
    def rotation(self) -> int:
        """Columns rotated together (`coat_core.int8`); 1: none."""
        return rotation_size(self.shape[1]) if self.codes.dtype == INT8.dtype else 1

    def for_fprop(self) -> Tensor:
        """Return FP8 or INT8 codes [N, K], to be multiplied by `scale`."""
        return self.codes if self.block_scales is None else decode_nvfp4(self.codes, self.block_scales, False)

    def for_dgrad(self) -> Tensor:
        """Return FP8 or INT8 codes [K, N]; contiguous where they are decoded, or there is such a copy."""
        if self.block_scales is not None:
            return decode_nvfp4(self.codes, self.block_scales, True)
        return self.codes.t() if self.transposed is None else self.transposed

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return W [N, K] in `dtype`."""
        values = dequantize(self.for_fprop(), self.scale, PER_ROW if self.scale.ndim else PER_TENSOR, dtype)
        return values if self.rotation == 1 else rotate(values, self.rotation)


def quantize_weight(weight: Tensor, config: FP8LinearConfig) -> StoredWeight:
    """Quantize W [N, K] to FP8 codes with one scale in all or one per output feature."""
    if config.weight_format == NVFP4:
        packed = nvfp4.quantize(weight)
        return StoredWeight(packed.codes, packed.scale, None, packed.block_scales)
    granularity = PER_ROW if config.weight_has_row_scales else PER_TENSOR
    codes, scale, _ = quantize(weight, config.weight_format, granularity)
    return StoredWeight(codes, scale)


def store_weight(module: nn.Module, weight: Tensor, config: FP8LinearConfig, persistent: bool = True) -> None:
    """Quantize `weight` [N, K] and register it on `module`, replacing a stored one."""
    stored = quantize_weight(weight, config)
    drop_weight(module)
    module.register_buffer(CODES, stored.codes.view(torch.uint8), persistent)
    module.register_buffer(SCALE, stored.scale.view(torch.int32), persistent)
    if stored.block_scales is not None:
        module.register_buffer(BLOCK_SCALES, stored.block_scales, persistent)


def drop_weight(module: nn.Module) -> None:
    """Undo `store_weight`."""
    for name in BUFFERS:
        if name in module._buffers:
            delattr(module, name)


def load_weight(module: nn.Module, config: FP8LinearConfig) -> StoredWeight:
    """Return the registered weight, as views."""
    bits = module._buffers[SCALE]
    assert bits is not None
    return as_stored(module._buffers, bits.view(torch.float32), config)


def read_weight(module: nn.Module, config: FP8LinearConfig, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return W [N, K] in `dtype` at any time: `module.fetch_weight` brings codes that are offloaded."""
    if (fetch := vars(module).get("fetch_weight")) is not None:
        fetch()
    return load_weight(module, config).dequantize(dtype)


def as_stored(buffers: Mapping[str, Tensor | None], scale: Tensor, config: FP8LinearConfig) -> StoredWeight:
    """Return the weight in these buffers, with `scale` fp32 [] or [N, 1]."""
    codes, transposed = buffers[CODES], buffers.get(TRANSPOSED)
    assert codes is not None
    if config.weight_format == NVFP4:
        return StoredWeight(codes, scale, None, buffers[BLOCK_SCALES])
    kind = product_format(config.weight_format).dtype
    return StoredWeight(codes.view(kind), scale, None if transposed is None else transposed.view(kind))


def stored_bytes(outputs: int, inputs: int, config: FP8LinearConfig) -> int:
    """Return the bytes of a stored weight [N, K], all buffers but a transposed copy."""
    scales = outputs if config.weight_has_row_scales else 1
    return sum(code_bytes(outputs, inputs, config)) + torch.float32.itemsize * scales


def code_bytes(outputs: int, inputs: int, config: FP8LinearConfig) -> tuple[int, ...]:
    """Return the bytes of each uint8 buffer, without scale and transposed copy."""
    if config.weight_format == NVFP4:
        return outputs * inputs // 2, outputs * inputs // nvfp4.BLOCK
    return (outputs * inputs,)


def wants_transposed(config: FP8LinearConfig) -> bool:
    """Whether dgrad needs the 8-bit codes transposed; other formats are decoded to either layout."""
    return config.use_fp8_gemm and config.grad_format != "bf16" and config.weight_format != NVFP4


def keep_transposed(module: nn.Module, config: FP8LinearConfig) -> None:
    """Store a second copy of the codes as [K, N], for dgrad, outside the state dict."""
    codes = load_weight(module, config).codes
    module.register_buffer(TRANSPOSED, transpose_codes(codes).view(torch.uint8), persistent=False)


def drop_transposed(module: nn.Module) -> None:
    """Undo `keep_transposed`."""
    module._buffers.pop(TRANSPOSED, None)
