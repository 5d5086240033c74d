"""Tables of integers on the device, uploaded without waiting for it, for kernels over many tensors.

Tables are cached by content: an unchanged list is not uploaded again, and a changed one is never mistaken for the old.
An upload copies from pinned memory that torch's host allocator reuses only when the copy is done.

A captured CUDA graph reads the table, or copies it from its pinned source, at each replay, so tables used in a capture
live as long as the process. Earlier steps allocate the pinned source: allocating may query events, which a capture
forbids.
"""

from __future__ import annotations

import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable

import torch
from torch import Tensor

KEPT_TABLES = 64  # weights of FLUX.1 that are updated one by one have some 20 sizes

Key = tuple[torch.device, Hashable]
_uploaded: OrderedDict[Key, Tensor] = OrderedDict()
_read_by_graphs: dict[Key, Tensor] = {}
_copied_by_graphs: dict[Key, Tensor] = {}  # pinned sources
_spares: dict[int, Tensor] = {}  # length → a pinned source for a capture


def device_table(content: Hashable, numbers: Callable[[], Iterable[int]], device: torch.device) -> Tensor:
    """Return integers as an int64 [n] table on the device; on a GPU, filled for later work on the current stream."""
    key = (device, content)
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if key in _uploaded:
        _uploaded.move_to_end(key)
        if capturing:
            _read_by_graphs[key] = _uploaded[key]
        else:
            _keep_spare(_uploaded[key])
        return _uploaded[key]
    if capturing and key in _copied_by_graphs:
        return _copied_by_graphs[key].to(device, non_blocking=True)
    values = torch.frombuffer(array.array("q", numbers()), dtype=torch.int64)
    if capturing:
        _copied_by_graphs[key] = source = _source(values, device, _spares.pop(len(values), None))
        return source.to(device, non_blocking=True)
    _uploaded[key] = _source(values, device, None).to(device, non_blocking=True)
    _keep_spare(_uploaded[key])
    if len(_uploaded) > KEPT_TABLES:
        _uploaded.popitem(last=False)
    return _uploaded[key]


def _keep_spare(table: Tensor) -> None:
    if table.is_cuda and len(table) not in _spares:
        _spares[len(table)] = torch.empty(len(table), dtype=table.dtype, pin_memory=True)


def _source(values: Tensor, device: torch.device, spare: Tensor | None) -> Tensor:
    source = torch.empty_like(values, pin_memory=device.type == "cuda") if spare is None else spare
    return source.copy_(values)
