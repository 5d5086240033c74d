"""What each block of a model does, as a pure function: `coat-flux plan` and both trainers call `decide`."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from coat_core.activation import Saving
from coat_core.formats import INT8
from coat_core.granularity import Granularity, Storage

from ..config.coat import COATConfig
from .measure import Picked, candidates
from .sizes import (
    FP32,
    SLOTS,
    Block,
    BlockBytes,
    FlowSettings,
    Moment,
    Tokens,
    UnknownBlock,
    block_bytes,
    extra_seconds,
    fewest_recomputed,
    largest_moment,
    pass_seconds,
    spread,
)

NOT_CAPTURED = "only the stand-alone trainer captures steps"


@dataclass(frozen=True)
class Given:
    """Inputs of a plan apart from the config; each change is a reason to decide again."""

    blocks: tuple[Block | UnknownBlock, ...]  # in forward order
    classes: tuple[str, ...] = ()  # names of their classes
    tokens: Tokens | None = None  # of the largest micro-batch; None before the first step
    value_bytes: int = 2  # of an element of hidden states
    lora_bytes: int = FP32  # of an element in the adapters' products
    dropout: bool = False  # whether the adapters have dropout
    quantized: bool = False  # the weights are those that ai-toolkit quantized its own way
    device: str = "cuda"  # type of the device
    allow_recompute: bool = True  # False forbids recomputation (`train.gradient_checkpointing: false`)
    free_bytes: float | None = None  # the budget minus everything held throughout a step; None: no limit
    stream_bytes: tuple[int, ...] = ()  # of each block's codes; empty if they cannot be in CPU memory
    reserve_bytes: int = 0  # that sampling or the optimizer needs free, at another time
    accumulates: bool = False  # gradients of earlier micro-batches are held throughout
    unfused: Mapping[int, str] = field(default_factory=dict)  # index of each block that cannot be fused → why
    transposed_bytes: int = 0  # of transposed copies of the weights, if they are made
    adapter_elements: int = 0  # of the matrices that the fused flow copies in the blocks' dtype
    graph_obstacle: str = NOT_CAPTURED  # why whole steps cannot be CUDA graphs; empty where they can
    picked: Picked | None = None  # the GEMM picked in the first step; None before it
    attention: Picked | None = None  # the attention kernel of the fused blocks, likewise
    recomputed: tuple[int, ...] | None = None  # indices of recomputed blocks; None: the config decides
    ran_out_with: int | None = None  # how many blocks recomputed when memory ran out; None where it did not
    without_copies: bool = False  # memory ran out with transposed copies
    frees_gradients: bool = False  # the optimizer uses and frees each gradient in backward


@dataclass(frozen=True)
class BlockChoice:
    """What one block does: `flow` is "fused" (`fused/`), "generic" (saved tensors packed) or "diffusers"."""

    recomputed: bool | None  # runs again in backward, else its saved tensors are kept; None: decided at the first step
    inputs: Storage | None  # of a recomputed block's inputs; None: high precision
    saved: Saving | None  # of a kept block's tensors; None: high precision
    flow: str
    obstacle: str  # why it is not fused, if it should be; else empty


@dataclass(frozen=True)
class BlockPlan:
    """What all blocks do. Their bytes are counted on first access, which takes seconds."""

    checkpointing: str  # `memory.checkpointing` in force
    gemm: str  # of `measure.GEMMS`, or the config's own scaling
    captured: bool  # steps are CUDA graphs
    blocks: tuple[BlockChoice, ...]  # in forward order
    recomputed: list[int] | None  # indices of the blocks that recompute; None before `auto` has chosen
    streamed: list[int]  # indices of the blocks with codes in CPU memory
    around_bytes: int  # saved outside the blocks
    freed_bytes: int  # of device memory, by codes in CPU memory
    free_bytes: float | None = field(compare=False)  # for a step, those included; None: no limit
    config: COATConfig = field(compare=False, repr=False)
    given: Given = field(compare=False, repr=False)

    @functools.cached_property
    def moment(self) -> Moment | None:
        """The moment when the blocks need most memory; None before the first step."""
        if self.given.tokens is None:
            return None
        return largest_moment(_sizes(self.config, self.given), self.recomputed or (), self.given.accumulates)

    @property
    def peak_bytes(self) -> int:
        """Bytes at that moment, with those saved outside the blocks."""
        return self.around_bytes + (0 if self.moment is None else self.moment.total)

    @functools.cached_property
    def shadow_bytes(self) -> int:
        """Bytes of `fused.linears.AdapterCopies`; 0 if no block is fused, or if a block would recompute for them."""
        given = self.given
        if given.tokens is None or all(choice.flow != "fused" for choice in self.blocks):
            return 0
        copied = given.adapter_elements * given.value_bytes
        fits = self.free_bytes is None or copied <= self.free_bytes - self.peak_bytes
        return copied if fits else 0

    @functools.cached_property
    def spare_bytes(self) -> float:
        """What a step leaves free, if `auto` recomputes nothing and streams nothing; else, or without a limit, -1."""
        if self.given.tokens is None or self.checkpointing != "auto" or self.recomputed or self.streamed:
            return -1.0
        return -1.0 if self.free_bytes is None else self.free_bytes - self.peak_bytes - self.shadow_bytes

    @functools.cached_property
    def transposed_bytes(self) -> int:
        """Bytes of the transposed copies of the weights; 0 if none are kept."""
        given, mode = self.given, self.config.memory.transposed_weights
        possible = self.config.enabled and given.tokens is not None and given.device == "cuda"
        if not possible or self.streamed or given.without_copies or mode == "never":
            return 0
        fits = mode == "always" or given.transposed_bytes <= self.spare_bytes
        return given.transposed_bytes if fits else 0


def decide(config: COATConfig, given: Given) -> BlockPlan:
    """Decide what every block does; before the first step (`given.tokens` is None) `auto` has no choice yet."""
    checkpointing = checkpointing_mode(config, given.allow_recompute)
    gemm = candidates(config)[0] if given.picked is None else given.picked.name
    in_fp8 = config.enabled and config.activation.use_fp8

    sizes: list[BlockBytes] = []
    around = 0
    if given.tokens is not None:
        known = [block for block in given.blocks if isinstance(block, Block)]
        around = known[-1].around(given.tokens, flow_settings(config, given)) if known else 0
        if checkpointing == "auto" or (config.memory.stream_blocks == "auto" and given.stream_bytes):
            sizes = _sizes(config, given)
    streamed = _streamed(config, given, checkpointing, sizes, around)
    freed = _freed(given, streamed)
    free = None if given.free_bytes is None else given.free_bytes + freed
    recomputed = _recomputed(given, checkpointing, sizes, around, free)

    blocks = []
    saving = saving_of(config)
    for i in range(len(given.blocks)):
        runs_again = None if recomputed is None else i in recomputed
        inputs = saved = None
        flow, obstacle = "diffusers", ""
        if runs_again and config.enabled and config.memory.enable_efficient_checkpoint:
            inputs = saving.tensors
        if in_fp8 and not runs_again:
            saved, flow = saving, config.activation.flow
            obstacle = given.unfused.get(i, "") if flow == "fused" else ""
            flow = "generic" if obstacle else flow
        blocks.append(BlockChoice(runs_again, inputs, saved, flow, obstacle))
    return BlockPlan(
        checkpointing=checkpointing,
        gemm=gemm if in_fp8 else "bf16",
        captured=config.speed.cuda_graphs == "auto" and not given.graph_obstacle,
        blocks=tuple(blocks),
        recomputed=recomputed,
        streamed=list(streamed),
        around_bytes=around,
        freed_bytes=freed,
        free_bytes=free,
        config=config,
        given=given,
    )


def _sizes(config: COATConfig, given: Given) -> list[BlockBytes]:
    """Bytes of each block."""
    assert given.tokens is not None
    settings = block_settings(config, given)
    return [block_bytes(block, given.tokens, own) for block, own in zip(given.blocks, settings, strict=True)]


def budget_bytes(config: COATConfig, usable: float | None) -> float | None:
    """The limit of the run's peak: `memory.budget_gb`, else `usable`; None: unknown."""
    budget_gb = config.memory.budget_gb
    return usable if budget_gb is None else budget_gb * 1e9


