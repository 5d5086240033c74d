"""Which blocks can be fused: those that can be read, after one comparison of each kind with diffusers' own code.

A block is read once, and again when anything about it has changed (`Unchanged`): trainers switch adapters on and off,
and merge them, between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from coat_core.activation import PackingConfig
from coat_core.linear.function import compute_dtype

from ..gemms import in_high_precision
from ..lookup import read_list
from ..quantized import has_adopted
from .frozen import NotFusable
from .modulation import Modulation, modulate_ahead
from .reading import FusedBlock, Reader, active_backend, read_with
from .shadow import LoraShadow
from .unchanged import Unchanged

# of a block's output between the fused flow and the model's own code, relative, in norms: with products in high
# precision, and as it runs. Adapters in fp32, which the fused flow multiplies in bf16, make 0.5 % of the one; where
# that moves FP8 codes inside the block, 2.5 % of the other
LARGEST_DIFFERENCE, LARGEST_IN_FP8 = 0.02, 0.05
# where ai-toolkit's linears cast x to 4 bits: those codes turn over by the last bit of bf16
LARGEST_WITH_CODES = 0.1


@dataclass(frozen=True)
class _Read:
    """A block's fused form, and what it was made for."""

    fused: FusedBlock
    packing: PackingConfig | None
    backend: str
    unchanged: Unchanged


class FusedForms:
    """Gives the fused form of blocks.

    The first block of each kind is run both ways, so that a diffusers version whose blocks compute something else is
    noticed at the first step and trained through its own code.

    Attributes:
        readings: how often a block was read.
    """

    def __init__(self) -> None:
        self._differs: dict[type, str] = {}  # kind of block → how its output differs; empty where it does not
        self._read: dict[int, _Read] = {}  # by id of the block, which `Unchanged` keeps alive
        self._shadow = LoraShadow((), torch.float32)
        self._place = 0  # of the block that ran last
        self.readings = 0

    def form_of(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], packing: PackingConfig | None
    ) -> FusedBlock:
        """Return the block's fused form, which takes `args` alone.

        Args:
            block: of any class.
            args: what it is about to be called with.
            kwargs: likewise; FLUX's blocks are given none.
            packing: how kept tensors are stored; None keeps them as they are.

        Raises:
            NotFusable: the block takes diffusers' own code; the message says why.
        """
        kind = type(block)
        if self._differs.get(kind):
            raise NotFusable(self._differs[kind])
        if kwargs:
            raise NotFusable(f"called with keywords ({', '.join(kwargs)})")
        fused = self._as_read(block, args, packing)
        if fused is not None:
            return fused
        key = id(block)
        self._read.pop(key, None)
        fused = fused_block(block, args, packing)
        if kind not in self._differs:
            adopted = has_adopted(block)
            difference, largest = relative_difference(fused, block, args), LARGEST_IN_FP8
            if adopted:
                largest = LARGEST_WITH_CODES
            elif difference <= largest:
                with in_high_precision(block):
                    exact = fused_block(block, args, packing, join=False)
                    difference, largest = relative_difference(exact, block, args), LARGEST_DIFFERENCE
            differs = difference > largest
            self._differs[kind] = f"its output differs from its own code's by {difference:.1%}" if differs else ""
            if differs:
                raise NotFusable(self._differs[kind])
        self.readings += 1
        unchanged = Unchanged(block, lambda: self._read.pop(key, None))
        self._read[key] = _Read(fused, packing, active_backend(), unchanged)
        return fused

    def begins(self, place: int) -> bool:
        """Whether a forward pass begins with the block that is about to run, at this place in forward order."""
        before, self._place = self._place, place
        return place <= before

    def prepare(self, block: nn.Module, args: tuple[Any, ...], copies: bool, kept: Sequence[nn.Module]) -> None:
        """Do what all blocks share at the beginning of a forward pass, for those that have been read.

        Their adapters are copied as they are now, and their modulations made.

        Args:
            block: the first one.
            args: what it is about to be called with.
            copies: False drops the adapters' copies.
            kept: blocks that run eager, and not again in the backward pass: those whose modulations are made.
        """
        dtype = compute_dtype(args[0])
        forms = [read.fused for read in self._read.values()] if copies else []
        if not self._shadow.is_of(forms, dtype):
            self._shadow.drop()
            self._shadow = LoraShadow(forms, dtype)
        self._shadow.refresh()
        modulations = [each for block in kept for each in self.modulations_of(block)]
        with suppress(NotFusable):
            temb = _reader_of(block).call(args).temb if modulations else None
            if temb is not None:
                modulate_ahead(modulations, temb)

    def modulations_of(self, block: nn.Module) -> list[Modulation]:
        """What makes a block's adaLN vectors; none before it has been read."""
        read = self._read.get(id(block))
        return [] if read is None else read.fused.block.modulations

    def _as_read(self, block: nn.Module, args: tuple[Any, ...], packing: PackingConfig | None) -> FusedBlock | None:
        read = self._read.get(id(block))
        if read is None or read.packing != packing or read.backend != active_backend() or not read.unchanged.holds():
            return None
        read.fused.reader.call(args)
        return read.fused

    def obstacle(self, block: nn.Module, args: tuple[Any, ...] | None = None) -> str | None:
        """Why a block will not be fused, as far as it shows without running it; None where it will be.

        Args:
            block: of any class.
            args: what it is about to be called with; None before that is known.
        """
        if self._differs.get(type(block)):
            return self._differs[type(block)]
        try:
            fused_block(block, args, None, join=False)
        except NotFusable as error:
            return str(error)
        return None


def fused_block(
    block: nn.Module, args: tuple[Any, ...] | None, config: PackingConfig | None, join: bool = True
) -> FusedBlock:
    """Return the block's fused form by the reader of its class; arguments and errors as `read_with`."""
    return read_with(_reader_of(block), block, args, config, join)


def _reader_of(block: nn.Module) -> Reader:
    known = read_list(type(block))
    if known is None or known.reader is None:
        raise NotFusable(f"a {type(block).__name__} has no reader")
    return known.reader


def attention_query(block: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
    """Return a tensor like q in the attention of a block [B, H, T + S, d], its values aside, and its mask.

    Args:
        block: of a class that has a reader.
        args: what it is about to be called with.

    Raises:
        NotFusable: it has none, or its reader does not take `args`.
    """
    reader = _reader_of(block)
    call = reader.call(args)
    tokens = call.image.shape[1] + (0 if call.text is None else call.text.shape[1])
    like = torch.empty(
        (len(call.image), tokens, *reader.heads(block)), dtype=compute_dtype(call.image), device=call.image.device
    )
    return like.transpose(1, 2), call.shared.mask


@torch.no_grad()
def relative_difference(fused: FusedBlock, block: nn.Module, args: tuple[Any, ...]) -> float:
    """Return how far the fused block's outputs are from the block's own, as a fraction of their norm."""
    expected, found = (
        torch.cat([x.float() for x in tree_leaves(run(*args)) if isinstance(x, Tensor)], dim=1)
        for run in (block, fused)
    )
    return float((expected - found).norm() / expected.norm())
