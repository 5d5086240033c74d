"""Runs a step's operators as a GPU would: ours by what is registered for CUDA, torch's by shape; and watches the host.

Whatever makes the host wait for the GPU comes through here as one of torch's operators: a number read back
(`_local_scalar_dense`), a copy to the CPU, a copy from CPU memory that is not pinned, a shape that depends on values.
"""

import functools
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import coat_core
import coat_flux

from .card import CARD, CardView, Event
from .streams import Memory, Stream

aten = torch.ops.aten
ON_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
LATE_NUMBER = 1.0  # what the host reads of a copy that it did not wait for
COPIES = (aten._to_copy.default, aten.copy_.default)
BY_VALUE = (
    aten.nonzero.default, aten.equal.default, aten.masked_select.default, aten._unique2.default,
    aten.unique_consecutive.default, aten.repeat_interleave.Tensor,
)  # fmt: skip
BY_MASK = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
ATTENTION = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "plain": SDPBackend.MATH,
}
# where a captured step may copy from the host's memory: it stays
STAYS = {"coat_core/ops/launch.py:device_table", "coat_flux/blocks/streaming.py:_fetch"}
OURS = {package.__name__: str(Path(package.__file__).parent) for package in (coat_core, coat_flux)}


class HostWaits(AssertionError):
    """The host waits for the GPU inside a step."""


class DeviceError(AssertionError):
    """Tensors of two devices meet, or a GEMM that no GPU has."""


class GPUOperators(TorchDispatchMode):
    """Runs operators on meta tensors as on the card."""

    def __init__(self, view: CardView, attention: str) -> None:
        super().__init__()
        self._allowed: Mapping[str, float] | None = None
        self.waits: Counter[str] = Counter()  # of the host inside a step, by place
        self.calls: Counter[str] = Counter()  # of our operators, by name
        self.memory = Memory()  # that streams share
        self._view, self._attention = view, ATTENTION[attention].value
        self._captures = False

    @contextmanager
    def step(self, allowed: Mapping[str, float]) -> Iterator[None]:
        """A step: inside it the host may wait only at the places of `allowed`, where it reads these numbers."""
        self._allowed = allowed
        Event.step += 1
        Event.on_wait = Stream.on_wait = self._wait
        try:
            yield
        finally:
            self._allowed = None

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Inside of a step, where the host may wait nowhere; a replay reads the host's memory as it is by then."""
        allowed, self._allowed, self._captures = self._allowed, {}, True
        try:
            yield
        finally:
            self._allowed, self._captures = allowed, False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "coat":
            self.calls[func._schema.name] += 1
            with self, self._view.again():
                return func.redispatch(ON_CUDA, *args, **kwargs)
        if _is_composite(func):  # below autograd, as inside a launcher, these come as they are
            with self:
                return func.decompose(*args, **kwargs)
        if func is aten._fused_sdp_choice.default:
            return self._attention
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            number = self._wait("reads a number")
            return number if args[0].dtype.is_floating_point else int(number)
        if _depends_on_values(func, args):
            raise HostWaits(f"{place()}: the host waits for the GPU, the shape of {func} depends on values")
        if not func.is_view:
            for x in args[1:] if func is aten.copy_.default else args:
                self.memory.read(x)
        if func is aten.copy_.default and args[0].is_meta:
            self.memory.write(args[0])
        if func in COPIES:
            return self._copy(func, args, kwargs)
        if func is aten._scaled_mm.default:
            check_scaled_mm(described(func, args, kwargs))
        _check_devices(func, args)
        return func(*args, **kwargs)

    def _copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A copy between CPU and GPU: the host waits, unless the CPU's memory is pinned and the copy may be late."""
        if func is aten.copy_.default:
            to_gpu, source = args[0].is_meta, args[1]
            late = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        else:
            device, source = kwargs.get("device"), args[0]
            to_gpu = source.is_meta if device is None else device.type == "meta"
            late = kwargs.get("non_blocking", False)
        if source.is_meta == to_gpu:
            return func(*args, **kwargs)
        if to_gpu:
            if not (late and self._view.is_pinned(source)):
                self._wait("copies from memory that is not pinned")
            if self._captures and place() not in STAYS:
                raise HostWaits(f"{place()}: a captured step copies from the host's memory, which is others' by then")
            return func(*args, **kwargs)
        no_wait = func is aten.copy_.default and late and self._view.is_pinned(args[0])
        number = LATE_NUMBER if no_wait else self._wait("copies to the CPU")
        found = torch.full(source.shape, number, dtype=kwargs.get("dtype") or source.dtype)
        return args[0].copy_(found) if func is aten.copy_.default else found

    def _wait(self, what: str) -> float:
        """Note that the host waits, and return the number it reads."""
        if self._allowed is None:
            return 1.0
        where = place()
        if where not in self._allowed:
            raise HostWaits(f"{where}: the host waits for the GPU, it {what}")
        self.waits[where] += 1
        return self._allowed[where]


def described(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """An operator's arguments by name: a tensor as (shape, strides, dtype)."""
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    return tuple(
        (name, (tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else x) for name, x in given.items()
    )


@functools.cache
def check_scaled_mm(arguments: tuple[tuple[str, Any], ...]) -> None:
    """Ask torch, by RuntimeError, whether a GPU takes such a GEMM: on fake CUDA tensors of these shapes and strides.

    What torch checks in C++ alone is added here, by the strictest of its kernels.
    """
    given = dict(arguments)
    (_, _, a), (_, _, b), out, bias = given["self"], given["mat2"], given.get("out_dtype"), given.get("bias")
    if a == b == torch.float8_e5m2:
        raise RuntimeError("Multiplication of two Float8_e5m2 matrices is not supported")
    if bias is not None and (out == torch.float32 or bias[2] != out):
        raise RuntimeError(f"a bias of {bias[2]} for an output of {out}: must be the same, of 16 bits")
    if len(given["scale_b"][0]) == 2 and (out, b) != (torch.bfloat16, torch.float8_e4m3fn):
        raise RuntimeError(f"row-wise scaling of {b} to {out}: must be e4m3 to bf16")
    with _disable_current_modes(), FakeTensorMode():
        for name, value in given.items():
            if isinstance(value, tuple):
                shape, strides, dtype = value
                given[name] = torch.empty_strided(shape, strides, dtype=dtype, device=CARD)
        aten._scaled_mm.default(**given)


def place() -> str:
    """The innermost function of ours that is running, as file:function; comprehensions and observers aside."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        for package, folder in OURS.items():
            name = frame.f_code.co_name
            if file.startswith(folder) and not name.startswith(("<", "__torch_")):
                return f"{package}{file[len(folder) :]}:{name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "outside"


@functools.cache
def _is_composite(func: Any) -> bool:
    """Whether torch puts an operator together from others, such as `item` and `to`."""
    composite: bool = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return composite


def _depends_on_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the host has to know values to know the result's shape: masks, too."""
    if func in BY_MASK:
        return any(isinstance(x, Tensor) and x.is_meta and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return func in BY_VALUE and args[0].is_meta


def _check_devices(func: Any, args: tuple[Any, ...]) -> None:
    """Tensors of the GPU and of the CPU do not meet; a CPU tensor of one element may."""
    kinds = set()
    for arg in args:
        for x in arg if isinstance(arg, list | tuple) else (arg,):
            if isinstance(x, Tensor) and (x.is_meta or x.ndim):
                kinds.add(x.is_meta)
    if len(kinds) > 1:
        raise DeviceError(f"{place()}: {func} is given tensors of the GPU and of the CPU")
