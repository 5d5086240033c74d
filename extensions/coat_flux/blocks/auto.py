"""`memory.checkpointing: auto`: the fewest recomputed blocks that stay within the budget.

Sizes are known at the first forward pass, so that is when the choice is made, and printed; it is made anew when a
larger batch or picture comes, or when gradients turn out to be accumulated. FLUX's blocks are reckoned by the formulas
that `coat-flux plan` prints, other architectures' by measured bytes per element of hidden states.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from .budget import budget_bytes, held_bytes
from .decide import BlockBytes, block_bytes, fewest_recomputed, largest_moment, settings_of
from .fused.chooser import FusedFlow
from .fused.flux1 import FUSABLE
from .lora import trained_parameters
from .sizes import FlowSettings, Tokens, around_bytes, kept_bytes, read_block

if TYPE_CHECKING:
    from ..config.coat import COATConfig

logger = logging.getLogger(__name__)


class Rates(NamedTuple):
    """Bytes kept per element of hidden states: in high precision with fp32 LoRA, packed, packed but for attention."""

    high_precision: float
    packed: float
    attention_kept: float


# scripts/bench_architectures.py, EXPERIMENTS.md; the last for classes nobody measured
RATES = {
    "BasicTransformerBlock": Rates(81.0, 29.9, 35.4),
    "JointTransformerBlock": Rates(95.7, 30.7, 37.6),
    "CogVideoXBlock": Rates(59.4, 19.7, 23.6),
    "ResnetBlock2D": Rates(16.0, 8.3, 8.3),
}
UNKNOWN = Rates(96.0, 38.0, 42.0)
FP8_INPUT, BF16_INPUT = 1.03, 2.0  # bytes that a recomputed block keeps per element
FP8_STATE, FP32_STATE = 1.1, 4.0  # bytes per parameter of one moment of AdamW


class AutoCheckpointing:
    """Chooses which blocks recompute.

    Args:
        blocks: full name → block, in forward order.
        config: the `coat:` block.
        flow: which blocks are fused; None where none is.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], config: COATConfig, flow: FusedFlow | None) -> None:
        self._blocks = list(blocks.values())
        self._config, self._flow = config, flow
        self._chosen_for = (0, False)
        self._generic: set[int] = set()  # blocks counted on as not fused
        self._outdated = False
        self._tokens = Tokens(0, 0, 0)  # of the largest micro-batch
        self._held: float | None = None  # before anything of a step is there
        self._trained: list[nn.Parameter] = []
        self.spare = -1.0  # bytes that a step leaves free; below 0 where blocks recompute

    @property
    def has_chosen(self) -> bool:
        """Whether a forward pass has come."""
        return self._chosen_for[0] > 0

    def choose(self, args: tuple[Any, ...]) -> set[int] | None:
        """Return the ids of the blocks to recompute, or None where the last choice holds.

        Args:
            args: what a block is about to be called with.
        """
        hidden = [x for x in args if isinstance(x, Tensor) and x.ndim == 3]
        size = sum(x.numel() for x in hidden)
        accumulates = bool(self._trained) and self._trained[0].grad is not None
        if size <= self._chosen_for[0] and accumulates <= self._chosen_for[1] and not self._outdated:
            return None
        self._outdated = False
        if size > self._chosen_for[0] and len(hidden) == 2:
            self._tokens = Tokens(hidden[0].shape[0], hidden[1].shape[1], hidden[0].shape[1])
        self._chosen_for = max(size, self._chosen_for[0]), accumulates or self._chosen_for[1]
        device = hidden[0].device
        if self._held is None:
            self._trained = [p for block in self._blocks for p in trained_parameters(block)]
            self._held = held_bytes(device) + self._optimizer_bytes()
        free = budget_bytes(device, self._config.memory.budget_gb) - self._held
        if all(type(block).__name__ in FUSABLE for block in self._blocks):
            sizes, around = self._flux_sizes(args)
        else:
            sizes, around = [self._rough_sizes(block, self._chosen_for[0]) for block in self._blocks], 0
        chosen = fewest_recomputed(sizes, free - around, self._chosen_for[1])
        peak = largest_moment(sizes, chosen, self._chosen_for[1]).total + around
        self.spare = -1.0 if chosen else free - peak
        self._tell(chosen, peak, free)
        return {id(self._blocks[i]) for i in chosen}

    def count_as_generic(self, block: nn.Module) -> None:
        """Choose again where a block turns out not to be fused after all."""
        if id(block) not in self._generic:
            self._generic.add(id(block))
            self._outdated = True

    def _optimizer_bytes(self) -> float:
        """The optimizer makes its states after the first backward pass."""
        options = self._config.optimizer
        fp8 = [options.use_fp8 and moment for moment in (options.use_fp8_m1, options.use_fp8_m2)]
        return sum(FP8_STATE if moment else FP32_STATE for moment in fp8) * sum(p.numel() for p in self._trained)

    def _flux_sizes(self, args: tuple[Any, ...]) -> tuple[list[BlockBytes], int]:
        image, text, tokens = args[0], args[1], self._tokens
        fused = settings_at(self._config, image)
        dropout = any(isinstance(module, nn.Dropout) and module.p for module in self._blocks[0].modules())
        generic = replace(settings_at(_generic(self._config), image), dropout=dropout)
        sizes, trained = [], image.requires_grad or text.requires_grad
        for block in self._blocks:
            if self._flow is None or self._flow.obstacle(block, args) is not None:
                self._generic.add(id(block))
            described = read_block(block, trained)
            sizes.append(block_bytes(described, tokens, generic if id(block) in self._generic else fused))
            trained = described.trained_output
        return sizes, around_bytes(described, tokens, fused)

    def _rough_sizes(self, block: nn.Module, elements: int) -> BlockBytes:
        rates, memory = RATES.get(type(block).__name__, UNKNOWN), self._config.memory
        kept = rates.packed if self._config.activation.attention == "fp8" else rates.attention_kept
        if not self._config.activation.use_fp8:
            kept = rates.high_precision
        recomputed = FP8_INPUT if memory.enable_efficient_checkpoint else BF16_INPUT
        whole = int(rates.high_precision * elements)
        gradients = sum(p.numel() * p.element_size() for p in trained_parameters(block))
        return BlockBytes(int(kept * elements), int(recomputed * elements), whole, whole, whole, gradients)

    def _tell(self, chosen: list[int], peak: float, free: float) -> None:
        logger.info(
            "checkpointing auto: %d of %d blocks recompute (%.2f GB for a step, %.2f GB free for it)",
            len(chosen), len(self._blocks), peak / 1e9, free / 1e9,
        )  # fmt: skip
        if peak > free:
            logger.warning(
                "memory.budget_gb: even recomputing every block may exceed the budget by %.2f GB; lower the resolution",
                (peak - free) / 1e9,
            )


