"""`coat_core.config`: defaults as documented, impossible values refused by name."""

from __future__ import annotations

import pytest

from coat_core.config import PAPER_EXPANSION, ExpansionConfig, FP8LinearConfig, FP8QuantizationConfig


def test_defaults_are_the_documented_ones() -> None:
    optimizer = FP8QuantizationConfig()
    assert (optimizer.use_fp8_m1, optimizer.use_fp8_m2, optimizer.m1_format, optimizer.m2_format) == (
        True,
        True,
        "e4m3",
        "e4m3",
    )
    assert (optimizer.block_size, optimizer.use_dynamic_range_expansion, optimizer.stochastic_rounding) == (
        128,
        True,
        False,
    )
    assert (optimizer.expansion.range_fraction, optimizer.expansion.exponent_step) == (4 / 7, 0.0)
    assert (PAPER_EXPANSION.range_fraction, PAPER_EXPANSION.exponent_step) == (0.5, 1 / 16)
    linear = FP8LinearConfig()
    assert (linear.weight_format, linear.weight_granularity, linear.input_format, linear.grad_format) == (
        "e4m3",
        "per_tensor",
        "e4m3",
        "e5m2",
    )


@pytest.mark.parametrize("size", [16, 32, 48, 128, 4096])
def test_block_sizes_that_are_allowed(size: int) -> None:
    assert FP8QuantizationConfig(block_size=size).block_size == size


@pytest.mark.parametrize("size", [0, 8, 24, 4112, -16, 128.0, True, "128", None])
def test_block_sizes_that_are_refused(size: object) -> None:
    with pytest.raises(ValueError, match=r"block_size=.*: must be a multiple of 16 from 16 to 4096"):
        FP8QuantizationConfig(block_size=size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_fp8_m1": "false"}, "use_fp8_m1='false': must be True or False"),
        ({"use_fp8_m2": 1}, "use_fp8_m2=1: must be True or False"),
        ({"use_dynamic_range_expansion": None}, "use_dynamic_range_expansion=None: must be True or False"),
        ({"stochastic_rounding": 0}, "stochastic_rounding=0: must be True or False"),
        ({"m1_format": "fp8"}, "m1_format='fp8': must be one of e4m3, e5m2, int8_ratio"),
        ({"m2_format": "E4M3"}, "m2_format='E4M3': must be one of e4m3, e5m2, uint8_log"),
        ({"m1_format": "uint8_log"}, "m1_format='uint8_log': must be one of e4m3, e5m2, int8_ratio"),
        ({"m2_format": "int8_ratio"}, "m2_format='int8_ratio': must be one of e4m3, e5m2, uint8_log"),
    ],
)
def test_optimizer_refusals(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FP8QuantizationConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_format": "int4"}, "weight_format='int4': must be one of e4m3, e5m2, nvfp4, int8"),
        ({"weight_granularity": "per_group"}, "weight_granularity='per_group': must be one of per_tensor, per_row"),
        ({"input_format": None}, "input_format=None: must be one of e4m3, e5m2"),
        ({"grad_format": "fp16"}, "grad_format='fp16': must be one of e4m3, e5m2, int8, bf16"),
        ({"input_granularity": "block"}, "input_granularity='block': must be one of per_tensor, per_row"),
        ({"fallback": "warn"}, "fallback='warn': must be one of bf16, error"),
        ({"use_fp8_gemm": "yes"}, "use_fp8_gemm='yes': must be True or False"),
    ],
)
def test_linear_refusals(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FP8LinearConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"range_fraction": 0.0}, "range_fraction=0.0"),
        ({"range_fraction": 1.5}, "range_fraction=1.5"),
        ({"range_fraction": float("nan")}, "range_fraction=nan"),
        ({"exponent_step": -0.1}, "exponent_step=-0.1"),
        ({"exponent_step": 0.5}, "exponent_step=0.5"),
        ({"exponent_max": 0.5}, "exponent_max=0.5"),
        ({"exponent_max": float("inf")}, "exponent_max=inf"),
    ],
)
def test_expansion_refusals(options: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        ExpansionConfig(**options)
