"""What autograd keeps for backward, read from the tensors themselves."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from coat_core.activation import ExactTensor, PackedSavedTensors
from coat_core.quantize import Quantized
from coat_flux.blocks.fused.parts import Kept


def saved_by(run: Callable[[], Any]) -> tuple[Any, list[Tensor]]:
    """What `run` returns, and the tensors that it saves for backward."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        return run(), saved


@dataclass
class Saved:
    """One tensor an operator saved: as it was, and in which storages it is kept."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    packed: Quantized | None
    storages: dict[int, int]  # address -> bytes


@dataclass
class SavedTensors:
    """Everything saved inside a `recording()`."""

    tensors: list[Saved] = field(default_factory=list)
    alive: list[object] = field(default_factory=list)  # so that no address is used twice

    def add(self, tensor: Tensor, result: Any) -> None:
        packed = None if isinstance(result, ExactTensor) else result.args[0]
        parts = (tensor,) if packed is None else (packed.codes, packed.scale)
        storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
        self.tensors.append(Saved(tuple(tensor.shape), tensor.dtype, packed, storages))
        self.alive.append(parts)

    @property
    def packed(self) -> list[Saved]:
        return [saved for saved in self.tensors if saved.packed is not None]

    def bytes(self) -> int:
        """Bytes kept, each storage once."""
        return sum({address: n for saved in self.tensors for address, n in saved.storages.items()}.values())


@contextmanager
def recording() -> Iterator[SavedTensors]:
    """Record what `PackedSavedTensors` sees, inside attention and outside it."""
    saved = SavedTensors()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_pack", "_pack_attention"):
            original = getattr(PackedSavedTensors, name)

            def recorded(self, tensor, *inputs, original=original):
                before = len(saved.tensors)
                result = original(self, tensor, *inputs)
                if len(saved.tensors) == before:  # _pack_attention calls _pack for what it may pack
                    saved.add(tensor, result)
                return result

            patch.setattr(PackedSavedTensors, name, recorded)
        yield saved


@contextmanager
def recording_fused() -> Iterator[list[tuple[str, tuple[Tensor, ...]]]]:
    """Record what the fused flow's functions keep, by name."""
    kept: list[tuple[str, tuple[Tensor, ...]]] = []
    with pytest.MonkeyPatch.context() as patch:
        add = Kept.add

        def recorded(self, name, *tensors):
            if self.wanted:
                kept.append((name, tuple(tensor for tensor in tensors if tensor is not None)))
            add(self, name, *tensors)

        patch.setattr(Kept, "add", recorded)
        yield kept
