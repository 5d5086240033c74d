"""Dispatch on CUDA: the operator's Triton launcher where Triton works on that card, else the reference, logged once.

Triton is imported when the first CUDA tensor meets an operator, never before.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

FIRST_CAPABILITY = (8, 0)  # Ampere; Triton has left older cards

launchers: dict[str, Any] = {}  # name of the operator → the operator, of those that a launcher runs on CUDA


def run_by_triton(op: Any) -> None:
    """Make `op`, from `operators.operator` or torch.library.custom_op, run its launcher on CUDA."""
    launchers[op._qualname] = op

    def run(*args: Any) -> Any:
        device = _device_of(args)
        if triton_obstacle(device) is not None:
            return op._init_fn(*args)
        if device.index == torch.cuda.current_device():  # the switch below takes three times as long as the question
            return launcher_of(op._qualname)(*args)
        with torch.cuda.device(device):
            return launcher_of(op._qualname)(*args)

    op.register_kernel("cuda")(run)


@functools.cache
def launcher_of(operator: str) -> Callable[..., Any]:
    """Return the CUDA launcher of an operator of `launchers`, as "coat::quantize"."""
    module = importlib.import_module(f"{launchers[operator]._init_fn.__module__}_kernel")
    launcher: Callable[..., Any] = getattr(module, operator.removeprefix("coat::"))
    return launcher


@functools.cache
def triton_obstacle(device: torch.device) -> str | None:
    """Return why this CUDA device cannot run the Triton kernels, or None, after trying one; warns once."""
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
            from coat_core.ops.quantize_kernel import agrees_with_reference

            return None if agrees_with_reference(device) else "a trial gave wrong codes"
    except torch.OutOfMemoryError:
        raise  # says nothing about Triton, and the answer is cached
    except Exception as error:  # whatever a missing compiler, driver or cache folder raises; it is logged
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


def _device_of(args: tuple[Any, ...]) -> torch.device:
    if type(args[0]) is Tensor:  # as almost always
        return args[0].device
    for arg in args:
        if isinstance(arg, Tensor):
            return arg.device
        if isinstance(arg, list) and arg:
            return _device_of(tuple(arg))
    raise TypeError("an operator without tensors")
