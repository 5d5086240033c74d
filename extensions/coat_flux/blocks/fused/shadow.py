"""The adapters' matrices in the dtype that blocks multiply in: copied together, once for each forward pass.

LoRA matrices are kept in fp32 and multiply in bf16. Cast where they are used, that is 2,500 small kernels a step of
FLUX.1-dev; one buffer for all of them is filled by nine.

    buffer    D = [A₁·f₁; A₂·f₂; …] of the linears that read one x, then U = [B₁; B₂; …]; then those of the next x
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..lora import PlainAdapter
from .linears import Copies, LinearGroup, scaled_down

if TYPE_CHECKING:
    from ...config.coat import COATConfig

__all__ = ["LoraShadow", "copied_bytes"]


def copied_bytes(config: COATConfig, lora_elements: int, value_bytes: int) -> int:
    """What the adapters' copies in the blocks' dtype take; see `LoraShadow`.

    Args:
        config: the `coat:` block; without the fused flow nothing is copied.
        lora_elements: of all adapters' matrices.
        value_bytes: of an element in the blocks' dtype.

    Returns:
        Bytes.
    """
    fused = config.enabled and config.activation.use_fp8 and config.activation.flow == "fused"
    return lora_elements * value_bytes if fused else 0


class LoraShadow:
    """Copies of the matrices of all adapters of fused blocks, which `linears` uses in their place.

    Args:
        forms: of the blocks, as readers return them.
        dtype: that the blocks multiply in.
    """

    def __init__(self, forms: Sequence[Any], dtype: torch.dtype) -> None:
        self.dtype = dtype
        groups = self._groups = [group for form in forms for group in _groups(form) if group.rank]
        self._copies: list[Tensor] = []
        self._matrices: list[Tensor] = []  # what each of them is of
        self._scaled: list[tuple[Tensor, PlainAdapter]] = []  # copy of A·f with f other than 1, its adapter
        shapes = [shape for group in groups for shape in _shapes(group)]
        if not shapes:
            return
        buffer = torch.zeros(sum(map(math.prod, shapes)), dtype=dtype, device=groups[0].parameters[0].device)
        pieces = buffer.split([math.prod(shape) for shape in shapes])
        matrices = iter([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)])
        for group in groups:
            down, up = next(matrices), next(matrices)
            group.all_adapters[0].copies = Copies(down, up)
            parts = zip(down.split(group.rank), up.split(group.widths), group.adapters, strict=True)
            for of_downs, of_ups, found in parts:
                start = 0
                for adapter in found:
                    stop = start + len(adapter.down)
                    if scaled_down(adapter) is adapter.down:
                        self._pair(of_downs[start:stop], adapter.down)
                    else:
                        self._scaled.append((of_downs[start:stop], adapter))
                    self._pair(of_ups[:, start:stop], adapter.up)
                    start = stop

    def _pair(self, copy: Tensor, matrix: Tensor) -> None:
        self._copies.append(copy)
        self._matrices.append(matrix)

    def drop(self) -> None:
        """Let the adapters be cast at each use again."""
        for group in self._groups:
            group.all_adapters[0].copies = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the matrices as they are now; not between a forward and its backward pass, if they have changed."""
        if self._copies:
            torch._foreach_copy_(self._copies, self._matrices)
        for copy, adapter in self._scaled:
            copy.copy_(scaled_down(adapter))


def _groups(form: Any) -> Iterator[LinearGroup]:
    """Yield the groups of linears of a fused form."""
    for field in fields(form):
        value = getattr(form, field.name)
        if isinstance(value, LinearGroup):
            yield value
        elif is_dataclass(value):
            yield from _groups(value)


def _shapes(group: LinearGroup) -> tuple[tuple[int, int], tuple[int, int]]:
    """Those of D and U."""
    width = group.all_adapters[0].down.shape[1]
    return (len(group.widths) * group.rank, width), (sum(group.widths), group.rank)
