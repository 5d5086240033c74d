"""First-order gradients only: autograd functions over FP8 values raise under `create_graph=True`.

A second derivative would go through casts, whose derivative is zero nearly everywhere, or through saved FP8 values that
autograd takes for constants: a wrong number. Torch's `once_differentiable` raises only in the second backward pass. But
autograd runs a backward pass with grad mode on exactly when its graph is recorded, so the first pass can raise.
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
    """Raise RuntimeError in a backward pass started with create_graph=True; does nothing elsewhere."""
    if torch.compiler.is_dynamo_compiling():  # while it traces; compiled backward passes are guarded from outside
        return
    if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(REFUSAL)


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate an autograd function's `backward`, under `@staticmethod`: RuntimeError if create_graph=True."""

    @functools.wraps(backward)
    def refusing(ctx: Any, *grads: Any) -> Any:
        refuse_second_order()
        return backward(ctx, *grads)

    return refusing


_has_autocast = functools.cache(torch.amp.is_autocast_available)


def autocast_is_on(device_type: str) -> bool:
    """Whether autocast is on for this type of device; the meta device has none."""
    return _has_autocast(device_type) and torch.is_autocast_enabled(device_type)


def checkpoint_records() -> bool:
    """Whether a function runs under non-reentrant torch.utils.checkpoint, first time or recomputing."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Switch autocast off on `device`, so that the dtype of x decides: it would run LayerNorm in fp32 on CUDA only."""
    if not autocast_is_on(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