def settings_at(config: COATConfig, image: Tensor) -> FlowSettings:
    """How blocks keep what they keep, called with this image stream here and now."""
    kind = image.device.type
    autocasts = torch.is_autocast_enabled(kind)
    lora_bytes = torch.get_autocast_dtype(kind).itemsize if autocasts else torch.float32.itemsize
    return settings_of(config, value_bytes=image.element_size(), lora_bytes=lora_bytes, cuda=kind == "cuda")


def generic_cost(block: nn.Module, args: tuple[Any, ...], config: COATConfig) -> str:
    """What the generic flow keeps of a FLUX block in place of the fused one, in words; empty where that is unknown."""
    if len(args) < 2:
        return ""
    image, text = args[:2]
    tokens = Tokens(image.shape[0], text.shape[1], image.shape[1])
    try:
        described = read_block(block, image.requires_grad or text.requires_grad)
    except (AttributeError, ValueError):  # not built as diffusers' is, which may be the reason
        return ""
    kept = [kept_bytes(described, tokens, settings_at(c, image)) for c in (_generic(config), config)]
    generic, fused = (size / (tokens.rows * described.hidden) for size in kept)
    return (
        f"; such a block keeps {kept[0] / 1e6:.2f} MB instead of {kept[1] / 1e6:.2f} MB "
        f"({generic:.1f} instead of {fused:.1f} bytes per token and channel)"
    )


def _generic(config: COATConfig) -> COATConfig:
    return replace(config, activation=replace(config.activation, flow="generic"))
