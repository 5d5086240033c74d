"""Launching kernels and allocating their results.

Triton's interpreter truncates on stores to bf16 and FP8 (triton issue 8322), so on the CPU kernels write fp32, which
`finished` casts; on CUDA buffers have their final dtype from the start. Its tl.dot multiplies the bits of bf16 as
integers: on the CPU kernels get factors in fp32, from `dot_operand`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from coat_core.formats import E4M3, FORMATS, Format, format_of
from coat_core.quantize import saturating_cast

FIRST_E4M3_CAPABILITY = (8, 9)  # Ada; older cards have no instruction that converts to it, and Triton has no type

Record = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]
_record: ContextVar[Record | None] = ContextVar("record", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a Triton kernel without contraction to fused multiply-adds, so that it rounds as its reference does."""
    options["enable_fp_fusion"] = False
    record = _record.get()
    if record is None:
        if _cards_without_e4m3():
            args = tuple(_readable(arg) for arg in args)
        kernel[grid](*args, **options)
    else:
        record(kernel, grid, args, options)


@functools.cache
def _cards_without_e4m3() -> frozenset[torch.device]:
    cards = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return frozenset(card for card in cards if torch.cuda.get_device_capability(card) < FIRST_E4M3_CAPABILITY)


def _readable(arg: Any) -> Any:
    """An argument as the kernel of its card reads it: e4m3 as bytes where Triton has no such type."""
    by_bytes = isinstance(arg, Tensor) and arg.dtype == E4M3.dtype and arg.device in _cards_without_e4m3()
    return arg.view(torch.uint8) if by_bytes else arg


@contextmanager
def recorded_launches(record: Record) -> Iterator[None]:
    """Pass this thread's launches (kernel, grid, arguments, options) to `record`, not to a GPU."""
    token = _record.set(record)
    try:
        yield
    finally:
        _record.reset(token)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a kernel's result; the tests poison it."""
    return torch.empty(shape, dtype=dtype, device=device)


def empty_values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate floating values that become `dtype` through `finished`."""
    return empty(shape, torch.float32 if device.type == "cpu" else dtype, device)


def empty_codes(shape: tuple[int, ...], fmt: Format, device: torch.device) -> Tensor:
    """Allocate codes that become FP8 through `finished`."""
    return empty(shape, torch.float32 if device.type == "cpu" else fmt.dtype, device)


@functools.cache
def nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the placeholder of an unrequested result, of shape [0]: the same tensor each time."""
    with torch.inference_mode(False):  # it may be saved for a backward pass
        return torch.empty(0, dtype=dtype, device=device)


def finished(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a kernel's result in its final dtype."""
    if buffer.dtype == dtype:
        return buffer
    is_fp8 = any(dtype == fmt.dtype for fmt in FORMATS.values())
    return saturating_cast(buffer, format_of(dtype)) if is_fp8 else buffer.to(dtype)


def dot_operand(x: Tensor) -> Tensor:
    """Return a matrix as a kernel's tl.dot reads it."""
    return x.to(torch.float32) if x.device.type == "cpu" else x


@contextmanager
def waiting_allowed(device: torch.device) -> Iterator[None]:
    """Let the CPU wait for the device, even where the caller made that an error (set_sync_debug_mode)."""
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def blocks(size: int, block: int) -> int:
    """Return how many blocks cover `size` elements."""
    return -(-size // block)


@functools.cache
def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()
