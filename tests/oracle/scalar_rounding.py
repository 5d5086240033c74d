"""Slow and obviously right: round one Python float to an FP8 format in exact rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

from coat_core.formats import Format


def round_to_format(value: float, fmt: Format) -> float:
    """Round to nearest, ties to the even mantissa, clamping to ±fmt.max; NaN stays NaN, the sign of zero is kept."""
    if math.isnan(value):
        return value
    magnitude = min(abs(value), fmt.max)
    _, exponent = math.frexp(magnitude)  # magnitude = f · 2^exponent with f in [0.5, 1)
    lowest = int(math.log2(fmt.smallest_normal))
    quantum = Fraction(2) ** (max(exponent - 1, lowest) - fmt.mantissa_bits)
    steps = round(Fraction(magnitude) / quantum)  # Python rounds Fractions half to even
    return math.copysign(float(steps * quantum), value)


def positive_values(fmt: Format) -> list[float]:
    """Every nonnegative finite value of the format, ascending: zero, subnormals, normals."""
    values = [step * fmt.smallest_subnormal for step in range(2**fmt.mantissa_bits)]
    base = fmt.smallest_normal
    while base <= fmt.max:
        values += [base * (1 + step / 2**fmt.mantissa_bits) for step in range(2**fmt.mantissa_bits)]
        base *= 2
    return [value for value in values if value <= fmt.max]
