"""Options of the optimizer states and of the FP8 linear. No math here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

from coat_core.formats import FORMATS, INT8, M1_FORMATS, M2_FORMATS, WEIGHT_FORMATS

GRANULARITIES = ("per_tensor", "per_row")


def _check_choices(config: Any, choices: dict[str, Collection[object]]) -> None:
    flags = {
        field.name: (True, False) for field in fields(config) if field.type == "bool"
    }  # annotations are strings here
    for name, allowed in {**flags, **choices}.items():
        value = getattr(config, name)
        if not isinstance(value, (str, bool)) or value not in allowed:
            raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(str, allowed))}")


@dataclass(frozen=True)
class ExpansionConfig:
    """Constants of dynamic range expansion (`expansion.py`).

    The defaults put a block's largest value on the format's max and its smallest on exactly 2 subnormal steps
    (max² · 4/7 = max / (2 · smallest subnormal), in both formats). A value stored again after each optimizer step then
    keeps its code; with the paper's constants (`PAPER_EXPANSION`) the block's edge drifts. Measured: RESULTS.md.

    Expanded blocks span max²·range_fraction. The exponent k is rounded down to a multiple of exponent_step (0: not
    rounded) and at most exponent_max, which must be finite. Raises ValueError for a constant outside its range.
    """

    range_fraction: float = 4.0 / 7.0
    exponent_step: float = 0.0
    exponent_max: float = 256.0

    def __post_init__(self) -> None:
        if not 0.0 < self.range_fraction <= 1.0:
            raise ValueError(f"range_fraction={self.range_fraction!r}: must be above 0 and at most 1")
        if not 0.0 <= self.exponent_step <= 0.25:
            raise ValueError(f"exponent_step={self.exponent_step!r}: must be from 0 to 0.25")
        if not 1.0 <= self.exponent_max <= 4096.0:
            raise ValueError(f"exponent_max={self.exponent_max!r}: must be from 1 to 4096")


# the constants of the paper's CUDA kernel: bound 448²/2, exponent in steps of 1/16
PAPER_EXPANSION = ExpansionConfig(range_fraction=1.0 / 2.0, exponent_step=1.0 / 16.0)


@dataclass(frozen=True)
class FP8QuantizationConfig:
    """How FP8AdamW stores its moments.

    Args:
        use_fp8_m1, use_fp8_m2: store exp_avg, exp_avg_sq in 8 bits; False keeps it in fp32.
        m1_format: of exp_avg: "e4m3", "e5m2", or "int8_ratio" (exp_avg/sqrt(exp_avg_sq), evenly spaced).
        m2_format: of exp_avg_sq: "e4m3", "e5m2", or "uint8_log" (evenly spaced in the logarithm).
        block_size: elements that share one scale; a multiple of 16 from 16 to 4096.
        use_dynamic_range_expansion: expand each block's range before the cast to e4m3 or e5m2; integer formats' grids
            span the block anyway.
        stochastic_rounding: write bf16/fp16 parameters back with stochastic rounding.
        moment_rounding: "stochastic" rounds exp_avg_sq at random, so that it does not drift; or "nearest".

    Raises ValueError for an option outside its range.
    """

    use_fp8_m1: bool = True
    use_fp8_m2: bool = True
    m1_format: str = "e4m3"
    m2_format: str = "e4m3"
    block_size: int = 128
    use_dynamic_range_expansion: bool = True
    stochastic_rounding: bool = False
    moment_rounding: str = "stochastic"
    expansion: ExpansionConfig = ExpansionConfig()

    def __post_init__(self) -> None:
        choices: dict[str, Collection[object]] = {
            "m1_format": M1_FORMATS,
            "m2_format": M2_FORMATS,
            "moment_rounding": ("nearest", "stochastic"),
        }
        _check_choices(self, choices)
        size = self.block_size
        if isinstance(size, bool) or not isinstance(size, int) or size % 16 or not 16 <= size <= 4096:
            raise ValueError(f"block_size={size!r}: must be a multiple of 16 from 16 to 4096")


@dataclass(frozen=True)
class FP8LinearConfig:
    """How a linear layer multiplies and what it saves for backward.

    Args:
        weight_format: of a frozen weight, "e4m3", "e5m2", "nvfp4" (4 bits; products read it as e4m3) or "int8"
            (rotated, one scale per output feature; products are INT8).
        weight_granularity: of e4m3 and e5m2, "per_tensor" or "per_row" (one scale per output feature).
        input_format: of the GEMM input, "e4m3" or "e5m2"; "int8" with weights in int8, and only with these.
        grad_format: of the output gradient in dgrad, "e5m2", "e4m3", or "bf16" for a bf16 GEMM; with weights in int8
            "int8" or "bf16".
        input_granularity: "per_tensor" or "per_row" (one scale per token; required by int8).
        wgrad_format: of the output gradient in a trained weight's wgrad, "e4m3" or "e5m2"; "bf16" multiplies the
            dequantized x in high precision.
        cache_weight: keep a trained weight's codes (1 byte per element) until it changes; False casts it in every
            forward pass and again in backward. Same results. `linear.function.forget_codes` has the limits.
        use_fp8_gemm: False keeps the FP8 weight but multiplies in the input's own precision.
        fallback: without an FP8 GEMM on the device, "bf16" multiplies in high precision, "error" raises.

    Raises ValueError for an option outside its range.
    """

    weight_format: str = "e4m3"
    weight_granularity: str = "per_tensor"
    input_format: str = "e4m3"
    grad_format: str = "e5m2"
    input_granularity: str = "per_row"
    use_fp8_gemm: bool = True
    fallback: str = "bf16"
    wgrad_format: str = "bf16"
    cache_weight: bool = False

    def __post_init__(self) -> None:
        in_int8 = self.weight_format == INT8.name
        choices: dict[str, Collection[object]] = {
            "weight_format": WEIGHT_FORMATS,
            "weight_granularity": GRANULARITIES,
            "input_format": (INT8.name,) if in_int8 else FORMATS,
            "grad_format": (INT8.name, "bf16") if in_int8 else (*FORMATS, "bf16"),
            "input_granularity": ("per_row",) if in_int8 else GRANULARITIES,
            "wgrad_format": ("bf16",) if in_int8 else (*FORMATS, "bf16"),
            "fallback": ("bf16", "error"),
        }
        _check_choices(self, choices)

    @property
    def weight_has_row_scales(self) -> bool:
        """Whether a stored weight has one scale for each output feature."""
        if self.weight_format not in FORMATS:
            return self.weight_format == INT8.name
        return self.weight_granularity == "per_row"

    @property
    def weight_stored_as(self) -> str:
        """Format and scaling of a stored weight, for messages."""
        if self.weight_format not in FORMATS:
            return self.weight_format
        return f"{self.weight_format}/{self.weight_granularity}"
