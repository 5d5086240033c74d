"""NVFP4 weights decoded to FP8 for one product, as an operator; `coat_core.nvfp4` has the format."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coat_core import nvfp4
from coat_core.casts import Decoded, declares
from coat_core.formats import E4M3
from coat_core.ops.operators import operator


@operator("coat::decode_nvfp4")
def decode_nvfp4(codes: Tensor, block_scales: Tensor, transposed: bool) -> Tensor:
    """Decode codes uint8 [N, K/2] with block scales uint8 [N, K/16] to a contiguous e4m3 [N, K], or [K, N]."""
    blocks = nvfp4.unpack(codes).unflatten(-1, (-1, nvfp4.BLOCK))
    bits = nvfp4.decode(blocks, block_scales).view(torch.uint8).flatten(-2)
    return (bits.t() if transposed else bits).contiguous().view(E4M3.dtype)


@declares(decode_nvfp4)
def _(out: Any, a: Any) -> Decoded:
    return Decoded(a.codes, out)
