"""Per block: keep what it saves (in FP8), or recompute it in backward (from an FP8 input).

Works through the one function that every diffusers model calls around each of its blocks
(`enable_gradient_checkpointing(function)`), so both hosts and all architectures share it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from coat_core.activation import PackedSavedTensors, PackingConfig, fp8_checkpoint
from coat_core.granularity import Granularity
from coat_core.linear.module import drop_transposed

from .auto import AutoCheckpointing, generic_cost
from .fused.chooser import FusedFlow, attention_kernel
from .fused.compiled import CompiledBlocks
from .fused.flux1 import FUSABLE, FusedBlock
from .gemms import TransposedWeights, multiply_in_bf16
from .measure import Picked, RunPath, SpeedPick, Unavailable

if TYPE_CHECKING:
    from ..config.coat import COATConfig

logger = logging.getLogger(__name__)


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
        self._config = config
        fuses = self.packs and config.activation.flow == "fused"
        self._fused_flow = FusedFlow(self.packing, on_lost=self._without_fused) if fuses else None
        self._auto = AutoCheckpointing(blocks, config, self._fused_flow) if self.mode == "auto" else None
        self.compile = "none" if config.speed.compile == "auto" else config.speed.compile
        self.picked: Picked | None = None
        self._measure = config.speed.measure
        self.fusable = all(type(block).__name__ in FUSABLE for block in blocks.values())
        self._pick = (
            SpeedPick(blocks, config, self._run_kept) if self.fusable and config.speed.measure != "never" else None
        )
        self._fallback = config.fallback
        self._compiled = CompiledBlocks(self.compile == "cudagraphs", config.fallback)
        self._exact_flow = FusedFlow(None, "runs eager, not compiled")
        self.attention_kernel: str | None = None  # of `coat_core.kernels.attention`, from the first step on
        self._transposed = TransposedWeights(blocks.values(), config.memory.transposed_weights)
        self._got: dict[int, str] = {}
        self._warned: set[str] = set()
        self._told: Counter[str] = Counter()
        self._more = ""  # why more blocks recompute than `auto` chose
        ids = [id(block) for block in blocks.values()]
        self._first, self._last = ids[0], ids[-1]

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
                "use a diffusers version that has them, or change coat_flux.blocks.architectures"
            )
        policy = cls(blocks, config, allow_recompute)
        model.enable_gradient_checkpointing(policy)
        return policy

    @classmethod
    def of(cls, model: nn.Module) -> BlockPolicy | None:
        """The policy that `install` put in place for a model, or for one inside it; None where there is none."""
        found = (vars(module).get("_gradient_checkpointing_func") for module in model.modules())
        return next((policy for policy in found if isinstance(policy, cls)), None)

    @property
    def recomputed(self) -> list[int] | None:
        """Indices of the blocks that recompute; None before `auto` has chosen."""
        if self._auto is not None and not self._auto.has_chosen:
            return None
        return [i for i, block in enumerate(self.blocks.values()) if id(block) in self._recomputed]

    @property
    def recomputation_reason(self) -> str:
        """Why so many blocks recompute, where `auto` or a lack of memory says it."""
        return self._more or ("" if self._auto is None else "the fewest with which a step fits the budget")

    @property
    def keeps_transposed(self) -> bool:
        """Whether there are second copies of the weights now."""
        return self._transposed.kept

    @property
    def transposed_weights(self) -> tuple[str, str]:
        """What there is of them, in words, and why; empty before the first step."""
        return self._transposed.describe(), self._transposed.reason

    @property
    def treatments(self) -> Counter[str]:
        """What the blocks got in the last whole forward pass, with their number; empty before the first."""
        return self._told

    @property
    def obstacles(self) -> list[str]:
        """Why blocks do not take the flow that was asked for, or are not compiled."""
        flows = [flow for flow in (self._fused_flow, self._exact_flow) if flow is not None]
        return list(dict.fromkeys([*(reason for flow in flows for reason in flow.obstacles), *self._warned]))

    def foreseen_obstacles(self) -> dict[str, str]:
        """Name of each block that will not take the fused flow that was asked for → why, before the first step."""
        if self._fused_flow is None:
            return {}
        found = ((name, self._fused_flow.obstacle(block)) for name, block in self.blocks.items())
        return {name: reason for name, reason in found if reason is not None}

    @property
    def will_pick(self) -> bool:
        """Whether the first step still has to choose GEMMs and compilation."""
        return self._pick is not None

    @property
    def compilation_failed(self) -> bool:
        """Whether torch.compile failed, so that blocks run eager."""
        return self._compiled.failed

    def keep_to(self, path: RunPath) -> None:
        """Let the first step take this path, where the config allows it, instead of choosing: `SpeedPick.keep_to`."""
        if self._pick is not None:
            self._pick.keep_to(path)

    def multiply_in_bf16(self, linears: Collection[nn.Module]) -> None:
        """Take linears of the blocks out of FP8 GEMMs for the rest of the run, as `activation.exclude` does.

        Args:
            linears: with FP8 weights, or trained ones that are cast at each use.
        """
        if self._pick is not None:
            self._pick.leave_out(linears)
        multiply_in_bf16(linears)
        for module in linears:
            drop_transposed(module)

    def recompute_more(self) -> str | None:
        """Where checkpointing is auto, drop the transposed weights, and when they are gone recompute all blocks.

        Returns:
            A line that says what changed; None where nothing is left.
        """
        if self.mode != "auto":
            return None
        freed = self._transposed.give_up()
        if freed:
            return f"transposed weights: {freed / 1e9:.2f} GB dropped for the rest of the run; results stay the same"
        before, every = len(self._recomputed), {id(block) for block in self.blocks.values()}
        if self._recomputed == every:
            return None
        self._recomputed, self._auto = every, None
        self._more = f"memory ran out with {before}"
        if self.compile == "cudagraphs":
            torch.compiler.reset()  # recordings keep the memory of what their blocks kept
        inputs = "FP8" if self.memory.enable_efficient_checkpoint else "exact"
        return (
            f"checkpointing auto: from here on all {len(every)} blocks recompute, before {before} did; "
            f"their gradients are now those of {inputs} inputs"
        )

    def describe(self) -> str:
        """One line: what is recomputed, how kept blocks store what they save."""
        stored = f"FP8 {self.packing.format} {self.packing.granularity.name}, attention {self.packing.attention}"
        fusable = any(type(block).__name__ in FUSABLE for block in self.blocks.values())
        flow = "fused" if self._fused_flow and fusable else "generic"
        kept = f"kept blocks save {stored}, {flow} flow" if self.packs else "kept blocks save high precision"
        kept += "" if self.compile == "none" else f"; compiled {self.compile}"
        inputs = "FP8" if self.memory.enable_efficient_checkpoint else "high precision"
        if self.mode == "auto":
            return f"checkpointing auto (chosen at the first step); {kept}; recomputed blocks keep {inputs} inputs"
        count = len(self._recomputed)
        return f"checkpointing {self.mode}: {count} of {len(self.blocks)} blocks recompute from {inputs} inputs; {kept}"

    def describe_path(self, device: torch.device) -> str:
        """One line: whether scaling and compilation are as written, or are picked at the first step.

        Args:
            device: where the model will run.
        """
        measures = self._pick is not None and (device.type == "cuda" or self._measure == "always")
        when = "picked by measurement at the first step" if measures else "as written"
        return f"path: {when} (speed.measure: {self._measure})"

    def __call__(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run one block, recomputing it in backward or keeping what it saves."""
        if self._pick is not None and torch.is_grad_enabled() and not kwargs:
            self.picked, self._pick = self._pick.choose(args), None
            self.compile = self.picked.path.compile
        if self._auto is not None:
            chosen = self._auto.choose(args)
            if chosen is not None:
                self._recomputed = chosen
                self._transposed.fit(args[0].device, self._auto.spare)
        elif id(block) == self._first and args:
            self._transposed.fit(args[0].device, -1.0)
        if id(block) == self._first:
            self._compiled.begin_pass()
            self._tell_attention(block, args)
        recomputed = self._recomputes(block)
        compiled = ""
        kept_in_fp8 = self.packs and not recomputed
        flow = self._fused_flow if kept_in_fp8 else self._exact_flow if self.compile != "none" else None
        fused = None if flow is None else flow.form_of(block, args, kwargs)
        if self.compile != "none":
            fused = self._compiled_form(block, fused, replayable=not recomputed)
            compiled = ", compiled" if fused is not None and not self._compiled.failed else ", eager"
        if recomputed:
            self._note(block, f"recomputed{compiled}")
            return self._recompute(fused or block, *args, **kwargs)
        if not self.packs:
            self._note(block, f"kept in high precision{compiled}")
            return (fused or block)(*args, **kwargs)
        if fused is not None:
            self._note(block, f"kept in FP8, fused flow, attention {self.packing.attention}{compiled}")
            return fused(*args)
        self._note(block, f"kept in FP8, generic flow, attention {self.packing.attention}{compiled}")
        return self._run_generic(block, *args, **kwargs)

    def _without_fused(self, block: nn.Module, args: tuple[Any, ...]) -> str:
        """Let `auto` count on the generic flow for a block; what that costs, for the warning."""
        if self._auto is not None:
            self._auto.count_as_generic(block)
        return generic_cost(block, args, self._config)

    def _run_generic(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with PackedSavedTensors(self.packing, keep=_frozen_tensors(block, (args, kwargs))):
            return block(*args, **kwargs)

    def _run_kept(self, compile: str, block: nn.Module, args: tuple[Any, ...]) -> Any:
        """A block that is not recomputed, for the start-up measurement."""
        if not self.packs:
            return block(*args)
        fused = None if self._fused_flow is None else self._fused_flow.form_of(block, args, {})
        if fused is None:
            return self._run_generic(block, *args)
        if compile == "none":
            return fused(*args)
        outputs = self._compiled.form_of(fused, replayable=False)(*args)
        if self._compiled.failed:
            raise Unavailable("torch.compile failed")
        return outputs

    def _recompute(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        if self.memory.enable_efficient_checkpoint:
            packing = self.packing
            return fp8_checkpoint(run, *args, fmt=packing.format, granularity=packing.granularity, **kwargs)
        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    def _compiled_form(self, block: nn.Module, fused: FusedBlock | None, replayable: bool) -> FusedBlock | None:
        if fused is not None:
            return self._compiled.form_of(fused, replayable)
        reason = f"speed.compile={self.compile!r}: a {type(block).__name__} that cannot be fused is not compiled"
        if self._fallback == "error":
            raise RuntimeError(f"fallback='error': {reason}; set coat.speed.compile: none, or fallback: bf16")
        if reason not in self._warned:
            self._warned.add(reason)
            logger.warning("%s, it runs eager", reason)
        return None

    def _note(self, block: nn.Module, got: str) -> None:
        """Count what each block got; one line in the log at the last block, where that is new."""
        self._got[id(block)] = got
        if id(block) != self._last:
            return
        counts = Counter(self._got.values())
        if counts != self._told:
            self._told = counts
            logger.info("blocks: %s", "; ".join(f"{count} {what}" for what, count in counts.items()))

    def _tell_attention(self, block: nn.Module, args: tuple[Any, ...]) -> None:
        """Once, the kernel that torch chooses for attention."""
        if self.attention_kernel is None and self.fusable and len(args) > 1 and torch.is_grad_enabled():
            self.attention_kernel = attention_kernel(block, args)
            logger.info("attention: torch's kernel %r", self.attention_kernel)

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
