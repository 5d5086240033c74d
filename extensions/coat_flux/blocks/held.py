"""Which tensors a run holds: bytes of the transformer, the adapters, gradients and so on, each storage once."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from coat_core.ops.dispatch import launchers
from coat_core.optim.sharded import local_values

USABLE_FRACTION = 0.92  # of a GPU's memory; the rest is left to CUDA's context, a display and fragmentation
LEAST_MARGIN = 1.28e9  # bytes of that rest on a small card: what 16 GB leave
FRAGMENTED = 0.04  # of a GPU's memory, lost between tensors; an assumption, as are the other two
SAVED = "saved activations"


def module_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers."""
    yield from module.parameters()
    yield from module.buffers()


def _state_tensors(optimizer: Any) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (x for x in tree_iter(state) if isinstance(x, Tensor))
    yield from getattr(optimizer, "staging", ())


# part → the tensors of its owner, in the order of counting: adapters may be part of the transformer
PARTS: dict[str, Callable[[Any], Iterable[Tensor]]] = {
    "lora": lambda module: [p for p in module.parameters() if p.requires_grad],
    "gradients": lambda module: [p.grad for p in module.parameters() if p.grad is not None],
    "optimizer": _state_tensors,
    "ema": lambda average: average.shadow.values() if hasattr(average, "shadow") else average.shadow_params,
    "transformer": module_tensors,
    "text encoders": module_tensors,
    "vae": module_tensors,
    SAVED: lambda _: (),
}


class HeldParts:
    """Counts tensors on one device by part; their owners may go at any time."""

    def __init__(self, device: torch.device):
        self._device = device
        self._owners: dict[str, list[weakref.ref[Any]]] = {part: [] for part in PARTS}

    def add(self, part: str, owner: Any) -> None:
        """Count the tensors of `owner`, as long as it lives, under `part`, one of `PARTS`."""
        self._owners[part].append(weakref.ref(owner))

    def count(self, parts: Iterable[str] = PARTS) -> dict[str, int]:
        """Bytes of these parts now, by default of all."""
        seen: set[int] = set()
        counts = dict.fromkeys(parts, 0)
        for part in counts:
            for owner in self.owners(part):
                counts[part] += sum(_new_bytes(x, self._device, seen) for x in PARTS[part](owner))
        return counts

    def owners(self, part: str) -> list[Any]:
        """Those counted under `part` that live."""
        owners = [reference() for reference in self._owners[part]]
        return [owner for owner in owners if owner is not None]


class HeldTensors(TorchDispatchMode):
    """Adds up the storages that operators make inside the `with` block, until they are freed.

    Without `kernels` an operator of `coat_core` runs as on a CPU, where what its reference makes for a moment counts.
    """

    def __init__(self, kernels: bool = True) -> None:
        super().__init__()
        self._kernels = kernels
        self.now = self.peak = 0
        self._living: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        operator = None if self._kernels else launchers.get(func._schema.name)
        if operator is not None:
            with self:
                return operator._init_fn(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tensors_in(args)}  # of a view, or changed in place
        for x in tensors_in((result,)):
            storage = x.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._living:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def drop(_: Any) -> None:
            self.now -= size
            del self._living[key]

        self._living[key] = weakref.ref(storage, drop)
        self.now += size
        self.peak = max(self.peak, self.now)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """What an operator takes or returns: tensors, and lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (x for x in value if isinstance(x, Tensor))


class AsOnGPU(TorchFunctionMode):
    """Runs attention and RMSNorm (unless `whole` is False) on the meta device as a GPU's single kernels do."""

    def __init__(self, whole: bool = True) -> None:
        super().__init__()
        self._whole = whole

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is torch.nn.functional.rms_norm and self._whole:
            return _RMSNorm.apply(args[0])
        if func is torch.nn.functional.dropout and self._whole and kwargs["training"] and kwargs["p"]:
            return torch.native_dropout(args[0], kwargs["p"], True)[0]
        return func(*args, **kwargs)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]
    return out


class _RMSNorm(torch.autograd.Function):
    """Keeps what torch's CUDA kernel keeps: x, and one fp32 value per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.empty_like(ctx.saved_tensors[0])


@torch.no_grad()
def largest_held(run: Callable[[], Any]) -> int:
    """The peak bytes of tensors allocated by `run`, which calls a module on the meta device.

    Real classes run at full size on any machine; workspaces of convolution and matrix libraries are not counted.
    """
    with AsOnGPU(), HeldTensors() as held:
        run()
    return held.peak


def _new_bytes(tensor: Tensor, device: torch.device, seen: set[int]) -> int:
    tensor = local_values(tensor)
    if hasattr(tensor, "__tensor_flatten__"):  # a wrapper of several tensors, as torchao's and quanto's weights
        return sum(_new_bytes(getattr(tensor, name), device, seen) for name in tensor.__tensor_flatten__()[0])
    if tensor.device.type != device.type or (device.index is not None and tensor.device.index != device.index):
        return 0
    storage = tensor.untyped_storage()
    if storage.data_ptr() in seen:
        return 0
    seen.add(storage.data_ptr())
    return storage.nbytes()


def room_of(total: float) -> float:
    """Bytes that a run plans with on a GPU of `total` bytes."""
    return min(total * USABLE_FRACTION, total - LEAST_MARGIN)


def usable_bytes(device: torch.device) -> float:
    """What a run can use of the device's memory; less than `room_of` where others hold much of a GPU's."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return min(room_of(total), free + torch.cuda.memory_reserved(device) - total * FRAGMENTED)
    return float(psutil.virtual_memory().available + psutil.Process().memory_info().rss)


def used_bytes(device: torch.device) -> tuple[int, int]:
    """(allocated, reserved) bytes now: of torch's CUDA allocator, or resident set and its peak."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    resident = psutil.Process().memory_info().rss
    return resident, max(peak_bytes(device), resident)


def peak_bytes(device: torch.device) -> int:
    """Peak bytes allocated: by torch on a GPU, by the process on other devices."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
