"""Runs every block as its plan has it: recomputed or kept, fused or not.

Calls reach it through a hook on each block (`hook.py`), so both trainers and all architectures share it. What each
block does is decided by `decide`, at the first forward pass, when sizes are known, and again only when what it rests on
changes: a larger batch comes, gradients turn out to be accumulated, a block turns out not to be fusable, or memory runs
out.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from coat_core.activation import PackedSavedTensors, fp8_checkpoint, may_draw
from coat_core.linear.weight import drop_transposed
from coat_core.optim.state import state_bytes

from . import in_words
from .attention_pick import AttentionPick
from .block_bytes import read_blocks, shown_by
from .decide import BlockChoice, BlockPlan, Given, budget_bytes, decide
from .fused.chooser import FusedForms, attention_query
from .fused.frozen import NotFusable
from .fused.reading import FusedBlock, argument_names
from .fused.shadow import copied_bytes
from .gemms import multiply_in_bf16, set_transposed, transposed_bytes
from .held import held_bytes, usable_bytes
from .hook import check_reached, first_tensor, frozen_tensors, hook_of, own_forward, take_over
from .lookup import block_name, listed_blocks, read_list
from .lora import trained_parameters
from .measure import GemmPick, PickedGemm
from .quantized import has_adopted
from .sizes import Tokens
from .streaming import StreamedWeights

if TYPE_CHECKING:
    from ..config.coat import COATConfig

logger = logging.getLogger(__name__)


class BlockRunner:
    """What is called instead of each block: `runner(block, *args)`.

    Args:
        blocks: full name → block, in forward order.
        config: the `coat:` block.
        allow_recompute: False forbids recomputation.

    Attributes:
        attention: chooses the kernel of the fused blocks' attention at the first step.
        ran: how each block ran that did: index → "fused", "own" (its own code) or "host" (in a checkpoint of its
            model's, where nothing of COAT is).

    Raises:
        ValueError: `memory.checkpointing` is all while recomputation is forbidden.
    """

    def __init__(self, blocks: dict[str, nn.Module], config: COATConfig, allow_recompute: bool) -> None:
        mode = config.memory.checkpointing
        if not allow_recompute and mode == "all":
            raise ValueError(
                f"coat.memory.checkpointing={mode!r}: train.gradient_checkpointing is false, which forbids "
                "recomputation; set one of them differently (checkpointing: none, or gradient_checkpointing: true)"
            )
        self.blocks = blocks
        self.ran: dict[int, str] = {}
        self.states_are_made = False  # the optimizer's, before the first step; a trainer says so
        self._config = config
        self._modules = list(blocks.values())
        self._places = {block: i for i, block in enumerate(self._modules)}
        self._reads = any(read_list(type(block)) for block in self._modules)
        self._fusable = all(read_list(type(block)) for block in self._modules)
        adopted = any(map(has_adopted, self._modules))
        measures = self._fusable and config.speed.measure != "never" and not adopted
        self._pick = GemmPick(blocks, config, self._run_kept) if measures else None
        self.attention = AttentionPick(config)
        self.streaming: StreamedWeights | None = None
        self._trial: tuple[BlockChoice, ...] = ()  # of the start-up measurement
        self._forms = FusedForms()
        self._size = 0  # elements of hidden states in the largest micro-batch
        self._held: float | None = None  # bytes, before anything of a step is there
        self._trained: list[nn.Parameter] = []
        self._warned: set[str] = set()
        self._logged: Counter[str] = Counter()
        self._table: dict[nn.Module, Callable[..., Any]] = {}
        self._plan: Any = None  # a BlockPlan, from the first decision on
        self._checked, self._decisions = False, 0
        names, sizes = (block_name(type(block)) for block in self._modules), read_blocks(self._modules, (), 0)
        facts = {"quantized": adopted, "picks_later": measures}
        self._given = Given(sizes, tuple(names), allow_recompute=allow_recompute, **facts)
        self._decide(unfused=self._obstacles())

    @classmethod
    def install(
        cls,
        model: Any,
        block_lists: tuple[str, ...],
        config: COATConfig,
        allow_recompute: bool,
        device: torch.device | None = None,
    ) -> BlockRunner:
        """Make the runner for `model` and let it take over the calls of its blocks.

        Args:
            model: of any class.
            block_lists: fnmatch patterns of the module lists whose items are its blocks, in forward order.
            config: the `coat:` block.
            allow_recompute: False forbids recomputation.
            device: where the blocks will run; default: where they are.

        Raises:
            ValueError: no module list matches, or as the class.
        """
        blocks = listed_blocks(model, block_lists)
        runner = cls(blocks, config, allow_recompute)
        ready = None
        if config.memory.stream_blocks != 0:
            here = next(model.parameters()).device if device is None else device
            streaming = runner.streaming = StreamedWeights(runner._modules, here)
            runner._decide(stream_bytes=streaming.bytes)
            ready = streaming.ready
        take_over(model, blocks.values(), runner, runner._note, ready)
        return runner

    @classmethod
    def of(cls, model: nn.Module) -> BlockRunner | None:
        """The runner that `install` put in place for a model, or for one inside it; None where there is none."""
        hooks = filter(None, map(hook_of, model.modules()))
        return next((hook.run for hook in hooks if isinstance(hook.run, cls)), None)

    @property
    def plan(self) -> BlockPlan:
        """What every block does; before the first step, as far as that is known."""
        if self._given.tokens is None:  # adapters may have been added since
            self._decide(blocks=read_blocks(self._modules, (), 0), unfused=self._obstacles())
        return self._plan

    @property
    def picked(self) -> PickedGemm | None:
        """What the first step picked; None before it, and where nothing is left to pick."""
        return self._given.picked

    @property
    def generation(self) -> tuple[int, int]:
        """Another one whenever a block would run otherwise than before: what was captured earlier is out of date."""
        return self._decisions, self._forms.readings

    def expect(self, **known: Any) -> None:
        """Take in, before the first step, what a trainer knows of it: fields of `decide.Given`."""
        self._decide(**known)

    def keep_gemm(self, gemm: str) -> None:
        """Let the first step take this one, where the config allows it: `GemmPick.keep`."""
        if self._pick is not None:
            self._pick.keep(gemm)

    def multiply_in_bf16(self, linears: Collection[nn.Module]) -> None:
        """Take linears of the blocks out of FP8 GEMMs for the rest of the run, as `activation.exclude` does.

        Args:
            linears: with FP8 weights, or trained ones that are cast at each use.
        """
        if self._pick is not None:
            self._pick.leave_out(linears)
        multiply_in_bf16(linears)
        self._decisions += 1
        for module in linears:
            drop_transposed(module)

    def recompute_more(self) -> str | None:
        """Where checkpointing is auto, drop the transposed weights, and when they are gone recompute all blocks.

        Returns:
            A line that says what changed; None where nothing is left.
        """
        plan = self.plan
        if plan.checkpointing != "auto":
            return None
        if plan.copies and self._config.memory.transposed_weights == "auto":
            freed = transposed_bytes(self._modules)
            self._decide(without_copies=True)
            return f"transposed weights: {freed / 1e9:.2f} GB dropped for the rest of the run; results stay the same"
        before, every = len(plan.recomputed or ()), tuple(range(len(self._modules)))
        if before == len(every):
            return None
        self._decide(recomputed=every, ran_out_with=before)
        inputs = "FP8" if self._config.memory.enable_efficient_checkpoint else "exact"
        return (
            f"checkpointing auto: from here on all {len(every)} blocks recompute, before {before} did; "
            f"their gradients are now those of {inputs} inputs"
        )

    def __call__(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run one block as the plan has it."""
        self._update_plan(block, args, kwargs)
        outputs = self._table[block](block, args, kwargs)
        if self.streaming is not None:
            self.streaming.announce(block, outputs)
        if block is self._modules[-1]:
            counts = in_words.treatments(self.plan, self.ran)
            if counts != self._logged:
                self._logged = counts
                logger.info("blocks: %s", "; ".join(f"{count} {what}" for what, count in counts.items()))
        return outputs

    def _note(self, block: nn.Module, how: str = "host") -> None:
        """Note how a block ran, as `ran` has it."""
        self.ran[self._places[block]] = how

    def check_step(self) -> None:
        """After the first step: see to it that every block was run here.

        Raises:
            RuntimeError: none was; or, with `fallback: error`, some of a list were not.
        """
        if not self._checked:
            self._checked = True
            check_reached(list(self.blocks), self.ran, strict=self._config.fallback == "error")

    def _update_plan(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Decide again where what was given has changed."""
        place = self._places[block]
        if self._reads and args and self._forms.begins(place):
            kept = [self._modules[i] for i in self._plan.eager_and_kept]
            self._forms.prepare(block, args, bool(self._plan.shadow_bytes), kept)
        known = self._given.attention is not None or not (place == 0 and self._fusable and len(args) > 1)
        if not known and torch.is_grad_enabled():
            with suppress(NotFusable):
                self._decide(attention=self.attention.choose(*attention_query(block, args)).row)
        if self._pick is not None and torch.is_grad_enabled() and not kwargs:
            picked, self._pick = self._pick.choose(args), None
            self._decide(picked=picked, picks_later=False)
        hidden = [x for x in args if isinstance(x, Tensor) and x.ndim == 3]
        size = sum(x.numel() for x in hidden)
        accumulates = any(x.grad is not None for x in self._trained[:1] + self._trained[-1:])  # FSDP2 hides the first's
        first = self._given.tokens is None and bool(hidden or (args and self._plan.checkpointing != "auto"))
        if first or size > self._size or accumulates > self._given.accumulates:
            self._start(block, args, hidden, size, accumulates)

    def _start(
        self, block: nn.Module, args: tuple[Any, ...], hidden: list[Tensor], size: int, accumulates: bool
    ) -> None:
        """Decide by the sizes of the first, or of a larger, micro-batch."""
        device, tokens = first_tensor(args).device, self._given.tokens or Tokens(0, 0, 0)
        if size > self._size and len(hidden) == 2:
            tokens = Tokens(hidden[0].shape[0], hidden[1].shape[1], hidden[0].shape[1])
        self._size = max(size, self._size)
        if self._held is None:
            self._trained = [p for block in self._modules for p in trained_parameters(block)]
            missing = [] if self.states_are_made or self._config.optimizer.offload == "cpu" else self._trained
            states = state_bytes(self._config.optimizer_config()[0], [p.numel() for p in missing])
            self._held = held_bytes(device) + states + (0 if self.streaming is None else self._plan.freed_bytes)
        facts, budget = shown_by(args), budget_bytes(self._config, usable_bytes(device))
        trained = sum(p.numel() for p in self._trained) if self._fusable else 0
        copied = facts["device"] == "cuda" and self._config.memory.transposed_weights != "never"
        self._decide(
            blocks=read_blocks(self._modules, args, self._size),
            tokens=tokens,
            dropout=any(isinstance(m, nn.Dropout) and m.p for block in self._modules for m in block.modules()),
            free_bytes=None if budget is None else budget - self._held,
            accumulates=accumulates or self._given.accumulates,
            unfused=self._obstacles(block, args),
            transposed_bytes=transposed_bytes(self._modules) if copied else 0,
            shadow_bytes=copied_bytes(self._config, trained, first_tensor(args).element_size()),
            **facts,
        )

    def _decide(self, **changed: Any) -> None:
        """Decide by what has changed, and let the blocks follow."""
        before = self._plan
        self._decisions += 1
        self._given = replace(self._given, **changed)
        plan = self._plan = decide(self._config, self._given)
        if self.streaming is not None and tuple(plan.streamed) != self.streaming.streamed:
            self.streaming.stream(plan.streamed)
        choices = zip(self._modules, plan.blocks, strict=True)
        self._table = {block: functools.partial(self._run, choice) for block, choice in choices}
        if plan.copies != (before is not None and before.copies):
            set_transposed(self._modules, plan.copies)
            made = "kept next to the weights" if plan.copies else "dropped, memory is needed otherwise"
            if not self._given.without_copies:
                logger.info("transposed weights: %.2f GB %s", transposed_bytes(self._modules) / 1e9, made)
        line, sizes = in_words.auto_line(plan, self._config), (plan.recomputed, plan.streamed, plan.peak_bytes)
        known = before is not None and in_words.auto_line(before, self._config)
        if line and not (known and sizes == (before.recomputed, before.streamed, before.peak_bytes)):
            logger.info(line)
            if plan.excess_bytes > 0:
                text = "memory.budget_gb: even recomputing every block may exceed the budget by %.2f GB"
                logger.warning(f"{text}; lower the resolution", plan.excess_bytes / 1e9)

    def _obstacles(self, called: nn.Module | None = None, args: tuple[Any, ...] | None = None) -> dict[int, str]:
        """Index of each block that cannot be fused, as far as it shows from the call of one → why."""
        names = None if called is None else argument_names(type(called))
        before = {} if called is None else self._given.unfused  # of others, what was found in their own call
        found = {}
        for i, block in enumerate(self._modules):
            alike = argument_names(type(block)) == names
            found[i] = self._forms.obstacle(block, args if alike else None) or (None if alike else before.get(i))
        return {i: reason for i, reason in found.items() if reason is not None}

    def _run(self, choice: BlockChoice, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block as its part of the plan has it."""
        form = self._form_of(choice, block, args, kwargs)
        own = own_forward(block)
        self._note(block, "own" if form is None else "fused")
        if choice.recomputed:
            run, packing = form or own, choice.inputs
            if packing is None:
                return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=may_draw(), **kwargs)
            return fp8_checkpoint(run, *args, fmt=packing.format, granularity=packing.granularity, **kwargs)
        if form is not None:
            return form(*args)
        if choice.saved is None:
            return own(*args, **kwargs)
        with PackedSavedTensors(choice.saved, keep=frozen_tensors(block, (args, kwargs))):
            return own(*args, **kwargs)

    def _form_of(
        self, choice: BlockChoice, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> FusedBlock | None:
        """The block's fused form; None where diffusers' code runs.

        A block that could not be fused is read again each time: adapters and hooks come and go.
        """
        fused = None
        if choice.flow == "fused" or choice.obstacle:
            try:
                fused = self._forms.form_of(block, args, kwargs, choice.saved)
            except NotFusable as error:
                self._lose(choice, block, str(error), args)
        if fused is not None and choice.obstacle:
            self._decide(unfused=self._obstacles(block, args))
        return fused

    def _lose(self, choice: BlockChoice, block: nn.Module, reason: str, args: tuple[Any, ...]) -> None:
        """A block cannot be fused: decide by that, and warn once for each kind and reason."""
        place, kind = self._places[block], block_name(type(block))
        if self._given.unfused.get(place) != reason:
            self._decide(unfused={**self._obstacles(block, args), place: reason})
        warning = f"{kind}: {in_words.GENERIC}: {reason}"
        if read_list(type(block)) is None or warning in self._warned:
            return
        self._warned.add(warning)
        logger.warning("%s%s", warning, in_words.generic_cost(self._config, self._given, block, args))

    def _run_kept(self, block: nn.Module, args: tuple[Any, ...]) -> Any:
        """Run a block that is not recomputed, for the start-up measurement."""
        if not self._trial:
            self._trial = decide(self._config, replace(self._given, recomputed=())).blocks
        return self._run(self._trial[self._places[block]], block, args, {})
