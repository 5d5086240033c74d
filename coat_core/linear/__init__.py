"""FP8 linear layers: the function, the modules, and conversion of whole models."""

from coat_core.linear.convert import ConversionReport, replace_linear_with_fp8, restore_linear
from coat_core.linear.function import fp8_linear
from coat_core.linear.module import FP8Linear, FP8TrainableLinear
from coat_core.linear.trained import forget_codes
from coat_core.linear.weight import quantize_weight

__all__ = [
    "ConversionReport",
    "FP8Linear",
    "FP8TrainableLinear",
    "forget_codes",
    "fp8_linear",
    "quantize_weight",
    "replace_linear_with_fp8",
    "restore_linear",
]
