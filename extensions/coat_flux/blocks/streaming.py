"""Frozen codes of blocks in CPU memory, copied to the device one block ahead of their use.

    CPU memory     the codes of every streamed block, pinned; nothing is ever written back
    slots          two buffers on the device, each as large as the largest streamed block; block n has slot n mod 2
    copy stream    while block n runs, the codes of block n + 1 (n - 1 in backward) are copied into the other slot

The buffers of a streamed block's linears are views of its slot: only their contents change, so readers stay valid
and a step can be a CUDA graph, copies included. The hook on each block triggers the copies in forward, a hook on
its outputs in backward. A pass ends with the codes of the next pass's start, unless graphs were captured: a replay
leaves no record, so each pass then copies everything.

With `share_out` (FSDP2's scheme) each process holds one part of every streamed block's codes on its device, and
gathers replace copies. All processes then run the same blocks in the same order.

Source: block swapping of kohya-ss/musubi-tuner (docs/advanced_config.md), host to device only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from coat_core.linear.function import BUFFERS
from coat_core.optim.offload import pin, unpin

from .fused.chooser import fused_block
from .fused.linears import NotFusable
from .gemms import stored_linears
from .sizes import SLOTS, aligned

PARKED = "parked_codes"


@dataclass
class _Codes:
    """One block's buffers and, while streamed, its CPU memory (shared out: this process's part, on the device)."""

    views: list[tuple[nn.Module, str, Tensor, int]]  # module, buffer's name, its shape on the meta device, first byte
    bytes: int
    host: Tensor | None = None

    def within(self, memory: Tensor) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for module, name, like, start in self.views:
            yield module, name, memory.as_strided(like.shape, like.stride(), memory.storage_offset() + start)

    def to_host(self, device: torch.device) -> None:
        self.host = torch.empty(self.bytes, dtype=torch.uint8)
        if device.type == "cuda":
            pin(self.host, "memory.stream_blocks", "stream fewer blocks")
        for module, name, view in self.within(self.host):
            view.copy_(module._buffers[name])
            module._buffers[name] = None  # the next block finds its memory free

    def to_device(self, device: torch.device) -> None:
        if self.host is None:
            return
        for module, name, view in self.within(self.host.to(device, copy=True)):
            module._buffers[name] = view
        unpin(self.host)
        self.host = None


class StreamedWeights:
    """Keeps the codes of some blocks in CPU memory, and on the device when needed; `blocks` are in forward order."""

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self._blocks, self._device = list(blocks), device
        for block in self._blocks:  # linears that read the same x become one, and stay that
            with suppress(NotFusable):
                fused_block(block)
        self._codes = [_read(block) for block in self._blocks]
        self._places: dict[nn.Module, int] = {}  # of streamed blocks, in forward order
        self.bytes = tuple(codes.bytes for codes in self._codes)  # of each block, as they were read
        self.streamed: list[int] = []  # indices of the blocks with codes in CPU memory
        self._slots: list[Tensor] = []  # uint8, on the device
        self._holds: list[int | None] = []  # of each slot the index of the block whose codes are there
        self._copied: list[Any] = []  # torch.cuda.Event after which they are
        self._hooked: set[int] = set()  # places of blocks whose backward will be announced
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._captured = False
        self._group: Any = None  # of the processes over which the codes are shared out
        self.stream(range(len(self._blocks)))

    @torch.no_grad()
    def stream(self, chosen: Collection[int]) -> None:
        """Keep the codes of these blocks in CPU memory from now on, all others on the device."""
        if self._stream is not None and self.streamed:
            torch.cuda.synchronize(self._device)
        self.streamed = sorted(chosen)
        self._places = {self._blocks[index]: place for place, index in enumerate(self.streamed)}
        self._hooked = set()
        for index in self.streamed:  # first what leaves the device
            if self._codes[index].host is None:
                codes = _read(self._blocks[index])
                codes.to_host(self._device)
                self._codes[index] = codes
        largest = max((self._codes[index].bytes for index in self.streamed), default=0)
        count = min(SLOTS, len(self.streamed))
        self._slots = [torch.zeros(largest, dtype=torch.uint8, device=self._device) for _ in range(count)]
        self._holds, self._copied = [None] * count, [None] * count
        for block, codes in zip(self._blocks, self._codes, strict=True):
            place = self._places.get(block)
            fetch = here = None
            if place is None:
                codes.to_device(self._device)
            else:
                fetch = functools.partial(self.ready, block)
                here = functools.partial(self._is_here, place)
                for module, name, view in codes.within(self._slots[place % SLOTS]):
                    module._buffers[name] = view
            for module, *_ in codes.views:
                vars(module).update(fetch_weight=fetch, codes_are_here=here)
                vars(module)["_apply"] = functools.partial(_apply_to_rest, module)

    @torch.no_grad()
    def share_out(self, group: Any) -> int:
        """Keep one part of each streamed block's codes per process of the group, and return its bytes. Collective."""
        processes, rank = dist.get_world_size(group), dist.get_rank(group)
        for index in self.streamed:
            codes = self._codes[index]
            assert codes.host is not None
            each = aligned(-(-codes.bytes // processes))
            whole = torch.zeros(each * processes, dtype=torch.uint8)
            whole[: codes.bytes] = codes.host
            unpin(codes.host)
            codes.host = whole[rank * each :][:each].to(self._device, copy=True)
            codes.bytes = each * processes
        self._group = group
        self.stream(self.streamed)
        return sum(codes.host.numel() for codes in self._codes if codes.host is not None)

    def ready(self, block: nn.Module, backward: bool = False) -> None:
        """Have a streamed block's codes in its buffers for later queued work, and start copying the next block's."""
        place = self._places.get(block)
        if place is None:
            return
        if place == 0 and not backward:  # a pass begins
            self._hooked.clear()
            if self._stream is not None:
                self._captured = self._captured or torch.cuda.is_current_stream_capturing()
            if self._captured:
                self._holds = [None] * len(self._slots)
        self._fetch(place)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied[place % SLOTS])
        after = place - 1 if backward else place + 1
        if (after in self._hooked) if backward else after < len(self.streamed):
            self._fetch(after)

    def announce(self, block: nn.Module, outputs: Any) -> None:
        """Restore the codes of a block before its backward pass begins, by a hook on its output tensors."""
        place = self._places.get(block)
        if place is None:
            return
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                self._hooked.add(place)
                output.register_hook(lambda _: self.ready(block, backward=True))

    def _is_here(self, place: int) -> bool:
        return self._holds[place % SLOTS] == self.streamed[place]

    def _fetch(self, place: int) -> None:
        """Queue the copy of a block's codes, unless they are there; it waits for all that is queued so far."""
        if self._is_here(place):
            return
        slot, codes = place % SLOTS, self._codes[self.streamed[place]]
        self._holds[slot] = self.streamed[place]
        # not counted by autograd: what it saved of a slot is there again in backward
        target = self._slots[slot].data[: codes.bytes]
        assert codes.host is not None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):  # None: where it is
            if self._group is None:
                target.copy_(codes.host, non_blocking=True)
            else:
                gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # from torch 2.13 on
                gather(target, codes.host, group=self._group)
        if self._stream is not None:
            self._copied[slot] = torch.cuda.Event()
            self._copied[slot].record(self._stream)


