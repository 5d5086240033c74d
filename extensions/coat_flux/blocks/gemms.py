"""How the blocks' linears multiply, changed while the model runs: their GEMMs, and transposed copies of weights.

`memory.transposed_weights`: tensor cores of sm_89 and sm_90 read W along its rows only, so dgrad transposes it at
each use. A second, transposed copy of the codes saves a few percent of the time for one byte per weight (8.6 GB
for FLUX.1-dev). Recomputing a block costs far more, so `auto` keeps copies only if no block recomputes and all
fit. For trained weights the codes themselves are kept until the next update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from coat_core.linear.function import TRANSPOSED, forget_codes, keep_transposed, load_weight, wants_transposed
from coat_core.linear.module import FP8Linear, FP8TrainableLinear

from ..config.coat import COATConfig
from .models import Family, matches


def stored_linears(block: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield linears with FP8 weights, ours and those of ai-toolkit, and the name of the attribute with their config."""
    for module in block.modules():
        if isinstance(module, FP8Linear):
            yield module, "config"
        elif hasattr(module, "coat_linear_config"):
            yield module, "coat_linear_config"


def multiply_in_bf16(linears: Iterable[Any]) -> None:
    """Let linears of ours, or of ai-toolkit with our weights, multiply in high precision."""
    for module in linears:
        name = "config" if isinstance(module, FP8Linear | FP8TrainableLinear) else "coat_linear_config"
        setattr(module, name, replace(getattr(module, name), use_fp8_gemm=False))


@contextmanager
def in_high_precision(block: nn.Module) -> Iterator[None]:
    """Let the linears of a block multiply in high precision inside the `with` block."""
    before = [(module, name, getattr(module, name)) for module, name in stored_linears(block)]
    multiply_in_bf16(module for module, _, _ in before)
    try:
        yield
    finally:
        for module, name, config in before:
            setattr(module, name, config)


def transposed_bytes(blocks: Iterable[nn.Module]) -> int:
    """Bytes of transposed copies of the blocks' weights, made or not, and of trained ones' codes."""
    blocks = list(blocks)
    copies = sum(math.prod(load_weight(module, config).shape) for module, config in _transposable(blocks))
    return copies + sum(module.weight.numel() for module in _cast_at_each_use(blocks))


def set_transposed(blocks: Iterable[nn.Module], wanted: bool) -> None:
    """Make or drop the copies, and keep or forget codes of trained weights, which their next use makes."""
    blocks = list(blocks)
    for linear in _cast_at_each_use(blocks):
        linear.config = replace(linear.config, cache_weight=wanted)
        forget_codes(linear)
    for module, config in _transposable(blocks):
        if wanted:
            keep_transposed(module, config)
        else:
            module._buffers.pop(TRANSPOSED, None)


def _cast_at_each_use(blocks: Iterable[nn.Module]) -> Iterator[FP8TrainableLinear]:
    for block in blocks:
        for module in block.modules():
            if isinstance(module, FP8TrainableLinear) and module.weight.requires_grad and module.config.use_fp8_gemm:
                yield module


def _transposable(blocks: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, Any]]:
    """FP8 linears whose dgrad reads such copies, with their config."""
    for block in blocks:
        for module, name in stored_linears(block):
            config = getattr(module, name)
            if wants_transposed(config):
                yield module, config


def high_precision_reason(name: str, config: COATConfig, family: Family) -> str:
    """Why a converted linear multiplies in high precision on any device; empty if in FP8."""
    activation = config.activation
    if not activation.use_fp8:
        return "activation.use_fp8: false"
    if not matches(name, tuple(activation.include)) or matches(name, tuple(activation.exclude)):
        return "activation.include / exclude"
    if matches(name, tuple(f"*.{row}" for row in family.one_row)):
        return "one row per image: reading the weight is all the time there is"
    return ""
