"""Blocks run through torch.compile, each by itself and without a graph break.

What is compiled is the run of a block as it was read (reading.py): weights and LoRA matrices are inputs of the compiled
code, so that all blocks of a kind share it. Another shape, another set of adapters or another strength compiles again.
The reading stays outside. So that the first block and those after it meet the same code, inputs always require a
gradient and outputs have rows of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
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
        fallback: "error" raises where torch.compile fails; "bf16" goes on.
        obstacle: why none is compiled, where that is known.

    Attributes:
        failed: whether torch.compile failed, so that all blocks run eager.
    """

    def __init__(self, fallback: str, obstacle: str = "") -> None:
        self._fallback = fallback
        self.failed = False
        self._compiled: dict[type, Callable[..., Any]] = {}
        if obstacle:
            self.give_up(obstacle)

    def form_of(self, fused: FusedBlock) -> Callable[..., Any]:
        """Return the compiled form of a block as `fused_block` gives it, with the same arguments and results."""

        def run(*args: Any) -> Any:
            if self.failed or _is_observed():
                return fused(*args)
            image, text, *others = fused.reader.call(args)
            inputs = (_requiring_grad(image), None if text is None else _requiring_grad(text), *others)
            try:
                with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
                    outputs = self._function(type(fused.block))(fused.block, *inputs)
            except _compiler_errors() as error:
                self.give_up(f"torch.compile: {_reason(error)}; {REMEDY}", error)
                return fused(*args)
            return fused.reader.results(*_first_order_only(*outputs))

        return run

    def _function(self, kind: Any) -> Callable[..., Any]:
        if kind not in self._compiled:
            self._compiled[kind] = torch.compile(kind.apart, fullgraph=True, dynamic=False)
        return self._compiled[kind]

    def give_up(self, reason: str, error: Exception | None = None) -> None:
        """Run blocks eager from here on.

        Raises:
            RuntimeError: `fallback` is error.
        """
        self.failed = True
        if self._fallback == "error":
            raise RuntimeError(f"fallback='error': {reason}") from error
        logger.warning("blocks run eager: %s", reason)


def _is_observed() -> bool:
    """Whether somebody counts operators (as the memory log does on a CPU), which compiled code does not show."""
    return _get_current_dispatch_mode() is not None


def _requiring_grad(x: Tensor) -> Tensor:
    return x.detach().requires_grad_() if torch.is_grad_enabled() and not x.requires_grad else x


def _first_order_only(*outputs: Tensor | None) -> tuple[Tensor | None, ...]:
    """The outputs; a backward pass with create_graph=True is refused here, since compiled code cannot ask."""
    for output in outputs:
        if output is not None and output.requires_grad:
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
