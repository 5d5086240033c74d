"""A block as one autograd function: its call, its saved tensors and their formats, the gradients it writes itself.

Autograd would hold every tensor an operator reads and accumulate gradients in separate kernels. Here a block saves
the tensors its passes name, the large ones in FP8, and kernels add gradients as they go.

As leaves of the graph, FLUX.1-dev's 988 adapter matrices cost a tenth of a step's host time: one autograd node
each. Inside `written_gradients` a block returns one stand-in tensor and adds their gradients to `.grad` itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from coat_core.activation import PackingConfig
from coat_core.autograd import first_order_only, without_autocast
from coat_core.granularity import PER_GROUP
from coat_core.ops.quantize import dequantize, quantize

NOT_SAVED = ("none", PER_GROUP.group_size)  # `saved_format` and `group_size` of kernels that are to pack nothing
Packed = tuple[Tensor, ...]  # (codes, scale), or (values,) where a tensor is saved as it is
Rotary = tuple[Tensor, Tensor]


class Shared(NamedTuple):
    """What the attention of all blocks of a pass shares; `mask` (`additive_mask`) broadcasts to [B, H, S, S]."""

    cos: Tensor  # fp32 [S, d] or [B, S, d]
    sin: Tensor  # fp32, like cos
    mask: Tensor | None = None


class Call(NamedTuple):
    """A block's inputs in any model; `temb` [B, D] feeds its own modulations, None if the model passes in vectors."""

    image: Tensor  # [B, S, D]
    text: Tensor | None  # [B, T, D]; None where `image` has the tokens of both, text first
    shared: Shared  # of the tokens of both, text first
    temb: Tensor | None = None
    vectors: tuple[Tensor, ...] = ()  # these [B, n·D], of each stream, text first


