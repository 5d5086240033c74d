"""First-order gradients only: how every autograd function over FP8 values answers `create_graph=True`.

A second derivative would go through casts, whose derivative is zero nearly everywhere, or through saved FP8 values that
autograd takes for constants: a wrong number, not an approximate one. Torch's own `once_differentiable` objects only in
the second backward pass, without a remedy. Autograd runs a backward pass with grad mode on exactly when it was asked
for a graph of it, so that the first pass can object.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

REFUSAL = (
    "create_graph=True: gradients through FP8 activations cannot be differentiated again; call backward without "
    "create_graph, or set coat.activation.use_fp8: false and coat.memory.enable_efficient_checkpoint: false"
)


def refuse_second_order() -> None:
    """Object to a backward pass that records a graph of itself; does nothing in any other and outside backward.

    Raises:
        RuntimeError: the running backward pass was started with create_graph=True.
    """
    if torch.compiler.is_dynamo_compiling():  # while it traces; compiled backward passes are guarded from outside
        return
    if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(REFUSAL)


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the `backward` of an autograd function whose gradients must not be differentiated again.

    Put it under `@staticmethod`, in place of torch's `once_differentiable`:

        @staticmethod
        @first_order_only
        def backward(ctx, grad): ...

    Returns:
        `backward`, which raises RuntimeError at once in a backward pass with create_graph=True.
    """

    @functools.wraps(backward)
    def refusing(ctx: Any, *grads: Any) -> Any:
        refuse_second_order()
        return backward(ctx, *grads)

    return refusing


def autocast_is_on(device_type: str) -> bool:
    """Whether autocast is on for this type of device; the meta device has none."""
    return _has_autocast(device_type) and torch.is_autocast_enabled(device_type)


_has_autocast = functools.cache(torch.amp.is_autocast_available)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Switch autocast off for what runs on `device`, so that the dtype of x decides; the meta device has none.

    Autocast would send LayerNorm through fp32 on CUDA only.
    """
    if not autocast_is_on(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
