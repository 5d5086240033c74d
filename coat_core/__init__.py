"""The quantization math of COAT (arXiv 2410.19313), on torch alone.

FP8 formats and scaling, dynamic range expansion, the FP8 AdamW optimizer, FP8 linear layers and FP8 saved tensors.
"""

from __future__ import annotations

from coat_core.config import PAPER_EXPANSION, ExpansionConfig, FP8LinearConfig, FP8QuantizationConfig
from coat_core.linear.module import (
    FP8Linear,
    FP8TrainableLinear,
    allow_merging,
    replace_linear_with_fp8,
    restore_linear,
)
from coat_core.ops.quantize import dequantize, quantize
from coat_core.optim import FP8AdamW
from coat_core.quantize import sqnr_db

__all__ = [
    "PAPER_EXPANSION",
    "ExpansionConfig",
    "FP8AdamW",
    "FP8Linear",
    "FP8LinearConfig",
    "FP8QuantizationConfig",
    "FP8TrainableLinear",
    "allow_merging",
    "dequantize",
    "quantize",
    "replace_linear_with_fp8",
    "restore_linear",
    "sqnr_db",
]
