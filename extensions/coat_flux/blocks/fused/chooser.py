"""Which blocks can be fused, and whether their fused forms give what their own code gives."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from coat_core.activation import Saving
from coat_core.linear.function import compute_dtype

from ..gemms import in_high_precision
from ..hook import argument_names, first_tensor, has_hooks, hook_of
from ..models import read_list
from ..quantized import is_adopted
from .forms import Form, Reader
from .linears import NotFusable
from .parts import EXACT
from .reading import check_attention

# of a block's output between the fused flow and the model's own code, relative, in norms: with products in high
# precision, and as it runs. Adapters in fp32, which the fused flow multiplies in bf16, make 0.5 % of the one; where
# that moves FP8 codes inside the block, 2.5 % of the other
LARGEST_DIFFERENCE, LARGEST_IN_FP8 = 0.02, 0.05
# where ai-toolkit's linears cast x to 4 bits: those codes turn over by the last bit of bf16
LARGEST_WITH_CODES = 0.1


def fused_block(block: nn.Module, saving: Saving = EXACT, join: bool = True) -> Form:
    """The block's fused form; NotFusable where it does more than the fused functions, or has no reader."""
    reader = _reader_of(block)
    hook = hook_of(block)
    if (vars(block).get("forward") if hook is None else hook.before) is not None:
        raise NotFusable("its forward was replaced")
    for name, module in block.named_modules():
        if has_hooks(module):
            raise NotFusable(f"hooks on {name or 'the block'}")
    names = argument_names(type(block))
    if names != reader.arguments:
        raise NotFusable(f"this diffusers' {type(block).__name__} takes {', '.join(names)}")
    if reader.processor:
        check_attention(getattr(block, "attn", None) or block.attention, reader.processor)
    form = reader.read(block, join)
    form.reader, form.saving = reader, saving
    return form


def _reader_of(block: nn.Module) -> Reader:
    known = read_list(type(block))
    if known is None or known.reader is None:
        raise NotFusable(f"a {type(block).__name__} has no reader")
    return known.reader


def attention_query(block: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
    """A tensor shaped like q in a block's attention [B, H, T + S, d], and its mask, or raise NotFusable."""
    reader = _reader_of(block)
    call = reader.call(*args)
    image = call.image
    tokens = call.image.shape[1] + (0 if call.text is None else call.text.shape[1])
    heads, width = attrgetter(*reader.heads)(block)
    shape = len(image), tokens, heads, width // heads
    return torch.empty(shape, dtype=compute_dtype(image), device=image.device).transpose(1, 2), call.shared.mask


def disagreement(fused: Form, block: nn.Module, args: tuple[Any, ...]) -> str:
    """Run a block both ways, to notice a diffusers version with other arithmetic; why it cannot be fused, or empty."""
    if first_tensor(args).dtype == torch.float16:
        return "in fp16, which its own code clips"
    adopted = any(map(is_adopted, block.modules()))
    largest = LARGEST_WITH_CODES if adopted else LARGEST_IN_FP8
    try:
        difference = relative_difference(fused, block, args)
        if not adopted and difference <= largest:
            with in_high_precision(block):
                exact = fused_block(block, fused.saving, join=False)
                difference = relative_difference(exact, block, args)
                largest = LARGEST_DIFFERENCE
    except NotFusable as error:
        return str(error)
    return f"its output differs from its own code's by {difference:.1%}" if difference > largest else ""


@torch.no_grad()
def relative_difference(fused: Form, block: nn.Module, args: tuple[Any, ...]) -> float:
    """How far the fused block's outputs are from the block's own, as a fraction of their norm."""
    expected, actual = (
        torch.cat([x.float() for x in tree_leaves(run(*args)) if isinstance(x, Tensor)], dim=1)
        for run in (block, fused)
    )
    return float((expected - actual).norm() / expected.norm())
