"""The two FP8 formats, and the storage formats of AdamW's moments and frozen weights.

| name | torch dtype         | max    | smallest normal | smallest subnormal | mantissa bits |
|------|---------------------|--------|-----------------|--------------------|---------------|
| e4m3 | float8_e4m3fn       | 448    | 2^-6            | 2^-9               | 3             |
| e5m2 | float8_e5m2         | 57344  | 2^-14           | 2^-16              | 2             |

e4m3 has no infinity; e5m2 has one, and torch's own cast sends large values there (`quantize.saturating_cast` does not).
Source: OCP 8-bit floating point specification (OFP8) 1.0; the values are checked against `torch.finfo` by the tests.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """An 8-bit format: its name, torch dtype and limits."""

    name: str  # as in the options
    dtype: torch.dtype  # of its codes, which identifies a moment's format
    max: float
    smallest_normal: float = 1.0
    mantissa_bits: int = 6
    numbers: tuple[str, ...] = ("scale",)  # that a block of a moment has besides its codes, without expansion


E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0, 2.0**-6, 3)
E5M2 = Format("e5m2", torch.float8_e5m2, 57344.0, 2.0**-14, 2)

FORMATS: dict[str, Format] = {fmt.name: fmt for fmt in (E4M3, E5M2)}
FP8_DTYPES = tuple(fmt.dtype for fmt in FORMATS.values())

INT8_RATIO = Format("int8_ratio", torch.int8, 127.0)
UINT8_LOG = Format("uint8_log", torch.uint8, 254.0, numbers=("scale", "exponent"))

# What exp_avg and exp_avg_sq may be stored in. How to add a format: coat_core/README.md.
M1_FORMATS: dict[str, Format] = {**FORMATS, INT8_RATIO.name: INT8_RATIO}
M2_FORMATS: dict[str, Format] = {**FORMATS, UINT8_LOG.name: UINT8_LOG}

# What a frozen weight may be stored in; `linear.function` says how.
NVFP4 = "nvfp4"
INT8 = Format("int8", torch.int8, 127.0)  # of x and W in products: `int8.py`
WEIGHT_FORMATS = (*FORMATS, NVFP4, INT8.name)


def product_format(weight_format: str) -> Format:
    """The format in which products read a weight stored in one of `WEIGHT_FORMATS`."""
    return {NVFP4: E4M3, INT8.name: INT8}.get(weight_format) or get_format(weight_format)


@functools.cache
def get_format(name: str) -> Format:
    """The format called `name`; ValueError unless that is "e4m3" or "e5m2"."""
    if name not in FORMATS:
        raise ValueError(f"format={name!r}: must be one of {', '.join(FORMATS)}")
    return FORMATS[name]


@functools.cache
def format_of(dtype: torch.dtype) -> Format:
    """The format whose codes have this torch dtype; ValueError unless FP8 as used here, or INT8."""
    for fmt in (*FORMATS.values(), INT8):
        if fmt.dtype == dtype:
            return fmt
    raise ValueError(f"dtype={dtype}: must be one of {', '.join(map(str, FP8_DTYPES))}")
