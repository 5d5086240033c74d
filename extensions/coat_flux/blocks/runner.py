"""Runs every block according to its plan: recomputed or not, fused or not.

    a pass begins    changed blocks are read again, `decide` is asked if sizes grew, adapters are copied,
                     modulations computed
    a block runs     its fused form, or its own code

Calls arrive through `hook.py`. `decide` is asked at the first forward pass, and again if its inputs change: a
larger batch, accumulated gradients, a block that cannot be fused, or an out-of-memory error.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from coat_core.activation import Masks, PackedSavedTensors, fp8_checkpoint, may_draw
from coat_core.linear.function import TRANSPOSED, compute_dtype
from coat_core.optim.state import state_bytes

from ..config.coat import COATConfig
from . import proving, report
from .decide import BlockPlan, Given, budget_bytes, decide, saving_of
from .fused.chooser import attention_query, disagreement, fused_block
from .fused.forms import Form
from .fused.linears import AdapterCopies, NotFusable
from .fused.parts import Modulation, modulate_ahead
from .gemms import multiply_in_bf16, set_transposed, transposed_bytes
from .held import usable_bytes, used_bytes
from .hook import first_tensor, has_hooks, hook_of, own_forward, take_over
from .lora import toolkit_adapters, trained_parameters
from .measure import AttentionPick, GemmPick, Picked
from .models import block_name, first_measured, listed_blocks, read_list
from .quantized import is_adopted
from .sizes import Tokens, read_blocks, shown_by
from .streaming import StreamedWeights

logger = logging.getLogger(__name__)


class BlockRunner:
    """What is called instead of each block: `runner(block, *args)`.

    ValueError if `memory.checkpointing` is all while recomputation is forbidden.
    """

    def __init__(self, blocks: dict[str, nn.Module], config: COATConfig, allow_recompute: bool) -> None:
        mode = config.memory.checkpointing
        if not allow_recompute and mode == "all":
            raise ValueError(
                f"coat.memory.checkpointing={mode!r}: train.gradient_checkpointing is false, which forbids "
                "recomputation; set one of them differently (checkpointing: none, or gradient_checkpointing: true)"
            )
        self.blocks = blocks
        # block index → "fused", "own" (its own code) or "host" (in a checkpoint of its model, without COAT)
        self.ran: dict[int, str] = {}
        self.states_are_made = False  # the optimizer's, before the first step; a trainer says so
        self._config = config
        self._modules = list(blocks.values())
        self._places = {block: i for i, block in enumerate(self._modules)}
        self._readable = [read_list(type(block)) is not None for block in self._modules]
        self._measured = first_measured(self._modules)
        self._fuses = config.enabled and config.activation.use_fp8 and config.activation.flow == "fused"
        adopted = any(is_adopted(module) for block in self._modules for module in block.modules())
        measures = all(self._readable) and config.speed.measure != "never" and not adopted
        self.gemms = GemmPick(blocks, config, self._kept_form) if measures else None
        self.picked: Picked | None = None  # the GEMM of the first step, by `gemms`, which is None from then on
        self.attention = AttentionPick(config)
        self.streaming: StreamedWeights | None = None
        proves = config.enabled and config.speed.kernels == "auto"
        self._unproved = set(map(type, self._modules)) if proves else set()  # classes of blocks
        self._place = len(self._modules)  # of the block that ran last
        self._state: BlockState | None = None  # of the blocks when they were read
        self._read_forms: dict[int, Form] = {}  # index → a block that can be fused
        self.forms: dict[int, Form] = {}  # those of them that the plan has run so
        self._copies: AdapterCopies | None = None
        self._modulations: list[Modulation] = []  # of the blocks whose vectors are made where a pass begins
        self._masks: Masks = WeakTensorKeyDictionary()  # of the forward pass
        self._refused: dict[int, str] = {}  # index → why its form did not take what it was called with
        self._differs: dict[type, str] = {}  # kind of block → how its form's output differs; empty where it does not
        self._size = 0  # elements of hidden states in the largest micro-batch
        self._held: float | None = None  # bytes, before anything of a step is there
        self._trained: list[nn.Parameter] = []
        self._warned: set[tuple[str, str]] = set()
        self._logged: BlockPlan | None = None  # the plan that was logged last
        self._counts: Counter[str] | None = None  # of blocks by what they do, as logged
        self._plan: Any = None  # a BlockPlan, from the first decision on
        self.generation = 0  # changes whenever a block would run differently, which invalidates captured graphs
        names, sizes = (block_name(type(block)) for block in self._modules), read_blocks(self._modules, (), 0)
        self._given = Given(sizes, tuple(names), allow_recompute=allow_recompute, quantized=adopted)
        self.expect(unfused=self._read_all(join=False)[1])

    @classmethod
    def install(
        cls,
        model: Any,
        block_lists: tuple[str, ...],
        config: COATConfig,
        allow_recompute: bool,
        device: torch.device | None = None,
    ) -> BlockRunner:
        """Make the runner for `model` and hook the blocks of the matching lists; ValueError if none matches."""
        blocks = listed_blocks(model, block_lists)
        runner = cls(blocks, config, allow_recompute)
        ready = None
        if config.memory.stream_blocks != 0:
            here = next(model.parameters()).device if device is None else device
            streaming = runner.streaming = StreamedWeights(runner._modules, here)
            runner.expect(stream_bytes=streaming.bytes)
            ready = streaming.ready
        take_over(model, blocks.values(), runner, runner._note_host, ready)
        return runner

    @classmethod
    def of(cls, model: nn.Module) -> BlockRunner | None:
        """The runner that `install` put in place for a model, or for one inside it; None where there is none."""
        hooks = filter(None, map(hook_of, model.modules()))
        return next((hook.run for hook in hooks if isinstance(hook.run, cls)), None)

    @property
    def plan(self) -> BlockPlan:
        """What every block does; before the first step, what is known of it."""
        if self._given.tokens is None:  # adapters may have been added since
            self.expect(blocks=read_blocks(self._modules, (), 0), unfused=self._read_all(join=False)[1])
        return self._plan

    def multiply_in_bf16(self, linears: Collection[nn.Module]) -> None:
        """Take FP8 linears of the blocks out of FP8 GEMMs for the rest of the run, as `activation.exclude` does."""
        multiply_in_bf16(linears)
        self.generation += 1
        for module in linears:
            module._buffers.pop(TRANSPOSED, None)

    def recompute_more(self) -> str | None:
        """Under `auto` drop the transposed weights, then recompute all blocks; return a log line or None."""
        plan = self.plan
        if plan.checkpointing != "auto":
            return None
        if plan.transposed_bytes and self._config.memory.transposed_weights == "auto":
            freed = transposed_bytes(self._modules)
            self.expect(without_copies=True)
            return f"transposed weights: {freed / 1e9:.2f} GB dropped for the rest of the run; results stay the same"
        before, every = len(plan.recomputed or ()), tuple(range(len(self._modules)))
        if before == len(every):
            return None
        self.expect(recomputed=every, ran_out_with=before)
        inputs = "FP8" if self._config.memory.enable_efficient_checkpoint else "exact"
        return (
            f"checkpointing auto: from here on all {len(every)} blocks recompute, before {before} did; "
            f"their gradients are now those of {inputs} inputs"
        )

    # --- a pass ---

    def __call__(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run one block as the plan has it."""
        place = self._places[block]
        begins, self._place = place <= self._place, place
        if begins:
            self._masks = WeakTensorKeyDictionary()
        if begins and (self._state is None or self._state.key() != self._state.before):  # a block has changed
            self._read()
        picks = place == self._measured if self._measured else begins
        if picks and (self._given.attention is None or self.gemms is not None):
            self._pick_kernels(place, args, kwargs)
        self._see_sizes(args)
        if self._state is None:  # copies of weights have changed
            self._read()
        form = self.forms.get(place)
        if type(block) in self._unproved:
            self._prove(place, form, begins, args, kwargs)
        if begins and self.forms and args:
            self.share(args)
        if form is None:
            outputs = self._run_own(place, args, kwargs)
        else:
            outputs = self._run_fused(place, form, args, kwargs)
        if self.streaming is not None:
            self.streaming.announce(block, outputs)
        if place == len(self._modules) - 1 and self._logged is not self._plan:
            self._logged = self._plan
            counts = report.treatments(self._plan, self.ran)
            if counts != self._counts:
                self._counts = counts
                logger.info("blocks: %s", "; ".join(f"{count} {what}" for what, count in counts.items()))
        return outputs

    def _prove(self, place: int, form: Form | None, begins: bool, args: tuple[Any, ...], kwargs: Any) -> None:
        """Prove the kernels of the first block of its class, before it runs."""
        block = self._modules[place]
        self._unproved.remove(type(block))
        if first_tensor((*args, *kwargs.values())).device.type != proving.DEVICE:
            return

        def run(*args: Any, **kwargs: Any) -> Any:
            if begins and self.forms and args:
                self.share(args)
            return self._run_own(place, args, kwargs) if form is None else form(*args, **kwargs)

        with suppress(NotFusable):
            proving.prove_block(block, run, args, kwargs, self._config)

    def _pick_kernels(self, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pick what is still to be picked, in the first pass, for this block's arguments."""
        if self._given.attention is None and place == self._measured and all(self._readable) and len(args) > 1:
            with suppress(NotFusable):
                query, mask = attention_query(self._modules[place], args)
                self.expect(attention=self.attention.choose(query, mask))
        if self.gemms is not None and not kwargs:
            self.picked, self.gemms = self.gemms.choose(args), None
            self._forget()
            self.expect(picked=self.picked)

    def share(self, args: tuple[Any, ...]) -> None:
        """Copy the adapters' matrices and compute modulation vectors, for the first fused block's coming `args`."""
        if self._plan.shadow_bytes:
            dtype = compute_dtype(args[0])
            if self._copies is None or self._copies.dtype != dtype:
                forms = self.forms.values()
                groups = [group for form in forms for group in form.groups]
                groups += [modulation.linear for form in forms for modulation in form.modulations]
                self._copies = AdapterCopies(groups, dtype)
            self._copies.refresh()
        with suppress(NotFusable):
            modulate_ahead(self._modulations, next(iter(self.forms.values())).reader.call(*args).temb)

    def _run_fused(self, place: int, form: Form, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = type(self._modules[place])
        if kind not in self._differs and not kwargs:  # once for each class: where the two differ, none of it fuses
            why = self._differs[kind] = disagreement(form, self._modules[place], args)
            if why:
                alike = [i for i, other in enumerate(self._modules) if type(other) is kind]
                self._read_forms = {i: x for i, x in self._read_forms.items() if i not in alike}
                self.expect(unfused={**self._given.unfused, **dict.fromkeys(alike, why)})
                return self._run_own(place, args, kwargs)
        try:
            outputs = form(*args, **kwargs)
        except NotFusable as error:
            self._refused[place] = str(error)
            if self._given.unfused.get(place) != str(error):
                self.expect(unfused={**self._given.unfused, **self._refused})
            return self._run_own(place, args, kwargs)
        if self._refused.pop(place, None) is not None:
            self.expect(unfused={i: why for i, why in self._given.unfused.items() if i != place})
        self.ran[place] = "fused"
        return outputs

    def _run_own(self, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        block, choice = self._modules[place], self._plan.blocks[place]
        if choice.obstacle and self._readable[place]:
            warning = block_name(type(block)), choice.obstacle
            if warning not in self._warned:
                self._warned.add(warning)
                logger.warning("%s: generic flow in place of the fused one, which keeps less: %s", *warning)
        self.ran[place] = "own"
        own = own_forward(block)
        if not choice.recomputed:
            return self._packed(block, args, kwargs) if choice.saved is not None else own(*args, **kwargs)
        if choice.inputs is None:
            return checkpoint(own, *args, use_reentrant=False, preserve_rng_state=may_draw(), **kwargs)
        return fp8_checkpoint(own, *args, storage=choice.inputs, **kwargs)

    def _packed(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        keep = [*block.parameters(), *block.buffers()]
        for x in tree_leaves((args, kwargs)):  # constants that all blocks share, such as rotary tables
            if isinstance(x, Tensor) and not x.requires_grad:
                keep.append(x)
        with PackedSavedTensors(saving_of(self._config), keep, self._masks):
            return own_forward(block)(*args, **kwargs)

    def _kept_form(self, block: nn.Module) -> Callable[..., Any]:
        """The function that runs a block without recomputation now, for the start-up measurement."""
        if self._fuses:
            with suppress(NotFusable):
                return fused_block(block, saving_of(self._config))
        return lambda *args: self._packed(block, args, {})

    # --- reading and deciding ---

    def _read_all(self, join: bool) -> tuple[dict[int, Form], dict[int, str]]:
        """Index → the fused form of each block that has one, and why for each of the others."""
        forms, unfused = {}, {}
        for i, block in enumerate(self._modules if self._fuses else ()):
            try:
                if self._differs.get(type(block)):
                    raise NotFusable(self._differs[type(block)])
                forms[i] = fused_block(block, saving_of(self._config), join)
            except NotFusable as error:
                unfused[i] = str(error)
        return forms, unfused

    def _read(self) -> None:
        self._forget()
        self._read_forms, unfused = self._read_all(join=True)
        self.generation += 1
        readable = [block for block, known in zip(self._modules, self._readable, strict=True) if known and self._fuses]
        self._state = BlockState(readable, self._forget)
        if unfused != self._given.unfused:
            self.expect(unfused=unfused)
        if self._state is None:  # other blocks are streamed now
            self._read()
        self._choose_forms()

    def _choose_forms(self) -> None:
        """Keep the forms of the blocks that the plan has run so, with their linears and modulations."""
        forms = {i: form for i, form in self._read_forms.items() if self._plan.blocks[i].saved is not None}
        if self._copies is not None and (forms.keys() != self.forms.keys() or not self._plan.shadow_bytes):
            for group in self._copies.groups:  # of blocks that stay fused, too
                group.copies = None
            self._copies = None
        self.forms, self._modulations = forms, []
        for i, form in forms.items():
            if self._plan.blocks[i].flow == "fused" and i not in self._plan.streamed:
                self._modulations += form.modulations

    def _forget(self) -> None:
        self._state, self._read_forms, self.forms, self._copies, self._refused = None, {}, {}, None, {}
        self._modulations = []

    def _see_sizes(self, args: tuple[Any, ...]) -> None:
        """Decide at the first call, and again at a larger micro-batch or the first one that adds to gradients."""
        size = 0
        streams: list[Tensor] = []
        for x in args:
            if isinstance(x, Tensor) and x.ndim == 3:
                streams.append(x)
                size += x.numel()
        accumulates = False
        for parameter in self._trained[:1] + self._trained[-1:]:  # FSDP2 hides the first's gradient
            accumulates = accumulates or parameter.grad is not None
        given = self._given
        first = given.tokens is None and bool(streams or (args and self._plan.checkpointing != "auto"))
        if not (first or size > self._size or accumulates > given.accumulates):
            return
        device, tokens = first_tensor(args).device, given.tokens or Tokens(0, 0, 0)
        if size > self._size and len(streams) == 2:
            tokens = Tokens(len(streams[0]), streams[1].shape[1], streams[0].shape[1])
        self._size = max(size, self._size)
        if self._held is None:
            self._trained = [p for block in self._modules for p in trained_parameters(block)]
            missing = [] if self.states_are_made or self._config.optimizer.offload == "cpu" else self._trained
            states = state_bytes(self._config.optimizer_config()[0], [p.numel() for p in missing])
            self._held = used_bytes(device)[0] + states + (0 if self.streaming is None else self._plan.freed_bytes)
        budget = budget_bytes(self._config, usable_bytes(device))
        self.expect(
            blocks=read_blocks(self._modules, args, self._size),
            tokens=tokens,
            dropout=any(isinstance(m, nn.Dropout) and m.p for block in self._modules for m in block.modules()),
            free_bytes=None if budget is None else budget - self._held,
            accumulates=accumulates or given.accumulates,
            transposed_bytes=transposed_bytes(self._modules),
            adapter_elements=sum(p.numel() for p in self._trained) if all(self._readable) else 0,
            **shown_by(args),
        )

    def expect(self, **changed: Any) -> None:
        """Decide again with other inputs, fields of `decide.Given`; a trainer knows some before the first step."""
        before = self._plan
        self.generation += 1
        self._given = replace(self._given, **changed)
        plan = self._plan = decide(self._config, self._given)
        if self.streaming is not None and plan.streamed != self.streaming.streamed:
            self.streaming.stream(plan.streamed)
        copies = plan.transposed_bytes > 0
        if copies != (before is not None and before.transposed_bytes > 0):
            self._forget()
            set_transposed(self._modules, copies)
            made = "kept next to the weights" if copies else "dropped, memory is needed otherwise"
            if not self._given.without_copies:
                logger.info("transposed weights: %.2f GB %s", transposed_bytes(self._modules) / 1e9, made)
        self._choose_forms()
        line = report.dropout_line(plan)
        if line and (before is None or line != report.dropout_line(before)):
            logger.info(line)
        line = report.auto_line(plan)
        if line and before is not None and report.auto_line(before):
            sizes = [(each.recomputed, each.streamed, each.peak_bytes) for each in (before, plan)]
            line = "" if sizes[0] == sizes[1] else line
        if line:
            logger.info(line)
            if plan.free_bytes is not None and plan.peak_bytes > plan.free_bytes:
                text = "memory.budget_gb: even recomputing every block may exceed the budget by %.2f GB"
                logger.warning(f"{text}; lower the resolution", (plan.peak_bytes - plan.free_bytes) / 1e9)

    def _note_host(self, block: nn.Module) -> None:
        self.ran[self._places[block]] = "host"

    def check_step(self) -> None:
        """After the first step, warn of blocks that were not called, or in a checkpoint of their model.

        A whole list may belong to another part of the model, such as Wan 2.2's second transformer. RuntimeError if no
        block ran here, or with `fallback: error` only some of a list.
        """
        lists: dict[str, list[str | None]] = {}
        for i, name in enumerate(self.blocks):
            lists.setdefault(name.rpartition(".")[0], []).append(self.ran.get(i))
        missed, partly, reached = [], False, 0
        for name, ways in lists.items():
            idle, host = ways.count(None), ways.count("host")
            if idle:
                missed.append(f"{idle} of {len(ways)} {name} were not called")
            if host:
                missed.append(f"{host} of {len(ways)} {name} are in a checkpoint of the model's own")
            partly = partly or host > 0 or 0 < idle < len(ways)
            reached += len(ways) - idle - host
        text = "the first step left COAT out of blocks, whose activations stay in high precision: " + ", ".join(missed)
        if missed and (not reached or (partly and self._config.fallback == "error")):
            raise RuntimeError(f"{text}; set coat.enabled: false, or report this model's class")
        if missed:
            logger.warning("%s", text)


class BlockState:
    """Everything a trainer may replace in blocks and adapters, as one list to compare.

    In-place changes do not count. Modules are referenced, so that their ids stay unique; tensors are not, so that
    no codes stay on a GPU when the model moves to the CPU. `on_moved` is called when a block's buffers are gone.
    """

    def __init__(self, blocks: Iterable[nn.Module], on_moved: Callable[[], None]) -> None:
        self._modules: list[nn.Module] = []
        self._moves: list[weakref.ref[Tensor]] = []
        networks: dict[int, Any] = {}
        for block in blocks:
            buffer = next(block.buffers(), None)
            if buffer is not None:
                self._moves.append(weakref.ref(buffer, lambda _: on_moved()))
            for module in block.modules():
                self._modules.append(module)
                for owner in toolkit_adapters(module):  # outside the block
                    self._modules += owner.modules()
                    if hasattr(owner, "network_ref"):
                        networks[id(owner.network_ref())] = owner.network_ref()
        self._modules = [each for each in self._modules if each._modules or each._parameters or each._buffers]
        self._networks = list(networks.values())
        self.before = self.key()

    def key(self) -> list[Any]:
        """As it is now; `before` is that of construction."""
        key: list[Any] = []
        for module in self._modules:
            state = vars(module)
            key += (type(module), state["training"], state.get("forward"), has_hooks(module))
            key += (state.get("config"), state.get("coat_linear_config"), *state["_modules"].values())
            for x in (*state["_parameters"].values(), *state["_buffers"].values()):
                if x is None:
                    continue
                key += (id(x), x.requires_grad)
                if type(x) is Tensor:  # a buffer: another may have the identity of one
                    key.append(x.data_ptr())
            if "scaling" in state:  # PEFT's layer
                key += (state["_disable_adapters"], *state["_active_adapter"], *state["merged_adapters"])
                key += (*state["scaling"].values(), *state["lora_variant"])
            elif "org_forward" in state:  # ai-toolkit's adapter
                key.append(state.get("scale"))
        for network in self._networks:
            key += (network.is_active, network.is_merged_in, network.is_lorm)
            strengths = network._multiplier if isinstance(network._multiplier, list) else [network._multiplier]
            key += strengths
            if strengths.count(strengths[0]) < len(strengths):  # only then its tensor is read, a new one a step
                key.append(id(network.torch_multiplier))
        return key
