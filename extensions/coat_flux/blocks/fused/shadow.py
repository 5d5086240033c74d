"""The adapters' matrices in the dtype that blocks multiply in: copied together, once for each forward pass.

LoRA matrices are kept in fp32 and multiply in bf16. Cast where they are used, that is 2,500 small kernels a step of
FLUX.1-dev; one buffer for all of them is filled by nine.

    buffer    [A₁·f₁; A₂·f₂; …] of the linears that read one x, then B₁, B₂, …; then those of the next x
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .linears import AdaptedLinear, Copies, scaled_down

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
        self._forms, self._dtype = list(forms), dtype
        groups = [group for form in forms for group in _groups(form)]
        adapters = [[adapter for linear in group for adapter in linear.adapters] for group in groups]
        self._pairs: list[tuple[Tensor, Tensor]] = []  # copy, what it is of
        self._scaled: list[tuple[Tensor, Any]] = []  # copy of A·f with f other than 1, its adapter
        adapters = [found for found in adapters if found]
        matrices = [[*(a.down for a in found), *(a.up for a in found)] for found in adapters]
        sizes = [matrix.numel() for found in matrices for matrix in found]
        if not sizes:
            return
        buffer = torch.empty(sum(sizes), dtype=dtype, device=matrices[0][0].device)
        pieces = (buffer[start:stop] for start, stop in pairwise(accumulate(sizes, initial=0)))
        for found in adapters:
            downs = [next(pieces).view_as(adapter.down) for adapter in found]
            ups = tuple(next(pieces).view_as(adapter.up) for adapter in found)
            for adapter, copy in zip(found, downs, strict=True):
                if scaled_down(adapter) is adapter.down:
                    self._pairs.append((copy, adapter.down))
                else:
                    self._scaled.append((copy, adapter))
            self._pairs += zip(ups, (adapter.up for adapter in found), strict=True)
            rows = sum(len(down) for down in downs)
            found[0].copies = Copies(downs[0].as_strided((rows, downs[0].shape[1]), downs[0].stride()), ups)

    def drop(self) -> None:
        """Let the adapters be cast at each use again."""
        for form in self._forms:
            for group in _groups(form):
                for adapter in (adapter for linear in group for adapter in linear.adapters):
                    adapter.copies = None

    def is_of(self, forms: Sequence[Any], dtype: torch.dtype) -> bool:
        """Whether these very forms were given, and this dtype, and the adapters are still on the same device."""
        same = len(forms) == len(self._forms) and all(map(operator.is_, forms, self._forms))
        stayed = all(copy.device == matrix.device for copy, matrix in self._pairs[:1])
        return same and stayed and dtype == self._dtype

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the matrices as they are now; not between a forward and its backward pass, if they have changed."""
        if self._pairs:
            copies, matrices = zip(*self._pairs, strict=True)
            torch._foreach_copy_(copies, matrices)
        for copy, adapter in self._scaled:
            copy.copy_(scaled_down(adapter))


def _groups(form: Any) -> Iterator[Sequence[AdaptedLinear]]:
    """Yield the linears of a fused form, those that read the same tensor together."""
    for field in fields(form):
        value = getattr(form, field.name)
        if isinstance(value, AdaptedLinear):
            yield (value,)
        elif isinstance(value, tuple) and value and isinstance(value[0], AdaptedLinear):
            yield value
        elif is_dataclass(value):
            yield from _groups(value)
