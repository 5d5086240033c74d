"""Sizes of a block: the bytes it saves for backward and needs temporarily, and the time it takes.

A FLUX block is counted on the meta device: diffusers' own block, with FP8 linears and LoRA, runs forward and backward
through the real code in a few hundredths of a second, and every storage is counted once. `decide` adds up the blocks.

    eager      diffusers' own code: norms, gates, attention and GELU save high precision, each adapter its own x
    generic    the same tensors packed to FP8 (`coat_core.activation`), one FP8 x for all adapters that read it
    fused      x, q, k, v, out, MLP before GELU, and with trained gates their inputs

A tensor is saved only if a gradient needs it. Operators count as a GPU's; kernels' own workspaces are not seen.

Shapes: rows = batch · tokens; d hidden, F MLP width, r rank. Bytes everywhere.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from coat_core.activation import SAVED_IN_FP8, FP8InputLinear, PackedSavedTensors, Saving, fp8_checkpoint, keep_no_input
from coat_core.autograd import autocast_is_on
from coat_core.config import FP8LinearConfig
from coat_core.linear.function import input_storage
from coat_core.linear.module import FP8Linear, FP8TrainableLinear, obstacle_to_conversion

from ..base.errors import UserError
from .fused.chooser import fused_block
from .fused.forms import Form
from .fused.linears import NotFusable
from .held import AsOnGPU, HeldTensors
from .hook import first_tensor
from .lora import LOKR, LokrLinear, toolkit_adapter, trained_parameters
from .models import FAMILIES, RATES, read_list, takes_arguments_of
from .models.family import Rates, Size

FP32 = 4
VALUES = {2: torch.bfloat16, 4: torch.float32}
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

# --- a block by its sizes ---

# kind of block → its list in the model
LISTS = {blocks.kind: blocks for family in FAMILIES.values() for blocks in family.lists if blocks.kind}
# kind of block → its linears: features in and out
LINEARS: dict[str, dict[str, tuple[Size, Size]]] = {}
for _kind, _blocks in LISTS.items():
    LINEARS[_kind] = {}
    for _linear in _blocks.linears:
        for _member, _outputs in zip(_linear.members, _linear.outputs, strict=True):
            LINEARS[_kind][_member] = (_linear.inputs, _outputs)


@dataclass(frozen=True)
class Block:
    """One transformer block, with names of its linears and parameters inside it."""

    kind: str  # of `LINEARS`: "double" (text and image streams) or "single" (both as one), of FLUX.1 or FLUX.2
    hidden: int  # d
    heads: int
    mlp: int  # F
    ranks: tuple[tuple[str, int], ...] = ()  # (linear, LoRA rank) of each adapter
    trained_input: bool = True  # its input requires a gradient
    trained_embedding: bool = False  # its modulation's input, in FLUX.2 the modulation, requires a gradient
    trained: tuple[str, ...] = ()  # its own parameters that are trained, without an adapter

    @property
    def trained_output(self) -> bool:
        """Whether the block's output requires a gradient."""
        return self.trained_input or self.trained_embedding or bool(self.ranks) or bool(self.trained)

    def shape(self, name: str) -> tuple[int, int]:
        """(in, out) features of a linear of the block."""
        inputs, outputs = (d * self.hidden + f * self.mlp for d, f in LINEARS[self.kind][name])
        return inputs, outputs

    def modulates(self, name: str) -> bool:
        """Whether a linear makes adaLN vectors, from one row per image: its products are not in FP8."""
        return name.endswith(".linear")

    def make(self) -> nn.Module:
        """Diffusers' block of these sizes on the meta device, without adapters; UserError if diffusers lacks it."""
        blocks = LISTS[self.kind]
        cls = getattr(importlib.import_module(f"diffusers.models.transformers.{blocks.source}"), blocks.block)
        if not takes_arguments_of(blocks, cls):
            raise UserError(f"{cls.__name__} of this diffusers cannot be counted; pip install -U diffusers")
        options = {} if self.kind == "double" else {"mlp_ratio": self.mlp / self.hidden}
        with torch.device("meta"):
            module: nn.Module = cls(self.hidden, self.heads, self.hidden // self.heads, **options)
        return module

    def arguments(self, tokens: Tokens, settings: FlowSettings) -> Callable[[], list[Any]]:
        """A function that makes new streams; modulation (or its input) and rotary tables are the same in each call."""
        dtype, both = VALUES[settings.value_bytes], tokens.image + tokens.text
        shared: list[Any] = []
        for count in LISTS[self.kind].vectors:
            shape = (tokens.batch, count * self.hidden)
            shared.append(torch.empty(shape, dtype=dtype, device="meta", requires_grad=self.trained_embedding))
        shared.append(tuple(torch.empty(both, self.hidden // self.heads, device="meta") for _ in range(2)))
        trained = torch.empty((), dtype=dtype, device="meta", requires_grad=True)

        def stream(length: int) -> Tensor:
            shape = (tokens.batch, length, self.hidden)
            if not self.trained_input:
                return torch.empty(shape, dtype=dtype, device="meta")
            # by an operator, as the block before makes it: a leaf would be held by its graph
            return trained.expand(shape) * 1

        def arguments() -> list[Any]:
            if self.kind == "flux2_single":
                return [stream(both), None, *shared]
            return [stream(tokens.image), stream(tokens.text), *shared]

        return arguments

    def around(self, tokens: Tokens, settings: FlowSettings) -> int:
        """Bytes saved outside the blocks, if it is the last: its output, rotary tables, final norm, prediction."""
        value_bytes, length = settings.value_bytes, tokens.text + tokens.image
        output_and_norm = tokens.rows * (self.hidden * value_bytes + 2 * FP32)
        tables = 2 * FP32 * (self.hidden // self.heads) * length
        prediction = 2 * tokens.batch * tokens.image * self.hidden * value_bytes if self.trained else 0
        return output_and_norm + tables + prediction

    @property
    def weight_elements(self) -> int:
        """Elements of its weights but for modulation."""
        return sum(math.prod(self.shape(name)) for name in LINEARS[self.kind] if not self.modulates(name))

    def operations(self, tokens: Tokens) -> tuple[int, int]:
        """Operations forward of its frozen weights, but for modulation, and of its attention."""
        streams = 2 if self.kind.endswith("double") else 1  # text and image have separate linears
        products = 2 * tokens.rows * (self.weight_elements // streams)
        return products, 4 * tokens.rows * (tokens.text + tokens.image) * self.hidden


def read_block(module: Any, trained_input: bool = True) -> Block | None:
    """Describe a real FLUX block with PEFT's or ai-toolkit's LoRA; None for another class, adapter or diffusers."""
    known = read_list(type(module))
    if known is None or not known.kind or not takes_arguments_of(known, type(module)):
        return None
    try:
        linears = {name: module.get_submodule(name) for name in LINEARS[known.kind]}
        ranks = {name: _rank(linear) for name, linear in linears.items()}
        bases = [getattr(linear, "base_layer", linear) for linear in linears.values()]
        heads = module.attn.heads
        hidden = bases[0].in_features
        widest = bases[-1].in_features
    except AttributeError:
        return None
    if None in ranks.values():
        return None
    trained = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and ".lora_" not in name and ".lokr_" not in name:
            trained.append(name)
    return Block(
        kind=known.kind,
        hidden=hidden,
        heads=heads,
        mlp=widest if known.kind.endswith("double") else widest - hidden,  # a single block's reads the attention too
        ranks=tuple((name, rank) for name, rank in ranks.items() if rank),
        trained_input=trained_input,
        trained=tuple(trained),
    )


def _rank(linear: Any) -> int | None:
    """Sum of the LoRAs' ranks on a linear; None if it has another adapter.

    A LoKr counts as a LoRA of as many parameters; the h that it does not save is 1 % in FLUX.1-dev at factor 8.
    """
    if hasattr(linear, "lora_A"):
        return sum(down.weight.shape[0] for down in linear.lora_A.values())
    owner = linear if isinstance(linear, LokrLinear) else toolkit_adapter(linear)
    if owner is None:
        return 0
    if owner is linear or type(owner).__name__ == LOKR:
        matrices = [parameter for name, parameter in owner.named_parameters() if name.startswith("lokr_")]
        return rank_of_as_many(sum(matrix.numel() for matrix in matrices), linear)
    return int(owner.lora_down.weight.shape[0]) if hasattr(owner, "lora_down") else None


def rank_of_as_many(parameters: int, linear: Any) -> int:
    """The rank of a LoRA of so many parameters, rounded up."""
    return math.ceil(parameters / (linear.in_features + linear.out_features))


# --- its bytes ---


@dataclass(frozen=True)
class Tokens:
    """Size of a micro-batch."""

    batch: int
    text: int  # of each image
    image: int

    @property
    def rows(self) -> int:
        """Rows of both streams together."""
        return self.batch * (self.text + self.image)


@dataclass(frozen=True)
class FlowSettings:
    """How blocks save tensors."""

    flow: str = "fused"  # "eager", "generic" or "fused"
    saving: Saving = SAVED_IN_FP8  # of packed tensors, and of recomputed blocks' inputs
    inputs: str = "per_row"  # granularity of the FP8 x of adapters in the generic flow and in recomputed blocks
    fp8_checkpoint: bool = True  # recomputed blocks keep FP8 inputs
    value_bytes: int = 2  # of an element of hidden states, 2 for bf16
    lora_bytes: int = FP32  # of an adapter's x and h outside the fused flow: 4 for fp32 adapters without autocast
    dropout: bool = False  # the adapters have dropout
    cuda: bool = True  # else RMSNorm saves an fp32 copy, and LayerNorm its statistics in bf16
    fp8_gemms: bool = True  # linears quantize what they multiply
    fp8_weights: bool = True  # linears hold codes; else GEMMs cast at each use, and the generic flow saves the codes
    weight_format: str = "e4m3"  # of these codes; other formats are decoded for a product
    kernels: bool = True  # casts and norms run as kernels; else they go through whole fp32 tensors
    frees_gradients: bool = False  # backward uses up each gradient at once (`train.fused_backward`)


class BlockBytes(NamedTuple):
    """Bytes of a block, if it is recomputed and if not."""

    kept: int  # saved for backward if it is not recomputed, without its output
    recomputed: int  # saved if it is
    workspace: int  # the most needed besides, in its forward or backward pass
    recomputation: int  # the same if it is recomputed
    gradients: int  # 0 where they are freed at once, and then in `workspace`


@functools.lru_cache(maxsize=2048)
@_disable_current_modes()
@torch.inference_mode(False)  # `decide` may ask while images are drawn
@torch.enable_grad()
def _counted(block: Block, tokens: Tokens, settings: FlowSettings, recomputes: bool) -> tuple[int, int]:
    """Bytes saved between a forward and a backward pass, without outputs; and the most that both need besides."""
    module = _module_for(block, settings)
    run = _run_of(module, settings, recomputes)
    if recomputes and settings.fp8_checkpoint:
        run = functools.partial(fp8_checkpoint, run, storage=settings.saving.tensors)
    elif recomputes:
        run = functools.partial(checkpoint, run, use_reentrant=False)
    hooks = []
    if settings.frees_gradients:
        for parameter in module.parameters():
            if parameter.requires_grad:
                hooks.append(parameter.register_post_accumulate_grad_hook(lambda freed: setattr(freed, "grad", None)))
    arguments = block.arguments(tokens, settings)
    if type(block) is not Block and isinstance(run, Form):  # tables that blocks share are made in the first pass
        with torch.no_grad():
            run(*arguments())
    with HeldTensors(settings.kernels) as held:
        outputs = [x for x in tree_leaves(run(*arguments())) if x is not None]
        storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in outputs}
        kept = held.now - sum(storages.values())
        loss = _Loss.apply(*outputs)
        del outputs
        loss.backward()
    module.zero_grad()
    for hook in hooks:
        hook.remove()
    workspace = held.peak - kept
    if recomputes and not settings.cuda:
        kept += torch.get_rng_state().nbytes  # kept by `checkpoint`, in CPU memory
    return kept, workspace


@functools.lru_cache(maxsize=1024)
@_disable_current_modes()
@torch.no_grad()
def forward_bytes(block: Block | UnknownBlock, tokens: Tokens, settings: FlowSettings) -> int:
    """Peak bytes of a block's forward pass when nothing is saved, as in sampling."""
    if isinstance(block, UnknownBlock):
        return block_bytes(block, tokens, settings).workspace
    arguments = block.arguments(tokens, settings)
    with HeldTensors(settings.kernels) as held:
        _run_of(_module_for(block, settings), settings)(*arguments())
    return held.peak


@functools.lru_cache(maxsize=64)
def gradient_bytes(block: Block, value_bytes: int) -> int:
    """Bytes of all gradients of a block: of fp32 adapters, and of its own parameters, in the dtype of its values."""
    total = FP32 * sum(rank * sum(block.shape(name)) for name, rank in block.ranks)
    if block.trained:
        parameters = dict(block.make().named_parameters())
        total += value_bytes * sum(parameters[name].numel() for name in block.trained)
    return total


class _Loss(torch.autograd.Function):
    """Frees its inputs; backward makes their gradients."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.like = [(x.shape, x.dtype) for x in outputs]
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.new_empty(shape, dtype=dtype) for shape, dtype in ctx.like)


def _run_of(module: nn.Module, settings: FlowSettings, recomputes: bool = False) -> Callable[..., Any]:
    if settings.flow == "fused" and not recomputes:
        with suppress(NotFusable):  # with such a version of diffusers a run takes the generic flow, too
            return fused_block(module, settings.saving)

    def run(*args: Any) -> Any:
        constants = [x for x in tree_leaves(args) if isinstance(x, Tensor) and not x.requires_grad]
        unpacked = [*module.parameters(), *module.buffers(), *constants]
        is_plain = recomputes or settings.flow == "eager"
        packing = nullcontext() if is_plain else PackedSavedTensors(settings.saving, unpacked)
        with AsOnGPU(settings.cuda), packing:
            return module(*args)

    return run


@functools.lru_cache(maxsize=64)
@_disable_current_modes()  # a watched step must not see its casts
def _module_for(block: Block, settings: FlowSettings) -> nn.Module:
    """A block on the meta device, with linears and adapters as in a run."""
    from peft import LoraConfig, inject_adapter_in_model

    gemms = FP8LinearConfig(input_granularity=settings.inputs, use_fp8_gemm=settings.fp8_gemms)
    if settings.weight_format == "int8":
        gemms = replace(gemms, weight_format="int8", input_format="int8", grad_format="int8")
    module = block.make().to(VALUES[settings.value_bytes]).requires_grad_(False)
    with torch.device("meta"):
        if block.ranks:
            ranks, dropout = dict(block.ranks), 0.5 if settings.dropout else 0.0
            lora = LoraConfig(rank_pattern=ranks, lora_dropout=dropout, target_modules=list(ranks))
            inject_adapter_in_model(lora, module, "default")
        for name, linear in list(module.named_modules()):
            if settings.flow != "eager" and isinstance(linear, CONVOLUTIONS):
                keep_no_input(linear)
            if type(linear) is not nn.Linear or ".lora_" in name or obstacle_to_conversion(linear) is not None:
                continue
            name = name.removesuffix(".base_layer")
            multiplies = settings.fp8_gemms and not block.modulates(name)
            if settings.fp8_weights and f"{name}.weight" not in block.trained:
                stored = replace(gemms, use_fp8_gemm=multiplies, weight_format=settings.weight_format)
                FP8Linear.from_linear(linear, stored)
            elif multiplies:
                FP8TrainableLinear.from_linear(linear, gemms)
    for name, parameter in module.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.to(VALUES[settings.lora_bytes])
            parameter.requires_grad_()
        elif name in block.trained:
            parameter.requires_grad_()
    for layer in module.modules():
        if settings.flow != "eager" and hasattr(layer, "lora_A"):
            shares = isinstance(layer.base_layer, FP8Linear | FP8TrainableLinear) and not settings.dropout
            source = layer.base_layer if shares else None
            FP8InputLinear.from_linear(layer.lora_A["default"], input_storage(gemms), source)
    return module.train()


# --- blocks of a model, known and unknown ---

UNKNOWN = Rates(96.0, 38.0, 42.0)  # of classes that were not measured
FP8_INPUT, BF16_INPUT = 1.03, 2.0  # bytes that a recomputed block saves per element
ATTENTION_IN_BF16 = 4 * (BF16_INPUT - FP8_INPUT)  # more bytes per element, of q, k, v and out


@dataclass(frozen=True)
class UnknownBlock:
    """A block that is not counted: its bytes are known per element of hidden states, by its class."""

    kind: str  # name of its class
    elements: int  # of hidden states in the largest micro-batch
    gradients: int  # bytes of its adapters
    fused: float = 0.0  # bytes per element in the fused flow; 0: it has none


def block_bytes(block: Block | UnknownBlock, tokens: Tokens, settings: FlowSettings) -> BlockBytes:
    """All numbers of a block; where nothing up to it is trained, the backward pass takes nothing."""
    if isinstance(block, Block):
        if not block.trained_output:
            return BlockBytes(0, 0, forward_bytes(block, tokens, settings), 0, 0)
        kept, workspace = _counted(block, tokens, settings, False)
        inputs, recomputation = _counted(block, tokens, settings, True)
        gradients = 0 if settings.frees_gradients else gradient_bytes(block, settings.value_bytes)
        return BlockBytes(kept, inputs, workspace, recomputation, gradients)
    rates = RATES.get(block.kind, UNKNOWN)
    packs_attention = settings.saving.attention == "fp8"
    rate = rates.packed if packs_attention else rates.attention_kept
    if settings.flow == "fused" and block.fused:
        rate = block.fused + (0.0 if packs_attention else ATTENTION_IN_BF16)
    elif settings.flow == "eager":
        rate = rates.high_precision
    recomputed = FP8_INPUT if settings.fp8_checkpoint else BF16_INPUT
    whole = int(rates.high_precision * block.elements)
    return BlockBytes(int(rate * block.elements), int(recomputed * block.elements), whole, whole, block.gradients)


def read_blocks(modules: Iterable[nn.Module], args: tuple[Any, ...], elements: int) -> tuple[Block | UnknownBlock, ...]:
    """Describe blocks with their adapters, in forward order; `args` are the first block's, if known."""
    trained = any(isinstance(x, Tensor) and x.requires_grad for x in args[:2])
    embedding = len(args) > 2 and isinstance(args[2], Tensor) and args[2].requires_grad
    blocks: list[Block | UnknownBlock] = []
    for module in modules:
        block = read_block(module, trained)
        if block is not None:
            block = replace(block, trained_embedding=embedding)
            blocks.append(block)
            trained = block.trained_output
            continue
        gradients = sum(p.numel() * p.element_size() for p in trained_parameters(module))
        trained = trained or gradients > 0
        known = read_list(type(module))
        fused = 0.0 if known is None else known.fused_bytes
        blocks.append(UnknownBlock(type(module).__name__, elements, gradients, fused))
    return tuple(blocks)


def shown_by(args: tuple[Any, ...]) -> dict[str, Any]:
    """Fields of `decide.Given` that a block's arguments determine: device type, bytes of values."""
    first = first_tensor(args)
    kind = first.device.type
    lora = torch.get_autocast_dtype(kind) if autocast_is_on(kind) else torch.float32
    return {"device": kind, "value_bytes": first.element_size(), "lora_bytes": lora.itemsize}


# --- all blocks of a step ---


class Moment(NamedTuple):
    """Bytes at one moment of a step."""

    kept: int  # saved for backward
    workspace: int
    gradients: int  # so far

    @property
    def total(self) -> int:
        """Sum of all three."""
        return sum(self)


def largest_moment(blocks: Sequence[BlockBytes], recomputed: Iterable[int] = (), accumulates: bool = False) -> Moment:
    """The moment when blocks need most: those up to one are saved, later ones (`accumulates`: all) have gradients."""
    chosen = set(recomputed)
    total = later = sum(block.gradients for block in blocks)
    kept = 0
    moments = [Moment(0, 0, 0)]
    for i, block in enumerate(blocks):
        later -= block.gradients
        kept += block.recomputed if i in chosen else block.kept
        workspace = block.recomputation if i in chosen else block.workspace
        moments.append(Moment(kept, workspace, total if accumulates else later))
    return max(moments, key=lambda moment: moment.total)


def fewest_recomputed(blocks: Sequence[BlockBytes], free: float, accumulates: bool = False) -> list[int]:
    """The fewest blocks to recompute so that `largest_moment` stays within `free` bytes, or all."""
    order = sorted(range(len(blocks)), key=lambda i: blocks[i].kept - blocks[i].recomputed, reverse=True)
    for count in range(len(blocks) + 1):
        if largest_moment(blocks, order[:count], accumulates).total <= free:
            return sorted(order[:count])
    return list(range(len(blocks)))


# --- blocks with codes in CPU memory, weighed against recomputation by modelled time ---
# A streamed block's codes cross the bus in forward and backward, while other blocks multiply; a recomputed block costs
# one more forward pass, during which codes can be copied too. The rates are those of an RTX 4090 with PCIe 4.0 x16;
# their ratio is half of it on a 4060 Ti, a third below on a 5090.

ALIGNMENT = 256  # bytes, where a storage begins in a slot; torch's CUDA allocator has 512, GEMMs want 16
SLOTS = 2  # buffers on the device that streamed blocks share
FP8_PER_SECOND, BF16_PER_SECOND = 330e12 * 0.65, 165e12 * 0.7  # operations of large matrix products
BACKWARD_OF_ATTENTION = 2.5  # of its forward pass
COPIED_PER_SECOND = 25e9  # bytes, host to device, pinned


def aligned(size: int) -> int:
    """Bytes that a storage takes in a slot."""
    return math.ceil(size / ALIGNMENT) * ALIGNMENT


def spread(count: int, blocks: int) -> tuple[int, ...]:
    """`count` indices of `blocks`, evenly spaced."""
    return tuple((2 * i + 1) * blocks // (2 * count) for i in range(count))


def pass_seconds(
    blocks: Sequence[Block | UnknownBlock], tokens: Tokens, codes: Sequence[int]
) -> list[tuple[float, float]]:
    """Each block's seconds, forward and backward; unknown blocks take as long as their codes' copy."""
    times = []
    for block, size in zip(blocks, codes, strict=True):
        if type(block) is Block:
            products, attention = block.operations(tokens)
            linear, other = products / FP8_PER_SECOND, attention / BF16_PER_SECOND
            times.append((linear + other, linear + BACKWARD_OF_ATTENTION * other))
        else:
            times.append((size / COPIED_PER_SECOND, size / COPIED_PER_SECOND))
    return times


def extra_seconds(
    times: Sequence[tuple[float, float]], codes: Sequence[int], streamed: Collection[int], recomputed: Collection[int]
) -> float:
    """Seconds that streaming and recomputing these blocks adds to a step; copies run beside products."""
    forward_times, backward_times = zip(*times, strict=True)
    again = sum(forward_times[i] for i in recomputed)
    copies = sum(codes[i] for i in streamed) / COPIED_PER_SECOND
    return again + max(0.0, copies - sum(forward_times)) + max(0.0, copies - sum(backward_times) - again)
