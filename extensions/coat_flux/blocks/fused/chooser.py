"""Which blocks can be fused, and when they must be read again: trainers switch, scale and merge adapters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from coat_core.activation import PackingConfig
from coat_core.linear.function import compute_dtype

from ..gemms import in_high_precision
from ..models import read_list
from ..quantized import has_adopted
from .linears import NotFusable
from .reading import FusedBlock, Reader, has_hooks, read_with

# of a block's output between the fused flow and the model's own code, relative, in norms: with products in high
# precision, and as it runs. Adapters in fp32, which the fused flow multiplies in bf16, make 0.5 % of the one; where
# that moves FP8 codes inside the block, 2.5 % of the other
LARGEST_DIFFERENCE, LARGEST_IN_FP8 = 0.02, 0.05
# where ai-toolkit's linears cast x to 4 bits: those codes turn over by the last bit of bf16
LARGEST_WITH_CODES = 0.1


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
    """Return a tensor shaped like q in a block's attention [B, H, T + S, d], and its mask, or raise NotFusable."""
    reader = _reader_of(block)
    call = reader.call(args)
    tokens = call.image.shape[1] + (0 if call.text is None else call.text.shape[1])
    like = torch.empty(
        (len(call.image), tokens, *reader.heads(block)), dtype=compute_dtype(call.image), device=call.image.device
    )
    return like.transpose(1, 2), call.shared.mask


def check_agreement(fused: FusedBlock, block: nn.Module, args: tuple[Any, ...]) -> None:
    """Run a block both ways, to notice a diffusers version with other arithmetic; NotFusable if the outputs differ."""
    adopted = has_adopted(block)
    difference, largest = relative_difference(fused, block, args), LARGEST_WITH_CODES if adopted else LARGEST_IN_FP8
    if not adopted and difference <= largest:
        with in_high_precision(block):
            exact = fused_block(block, args, fused.block.saving.config, join=False)
            difference, largest = relative_difference(exact, block, args), LARGEST_DIFFERENCE
    if difference > largest:
        raise NotFusable(f"its output differs from its own code's by {difference:.1%}")


@torch.no_grad()
def relative_difference(fused: FusedBlock, block: nn.Module, args: tuple[Any, ...]) -> float:
    """Return how far the fused block's outputs are from the block's own, as a fraction of their norm."""
    expected, found = (
        torch.cat([x.float() for x in tree_leaves(run(*args)) if isinstance(x, Tensor)], dim=1)
        for run in (block, fused)
    )
    return float((expected - found).norm() / expected.norm())


class BlockState:
    """Everything a trainer may replace in blocks and adapters, as one list to compare.

    In-place changes do not count. Modules are referenced, so that their ids stay unique; tensors are not, so that
    no codes stay on a GPU when the model moves to the CPU. `on_moved` is called after a block's buffers were
    replaced and freed.
    """

    def __init__(self, blocks: Iterable[nn.Module], on_moved: Callable[[], None]) -> None:
        blocks = list(blocks)
        self._modules = [module for block in blocks for module in _modules(block) if _holds_something(module)]
        self._states = list(map(vars, self._modules))
        self._adapted = [state for state in self._states if "scaling" in state]  # PEFT's layers
        networks = (state["network_ref"]() for state in self._states if "network_ref" in state)
        self._networks = list({id(network): network for network in networks}.values())
        buffers = (next(block.buffers(), None) for block in blocks)
        self._moves = [weakref.ref(buffer, lambda _: on_moved()) for buffer in buffers if buffer is not None]
        self._before = self._key()

    def changed(self) -> bool:
        """Whether anything differs since construction."""
        return self._key() != self._before

    def _key(self) -> list[Any]:
        states = self._states
        tensors = [x for s in states for x in (*s["_parameters"].values(), *s["_buffers"].values()) if x is not None]
        return [
            *map(type, self._modules),
            *(child for state in states for child in state["_modules"].values()),
            *map(id, tensors),
            *(x.requires_grad for x in tensors),
            *(x.data_ptr() for x in tensors if type(x) is Tensor),  # of a buffer: another may have the identity of one
            *((s["training"], s.get("forward"), s.get("config"), s.get("coat_linear_config")) for s in states),
            *map(has_hooks, self._modules),
            *((s["_disable_adapters"], *s["_active_adapter"], *s["merged_adapters"]) for s in self._adapted),
            *((*s["scaling"].values(), *s["lora_variant"]) for s in self._adapted),
            *map(_network_state, self._networks),
        ]


def _modules(block: nn.Module) -> Iterator[nn.Module]:
    """The modules of a block and of ai-toolkit's LoRAs on it, which are no part of it."""
    for module in block.modules():
        yield module
        owner = getattr(vars(module).get("forward"), "__self__", None)
        while hasattr(owner, "lora_down") and hasattr(owner, "org_forward"):
            yield from owner.modules()
            owner = getattr(owner.org_forward, "__self__", None)


def _holds_something(module: nn.Module) -> bool:
    return bool(module._modules or module._parameters or module._buffers)


def _network_state(network: Any) -> tuple[Any, ...]:
    strengths = network._multiplier if isinstance(network._multiplier, list) else [network._multiplier]
    differ = any(strength != strengths[0] for strength in strengths)  # a tensor is read where they do, a new one a step
    switches = (network.is_active, network.is_merged_in, network.is_lorm)
    return *switches, *strengths, id(network.torch_multiplier) if differ else None
