"""FLUX's blocks by their sizes: their linears, and an equal block on the meta device."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import UserError
from .fused.reading import argument_names
from .lookup import read_list
from .lora import toolkit_adapter
from .models import FAMILIES
from .models.family import Size

# kind of block → its linears: features in and out
LINEARS: dict[str, dict[str, tuple[Size, Size]]] = {
    blocks.kind: {
        member: (linear.inputs, outputs)
        for linear in blocks.linears
        for member, outputs in zip(linear.members, linear.outputs, strict=True)
    }
    for family in FAMILIES.values()
    for blocks in family.lists
    if blocks.kind
}
LISTS = {blocks.kind: blocks for family in FAMILIES.values() for blocks in family.lists}


def modulates(name: str) -> bool:
    """Whether a linear makes adaLN vectors, from one row an image."""
    return name.endswith(".linear")


@dataclass(frozen=True)
class Block:
    """One transformer block; `trained_embedding`: its modulation's input (in FLUX.2 the modulation) has a gradient."""

    kind: str  # of `LINEARS`: "double" (text and image streams) or "single" (both as one), of FLUX.1 or FLUX.2
    hidden: int  # d
    heads: int  # of attention
    mlp: int  # F
    ranks: tuple[tuple[str, int], ...] = ()  # (linear's name in the block, LoRA rank) of each adapter
    trained_input: bool = True  # whether a gradient goes on to what lies before the block
    trained_embedding: bool = False
    trained: tuple[str, ...] = ()  # names in the block of its own parameters that are trained, without an adapter

    @property
    def trained_output(self) -> bool:
        """Whether the block's output requires a gradient."""
        return self.trained_input or self.trained_embedding or bool(self.ranks) or bool(self.trained)

    @property
    def streams(self) -> int:
        """2 if text and image have separate linears."""
        return 2 if self.kind.endswith("double") else 1

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.hidden // self.heads

    @property
    def widest(self) -> int:
        """Input features of the MLP's second linear, the widest of the block."""
        return max(self.shape(name)[0] for name in LINEARS[self.kind])

    @property
    def weights_per_row(self) -> int:
        """Weights that a token is multiplied with."""
        shapes = [self.shape(name) for name in LINEARS[self.kind] if not modulates(name)]
        return sum(inputs * outputs for inputs, outputs in shapes) // self.streams

    def shape(self, name: str) -> tuple[int, int]:
        """(in, out) features of a linear of the block."""
        inputs, outputs = (d * self.hidden + f * self.mlp for d, f in LINEARS[self.kind][name])
        return inputs, outputs


def read_block(module: Any, trained_input: bool = True) -> Block:
    """Describe a real FLUX block with PEFT's or ai-toolkit's adapters.

    Raises:
        AttributeError: the structure differs from diffusers'.
        ValueError: another class or diffusers version, or an adapter that is not a LoRA.
    """
    known = read_list(type(module))
    if known is None or not known.kind or not _is_known(type(module)):
        raise ValueError(f"a {type(module).__name__}: sizes are known of FLUX's blocks only; treat it as unknown")
    kind = known.kind
    linears = {name: module.get_submodule(name) for name in LINEARS[kind]}
    ranks = {name: rank for name, linear in linears.items() if (rank := _rank(linear))}
    bases = [getattr(linear, "base_layer", linear) for linear in linears.values()]
    hidden, heads = bases[0].in_features, module.attn.heads
    widest = bases[-1].in_features  # of the MLP's second linear
    mlp = widest if kind.endswith("double") else widest - hidden
    own = (name for name, param in module.named_parameters() if param.requires_grad and ".lora_" not in name)
    return Block(kind, hidden, heads, mlp, tuple(ranks.items()), trained_input, trained=tuple(own))


def _is_known(cls: type[nn.Module]) -> bool:
    known = read_list(cls)
    return known is not None and known.reader is not None and known.reader.arguments == argument_names(cls)


def _rank(linear: Any) -> int:
    """Sum of the adapters' ranks on a linear; ValueError if one has none."""
    downs: Mapping[str, Any] | None = getattr(linear, "lora_A", None)
    if downs is not None:
        return sum(down.weight.shape[0] for down in downs.values())
    owner = toolkit_adapter(linear)
    if owner is None:
        return 0
    if not hasattr(owner, "lora_down"):
        raise ValueError(f"a {type(owner).__name__}: sizes are known of LoRA's only; treat the block as unknown")
    return int(owner.lora_down.weight.shape[0])


def make_block(block: Block) -> nn.Module:
    """Diffusers' block of these sizes on the meta device, without adapters; UserError if diffusers lacks it."""
    blocks = LISTS[block.kind]
    cls = getattr(importlib.import_module(f"diffusers.models.transformers.{blocks.source}"), blocks.block)
    options = {} if block.kind == "double" else {"mlp_ratio": block.mlp / block.hidden}
    with torch.device("meta"):
        made: nn.Module = cls(block.hidden, block.heads, block.head_dim, **options)
    if not _is_known(type(made)):
        raise UserError(f"{type(made).__name__} of this diffusers cannot be counted; pip install -U diffusers")
    return made


def shared_arguments(block: Block, batch: int, tokens: int, dtype: torch.dtype) -> list[Any]:
    """A block's arguments after the two streams: modulation or its input, rotary tables."""

    def vectors(count: int) -> Tensor:
        shape = (batch, count * block.hidden)
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=block.trained_embedding)

    rotary = tuple(torch.empty(tokens, block.head_dim, device="meta") for _ in range(2))
    return [*map(vectors, LISTS[block.kind].vectors), rotary]
