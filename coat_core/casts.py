"""Casts of operators to 8 bits, declared next to each operator for a probe that observes a step.

A declaration takes a call's result and arguments by name, and returns a record of each tensor it cast or multiplied.
Only the probe calls it (`coat_flux.watch.casts`, a dispatch mode), so an unobserved step pays nothing.
"""

from __future__ import annotations

import inspect
from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from coat_core.granularity import Granularity

INPUT, GRADIENT = "input", "gradient"  # of a linear


class Cast(NamedTuple):
    """A tensor, or the bytes of a stored weight, that became FP8 codes; without a kind their products decide."""

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


# an operator that updates moments in place declares its own arguments, and is asked before the call
Declared = Cast | tuple[Any, ...] | Product
declarations: dict[str, Callable[..., Declared]] = {}  # name of the operator → (result, *arguments) → its casts


def arguments_of(op: Any) -> Callable[..., Any]:
    """A named tuple with the names and defaults of an operator's arguments."""
    parameters = inspect.signature(op._init_fn).parameters
    defaults = [parameter.default for parameter in parameters.values() if parameter.default is not parameter.empty]
    return namedtuple("Arguments", parameters, defaults=defaults)


def declares(op: Any) -> Callable[[Callable[[Any, Any], Declared]], Callable[[Any, Any], Declared]]:
    """Decorator: this function of a call's result and arguments by name declares its casts."""
    arguments = arguments_of(op)

    def register(declaration: Callable[[Any, Any], Declared]) -> Callable[[Any, Any], Declared]:
        declarations[op._qualname] = lambda result, *args, **kwargs: declaration(result, arguments(*args, **kwargs))
        return declaration

    return register
