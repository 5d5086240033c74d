"""How an operator `coat::` is registered, and what runs in its place on CUDA.

Its body is the reference, the CPU implementation, and its own fake. On CUDA its Triton launcher runs where Triton works
on that card, unless its kernel was proved wrong (`proof.py`) or failed, or the user left it out; else the body, logged
once. Triton is imported when the first CUDA tensor meets an operator, never before.

`Operator` replaces torch.library.custom_op for operators that change none of their arguments. That one registers an
autograd kernel in Python, 14 µs of the 21 µs a call spends outside its body; ours run inside autograd functions.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import pkgutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._autograd import _profiler_enabled
from torch._compile import _disable_dynamo
from torch.nn import Parameter

from coat_core.casts import arguments_of

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
_library = torch.library.Library("coat", "FRAGMENT")

FIRST_CAPABILITY = (8, 0)  # Ampere; Triton has left older cards

# by an operator's name, as "coat::quantize":
launchers: dict[str, Any] = {}  # the operator, if it has a launcher for CUDA
on_cuda: dict[str, Callable[..., Any]] = {}  # what is called with CUDA tensors
replaced: dict[str, str] = {}  # why its kernel is not used on CUDA
instead: dict[str, Callable[..., Any]] = {}  # what is called in place of its launcher, such as its body

Watch = Callable[[str, tuple[Any, ...], dict[str, Any]], None]
watched_by: Watch | None = None  # inside of `references`
_failures_end_the_run = False


class Operator(Generic[P, R]):
    """An operator, called like its body."""

    def __init__(self, qualname: str, body: Callable[P, R]) -> None:
        functools.update_wrapper(self, body)
        self._qualname, self._init_fn = qualname, body
        self._name = qualname.removeprefix("coat::")
        self.kernels: dict[str, Callable[..., Any]] = {}  # replacements of the body by type of device
        schema = torch.library.infer_schema(body, mutates_args=())
        _library.define(self._name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        self._opoverload = getattr(torch.ops.coat, self._name).default
        # if torch.compile runs a caller in eager mode, it would trace into the body, and Inductor rounds otherwise
        _library.impl(self._name, _disable_dynamo(body), "CompositeExplicitAutograd")
        torch.library.register_fake(qualname, body, lib=_library)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it on the device of its arguments."""
        if torch.is_grad_enabled():
            trained = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.requires_grad]
            if trained:
                result: R = _WithoutGradient.apply(self._qualname, lambda: self._opoverload(*args, **kwargs), *trained)
                return result
        run: Callable[..., R] = self._opoverload
        # plain tensors, watched by no mode, need no dispatcher: 2 µs less, in 1,900 calls a step
        if not (torch.compiler.is_dynamo_compiling() or _len_torch_dispatch_stack() or _profiler_enabled()):
            for arg in args:
                if arg is not None:
                    x = arg[0] if type(arg) is list and arg else arg
                    if type(x) is Tensor or type(x) is Parameter:
                        run = self.kernels.get(x.device.type, run)
                    break
        return run(*args, **kwargs)

    def register_kernel(self, device_type: str, kernel: Callable[..., Any]) -> None:
        """Run this function in place of the body on such devices."""
        self.kernels[device_type] = kernel
        _library.impl(self._name, kernel, device_type.upper())