def _read(block: nn.Module) -> _Codes:
    """Lay out the codes of a block; buffers that are views of one storage stay that."""
    starts: dict[int, int] = {}
    views, total = [], 0
    for module, _ in stored_linears(block):
        for name, buffer in codes_of(module).items():
            storage = buffer.untyped_storage()
            if storage._cdata not in starts:
                starts[storage._cdata] = total
                total += aligned(storage.nbytes())
            start = starts[storage._cdata] + buffer.storage_offset() * buffer.itemsize
            views.append((module, name, buffer.to("meta"), start))
    return _Codes(views, total)


def codes_of(module: nn.Module) -> dict[str, Tensor]:
    """Name → uint8 buffer with codes of a frozen weight."""
    return {name: x for name in BUFFERS if (x := module._buffers.get(name)) is not None and x.dtype == torch.uint8}


def codes_to_host(module: nn.Module) -> None:
    """Bring the codes of a linear to the CPU, and nothing else of it."""
    module._buffers.update({name: codes.to("cpu") for name, codes in codes_of(module).items()})


def park(module: nn.Module) -> None:
    """Keep codes on the CPU, out of the buffers."""
    codes_to_host(module)
    vars(module)[PARKED] = codes_of(module)
    module._buffers.update(dict.fromkeys(vars(module)[PARKED]))


def unpark(module: nn.Module) -> bool:
    """Give a linear its codes back, on the CPU; returns whether they were parked."""
    parked = vars(module).pop(PARKED, {})
    module._buffers.update(parked)
    return bool(parked)


def _apply_to_rest(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply`, which moves and casts a model, of all but the codes: one slot would become many tensors."""
    kept = {} if vars(module).get("fetch_weight") is None else codes_of(module)
    module._buffers.update(dict.fromkeys(kept))
    try:
        type(module)._apply(module, fn, recurse)
    finally:
        module._buffers.update(kept)
    return module