def checkpointing_mode(config: COATConfig, allow_recompute: bool) -> str:
    """`memory.checkpointing` in force; without COAT diffusers recomputes every block."""
    if not allow_recompute:
        return "none"
    return config.memory.checkpointing if config.enabled else "all"


def _streamed(config: COATConfig, given: Given, mode: str, sizes: Sequence[BlockBytes], around: int) -> tuple[int, ...]:
    """Indices of the blocks with codes in CPU memory; `auto`: the fastest step that fits."""
    option, codes = config.memory.stream_blocks, given.stream_bytes
    count = len(codes)
    if option != "auto":
        return spread(count if option == "all" else min(option, count), count)
    if not codes or given.tokens is None or given.ran_out_with is not None:
        return tuple(range(count))  # all: sizes are not known, or memory ran out

    times = pass_seconds(given.blocks, given.tokens, codes)

    def cost(number: int) -> tuple[float, float, int]:
        """Excess bytes, extra seconds, this number."""
        streamed = spread(number, count)
        free = None if given.free_bytes is None else given.free_bytes + _freed(given, streamed)
        recomputed = _recomputed(given, mode, sizes, around, free) or ()
        needed = max(largest_moment(sizes, recomputed, given.accumulates).total + around, given.reserve_bytes)
        excess = 0.0 if free is None else needed - free
        return max(0.0, excess), extra_seconds(times, codes, streamed, recomputed), number

    *_, cheapest = min(cost(number) for number in range(count + 1))
    return spread(cheapest, count)