@dataclass(frozen=True)
class Saving:
    """How tensors are saved; `config` None saves them unpacked."""

    config: PackingConfig | None

    @cached_property
    def in_passing(self) -> tuple[str, int]:
        """`saved_format` and `group_size` for the producing kernels; "none" if they cannot pack."""
        config = self.config
        packs = config is not None and config.granularity.name == "per_group"
        return (config.format, config.granularity.group_size) if config is not None and packs else NOT_SAVED

    @cached_property
    def of_attention(self) -> Saving:
        """How q, k, v and out are saved."""
        return self if self.config is None or self.config.attention == "fp8" else AS_THEY_ARE

    def keep(self, x: Tensor, codes: Tensor, scale: Tensor) -> Packed:
        """Return the saved form of x; `codes` and `scale` come from its kernel, if any."""
        if self.config is None:
            return (x,)
        if self.in_passing[0] != "none":
            return codes, scale
        quantized = quantize(x, self.config.format, self.config.granularity)
        return quantized.codes, quantized.scale

    def read(self, packed: Packed, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return the saved form for kernels: codes and scales, or values and None."""
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
class Recomputed(Saving):
    """For a tensor that is not saved: backward recomputes it and passes `values`."""

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
    """Collects tensors by name for `ctx.save_for_backward` and finds them in backward; `wanted=False` saves nothing."""

    def __init__(self, wanted: bool = True) -> None:
        self.wanted = wanted
        self.facts: dict[str, Any] = {}
        self._tensors: Any = []  # a list, or what autograd hands back
        self._places: dict[str, tuple[int, int]] = {}
        self._watched: Sequence[Tensor] = ()

    def add(self, name: str, *tensors: Tensor | None) -> None:
        """Save these tensors, None left out, under one name."""
        start = len(self._tensors)
        if self.wanted:
            self._tensors += [tensor for tensor in tensors if tensor is not None]
        self._places[name] = (start, len(self._tensors))

    def saving(self, asked: Saving) -> Saving:
        """How tensors are saved here, if at all."""
        return asked if self.wanted else AS_THEY_ARE

    def __getitem__(self, name: str) -> Packed:
        start, stop = self._places[name]
        return tuple(self._tensors[start:stop])

    def first(self, name: str) -> Tensor | None:
        """The first tensor of that name, or None."""
        start, stop = self._places[name]
        return self._tensors[start] if stop > start else None

    def save(self, ctx: Any, watched: Sequence[Tensor]) -> None:
        """Hand everything to autograd, which detects in-place changes; `watched` parameters are compared by version."""
        ctx.save_for_backward(*self._tensors)
        ctx.kept_places, ctx.kept_facts = self._places, self.facts
        ctx.kept_watched = watched, [tensor._version for tensor in watched]

    @classmethod
    def of(cls, ctx: Any) -> Kept:
        """The saved tensors, in backward; RuntimeError if one was changed in place since."""
        watched, versions = ctx.kept_watched
        if [tensor._version for tensor in watched] != versions:
            raise RuntimeError(
                "an adapter that the backward pass needs has been modified by an inplace operation: change adapters "
                "after it"
            )
        kept = cls()
        kept._tensors, kept._places, kept.facts = ctx.saved_tensors, ctx.kept_places, ctx.kept_facts
        return kept


_written: ContextVar[bool] = ContextVar("written", default=False)
_requires_grad = attrgetter("requires_grad")
_STAND_IN = torch.zeros((), requires_grad=True)


@contextmanager
def written_gradients(on: bool = True) -> Iterator[None]:
    """Let blocks called in here write their adapters' gradients, for a trainer that reads `.grad` after `backward()`.

    `torch.autograd.grad` finds no adapter in such a graph, and hooks on adapters (DistributedDataParallel) do not
    run.
    """
    token = _written.set(on)
    try:
        yield
    finally:
        _written.reset(token)


def leaves_of(parameters: Sequence[nn.Parameter]) -> Sequence[Tensor]:
    """An autograd function's inputs for its adapters: the matrices, or their stand-in."""
    stands = _written.get() and parameters and all(map(_requires_grad, parameters))
    return (_STAND_IN,) if stands else parameters


def returned(count: int, parameters: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> Sequence[Any]:
    """A backward pass's result for its `count` leaves; with a stand-in, `.grad` is written."""
    if count == len(parameters):
        return grads
    for parameter, grad in zip(parameters, grads, strict=True):
        if parameter.grad is None:
            parameter.grad = grad
        else:
            parameter.grad += grad
    return (None,)


class WrittenOut(Protocol):
    """A block with written-out passes: `backward` returns the gradients of `forward`'s inputs and parameters."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The adapters' matrices, in the order of `backward`'s gradients."""

    def forward(
        self, kept: Kept, shared: Shared, inputs: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[Tensor, ...]:
        """Return the outputs, and save in `kept` what backward needs."""

    def backward(
        self, kept: Kept, shared: Shared, grads: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """Return the gradients of the inputs and of the parameters."""


def run_block(block: WrittenOut, shared: Shared, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Run the block with gradients for its inputs and its adapters."""
    fixed = shared[: 2 if shared.mask is None else 3]
    outputs: tuple[Tensor, ...] = _Block.apply(
        block, torch.is_grad_enabled(), len(fixed), len(inputs), *fixed, *inputs, *leaves_of(block.parameters)
    )
    return outputs


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, block: WrittenOut, keeps: bool, first: int, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        kept, shared, inputs = Kept(keeps), Shared(*tensors[:first]), tensors[first : first + count]
        ctx.inputs = slice(4 + first, 4 + first + count)  # among the arguments
        outputs = block.forward(kept, shared, inputs, ctx.needs_input_grad[ctx.inputs])
        leaves = tensors[first + count :]
        kept.save(ctx, leaves if len(leaves) == len(block.parameters) else block.parameters)
        ctx.block, ctx.shared, ctx.leaves = block, shared, len(leaves)
        return outputs

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[ctx.inputs]
        with without_autocast(grads[0].device):
            of_inputs, of_parameters = ctx.block.backward(Kept.of(ctx), ctx.shared, grads, needs)
        needed = [grad if needed else None for grad, needed in zip(of_inputs, needs, strict=True)]
        return *[None] * ctx.inputs.start, *needed, *returned(ctx.leaves, ctx.block.parameters, of_parameters)
