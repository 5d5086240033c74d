"""Moments in CPU memory, whose blocks pass through the parameters' device for an update.

    CPU memory     codes and numbers of all parameters, packed as on a device (`packing`), pinned for a GPU's copies
    slots          SLOTS buffers on the device, each for as many blocks as the operator works on at once
    two streams    in: an update's blocks arrive as soon as a slot is free; out: they return when it is done

The operator finds the same codes, numbers and draws in a slot, so the results are the same to the bit. A copy in waits
for its slot and not for the gradient: while the CPU is ahead of the GPU, blocks arrive before the update needs them,
and both directions of the bus are in use. On a CPU these are plain copies.

Source: the optimizer states of ZeRO-Offload (arXiv 2101.06840), with the update left on the GPU.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from coat_core.config import FP8QuantizationConfig
from coat_core.ops.adamw import Moment, chunk_elements
from coat_core.ops.launch import n_blocks
from coat_core.optim.state import Storage, empty_moment, state_bytes

logger = logging.getLogger(__name__)

SLOTS = 3  # one is filled, one updated, one emptied


class Staging:
    """The slots of one device, each of `elements`, for `host`, the packed moments by name, which are pinned here."""

    def __init__(self, host: dict[str, Moment], stored: dict[str, Storage], device: torch.device) -> None:
        self._host, self._device = host, device
        blocks, block_size = host["exp_avg"].codes.shape
        rows = _slot_rows(blocks, block_size, device)
        self.elements = max(rows, 1) * block_size
        self._slots: list[dict[str, Moment]] = []
        for _ in range(SLOTS):
            self._slots.append({name: empty_moment(rows, storage, device) for name, storage in stored.items()})
        self.tensors = [part for slot in self._slots for moment in slot.values() for part in moment]
        self._blocks: list[slice | None] = [None] * SLOTS  # that were last in each
        self._free: list[Any] = [None] * SLOTS  # torch.cuda.Event after which each is free
        self._turn = 0
        self._inward = self._outward = None
        if device.type == "cuda":
            self._inward = torch.cuda.Stream(device)
            self._outward = torch.cuda.Stream(device)
            self._inward.wait_stream(torch.cuda.current_stream(device))  # which has made the slots
            pinned = [part for moment in host.values() for part in moment]
            for part in pinned:
                pin(part, "optimizer.offload", "use a machine with more")
            weakref.finalize(self, _release, pinned, self._outward).atexit = False

    @contextmanager
    def blocks(self, rows: slice) -> Iterator[dict[str, Moment]]:
        """Bring rows of the packed moments, at most a slot's, to the device; final values return to CPU memory."""
        if rows in self._blocks:  # they may still be leaving that slot
            number = self._blocks.index(rows)
        else:
            number = self._turn
            self._turn = (number + 1) % SLOTS
            self._blocks[number] = rows
        count = rows.stop - rows.start
        here: dict[str, Moment] = {}
        staged: list[Tensor] = []
        at_home: list[Tensor] = []
        for name, (codes, numbers) in self._slots[number].items():
            flat = numbers.view(-1)[: len(numbers) * count]
            here[name] = Moment(codes[:count], flat.view(len(numbers), count))
            staged += [here[name].codes, *here[name].numbers]
            home = self._host[name]
            at_home += [home.codes[rows], *home.numbers[:, rows]]
        if self._inward is None or self._outward is None:
            _copy(at_home, staged)
            yield here
            _copy(staged, at_home)
            return
        if self._free[number] is not None:
            self._inward.wait_event(self._free[number])
        _copy(at_home, staged, self._inward)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._inward)
        yield here
        self._outward.wait_stream(current)
        _copy(staged, at_home, self._outward)
        self._free[number] = torch.cuda.Event()
        self._free[number].record(self._outward)

    def synchronize(self) -> None:
        """Wait until CPU memory has the last update's results."""
        if self._outward is not None:
            self._outward.synchronize()


def staging_bytes(config: FP8QuantizationConfig, sizes: Iterable[int], device: torch.device) -> int:
    """The bytes of the slots on a device, for parameters of `sizes` elements."""
    block_size = config.block_size
    rows = _slot_rows(sum(n_blocks(size, block_size) for size in sizes), block_size, device)
    return SLOTS * state_bytes(config, [rows * block_size])


def _slot_rows(blocks: int, block_size: int, device: torch.device) -> int:
    return min(blocks, max(chunk_elements(device) // block_size, 1))


def _copy(sources: list[Tensor], targets: list[Tensor], stream: Any = None) -> None:
    with torch.cuda.stream(stream):  # None: where it is
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)


def _release(pinned: list[Tensor], stream: Any) -> None:
    stream.synchronize()
    for memory in pinned:
        unpin(memory)


def pin(memory: Tensor, what: str, remedy: str) -> None:
    """Register contiguous CPU memory for a GPU until `unpin`; a failure's warning names `what` and `remedy`."""
    failed = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) if memory.nbytes else 0
    if failed:
        logger.warning(
            "%s: %.2f GB of CPU memory cannot be pinned (CUDA error %d): copies are slower and the host waits for "
            "them; free some memory, or %s",
            what,
            memory.nbytes / 1e9,
            failed,
            remedy,
        )
        with suppress(RuntimeError):  # CUDA keeps the error for the next launch to raise: this one
            torch.ones(1, device="cuda")


def unpin(memory: Tensor) -> None:
    """Undo `pin`; does nothing to memory that is not pinned."""
    if memory.device.type == "cpu" and memory.is_pinned():
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
