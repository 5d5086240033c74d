"""A view of meta tensors in which they are on a CUDA device, so that the lines for a GPU run on a machine without one.

With FakeTensorMode a torch without CUDA aborts in the autograd engine. Meta tensors train; only what Python reads of
them and where it asks for new ones is translated, torch's own C++ still sees the meta device.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import _allowed_determinism_checks_to_fns

from coat_flux.blocks import sizes

from .streams import Stream, current_stream, stream

CARD, META = torch.device("cuda", 0), torch.device("meta")
CAPABILITY = (9, 0)
MEMORY = 80 << 30
ALLOCATION = 512  # bytes that torch's CUDA allocator aligns to


class Event:
    """torch.cuda.Event of a GPU on which everything takes a millisecond; a step's work is done when the step is."""

    step = 0  # the number of the one under way
    on_wait: Callable[[str], Any] = staticmethod(lambda what: None)  # where the host waits for work of this very step

    def __init__(self, **_: Any) -> None:
        self._recorded, self.done = -1, Counter[Stream]()

    def record(self, stream: Stream | None = None) -> None:
        self._recorded, self.done = Event.step, (stream or Stream.current).done.copy()

    def wait(self, *_: Any) -> None:
        Stream.current.wait_event(self)

    def synchronize(self) -> None:
        if self._recorded == Event.step:
            Event.on_wait("waits for an event of the same step")

    def query(self) -> bool:
        return self._recorded != Event.step

    def elapsed_time(self, _: Event) -> float:
        return 1.0


# what is asked of torch.cuda about the card
UNDONE = ("init", "empty_cache", "synchronize", "set_device", "set_sync_debug_mode", "reset_peak_memory_stats")
BYTES = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
CUDA: dict[str, Any] = {
    **dict.fromkeys(UNDONE, lambda *_: None),
    **dict.fromkeys(BYTES, lambda *_: 0),
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: CARD.index,
    "device": lambda _: nullcontext(),
    "get_device_name": lambda *_: "a card that is not there",
    "get_device_capability": lambda *_: CAPABILITY,
    "get_device_properties": lambda *_: SimpleNamespace(total_memory=MEMORY, multi_processor_count=132),
    "mem_get_info": lambda *_: (MEMORY, MEMORY),
    "is_current_stream_capturing": lambda: False,
    "get_sync_debug_mode": lambda: 0,
    "Event": Event,
    "Stream": Stream,
    "stream": stream,
    "current_stream": current_stream,
    "cudart": lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0),
}


class CardView(TorchFunctionMode):
    """Shows meta tensors as tensors of the card."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = False
        # storages of CPU tensors that a copy need not wait for
        self.pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in VIEWS:
            return VIEWS[func](args[0])
        if func is torch.device:  # a name becomes a device: no tensor is made
            return func(*args, **(kwargs or {}))
        if func is Tensor.is_pinned:
            return self.is_pinned(args[0])
        kwargs = {name: _on_meta(value) for name, value in (kwargs or {}).items()}
        pins = bool(kwargs.pop("pin_memory", False))
        if func is Tensor.pin_memory:
            func, pins = Tensor.clone, True
        result = func(*map(_on_meta, args), **kwargs)
        if pins:
            self.pinned.add(result.untyped_storage())
        return result

    def again(self) -> AbstractContextManager[Any]:
        """The view inside a function that torch runs with it put aside."""
        return nullcontext() if self.hidden or self in _get_current_function_mode_stack() else self

    def is_pinned(self, x: Tensor) -> bool:
        return x.untyped_storage() in self.pinned


def _on_meta(value: Any) -> Any:
    kind = type(value)
    if kind is torch.device:
        return META if value.type == "cuda" else value
    return META if kind is str and (value == "cuda" or value.startswith("cuda:")) else value


# what Python reads of a tensor that is on the meta device
VIEWS: dict[Any, Callable[..., Any]] = {
    Tensor.device.__get__: lambda x: CARD if x.is_meta else x.device,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda x: x.is_meta,  # type: ignore[attr-defined]
    Tensor.get_device: lambda x: CARD.index if x.is_meta else x.get_device(),
    Tensor.data_ptr: lambda x: address(x) if x.is_meta else x.data_ptr(),
}


def address(x: Tensor) -> int:
    """An address such as CUDA's allocator gives: storages at multiples of 512 bytes, a view at its offset in one."""
    return x.untyped_storage()._cdata * ALLOCATION + x.storage_offset() * x.itemsize


@contextmanager
def card_view(patch: pytest.MonkeyPatch) -> Iterator[CardView]:
    """Show meta tensors as the card's inside the `with` block, in backward passes too."""
    view, run_backward = CardView(), torch.autograd._engine_run_backward

    def backward(*args: Any, **kwargs: Any) -> Any:  # `Tensor.backward` itself runs with the view put aside
        with view.again():
            return run_backward(*args, **kwargs)

    def counted(count: Any, *args: Any) -> Any:  # what a block keeps is counted on meta tensors as such
        view.hidden = True
        try:
            with _disable_current_modes(), _pop_mode_temporarily():
                return count(*args)
        finally:
            view.hidden = False

    patch.setattr(torch.autograd, "_engine_run_backward", backward)
    for name in ("_counted", "forward_bytes"):
        patch.setattr(sizes, name, functools.partial(counted, getattr(sizes, name)))
    # what is recomputed is compared with the first pass, where saved-tensor hooks run with the view put aside
    patch.setitem(_allowed_determinism_checks_to_fns, "default", lambda x: {"shape": x.shape, "dtype": x.dtype})
    for name, value in CUDA.items():
        patch.setattr(torch.cuda, name, value)
    # torch's AdamW asks its stream; a torch with CUDA but without a driver would raise
    patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    with view:
        yield view
