"""The CPU's side of a launch: results, small tables on the device, and the call itself. Needs no triton.

Triton's interpreter truncates on stores to bf16 and FP8 (triton issue 8322), so on the CPU kernels write fp32, which
`finished` casts; on CUDA buffers have their final dtype from the start. Its tl.dot multiplies the bits of bf16 as
integers: on the CPU kernels get factors in fp32, from `dot_operand`.

Tables (`device_table`) are cached by content: an unchanged list is not uploaded again, and a changed one is never
mistaken for the old. An upload copies from pinned memory that torch's host allocator reuses only when the copy is done.
A captured CUDA graph reads the table, or copies it from its pinned source, at each replay, so tables used in a capture
live as long as the process. Earlier steps allocate the pinned source: a capture forbids it.
"""

from __future__ import annotations

import array
import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

from coat_core.formats import E4M3, FP8_DTYPES, format_of
from coat_core.quantize import saturating_cast

FIRST_E4M3_CAPABILITY = (8, 9)  # Ada; older cards have no instruction that converts to it, and Triton has no type
KEPT_TABLES = 64  # weights of FLUX.1 that are updated one by one have some 20 sizes

T = TypeVar("T")
Record = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]
_record: ContextVar[Record | None] = ContextVar("record", default=None)

Allocate = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]
_allocate: ContextVar[Allocate | None] = ContextVar("allocate", default=None)

Key = tuple[torch.device, Hashable]
_uploaded: OrderedDict[Key, Tensor] = OrderedDict()
_read_by_graphs: dict[Key, Tensor] = {}
_copied_by_graphs: dict[Key, Tensor] = {}  # pinned sources
_spares: dict[int, Tensor] = {}  # length → a pinned source for a capture


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a Triton kernel without contraction to fused multiply-adds, so that it rounds as its reference does."""
    options["enable_fp_fusion"] = False
    record = _record.get()
    if record is not None:
        record(kernel, grid, args, options)
        return
    as_bytes = _cards_without_e4m3()
    if as_bytes:  # there Triton has no type e4m3
        views = []
        for arg in args:
            is_e4m3 = isinstance(arg, Tensor) and arg.dtype == E4M3.dtype
            views.append(arg.view(torch.uint8) if is_e4m3 and arg.device in as_bytes else arg)
        args = tuple(views)
    kernel[grid](*args, **options)


@functools.cache
def _cards_without_e4m3() -> frozenset[torch.device]:
    cards = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return frozenset(card for card in cards if torch.cuda.get_device_capability(card) < FIRST_E4M3_CAPABILITY)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a kernel's result."""
    allocate = _allocate.get()
    return torch.empty(shape, dtype=dtype, device=device) if allocate is None else allocate(shape, dtype, device)


@contextmanager
def _with_value(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def recorded_launches(record: Record) -> AbstractContextManager[None]:
    """Pass this thread's launches (kernel, grid, arguments, options) to `record`, not to a GPU."""
    return _with_value(_record, record)


def allocated_by(allocate: Allocate) -> AbstractContextManager[None]:
    """Let `allocate` make this thread's results, as a self-test does (`proof.Buffers`)."""
    return _with_value(_allocate, allocate)


def empty_values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate values or FP8 codes that become `dtype` through `finished`."""
    return empty(shape, torch.float32 if device.type == "cpu" else dtype, device)


@functools.cache
def nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The placeholder of an unrequested result, of shape [0]: the same tensor each time."""
    with torch.inference_mode(False):  # it may be saved for a backward pass
        return torch.empty(0, dtype=dtype, device=device)


def finished(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """A kernel's result in its final dtype."""
    if buffer.dtype == dtype:
        return buffer
    return saturating_cast(buffer, format_of(dtype)) if dtype in FP8_DTYPES else buffer.to(dtype)


def dot_operand(x: Tensor) -> Tensor:
    """A matrix as a kernel's tl.dot reads it."""
    return x.to(torch.float32) if x.device.type == "cpu" else x


@functools.cache
def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()


def n_blocks(size: int, block_size: int) -> int:
    """The number of blocks that `size` elements take, the last one possibly shorter."""
    return -(-size // block_size)


def device_table(content: Hashable, numbers: Callable[[], Iterable[int]], device: torch.device) -> Tensor:
    """Integers as an int64 [n] table on the device; on a GPU, filled for later work on the current stream."""
    key = (device, content)
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if key in _uploaded:
        _uploaded.move_to_end(key)
        if capturing:
            _read_by_graphs[key] = _uploaded[key]
            return _uploaded[key]
    elif capturing and key in _copied_by_graphs:
        return _copied_by_graphs[key].to(device, non_blocking=True)
    else:
        values = torch.frombuffer(array.array("q", numbers()), dtype=torch.int64)
        if capturing:
            spare = _spares.pop(len(values), None)
            source = torch.empty_like(values, pin_memory=True) if spare is None else spare
            _copied_by_graphs[key] = source.copy_(values)
            return source.to(device, non_blocking=True)
        source = torch.empty_like(values, pin_memory=device.type == "cuda").copy_(values)
        _uploaded[key] = source.to(device, non_blocking=True)
        if len(_uploaded) > KEPT_TABLES:
            _uploaded.popitem(last=False)
    table = _uploaded[key]
    if table.is_cuda and len(table) not in _spares:
        _spares[len(table)] = torch.empty(len(table), dtype=table.dtype, pin_memory=True)
    return table
