"""The fused FP8 flow: FLUX blocks through autograd functions that keep only what DESIGN lists, in FP8."""

from .blocks import FUSABLE, FusedBlock, fused_block, relative_difference
from .linears import NotFusable

__all__ = ["FUSABLE", "FusedBlock", "NotFusable", "fused_block", "relative_difference"]