def operator(qualname: str, triton: bool = True) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Decorator: register this function as "coat::<name>"; with `triton`, `<module>_kernel` has its launcher.

    A name is never reused with another signature: torch.compile's disk cache would call it by the old one.
    """

    def register(body: Callable[P, R]) -> Operator[P, R]:
        op = Operator(qualname, body)
        if triton:
            run_by_triton(op)
        return op

    return register


class _WithoutGradient(torch.autograd.Function):
    """A call outside of any autograd function, with arguments that require a gradient."""

    @staticmethod
    def forward(ctx: Any, qualname: str, call: Callable[[], Any], *trained: Tensor) -> Any:
        ctx.qualname = qualname
        return call()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(f"{ctx.qualname}: has no gradient; call it inside an autograd function that computes one")


def launcher(op: Any) -> Callable[[Callable[[Any], Any]], Callable[..., Any]]:
    """Decorator: make this function of the arguments, as one object, the CUDA launcher of `op`, called like it."""
    arguments = arguments_of(op)
    return lambda launch: functools.wraps(launch)(lambda *args, **kwargs: launch(arguments(*args, **kwargs)))


def run_by_triton(op: Any) -> None:
    """Make `op`, from `operator` or torch.library.custom_op, run its launcher on CUDA, or its body instead."""
    name: str = op._qualname
    launchers[name] = op

    def run(*args: Any, **kwargs: Any) -> Any:
        if watched_by is not None:
            watched_by(name, args, kwargs)
            return op._init_fn(*args, **kwargs)
        if name in instead:
            return instead[name](*args, **kwargs)
        device = _device_of((*args, *kwargs.values()))
        if triton_obstacle(device) is not None:
            return op._init_fn(*args, **kwargs)
        try:
            if device.type != "cuda" or device.index == torch.cuda.current_device():  # needs no switch
                return launcher_of(name)(*args, **kwargs)
            with torch.cuda.device(device):
                return launcher_of(name)(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler's or a launch's, before anything was written
            if _failures_end_the_run or torch.cuda.is_current_stream_capturing():
                raise
            use_reference(name, first_line(error))
        return op._init_fn(*args, **kwargs)

    on_cuda[name] = run
    op.register_kernel("cuda", run)


def use_kernels(policy: str, left_out: Collection[str] = ()) -> None:
    """Choose for the whole process: `auto`, all kernels but those that fail; `all`, failures are errors; `none`.

    The reference of the operators `left_out`, named without "coat::", runs in any case.
    """
    global _failures_end_the_run
    _failures_end_the_run = policy == "all"
    if policy == "all":
        replaced.clear()
    load_operators()
    instead.clear()
    names = [*replaced, *(f"coat::{name}" for name in left_out)]
    for name in launchers if policy == "none" else names:
        instead[name] = launchers[name]._init_fn


def use_reference(operator: str, why: str) -> None:
    """Run this operator's reference on CUDA from now on; logged once."""
    if operator not in replaced:
        logger.warning("%s: PyTorch reference in place of its kernel: %s", operator.removeprefix("coat::"), why)
    replaced[operator] = why
    instead[operator] = launchers[operator]._init_fn


@contextmanager
def references(watch: Watch) -> Iterator[None]:
    """Run references on CUDA in the `with` block, in all threads, and show each call to `watch` before it runs."""
    global watched_by
    before, watched_by = watched_by, watch
    try:
        yield
    finally:
        watched_by = before


def show_first_call(operator: str, watch: Watch) -> None:
    """Show the operator's next call on CUDA to `watch` before it runs."""

    def shown(*args: Any, **kwargs: Any) -> Any:
        del instead[operator]
        watch(operator, args, kwargs)
        return on_cuda[operator](*args, **kwargs)

    instead.setdefault(operator, shown)


def load_operators() -> None:
    """Import every operator, which completes `launchers`."""
    modules = {module.name for module in pkgutil.iter_modules(importlib.import_module(__package__).__path__)}
    for name in sorted(modules):
        if f"{name}_kernel" in modules:  # the kernels themselves need triton
            importlib.import_module(f"{__package__}.{name}")


def first_line(error: Exception) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


@functools.cache
def launcher_of(operator: str) -> Callable[..., Any]:
    """The CUDA launcher of an operator of `launchers`."""
    module = importlib.import_module(f"{launchers[operator]._init_fn.__module__}_kernel")
    launch: Callable[..., Any] = getattr(module, operator.removeprefix("coat::"))
    return launch


@functools.cache
def triton_obstacle(device: torch.device) -> str | None:
    """Why this CUDA device cannot run the Triton kernels, or None; runs one to find out, and warns once."""
    reason = _find_obstacle(device)
    if reason is not None:
        logger.warning("%s: no Triton kernels, the slower PyTorch reference runs instead: %s", device, reason)
    return reason


def _find_obstacle(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton; on Windows triton-windows)"
    capability = torch.cuda.get_device_capability(device)
    if capability < FIRST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is too old for Triton (8.0 and up are not)"
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the first FP8 operator of this GPU runs in a CUDA graph's capture: do a step before it")
    try:
        with torch.cuda.device(device):
            kernels = importlib.import_module(f"{__package__}.quantize_kernel")  # by name, as all launchers
            return None if kernels.agrees_with_reference(device) else "a trial gave wrong codes"
    except torch.OutOfMemoryError:
        raise  # says nothing about Triton, and the answer is cached
    except Exception as error:  # whatever a missing compiler, driver or cache folder raises; it is logged
        return first_line(error)


def _device_of(args: tuple[Any, ...]) -> torch.device:
    if type(args[0]) is Tensor:  # as almost always
        return args[0].device
    for arg in args:
        if isinstance(arg, Tensor):
            return arg.device
        if isinstance(arg, list) and arg:
            return _device_of(tuple(arg))
    raise TypeError("an operator without tensors")
