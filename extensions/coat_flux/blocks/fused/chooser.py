"""Which blocks can be fused, and whether their fused forms give what their own code gives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from coat_core.activation import Saving
from coat_core.linear.function import compute_dtype

from ..gemms import in_high_precision
from ..models import read_list
from ..quantized import has_adopted
from .forms import Form
from .linears import NotFusable
from .parts import AS_THEY_ARE
from .reading import Reader, read_with

# of a block's output between the fused flow and the model's own code, relative, in norms: with products in high
# precision, and as it runs. Adapters in fp32, which the fused flow multiplies in bf16, make 0.5 % of the one; where
# that moves FP8 codes inside the block, 2.5 % of the other
LARGEST_DIFFERENCE, LARGEST_IN_FP8 = 0.02, 0.05
# where ai-toolkit's linears cast x to 4 bits: those codes turn over by the last bit of bf16
LARGEST_WITH_CODES = 0.1


def fused_block(
    block: nn.Module, args: tuple[Any, ...] | None = None, saving: Saving = AS_THEY_ARE, join: bool = True
) -> Form:
    """Return the block's fused form by the reader of its class; arguments and errors as `read_with`."""
    return read_with(_reader_of(block), block, args, saving, join)


def _reader_of(block: nn.Module) -> Reader:
    known = read_list(type(block))
    if known is None or known.reader is None:
        raise NotFusable(f"a {type(block).__name__} has no reader")
    return known.reader


def attention_query(block: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
    """Return a tensor shaped like q in a block's attention [B, H, T + S, d], and its mask, or raise NotFusable."""
    reader = _reader_of(block)
    call = reader.call(args)
    tokens = call.image.shape[1] + (0 if call.text is None else call.text.shape[1])
    like = torch.empty(
        (len(call.image), tokens, *reader.heads(block)), dtype=compute_dtype(call.image), device=call.image.device
    )
    return like.transpose(1, 2), call.shared.mask


def disagreement(fused: Form, block: nn.Module, args: tuple[Any, ...]) -> str:
    """Run a block both ways, to notice a diffusers version with other arithmetic; why it cannot be fused, or empty."""
    adopted = has_adopted(block)
    try:
        difference, largest = relative_difference(fused, block, args), LARGEST_WITH_CODES if adopted else LARGEST_IN_FP8
        if not adopted and difference <= largest:
            with in_high_precision(block):
                exact = fused_block(block, args, fused.saving, join=False)
                difference, largest = relative_difference(exact, block, args), LARGEST_DIFFERENCE
    except NotFusable as error:
        return str(error)
    return f"its output differs from its own code's by {difference:.1%}" if difference > largest else ""


@torch.no_grad()
def relative_difference(fused: Form, block: nn.Module, args: tuple[Any, ...]) -> float:
    """Return how far the fused block's outputs are from the block's own, as a fraction of their norm."""
    expected, found = (
        torch.cat([x.float() for x in tree_leaves(run(*args)) if isinstance(x, Tensor)], dim=1)
        for run in (block, fused)
    )
    return float((expected - found).norm() / expected.norm())