def _freed(given: Given, streamed: Collection[int]) -> int:
    """Bytes that these blocks' codes free on the device, less the buffers they pass through."""
    codes = [given.stream_bytes[i] for i in streamed]
    slots = min(SLOTS, len(codes)) * max(codes, default=0)
    return -slots if given.device == "cpu" else sum(codes) - slots


def _recomputed(
    given: Given, mode: str, sizes: Sequence[BlockBytes], around: int, free: float | None
) -> list[int] | None:
    if given.recomputed is not None:
        return sorted(given.recomputed)
    if mode == "all":
        return list(range(len(given.blocks)))
    if mode == "auto" and given.tokens is None:
        return None
    if mode == "none" or free is None:
        return []
    return fewest_recomputed(sizes, free - around, given.accumulates)


def saving_of(config: COATConfig) -> Saving:
    """How saved tensors, and inputs of recomputed blocks, are stored in FP8."""
    activation = config.activation
    granularity = Granularity(activation.nonlinear_granularity, activation.group_size)
    fmt = "e4m3" if activation.format == INT8.name else activation.format  # INT8 needs rotated rows
    return Saving(Storage(fmt, granularity), activation.attention)


def block_settings(config: COATConfig, given: Given) -> list[FlowSettings]:
    """How each block saves tensors if it is not recomputed."""
    generic = flow_settings(config, given, False)
    fused = flow_settings(config, given)
    return [generic if i in given.unfused else fused for i in range(len(given.blocks))]


def flow_settings(config: COATConfig, given: Given, fused: bool = True) -> FlowSettings:
    """How a block saves tensors; without COAT, or with FP8 weights alone, in high precision."""
    activation, cuda = config.activation, given.device == "cuda"
    in_fp8 = config.enabled and activation.use_fp8
    return FlowSettings(
        flow=(activation.flow if fused else "generic") if in_fp8 else "eager",
        saving=saving_of(config),
        inputs=activation.linear_granularity,
        fp8_checkpoint=config.enabled and config.memory.enable_efficient_checkpoint,
        value_bytes=given.value_bytes,
        lora_bytes=given.lora_bytes,
        dropout=given.dropout,
        cuda=cuda,
        fp8_gemms=in_fp8 and not given.quantized,
        fp8_weights=config.enabled and (config.weight.use_fp8 or given.quantized),
        weight_format="e4m3" if given.quantized else config.linear_config().weight_format,
        kernels=cuda,
        frees_gradients=given.frees_gradients and not given.accumulates,
    )
