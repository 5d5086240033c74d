"""The bytes that `decide` weighs: of one block, and of the moment of a step when all blocks together need most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from coat_core.autograd import autocast_is_on

from .described import Block, read_block
from .hook import first_tensor
from .lookup import read_list
from .lora import trained_parameters
from .sizes import BlockBytes, FlowSettings, Tokens, flux_bytes


class Rates(NamedTuple):
    """Bytes kept per element of hidden states: in high precision with fp32 LoRA, packed, packed but for attention."""

    high_precision: float
    packed: float
    attention_kept: float


# measured (RESULTS.md); the last for classes nobody measured
RATES = {
    "BasicTransformerBlock": Rates(81.0, 29.9, 35.4),
    "JointTransformerBlock": Rates(95.7, 30.7, 37.6),
    "CogVideoXBlock": Rates(59.4, 19.7, 23.6),
    "ResnetBlock2D": Rates(16.0, 8.3, 8.3),
}
UNKNOWN = Rates(96.0, 38.0, 42.0)
FP8_INPUT, BF16_INPUT = 1.03, 2.0  # bytes that a recomputed block keeps per element
ATTENTION_IN_BF16 = 4 * (BF16_INPUT - FP8_INPUT)  # more bytes per element, of q, k, v and out


@dataclass(frozen=True)
class UnknownBlock:
    """A block without a list of saved tensors: its bytes are measured per element of hidden states."""

    kind: str  # name of its class
    elements: int  # of hidden states in the largest micro-batch
    gradients: int  # bytes of its adapters
    fused: float = 0.0

    def bytes(self, settings: FlowSettings) -> BlockBytes:
        """All numbers of the block."""
        rates = RATES.get(self.kind, UNKNOWN)
        kept = rates.packed if settings.attention == "fp8" else rates.attention_kept
        if settings.flow == "fused" and self.fused:
            kept = self.fused + (0.0 if settings.attention == "fp8" else ATTENTION_IN_BF16)
        elif settings.flow == "eager":
            kept = rates.high_precision
        recomputed = FP8_INPUT if settings.fp8_checkpoint else BF16_INPUT
        whole = int(rates.high_precision * self.elements)
        return BlockBytes(int(kept * self.elements), int(recomputed * self.elements), whole, whole, self.gradients)


def read_blocks(modules: Iterable[nn.Module], args: tuple[Any, ...], elements: int) -> tuple[Block | UnknownBlock, ...]:
    """Describe blocks with their adapters, in forward order; `args` are those of the first block's call, if known."""
    trained = any(isinstance(x, Tensor) and x.requires_grad for x in args[:2])
    embedding = len(args) > 2 and isinstance(args[2], Tensor) and args[2].requires_grad
    found: list[Block | UnknownBlock] = []
    for block in modules:
        try:
            described = replace(read_block(block, trained), trained_embedding=embedding)
        except (AttributeError, ValueError):  # another class, not built as diffusers' is, or with LoKr
            gradients = sum(p.numel() * p.element_size() for p in trained_parameters(block))
            known, trained = read_list(type(block)), trained or gradients > 0
            found.append(
                UnknownBlock(type(block).__name__, elements, gradients, 0.0 if known is None else known.fused_bytes)
            )
        else:
            found.append(described)
            trained = described.trained_output
    return tuple(found)


def shown_by(args: tuple[Any, ...]) -> dict[str, Any]:
    """Fields of `decide.Given` that a block's arguments determine: types of device and values."""
    first = first_tensor(args)
    kind = first.device.type
    lora = torch.get_autocast_dtype(kind) if autocast_is_on(kind) else torch.float32
    return {"device": kind, "value_bytes": first.element_size(), "lora_bytes": lora.itemsize}


def block_bytes(block: Block | UnknownBlock, tokens: Tokens, settings: FlowSettings) -> BlockBytes:
    """All numbers of a block."""
    return block.bytes(settings) if isinstance(block, UnknownBlock) else flux_bytes(block, tokens, settings)


class Moment(NamedTuple):
    """Bytes at one moment of a step: saved for backward, temporary, gradients so far."""

    kept: int
    workspace: int
    gradients: int

    @property
    def total(self) -> int:
        """Sum of all three."""
        return sum(self)


def largest_moment(blocks: Sequence[BlockBytes], recomputed: Iterable[int] = (), accumulates: bool = False) -> Moment:
    """Find the moment of a step when the blocks need most; `accumulates`: earlier gradients are held throughout."""
    chosen = set(recomputed)
    total = sum(block.gradients for block in blocks)
    kept, later, moments = 0, total, [Moment(0, 0, 0)]
    for i, block in enumerate(blocks):
        later -= block.gradients
        kept += block.recomputed if i in chosen else block.kept
        workspace = block.recomputation if i in chosen else block.workspace
        moments.append(Moment(kept, workspace, total if accumulates else later))
    return max(moments, key=lambda moment: moment.total)


def fewest_recomputed(blocks: Sequence[BlockBytes], free: float, accumulates: bool = False) -> list[int]:
    """Choose the fewest blocks to recompute so that `largest_moment` stays within `free` bytes, or all."""
    order = sorted(range(len(blocks)), key=lambda i: blocks[i].kept - blocks[i].recomputed, reverse=True)
    kept = sum(block.kept for block in blocks)  # at the end of the forward pass, with `count` recomputed
    for count in range(len(blocks) + 1):
        if count:
            kept -= blocks[order[count - 1]].kept - blocks[order[count - 1]].recomputed
        if kept <= free and largest_moment(blocks, order[:count], accumulates).total <= free:
            return sorted(order[:count])
    return list(range(len(blocks)))
