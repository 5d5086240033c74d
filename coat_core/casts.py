"""What operators cast to 8 bits, declared next to each of them for a probe that observes a step.

A declaration takes the result and the arguments of a call, as the operator does, and returns a record of what that
call cast or multiplied: several where it cast several tensors. It is kept under the operator's name and called by the
probe alone (`coat_flux.watch.casts`, a dispatch mode), so a step that nobody observes pays nothing for it, compiled or
not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from coat_core.granularity import Granularity

INPUT, GRADIENT = "input", "gradient"  # of a linear


class Cast(NamedTuple):
    """A tensor that became FP8 codes.

    Attributes:
        kind: `INPUT` or `GRADIENT`; None where the products that read the codes decide, and codes that none reads are
            saved for backward.
        values: what was cast [..., K].
        codes: FP8, like values.
        scale: fp32, as `granularity` has it.
        granularity: which elements share a scale.
        factors: fp32 [K] that values were multiplied by before all else; None for ones.
    """

    kind: str | None
    values: Tensor
    codes: Tensor
    scale: Tensor
    granularity: Granularity
    factors: Tensor | None = None


class Product(NamedTuple):
    """A product with a weight in FP8.

    Attributes:
        weight: its codes.
        codes: of the other operand; None where that is not in FP8.
        kind: of the other operand: `INPUT` in the forward pass, `GRADIENT` in the backward pass.
    """

    weight: Tensor
    codes: Tensor | None = None
    kind: str = INPUT


class Decoded(NamedTuple):
    """A stored weight that was decoded to FP8 for one product.

    Attributes:
        stored: its codes as they are stored.
        codes: in FP8.
    """

    stored: Tensor
    codes: Tensor


class MomentUpdate(NamedTuple):
    """A step of AdamW in place on packed moments; declared before it happens.

    Attributes:
        params: the parameters.
        grads: one for each.
        exp_avg: codes and numbers of the packed first moment.
        exp_avg_sq: of the second.
        first_blocks: where the blocks of each parameter start.
        hyper: the scalars of `kernels.adamw.Hyper`.
        maximize: ascend instead of descend.
    """

    params: list[Tensor]
    grads: list[Tensor]
    exp_avg: tuple[Tensor, Tensor]
    exp_avg_sq: tuple[Tensor, Tensor]
    first_blocks: list[int]
    hyper: list[float]
    maximize: bool


Declared = Cast | tuple[Cast, ...] | Product | Decoded | MomentUpdate | None
Declaration = Callable[..., Declared]
declarations: dict[str, Declaration] = {}  # name of the operator → its declaration


def declares(op: Any) -> Callable[[Declaration], Declaration]:
    """Decorator: this function declares what calls of `op`, an operator, cast.

    It takes what the operator returned, then the operator's arguments. That of an operator that changes moments takes
    its arguments alone, before it runs.
    """

    def keep(declaration: Declaration) -> Declaration:
        declarations[op._qualname] = declaration
        return declaration

    return keep
