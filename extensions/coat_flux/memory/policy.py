"""Per block: keep what it saves (in FP8), or recompute it in backward (from an FP8 input).

Works through the one function that every diffusers model calls around each of its blocks
(`enable_gradient_checkpointing(function)`), so both hosts and all architectures share it.

`auto` keeps as many blocks as the budget allows. What a kept block saves is estimated as
elements of its hidden states × bytes per element from `SAVED_BYTES`; the sizes are known at the first forward pass,
so that is when the choice is made, and printed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from coat_core.activation import PackedSavedTensors, PackingConfig, fp8_checkpoint
from coat_core.granularity import Granularity

from ..flow import FUSABLE, FusedFlow
from .budget import budget_bytes, held_bytes

if TYPE_CHECKING:
    from ..config import COATConfig

logger = logging.getLogger(__name__)

# bytes kept per element of hidden states: bf16 with fp32 LoRA, packed FP8, packed FP8 but attention in bf16;
# scripts/bench_memory.py, EXPERIMENTS.md
SAVED_BYTES = {"FluxTransformerBlock": (62.3, 18.6, 22.5), "FluxSingleTransformerBlock": (62.2, 17.6, 21.4)}
SAVED_BYTES_UNKNOWN = (62.3, 30.0, 34.0)


class BlockPolicy:
    """The function a diffusers model calls instead of each block: `policy(block, *args)`.

    Args:
        blocks: full name → block, in forward order.
        config: the `coat:` block.
        allow_recompute: False forbids recomputation.

    Raises:
        ValueError: `memory.checkpointing` is all or every_n while the host forbids recomputation.
    """

    def __init__(self, blocks: dict[str, nn.Module], config: COATConfig, allow_recompute: bool) -> None:
        mode = config.memory.checkpointing
        if not allow_recompute and mode in ("all", "every_n"):
            raise ValueError(
                f"coat.memory.checkpointing={mode!r}: train.gradient_checkpointing is false, which forbids "
                "recomputation; set one of them differently (checkpointing: none, or gradient_checkpointing: true)"
            )
        self.mode = mode if allow_recompute else "none"
        self.memory = config.memory
        granularity = Granularity(config.activation.nonlinear_granularity, config.activation.group_size)
        self.packing = PackingConfig(config.activation.format, granularity, config.activation.attention)
        self.packs = config.activation.use_fp8
        self.blocks = blocks
        self._recomputed: set[int] = self._fixed_choice()
        self._chosen_for = 0
        self._fused_flow = FusedFlow(self.packing) if self.packs and config.activation.flow == "fused" else None
        self._got: dict[int, str] = {}
        self._told: Counter[str] = Counter()
        self._last = id(list(blocks.values())[-1])

    @classmethod
    def install(
        cls, model: Any, block_lists: tuple[str, ...], config: COATConfig, allow_recompute: bool
    ) -> BlockPolicy:
        """Make the policy for `model` and put it in place of its gradient checkpointing function.

        Args:
            model: a diffusers model.
            block_lists: fnmatch patterns of the module lists whose items the model passes to that function, in
                forward order.
            config: the `coat:` block.
            allow_recompute: False forbids recomputation.

        Raises:
            ValueError: no module list matches, or as the class.
        """
        blocks = {
            f"{name}.{i}": block
            for pattern in block_lists
            for name, items in model.named_modules()
            if isinstance(items, nn.ModuleList) and fnmatchcase(name, pattern)
            for i, block in enumerate(items)
        }
        if not blocks:
            raise ValueError(
                f"{type(model).__name__}: has none of the block lists its policy names ({', '.join(block_lists)}); "
                "use a diffusers version that has them, or change coat_flux.flux.policy"
            )
        policy = cls(blocks, config, allow_recompute)
        model.enable_gradient_checkpointing(policy)
        return policy

    def describe(self) -> str:
        """One line: what is recomputed, how kept blocks store what they save."""
        stored = f"FP8 {self.packing.format} {self.packing.granularity.name}, attention {self.packing.attention}"
        fusable = any(type(block).__name__ in FUSABLE for block in self.blocks.values())
        flow = "fused" if self._fused_flow and fusable else "generic"
        kept = f"kept blocks save {stored}, {flow} flow" if self.packs else "kept blocks save high precision"
        inputs = "FP8" if self.memory.enable_efficient_checkpoint else "high precision"
        if self.mode == "auto":
            return f"checkpointing auto (chosen at the first step); {kept}; recomputed blocks keep {inputs} inputs"
        count = len(self._recomputed)
        return f"checkpointing {self.mode}: {count} of {len(self.blocks)} blocks recompute from {inputs} inputs; {kept}"

    def __call__(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run one block, recomputing it in backward or keeping what it saves."""
        if self.mode == "auto":
            self._choose(args)
        if self._recomputes(block):
            self._note(block, "recomputed")
            if self.memory.enable_efficient_checkpoint:
                packing = self.packing
                return fp8_checkpoint(block, *args, fmt=packing.format, granularity=packing.granularity, **kwargs)
            return checkpoint(block, *args, use_reentrant=False, **kwargs)
        if not self.packs:
            self._note(block, "kept in high precision")
            return block(*args, **kwargs)
        fused = None if self._fused_flow is None else self._fused_flow.form_of(block, args, kwargs)
        if fused is not None:
            self._note(block, f"kept in FP8, fused flow, attention {self.packing.attention}")
            return fused(*args)
        self._note(block, f"kept in FP8, generic flow, attention {self.packing.attention}")
        with PackedSavedTensors(self.packing, keep=_frozen_tensors(block, (args, kwargs))):
            return block(*args, **kwargs)

    def _note(self, block: nn.Module, got: str) -> None:
        """Count what each block got; one line in the log at the last block, where that is new."""
        self._got[id(block)] = got
        counts = Counter(self._got.values())
        if id(block) == self._last and counts != self._told:
            self._told = counts
            logger.info("blocks: %s", "; ".join(f"{count} {what}" for what, count in counts.items()))

    def _recomputes(self, block: nn.Module) -> bool:
        if any(block is listed for listed in self.blocks.values()):
            return id(block) in self._recomputed
        if self.mode == "every_n":
            raise ValueError(
                f"coat.memory.checkpointing='every_n': this model checkpoints {type(block).__name__} modules inside "
                "its blocks, which cannot be counted; set checkpointing: all or none"
            )
        return self.mode in ("all", "auto")  # what such a part saves is unknown to auto

    def _fixed_choice(self) -> set[int]:
        ids = [id(block) for block in self.blocks.values()]
        if self.mode == "all":
            return set(ids)
        if self.mode == "every_n":
            n = self.memory.every_n
            return set(ids[n - 1 :: n])
        return set()

    def _choose(self, args: tuple[Any, ...]) -> None:
        """For `auto`: the fewest recomputed blocks that fit the budget at this size, chosen anew when it grows."""
        hidden = [x for x in args if isinstance(x, Tensor) and x.ndim == 3]
        elements = sum(x.numel() for x in hidden)
        if elements <= self._chosen_for:
            return
        self._chosen_for = elements
        saved = {id(block): self._saved_bytes(block) * elements for block in self.blocks.values()}
        free = budget_bytes(hidden[0].device, self.memory.budget_gb) - held_bytes(hidden[0].device)
        # while one block is recomputed, all it saves in high precision is there at once
        free -= max(_rates(block)[0] for block in self.blocks.values()) * elements
        needed = sum(saved.values())
        self._recomputed.clear()
        for block in sorted(saved, key=saved.__getitem__, reverse=True):
            if needed <= free:
                break
            self._recomputed.add(block)
            needed -= saved[block] - self._input_bytes() * elements
        logger.info(
            "checkpointing auto: %d of %d blocks recompute (%.2f GB to keep for backward, %.2f GB free for it)",
            len(self._recomputed), len(self.blocks), needed / 1e9, free / 1e9,
        )  # fmt: skip
        if needed > free:
            logger.warning("memory.budget_gb: even recomputing every block may exceed the budget; lower the resolution")

    def _saved_bytes(self, block: nn.Module) -> float:
        high_precision, packed, attention_kept = _rates(block)
        if not self.packs:
            return high_precision
        return packed if self.packing.attention == "fp8" else attention_kept

    def _input_bytes(self) -> float:
        return 1.03 if self.memory.enable_efficient_checkpoint else 2.0


def _rates(block: nn.Module) -> tuple[float, float, float]:
    return SAVED_BYTES.get(type(block).__name__, SAVED_BYTES_UNKNOWN)


def _frozen_tensors(block: nn.Module, args: tuple[Any, ...]) -> Iterator[Tensor]:
    """Parameters and buffers of the block, and constants given to it that all blocks share (rotary tables)."""
    yield from block.parameters()
    yield from block.buffers()
    yield from (x for x in _tensors(args) if not x.requires_grad)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
