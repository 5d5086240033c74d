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
    """A tensor that became FP8 codes; without a kind the products that read the codes decide."""

    kind: str | None  # `INPUT` or `GRADIENT`
    values: Tensor  # before the cast [..., K]
    codes: Tensor  # FP8, like values
    scale: Tensor  # fp32, as `granularity` has it
    granularity: Granularity
    factors: Tensor | None = None  # fp32 [K] that values were multiplied by before all else


class Product(NamedTuple):
    """A product with a weight in FP8; `codes` and `kind` are those of the other operand, None where not in FP8."""

    weight: Tensor
    codes: Tensor | None = None
    kind: str = INPUT


class Decoded(NamedTuple):
    """A weight whose `stored` codes were decoded to FP8 `codes` for one product."""

    stored: Tensor
    codes: Tensor


# an operator that updates moments in place declares its own arguments, and is asked before the call
Declared = Cast | tuple[Cast, ...] | Product | Decoded | SimpleNamespace
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
