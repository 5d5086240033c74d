"""Which blocks take the fused flow: those that can, after one comparison of each kind with diffusers' own code."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from coat_core.activation import PackingConfig
from coat_core.kernels.attention import chosen_kernel

from .flux1 import FUSABLE, FusedBlock, fused_block
from .linears import NotFusable

logger = logging.getLogger(__name__)

# of a block's output between the fused flow and diffusers' code, relative, in norms; on a CPU it is that of rounding
LARGEST_DIFFERENCE = 0.02

GENERIC = "generic flow in place of the fused one, which keeps less"


class FusedFlow:
    """Gives the fused form of a block, or None where it takes the generic flow; the reason is logged once per kind.

    The first block of each kind is run both ways, so that a diffusers version whose blocks compute something else is
    noticed at the first step and trained through its own code.

    Args:
        packing: how kept tensors are stored; None keeps them as they are.
        otherwise: what a block does that cannot be fused, for the log.
        on_lost: called with a block that cannot be fused and its arguments; returns what that costs, for the log.
    """

    def __init__(
        self,
        packing: PackingConfig | None,
        otherwise: str = GENERIC,
        on_lost: Callable[[nn.Module, tuple[Any, ...]], str] = lambda block, args: "",
    ) -> None:
        self._packing, self._otherwise, self._on_lost = packing, otherwise, on_lost
        self._equal: dict[type, bool] = {}
        self._told: set[tuple[str, str]] = set()

    def form_of(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FusedBlock | None:
        """Return the block's fused form, which takes `args` alone, or None.

        Args:
            block: of any class.
            args: what it is about to be called with.
            kwargs: likewise; FLUX's blocks are given none.
        """
        kind = type(block)
        if kind.__name__ not in FUSABLE or not self._equal.get(kind, True):
            return None
        if kwargs:
            self._tell(block, args, f"called with keywords ({', '.join(kwargs)})")
            return None
        try:
            fused = fused_block(block, args, self._packing)
        except NotFusable as error:
            self._tell(block, args, str(error))
            return None
        if kind not in self._equal:
            difference = relative_difference(fused, block, args)
            self._equal[kind] = difference <= LARGEST_DIFFERENCE
            if not self._equal[kind]:
                self._tell(block, args, f"its output differs from diffusers' by {difference:.1%}")
                return None
        return fused

    def obstacle(self, block: nn.Module, args: tuple[Any, ...] | None = None) -> str | None:
        """Why a block will not be fused, as far as it shows without running it; None where it will be.

        Args:
            block: of any class.
            args: what it is about to be called with; None before that is known.
        """
        if not self._equal.get(type(block), True):
            return "its output differs from diffusers'"
        try:
            fused_block(block, args, self._packing)
        except NotFusable as error:
            return str(error)
        return None

    @property
    def obstacles(self) -> list[str]:
        """Why blocks are not fused, those that were met so far, by kind of block."""
        return sorted(f"{kind}: {reason}" for kind, reason in self._told)

    def _tell(self, block: nn.Module, args: tuple[Any, ...], reason: str) -> None:
        key, cost = (type(block).__name__, reason), self._on_lost(block, args)
        if key not in self._told:
            self._told.add(key)
            logger.warning("%s: %s: %s%s", key[0], self._otherwise, reason, cost)


def attention_kernel(block: nn.Module, args: tuple[Any, ...]) -> str:
    """Name torch's choice for the attention of a FLUX.1 block, as `coat_core.kernels.attention` names it.

    Args:
        block: of a class in `FUSABLE`.
        args: what it is about to be called with: image [B, S, D] and text [B, T, D] first.
    """
    attn: Any = block.attn
    image, text = args[0], args[1]
    kind = image.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else image.dtype
    shape = (image.shape[0], image.shape[1] + text.shape[1], attn.heads, attn.head_dim)
    q = torch.empty(shape, dtype=dtype, device=image.device).transpose(1, 2)
    return chosen_kernel(q, q, q)


@torch.no_grad()
def relative_difference(fused: FusedBlock, block: nn.Module, args: tuple[Any, ...]) -> float:
    """Return how far the fused block's outputs are from the block's own, as a fraction of their norm."""
    expected, found = (torch.cat([x.float() for x in run(*args)], dim=1) for run in (block, fused))
    return float((expected - found).norm() / expected.norm())
