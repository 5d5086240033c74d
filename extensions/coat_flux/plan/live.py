"""The most bytes a module's forward pass holds at one moment, found by running it on the meta device.

Meta tensors have shapes and lifetimes but no memory, so the real class runs at full size in a moment, on any machine.
Counted is what torch would allocate; what a convolution or matrix library takes for itself is not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["largest_held"]


class _Held(TorchDispatchMode):
    """Adds up the storages that operators make, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._now = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_iter(result):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given:
                self._add(x.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self._now -= self._sizes.pop(key)


class _AttentionKernel(TorchFunctionMode):
    """Attention as a GPU's kernels do it: q, k and v to out, without the matrix of weights in between."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, value = _query_and_value(*args, **kwargs)
            return query.new_empty((*query.shape[:-1], value.shape[-1]))
        return func(*args, **kwargs)


def _query_and_value(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return query, value


@torch.no_grad()
def largest_held(run: Callable[[], Any]) -> int:
    """Return the most bytes that the tensors made by `run` take at one moment.

    Args:
        run: calls a module on the meta device, with inputs it makes itself.
    """
    with _AttentionKernel(), _Held() as held:
        run()
    return held.peak
