"""Blocks run through torch.compile, each by itself and without a graph break.

What is compiled is the run of a block as it was read (reading.py): weights and LoRA matrices are inputs of the compiled
code, so that all blocks of a kind share it. Another shape, another set of adapters or another strength compiles again.
The reading stays outside. So that the first block and those after it meet the same code, inputs always require a
gradient and outputs have rows of their own.

With CUDA graphs the compiled code is recorded and replayed: weights are declared to stay where they are (other inputs
are copied into the recording's memory at each replay), and the gradients of the LoRA are copied out of that memory,
which the next step overwrites.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from coat_core.autograd import refuse_second_order

from .reading import FusedBlock

logger = logging.getLogger(__name__)

RECOMPILE_LIMIT = 64  # of one kind of block: shapes of the data set's buckets, with and without adapters
REMEDY = "install a C++ compiler (and Triton on a GPU) or set coat.speed.compile: none"


class CompiledBlocks:
    """Gives the compiled form of a fused block; blocks run eager where torch.compile fails, with one warning.

    Args:
        fallback: "error" raises where torch.compile fails, or where there are no CUDA graphs; "bf16" goes on.

    Attributes:
        failed: whether torch.compile failed, so that all blocks run eager.
    """

    def __init__(self, fallback: str) -> None:
        self._fallback = fallback
        self._lacks_graphs = False  # and it was said
        self.failed = False
        self._compiled: dict[tuple[type, bool], Callable[..., tuple[Tensor, Tensor]]] = {}

    def lacks_graphs(self, device: str) -> None:
        """Warn once, or with `fallback: error` raise, that blocks are compiled without CUDA graphs on this device."""
        if not self._lacks_graphs:
            self._lacks_graphs = True
            self._warn(f"there are no CUDA graphs on a {device}; set coat.speed.compile: blocks", None)

    def form_of(self, fused: FusedBlock, replayable: bool) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return the fused block's compiled form, with the same arguments and results.

        Args:
            fused: as `fused_block` gives it.
            replayable: as a CUDA graph; not where it runs again in the midst of a backward pass.
        """

        def run(hidden: Tensor, text: Tensor, temb: Tensor, rotary: Any, _: Any = None) -> tuple[Tensor, Tensor]:
            if self.failed or _is_observed():
                return fused(hidden, text, temb, rotary)
            block = _ready_for_replay(fused) if replayable else fused
            inputs = (_requiring_grad(hidden), _requiring_grad(text), temb, rotary)
            try:
                with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
                    return _first_order_only(*self._function(type(fused), replayable)(block, *inputs))
            except _compiler_errors() as error:
                self._fail(f"torch.compile: {_reason(error)}; {REMEDY}", error)
            return fused(hidden, text, temb, rotary)

        return run

    def _function(self, kind: Any, graphs: bool) -> Callable[..., tuple[Tensor, Tensor]]:
        key = kind, graphs
        if key not in self._compiled:
            mode = "reduce-overhead" if graphs else None
            self._compiled[key] = torch.compile(kind.apart, fullgraph=True, dynamic=False, mode=mode)
        return self._compiled[key]

    def _fail(self, reason: str, error: Exception) -> None:
        self.failed = True
        self._warn(reason, error)

    def _warn(self, reason: str, error: Exception | None) -> None:
        if self._fallback == "error":
            raise RuntimeError(f"fallback='error': {reason}") from error
        logger.warning("blocks run %s: %s", "eager" if self.failed else "compiled without CUDA graphs", reason)


def _is_observed() -> bool:
    """Whether somebody counts operators (as the memory log does on a CPU), which compiled code does not show."""
    return _get_current_dispatch_mode() is not None


def _requiring_grad(x: Tensor) -> Tensor:
    return x.detach().requires_grad_() if torch.is_grad_enabled() and not x.requires_grad else x


def _first_order_only(*outputs: Tensor) -> tuple[Tensor, ...]:
    """The outputs; a backward pass with create_graph=True is refused here, since compiled code cannot ask."""
    for output in outputs:
        if output.requires_grad:
            output.register_hook(lambda _: refuse_second_order())
    return outputs


def _compiler_errors() -> tuple[type[Exception], ...]:
    """What torch.compile raises while it compiles, and never what compiled code raises."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch._inductor.exc import InductorError

    return TorchDynamoException, FailOnRecompileLimitHit, InductorError


def _reason(error: Exception) -> str:
    inner = getattr(error, "inner_exception", error)  # a backend's own error
    return f"{type(inner).__name__}: {next(iter(str(inner).splitlines()), 'no message')}"


def _ready_for_replay(fused: Any) -> Any:
    """The block with LoRA matrices whose gradients are copied, and all its tensors declared to stay where they are."""
    trained = [tensor for tensor in _tensors(fused) if tensor.requires_grad]
    if trained and torch.is_grad_enabled():
        views = _CopiedGradients.apply(*trained)
        fused = _replaced(fused, {id(old): new for old, new in zip(trained, views, strict=True)})
    for tensor in _tensors(fused):
        torch._dynamo.mark_static_address(tensor, guard=False)
    return fused


def _tensors(value: Any) -> Iterator[Tensor]:
    """Weights and matrices of a block; a LoRA's strengths per image are others at each step."""
    if isinstance(value, Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name != "strengths":
                yield from _tensors(getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)


def _replaced(value: Any, by: dict[int, Tensor]) -> Any:
    """The same dataclasses and tuples with other tensors, by id."""
    if isinstance(value, Tensor):
        return by.get(id(value), value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _replaced(getattr(value, field.name), by) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return tuple(_replaced(item, by) for item in value) if isinstance(value, tuple) else value


class _CopiedGradients(torch.autograd.Function):
    """The tensors themselves; their gradients arrive as copies, made by one launch."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch._foreach_mul(grads, 1.0))
