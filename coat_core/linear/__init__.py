"""FP8 linear layers: the function, the modules, and conversion of whole models."""

from coat_core.linear.function import forget_codes, fp8_linear, quantize_weight
from coat_core.linear.module import (
    FP8Linear,
    FP8TrainableLinear,
    allow_merging,
    replace_linear_with_fp8,
    restore_linear,
)

__all__ = [
    "FP8Linear",
    "FP8TrainableLinear",
    "allow_merging",
    "forget_codes",
    "fp8_linear",
    "quantize_weight",
    "replace_linear_with_fp8",
    "restore_linear",
]
