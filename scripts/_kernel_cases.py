"""Calls of every launcher at FLUX.1's shapes, on tensors without memory: what compile_kernels.py compiles."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coat_core.formats import FORMATS
from coat_core.kernels import gpu

TOKENS, HIDDEN, MLP = 4608, 3072, 12288


def launcher_modules() -> list[Any]:
    """Every module of `coat_core.kernels.gpu`."""
    return [importlib.import_module(f"{gpu.__name__}.{found.name}") for found in pkgutil.iter_modules(gpu.__path__)]


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _quantize_cases() -> dict[str, Callable[[], Any]]:
    from coat_core.kernels.gpu.quantize import cast_by_amax, dequantize, quantize, transpose_codes

    cases: dict[str, Callable[[], Any]] = {}
    x, wide, row_scale = _empty(TOKENS, HIDDEN), _empty(TOKENS, MLP), _empty(TOKENS, 1, dtype=torch.float32)
    for name, fmt in FORMATS.items():
        codes = _empty(TOKENS, HIDDEN, dtype=fmt.dtype)
        cases[f"quantize per tensor {name}"] = partial(quantize, x, name, "per_tensor", 128, None)
        cases[f"quantize per row {name}"] = partial(quantize, wide, name, "per_row", 128, None)
        narrow, factors = _empty(8, 64, dtype=torch.float32), _empty(HIDDEN, dtype=torch.float32)
        cases[f"quantize fp32 per row {name}"] = partial(quantize, narrow, name, "per_row", 128, None)
        cases[f"quantize with factors per row {name}"] = partial(quantize, x, name, "per_row", 128, factors)
        cases[f"quantize with factors per tensor {name}"] = partial(quantize, x, name, "per_tensor", 128, factors)
        for group in (16, 128, 256):
            cases[f"quantize 1x{group} {name}"] = partial(quantize, x, name, "per_group", group, None)
            scale = _empty(TOKENS, HIDDEN // group, dtype=torch.float32)
            cases[f"dequantize 1x{group} {name}"] = partial(
                dequantize, codes, scale, "per_group", group, torch.bfloat16
            )
        cases[f"cast by amax {name}"] = partial(cast_by_amax, x, row_scale.view(-1), name)
        cases[f"dequantize per row {name}"] = partial(dequantize, codes, row_scale, "per_row", 128, torch.bfloat16)
        cases[f"transpose {name}"] = partial(transpose_codes, codes)
    return cases


def _weight_only_cases() -> dict[str, Callable[[], Any]]:
    from coat_core.kernels.gpu.weight_only import weight_only_linear

    bias, scale = _empty(6 * HIDDEN), _empty(dtype=torch.float32)
    codes = {name: _empty(6 * HIDDEN, HIDDEN, dtype=fmt.dtype) for name, fmt in FORMATS.items()}
    return {
        f"weight only, batch {batch} {name}": partial(
            weight_only_linear, _empty(batch, HIDDEN), codes[name], scale, bias, torch.bfloat16
        )
        for name in FORMATS
        for batch in (1, 4)
    }


CASES: dict[str, Callable[[], Any]] = {**_quantize_cases(), **_weight_only_cases()}
