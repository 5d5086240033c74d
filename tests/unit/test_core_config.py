"""`coat_core.config`: impossible values are refused by name."""

from functools import partial
from typing import Any

import pytest

from coat_core.config import ExpansionConfig, FP8LinearConfig, FP8QuantizationConfig

INT8 = partial(FP8LinearConfig, weight_format="int8", input_format="int8", grad_format="int8")
REFUSED: list[tuple[Any, str, list[Any]]] = [  # of each key values outside its rule
    (FP8QuantizationConfig, "block_size", [0, 8, 24, 4112, -16, 128.0, True, "128", None]),
    (FP8QuantizationConfig, "use_fp8_m1", ["false"]),
    (FP8QuantizationConfig, "use_fp8_m2", [1]),
    (FP8QuantizationConfig, "use_dynamic_range_expansion", [None]),
    (FP8QuantizationConfig, "stochastic_rounding", [0]),
    (FP8QuantizationConfig, "m1_format", ["fp8", "uint8_log"]),
    (FP8QuantizationConfig, "m2_format", ["E4M3", "int8_ratio"]),
    (FP8QuantizationConfig, "moment_rounding", ["up"]),
    (FP8LinearConfig, "weight_format", ["int4"]),
    (FP8LinearConfig, "weight_granularity", ["per_group"]),
    (FP8LinearConfig, "input_format", [None, "int8"]),
    (FP8LinearConfig, "grad_format", ["fp16", "int8"]),
    (FP8LinearConfig, "input_granularity", ["block", "per_group"]),
    (FP8LinearConfig, "fallback", ["warn"]),
    (FP8LinearConfig, "use_fp8_gemm", ["yes", 1]),
    (FP8LinearConfig, "cache_weight", [0]),
    (FP8LinearConfig, "wgrad_format", ["fp8"]),
    (INT8, "input_format", ["e4m3"]),
    (INT8, "grad_format", ["e5m2"]),
    (INT8, "input_granularity", ["per_tensor"]),
    (INT8, "wgrad_format", ["e4m3"]),
    (ExpansionConfig, "range_fraction", [0.0, 1.5, float("nan")]),
    (ExpansionConfig, "exponent_step", [-0.1, 0.5]),
    (ExpansionConfig, "exponent_max", [0.5, float("inf")]),
]


@pytest.mark.parametrize(("config", "key", "value"), [(c, k, v) for c, k, values in REFUSED for v in values])
def test_values_outside_their_range_are_refused_by_name(config, key, value):
    with pytest.raises(ValueError, match=f"^{key}={value!r}: must be ".replace("(", r"\(")):
        config(**{key: value})
