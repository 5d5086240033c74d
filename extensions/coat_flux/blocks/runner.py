"""Runs every block according to its plan: recomputed or not, fused or not.

    a pass begins    blocks are read again if one has changed, `decide` is asked if sizes grew,
                     adapters are copied, modulations computed
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
        self.states_are_made = False  # the optimizer's, which a trainer may make before the first step
        self._config = config
        self._modules = list(blocks.values())
        self._indices = {block: i for i, block in enumerate(self._modules)}
        self._readable = [read_list(type(block)) is not None for block in self._modules]
        self._measured = first_measured(self._modules)
        self._fuses = config.enabled and config.activation.use_fp8 and config.activation.flow == "fused"
        adopted = any(is_adopted(module) for block in self._modules for module in block.modules())
        measures = all(self._readable) and config.speed.measure != "never" and not adopted
        self.gemms = GemmPick(blocks, config, self._timed_form) if measures else None  # None after its pick
        self.picked: Picked | None = None  # its pick
        self.attention = AttentionPick(config)
        self.streaming: StreamedWeights | None = None
        proves = config.enabled and config.speed.kernels == "auto"
        self._unproved = set(map(type, self._modules)) if proves else set()  # classes of blocks
        self._last = len(self._modules)  # index of the block that ran last
        self._state: BlockState | None = None  # of the blocks when read; None: they must be
        self._read_forms: dict[int, Form] = {}  # index → form, of all blocks that can be fused
        self.forms: dict[int, Form] = {}  # index → form, of the blocks that run fused under the plan
        self._copies: AdapterCopies | None = None
        self._modulations: list[Modulation] = []  # computed at the beginning of a pass
        self._masks: Masks = WeakTensorKeyDictionary()  # of the forward pass
        self._refused_calls: dict[int, str] = {}  # index → why its form could not take the last call
        self._disagreements: dict[type, str] = {}  # class → what is wrong with its forms' output, or ""
        self._largest = 0  # elements of hidden states in the largest micro-batch
        self._held_bytes: float | None = None  # held throughout a step; None before the first
        self._trained: list[nn.Parameter] = []
        self._warned: set[tuple[str, str]] = set()
        self._logged_plan: BlockPlan | None = None
        self._logged_counts: Counter[str] | None = None  # blocks by what they do
        self._plan: Any = None  # a BlockPlan, from the first decision on
        self.generation = 0  # changes whenever a block would run differently, which invalidates captured graphs
        sizes, names = read_blocks(self._modules, (), 0), tuple(block_name(type(block)) for block in self._modules)
        self._given = Given(sizes, names, allow_recompute=allow_recompute, quantized=adopted)
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
            run_device = next(model.parameters()).device if device is None else device
            streaming = runner.streaming = StreamedWeights(runner._modules, run_device)
            runner.expect(stream_bytes=streaming.bytes)
            ready = streaming.ready
        take_over(model, blocks.values(), runner, runner._on_host, ready)
        return runner

    # a method, so that the hooks of a copied model call the copied runner
    def _on_host(self, block: nn.Module) -> None:
        self.ran[self._indices[block]] = "host"

    @classmethod
    def of(cls, model: nn.Module) -> BlockRunner | None:
        """The installed runner of a model, or of one inside it; None without one."""
        hooks = filter(None, map(hook_of, model.modules()))
        return next((hook.run for hook in hooks if isinstance(hook.run, cls)), None)

    @property
    def plan(self) -> BlockPlan:
        """What every block does; before the first step, as far as that is known."""
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
        count, before = len(self._modules), len(plan.recomputed or ())
        if before == count:
            return None
        self.expect(recomputed=tuple(range(count)), ran_out_with=before)
        inputs = "FP8" if self._config.memory.enable_efficient_checkpoint else "exact"
        return (
            f"checkpointing auto: from here on all {count} blocks recompute, before {before} did; "
            f"their gradients are now those of {inputs} inputs"
        )

    # --- a pass ---

    def __call__(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run one block as the plan has it."""
        index = self._indices[block]
        begins = index <= self._last  # a pass
        self._last = index
        if begins:
            self._masks = WeakTensorKeyDictionary()
            if self._state is None or self._state.key() != self._state.before:  # a block has changed
                self._read()
        picks = index == self._measured if self._measured else begins
        if picks and (self._given.attention is None or self.gemms is not None):
            self._pick_kernels(index, args, kwargs)
        self._decide_by_sizes(args)
        if self._state is None:  # forgotten by the pick or the decision
            self._read()
        form = self.forms.get(index)
        if type(block) in self._unproved:
            self._prove(index, form, begins, args, kwargs)
        if begins and self.forms and args:
            self.share(args)
        if form is None:
            outputs = self._run_own(index, args, kwargs)
        else:
            outputs = self._run_fused(index, form, args, kwargs)
        if self.streaming is not None:
            self.streaming.announce(block, outputs)
        if index == len(self._modules) - 1 and self._logged_plan is not self._plan:
            self._logged_plan = self._plan
            counts = report.treatments(self._plan, self.ran)
            if counts != self._logged_counts:
                self._logged_counts = counts
                logger.info("blocks: %s", "; ".join(f"{count} {what}" for what, count in counts.items()))
        return outputs

    def _prove(self, index: int, form: Form | None, begins: bool, args: tuple[Any, ...], kwargs: Any) -> None:
        """Prove the kernels of a block, the first of its class, before it runs."""
        block = self._modules[index]
        self._unproved.remove(type(block))
        if first_tensor((*args, *kwargs.values())).device.type != proving.DEVICE:
            return

        def run(*args: Any, **kwargs: Any) -> Any:
            if begins and self.forms and args:
                self.share(args)
            return self._run_own(index, args, kwargs) if form is None else form(*args, **kwargs)

        with suppress(NotFusable):
            proving.prove_block(block, run, args, kwargs, self._config)

    def _pick_kernels(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pick the attention kernel and the GEMM by this block's arguments, in the first pass that allows it."""
        if self._given.attention is None and index == self._measured and all(self._readable) and len(args) > 1:
            with suppress(NotFusable):
                query, mask = attention_query(self._modules[index], args)
                self.expect(attention=self.attention.choose(query, mask))
        if self.gemms is not None and not kwargs:
            self.picked, self.gemms = self.gemms.choose(args), None
            self._forget()
            self.expect(picked=self.picked)

    def share(self, args: tuple[Any, ...]) -> None:
        """Copy the adapters' matrices and compute modulation vectors, for the pass that begins with `args`."""
        forms = list(self.forms.values())
        if self._plan.shadow_bytes:
            dtype = compute_dtype(args[0])
            if self._copies is None or self._copies.dtype != dtype:
                groups = [group for form in forms for group in form.groups]
                groups += [modulation.linear for form in forms for modulation in form.modulations]
                self._copies = AdapterCopies(groups, dtype)
            self._copies.refresh()
        with suppress(NotFusable):
            modulate_ahead(self._modulations, forms[0].reader.call(*args).temb)

    def _run_fused(self, index: int, form: Form, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = type(self._modules[index])
        if kind not in self._disagreements and not kwargs:  # the first block of its class decides for all
            why = self._disagreements[kind] = disagreement(form, self._modules[index], args)
            if why:
                alike = [i for i, other in enumerate(self._modules) if type(other) is kind]
                self._read_forms = {i: x for i, x in self._read_forms.items() if i not in alike}
                self.expect(unfused={**self._given.unfused, **dict.fromkeys(alike, why)})
                return self._run_own(index, args, kwargs)
        # arguments that a form cannot take make its block unfused in the plan, until a call with others
        try:
            outputs = form(*args, **kwargs)
        except NotFusable as error:
            self._refused_calls[index] = str(error)
            if self._given.unfused.get(index) != str(error):
                self.expect(unfused={**self._given.unfused, **self._refused_calls})
            return self._run_own(index, args, kwargs)
        if self._refused_calls.pop(index, None) is not None:
            self.expect(unfused={i: why for i, why in self._given.unfused.items() if i != index})
        self.ran[index] = "fused"
        return outputs

    def _run_own(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block's own code: recomputed, with packed saved tensors, or unchanged."""
        block, choice = self._modules[index], self._plan.blocks[index]
        if choice.obstacle and self._readable[index]:
            warning = block_name(type(block)), choice.obstacle
            if warning not in self._warned:
                self._warned.add(warning)
                logger.warning("%s: generic flow in place of the fused one, which saves less: %s", *warning)
        self.ran[index] = "own"
        forward = own_forward(block)
        if choice.recomputed and choice.inputs is not None:
            return fp8_checkpoint(forward, *args, storage=choice.inputs, **kwargs)
        if choice.recomputed:
            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=may_draw(), **kwargs)
        if choice.saved is not None:
            return self._run_packed(block, args, kwargs)
        return forward(*args, **kwargs)

    def _run_packed(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        exact = [*block.parameters(), *block.buffers()]  # not packed
        for x in tree_leaves((args, kwargs)):  # constants that all blocks share, such as rotary tables
            if isinstance(x, Tensor) and not x.requires_grad:
                exact.append(x)
        with PackedSavedTensors(saving_of(self._config), exact, self._masks):
            return own_forward(block)(*args, **kwargs)

    def _timed_form(self, block: nn.Module) -> Callable[..., Any]:
        """What `GemmPick` times: a block without recomputation, as its linears are set now."""
        if self._fuses:
            with suppress(NotFusable):
                return fused_block(block, saving_of(self._config))
        return lambda *args: self._run_packed(block, args, {})

    # --- reading and deciding ---

    def _read_all(self, join: bool) -> tuple[dict[int, Form], dict[int, str]]:
        """Index → form of each block that can be fused, index → reason of each that cannot."""
        forms, unfused = {}, {}
        for i, block in enumerate(self._modules if self._fuses else ()):
            try:
                if self._disagreements.get(type(block)):
                    raise NotFusable(self._disagreements[type(block)])
                forms[i] = fused_block(block, saving_of(self._config), join)
            except NotFusable as error:
                unfused[i] = str(error)
        return forms, unfused

    def _read(self) -> None:
        """Read all blocks: their forms, and the state that later passes compare with."""
        self._forget()
        self._read_forms, unfused = self._read_all(join=True)
        self.generation += 1
        watched = [block for i, block in enumerate(self._modules) if self._readable[i] and self._fuses]
        self._state = BlockState(watched, self._forget)
        if unfused != self._given.unfused:
            self.expect(unfused=unfused)
        if self._state is None:  # the new plan streams other blocks
            self._read()
        self._choose_forms()

    def _forget(self) -> None:
        self._state = self._copies = None
        self._read_forms, self.forms, self._refused_calls, self._modulations = {}, {}, {}, []

    def _choose_forms(self) -> None:
        """Select the forms of the blocks that the plan does not recompute, and their modulations."""
        forms = {i: form for i, form in self._read_forms.items() if self._plan.blocks[i].saved is not None}
        if self._copies is not None and (forms.keys() != self.forms.keys() or not self._plan.shadow_bytes):
            for group in self._copies.groups:  # one buffer holds all
                group.copies = None
            self._copies = None
        self.forms, self._modulations = forms, []
        for i, form in forms.items():
            if self._plan.blocks[i].flow == "fused" and i not in self._plan.streamed:
                self._modulations += form.modulations

    def _decide_by_sizes(self, args: tuple[Any, ...]) -> None:
        """Decide at the first call, and again at a larger micro-batch or the first one that adds to gradients."""
        streams: list[Tensor] = []  # hidden states [B, S, D]
        size = 0
        for x in args:
            if isinstance(x, Tensor) and x.ndim == 3:
                streams.append(x)
                size += x.numel()
        accumulates = False
        for parameter in self._trained[:1] + self._trained[-1:]:  # FSDP2 hides the first's gradient
            accumulates = accumulates or parameter.grad is not None
        given = self._given
        first = given.tokens is None and bool(streams or (args and self._plan.checkpointing != "auto"))
        if not (first or size > self._largest or accumulates > given.accumulates):
            return
        device, tokens = first_tensor(args).device, given.tokens or Tokens(0, 0, 0)
        if size > self._largest and len(streams) == 2:
            tokens = Tokens(len(streams[0]), text=streams[1].shape[1], image=streams[0].shape[1])
        self._largest = max(size, self._largest)
        if self._held_bytes is None:
            self._trained = [p for block in self._modules for p in trained_parameters(block)]
            self._held_bytes = used_bytes(device)[0]
            if not self.states_are_made and self._config.optimizer.offload != "cpu":  # the first step makes them
                stored = self._config.optimizer_config()[0]
                self._held_bytes += state_bytes(stored, [p.numel() for p in self._trained])
            if self.streaming is not None:
                self._held_bytes += self._plan.freed_bytes  # as with all codes on the device
        budget = budget_bytes(self._config, usable_bytes(device))
        self.expect(
            blocks=read_blocks(self._modules, args, self._largest),
            tokens=tokens,
            dropout=any(isinstance(m, nn.Dropout) and m.p for block in self._modules for m in block.modules()),
            free_bytes=None if budget is None else budget - self._held_bytes,
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
            change = "kept next to the weights" if copies else "dropped, memory is needed otherwise"
            if not self._given.without_copies:
                logger.info("transposed weights: %.2f GB %s", transposed_bytes(self._modules) / 1e9, change)
        self._choose_forms()
        dropout = report.dropout_line(plan)
        if dropout and (before is None or dropout != report.dropout_line(before)):
            logger.info(dropout)
        auto = report.auto_line(plan)
        if auto and before is not None and report.auto_line(before):
            old, new = ((p.recomputed, p.streamed, p.peak_bytes) for p in (before, plan))
            auto = "" if old == new else auto  # only the free memory differs
        if auto:
            logger.info(auto)
            if plan.free_bytes is not None and plan.peak_bytes > plan.free_bytes:
                text = "memory.budget_gb: even recomputing every block may exceed the budget by %.2f GB"
                logger.warning(f"{text}; lower the resolution", (plan.peak_bytes - plan.free_bytes) / 1e9)

    def check_step(self) -> None:
        """After the first step, warn of blocks that were not called, or in a checkpoint of their model.

        A whole list may belong to another part of the model, such as Wan 2.2's second transformer. RuntimeError if no
        block ran here, or with `fallback: error` only some of a list.
        """
        ways_of_list: dict[str, list[str | None]] = {}
        for i, name in enumerate(self.blocks):
            ways_of_list.setdefault(name.rpartition(".")[0], []).append(self.ran.get(i))
        missed, partly, reached = [], False, 0
        for name, ways in ways_of_list.items():
            idle, on_host = ways.count(None), ways.count("host")
            if idle:
                missed.append(f"{idle} of {len(ways)} {name} were not called")
            if on_host:
                missed.append(f"{on_host} of {len(ways)} {name} are in a checkpoint of the model's own")
            partly = partly or on_host > 0 or 0 < idle < len(ways)
            reached += len(ways) - idle - on_host
        if not missed:
            return
        text = "the first step left COAT out of blocks, whose activations stay in high precision: " + ", ".join(missed)
        if not reached or (partly and self._config.fallback == "error"):
            raise RuntimeError(f"{text}; set coat.enabled: false, or report this model's class")
        logger.warning("%s", text)


class BlockState:
    """Everything a trainer may replace in blocks and adapters, as one list to compare.

    In-place changes do not count. Modules are referenced, so that their ids stay unique; tensors are not, so that
    no codes stay on a GPU when the model moves to the CPU. `on_moved` is called when a block's buffers are gone.
    """

    def __init__(self, blocks: Iterable[nn.Module], on_moved: Callable[[], None]) -> None:
        self._modules: list[nn.Module] = []
        self._moves: list[weakref.ref[Tensor]] = []  # alive, or they would not call
        networks: dict[int, Any] = {}  # id → ai-toolkit's network, which has the strengths of its adapters
        for block in blocks:
            buffer = next(block.buffers(), None)
            if buffer is not None:
                self._moves.append(weakref.ref(buffer, lambda _: on_moved()))
            for module in block.modules():
                self._modules.append(module)
                for adapter in toolkit_adapters(module):  # not among the block's modules
                    self._modules += adapter.modules()
                    if hasattr(adapter, "network_ref"):
                        network = adapter.network_ref()
                        networks[id(network)] = network
        self._modules = [m for m in self._modules if m._modules or m._parameters or m._buffers]
        self._networks = list(networks.values())
        self.before = self.key()

    def key(self) -> list[Any]:
        """The state now; `before` is the one at construction."""
        key: list[Any] = []
        for module in self._modules:
            state = vars(module)
            key += (type(module), state["training"], state.get("forward"), has_hooks(module))
            key += (state.get("config"), state.get("coat_linear_config"), *state["_modules"].values())
            for x in (*state["_parameters"].values(), *state["_buffers"].values()):
                if x is None:
                    continue
                key += (id(x), x.requires_grad)
                if type(x) is Tensor:  # a buffer, which can be freed: a new one may get its id
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
            # adapters read the tensor, made once a step, only if strengths differ
            if strengths.count(strengths[0]) < len(strengths):
                key.append(id(network.torch_multiplier))
        return key
