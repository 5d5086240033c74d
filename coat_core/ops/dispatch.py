"""What an operator runs on CUDA: its Triton launcher where Triton works on that card, else the reference.

Callers never ask: the reason for the reference is one line of log. Triton is imported when the first CUDA tensor meets
an operator, never before.
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


launchers: dict[str, tuple[Any, str]] = {}  # name of the operator → (operator, launcher)


def run_by_triton(op: Any, launcher: str) -> None:
    """Make `op` run a launcher on CUDA.

    Args:
        op: from `operators.operator` or torch.library.custom_op; its body is the reference, and what runs without
            Triton.
        launcher: "<family>.<function>" of the module `<family>_kernel`, with the operator's arguments and results.
    """
    module, name = launcher.split(".")
    reference = op._init_fn
    launchers[op._qualname] = (op, launcher)

    def run(*args: Any) -> Any:
        device = _device_of(args)
        if triton_obstacle(device) is not None:
            return reference(*args)
        if device.index == torch.cuda.current_device():  # the switch below takes three times as long as the question
            return _launcher(module, name)(*args)
        with torch.cuda.device(device):
            return _launcher(module, name)(*args)

    op.register_kernel("cuda")(run)


@functools.cache
def triton_obstacle(device: torch.device) -> str | None:
    """Return why this CUDA device does not run the Triton kernels, or None where it does; warns once.

    The answer comes from quantizing a few numbers on the device and comparing them with the reference.
    """
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
            return None if _launcher("quantize", "agrees_with_reference")(device) else "a trial gave wrong codes"
    except torch.OutOfMemoryError:
        raise  # says nothing about Triton, and the answer is kept
    except Exception as error:  # whatever a missing compiler, driver or cache folder raises; it is logged
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


def launcher_of(operator: str) -> Callable[..., Any] | None:
    """Return what an operator ("coat::quantize") runs on CUDA where Triton works; None of one without a launcher."""
    found = launchers.get(operator)
    return None if found is None else _launcher(*found[1].split("."))


@functools.cache
def _launcher(module: str, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module(f"coat_core.ops.{module}_kernel"), name)
    return found


def _device_of(args: tuple[Any, ...]) -> torch.device:
    if type(args[0]) is Tensor:  # as almost always
        return args[0].device
    for arg in args:
        if isinstance(arg, Tensor):
            return arg.device
        if isinstance(arg, list) and arg:
            return _device_of(tuple(arg))
    raise TypeError("an operator without tensors")
