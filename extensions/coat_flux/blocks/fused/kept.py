"""What a block keeps for backward: named tensors, the large ones in FP8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coat_core.activation import PackingConfig
from coat_core.granularity import PER_GROUP
from coat_core.ops.quantize import dequantize, quantize

NOT_SAVED = ("none", PER_GROUP.group_size)  # `saved_format` and `group_size` of kernels that are to pack nothing
Packed = tuple[Tensor, ...]  # (codes, scale), or (values,) where a tensor is kept as it is


@dataclass(frozen=True)
class Saving:
    """How tensors are kept.

    Attributes:
        config: None keeps them as they are.
        in_passing: `saved_format` and `group_size` of the kernels that make what is kept; "none" where they cannot
            pack it.
        of_attention: how q, k, v and out are kept.
    """

    config: PackingConfig | None

    def __post_init__(self) -> None:
        config = self.config
        packs = config is not None and config.granularity.name == "per_group"
        in_passing = (config.format, config.granularity.group_size) if packs else NOT_SAVED
        whole = config is None or config.attention == "fp8"
        vars(self).update(in_passing=in_passing, of_attention=self if whole else AS_THEY_ARE)

    def keep(self, x: Tensor, codes: Tensor, scale: Tensor) -> Packed:
        """Return what is kept of x; `codes` and `scale` are those that its kernel made, where it did."""
        if self.config is None:
            return (x,)
        if self.in_passing[0] != "none":
            return codes, scale
        quantized = quantize(x, self.config.format, self.config.granularity)
        return quantized.codes, quantized.scale

    def read(self, packed: Packed, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return what `keep` returned as kernels read it: codes and their scales, or values and None."""
        if len(packed) == 2 and self.in_passing[0] != "none":
            return packed
        return self.unpack(packed, dtype), None

    def unpack(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        """Return the values, in `dtype`."""
        if self.config is None or len(packed) == 1:
            return packed[0]
        return dequantize(packed[0], packed[1], self.config.granularity, dtype)


AS_THEY_ARE = Saving(None)


@dataclass(frozen=True)
class MadeAgain(Saving):
    """Of a tensor that is not kept: backward makes it again, and hands it over as `values`."""

    config: PackingConfig | None = None
    values: Tensor | None = None

    def keep(self, x: Tensor, codes: Tensor, scale: Tensor) -> Packed:
        """Nothing."""
        return ()

    def unpack(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        """The values."""
        assert self.values is not None
        return self.values


class Kept:
    """Collects tensors by name for `ctx.save_for_backward`, and finds them again in backward.

    Args:
        wanted: False keeps nothing: no backward pass follows.

    Attributes:
        wanted: as given.
        facts: what is kept besides tensors.
    """

    def __init__(self, wanted: bool = True) -> None:
        self.wanted = wanted
        self._tensors: Any = []  # a list, or what autograd hands back
        self._places: dict[str, tuple[int, int]] = {}
        self._watched: list[tuple[Sequence[Tensor], list[int]]] = []
        self.facts: dict[str, Any] = {}

    def add(self, name: str, *tensors: Tensor | None) -> None:
        """Keep these tensors under one name; those that are None are left out."""
        start = len(self._tensors)
        if self.wanted:
            self._tensors += [tensor for tensor in tensors if tensor is not None]
        self._places[name] = (start, len(self._tensors))

    def watch(self, tensors: Sequence[Tensor]) -> None:
        """Let backward refuse if these, which others keep, have been changed in place: cheaper than to save them."""
        self._watched.append((tensors, _versions(tensors)))

    def saving(self, asked: Saving) -> Saving:
        """How tensors are kept here: as asked, or not at all."""
        return asked if self.wanted else AS_THEY_ARE

    def __getitem__(self, name: str) -> Packed:
        start, stop = self._places[name]
        return tuple(self._tensors[start:stop])

    def first(self, name: str) -> Tensor | None:
        """The first tensor of that name; None where there is none."""
        start, stop = self._places[name]
        return self._tensors[start] if stop > start else None

    def save(self, ctx: Any) -> None:
        """Hand everything to autograd, which also watches over in-place changes."""
        ctx.save_for_backward(*self._tensors)
        ctx.kept_places, ctx.kept_facts, ctx.kept_watched = self._places, self.facts, self._watched

    @classmethod
    def of(cls, ctx: Any) -> Kept:
        """What was saved, in backward; RuntimeError where it has been changed in place since."""
        if any(_versions(tensors) != versions for tensors, versions in ctx.kept_watched):
            raise RuntimeError(
                "an adapter that the backward pass needs has been modified by an inplace operation: change adapters "
                "after it"
            )
        kept = cls()
        kept._tensors, kept._places, kept.facts = ctx.saved_tensors, ctx.kept_places, ctx.kept_facts
        return kept


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]
