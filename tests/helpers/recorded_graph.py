"""A CUDA graph without a GPU: the operators of a call are recorded, and a replay runs them on the same tensors.

As in a captured graph Python does not run again, and a read by the host fails while recording. Recording computes,
where a capture does not, so what changed in place is put back.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
DRAWS = ("aten.rand", "aten.normal", "aten.bernoulli", "aten.native_dropout", "aten.uniform")


class RecordedGraph(TorchDispatchMode):
    """Records while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self.replays = 0
        self.pool_of: str | None = None  # the memory that it got

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in READS:
            raise RuntimeError("operation not permitted when stream is capturing: the host reads a tensor")
        if any(word in str(func) for word in DRAWS):
            raise RuntimeError(f"{func} draws random numbers in a captured step")
        outputs = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]
        self._calls.append((func, args, kwargs or {}, made))
        return outputs

    def pool(self) -> str:
        return "pool"

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, before in self._calls:
            after = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for old, new in zip(before, after, strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def recording(state: Callable[[], list[Tensor]], graphs: list[RecordedGraph]) -> Callable[..., Any]:
    """Make what stands in for `step_graph.capture`; `state` has all tensors that the call changes."""

    def capture(call: Callable[[], Any], pool: Any = None) -> tuple[Any, Any]:
        kept = [x.detach().clone() for x in state()]
        graph = RecordedGraph()
        graph.pool_of = pool
        with graph:
            made = call()
        with torch.no_grad():
            for x, value in zip(state(), kept, strict=True):
                x.copy_(value)
        graphs.append(graph)
        return graph, made

    return capture
