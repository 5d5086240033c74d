"""Casts of operators to 8 bits, declared next to each operator for a probe that observes a step.

A declaration takes a call's result and arguments by name, and returns a record of each tensor it cast or multiplied.
Only the probe calls it (`coat_flux.watch.casts`, a dispatch mode), so an unobserved step pays nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor

from coat_core.granularity import Granularity

INPUT, GRADIENT = "input", "gradient"  # of a linear


class Cast(NamedTuple):
    """A tensor that became FP8 codes."""

    # `INPUT` or `GRADIENT`; None where the products that read the codes decide, and codes that none reads are saved
    # for backward
    kind: str | None
    values: Tensor  # before the cast [..., K]
    codes: Tensor  # FP8, like values
    scale: Tensor  # fp32, as `granularity` has it
    granularity: Granularity  # which elements share a scale
    factors: Tensor | None = None  # fp32 [K] that values were multiplied by before all else; None for ones


class Product(NamedTuple):
    """A product with a weight in FP8."""

    weight: Tensor  # its codes
    codes: Tensor | None = None  # of the other operand; None where that is not in FP8
    kind: str = INPUT  # of the other operand: `INPUT` in the forward pass, `GRADIENT` in the backward pass


class Decoded(NamedTuple):
    """A weight whose `stored` codes were decoded to FP8 `codes` for one product."""

    stored: Tensor
    codes: Tensor


class MomentUpdate(NamedTuple):
    """A step of AdamW in place on packed moments; declared before the step, with None for the result."""

    params: list[Tensor]  # the parameters
    grads: list[Tensor]  # one for each
    exp_avg: tuple[Tensor, Tensor]  # codes and numbers of the packed first moment
    exp_avg_sq: tuple[Tensor, Tensor]  # of the second
    first_blocks: list[int]  # where the blocks of each parameter start
    hyper: list[float]  # the scalars of `ops.adamw.Hyper`
    maximize: bool  # ascend instead of descend


Declared = Cast | tuple[Cast, ...] | Product | Decoded | MomentUpdate
declarations: dict[str, Callable[..., Declared]] = {}  # name of the operator → (result, *arguments) → its casts


def declares(op: Any) -> Callable[[Callable[[Any, Any], Declared]], Callable[[Any, Any], Declared]]:
    """Decorator: this function of the result and a namespace of arguments declares the casts of a call of `op`."""
    signature = inspect.signature(op._init_fn)

    def register(declaration: Callable[[Any, Any], Declared]) -> Callable[[Any, Any], Declared]:
        def declare(result: Any, *args: Any, **kwargs: Any) -> Declared:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return declaration(result, SimpleNamespace(**bound.arguments))

        declarations[op._qualname] = declare
        return declaration

    return register
