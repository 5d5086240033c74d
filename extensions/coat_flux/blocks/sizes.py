"""The bytes a FLUX block saves for backward, and needs for a moment, counted on the meta device.

diffusers' own block, with FP8 linears and LoRA, runs forward and backward through the real code in a few
hundredths of a second, and every storage is counted once. `decide` adds up the blocks.

    eager      diffusers' own code: norms, gates, attention and GELU save high precision, each adapter its own x
    generic    the same tensors packed to FP8 (`coat_core.activation.packing`), one FP8 x for all adapters that read it
    fused      x, q, k, v, out, MLP before GELU, and with trained gates their inputs

A tensor is saved only if a gradient needs it. Operators count as a GPU's; kernels' own workspaces are not seen.

Shapes: rows = batch · tokens; d hidden, F MLP width, r rank. Bytes everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from coat_core.activation import FP8InputLinear, PackedSavedTensors, PackingConfig, fp8_checkpoint
from coat_core.config import FP8LinearConfig
from coat_core.granularity import PER_GROUP, PER_ROW, Granularity
from coat_core.linear.function import input_granularity
from coat_core.linear.module import FP8Linear, FP8TrainableLinear
from coat_core.ops.dispatch import launchers

from .described import Block, make_block, modulates, shared_arguments
from .fused.chooser import fused_block
from .fused.linears import NotFusable
from .held import AsOnGPU, HeldTensors
from .kinds import KINDS, saved_tensors

FLOWS = ("eager", "generic", "fused")
FP32 = 4
VALUES = {2: torch.bfloat16, 4: torch.float32}


@dataclass(frozen=True)
class Tokens:
    """Size of a micro-batch: images, text tokens and image tokens of each."""

    batch: int
    text: int
    image: int

    @property
    def rows(self) -> int:
        """Rows of both streams together."""
        return self.batch * (self.text + self.image)


@dataclass(frozen=True)
class FlowSettings:
    """How blocks save tensors.

    Attributes:
        fp8_adapters: adapters save x in FP8 (`attach_lora`); in the eager flow only in recomputed blocks.
        lora_bytes: per element of an adapter's x and h outside the fused flow: 4 for fp32 adapters without autocast.
        cuda: torch's CUDA operators; on a CPU RMSNorm saves an fp32 copy and LayerNorm its statistics in bf16.
        fp8_weights: linears hold codes; else GEMMs cast at each use, and the generic flow saves the codes.
    """

    flow: str = "fused"  # one of `FLOWS`
    attention: str = "fp8"  # "fp8" or "bf16", of q, k, v and out
    packing: Granularity = PER_GROUP  # scaling of packed tensors and of recomputed blocks' inputs
    inputs: Granularity = PER_ROW  # scaling of the FP8 x of adapters in the generic flow and in recomputed blocks
    fp8_adapters: bool = True
    fp8_checkpoint: bool = True  # recomputed blocks keep FP8 inputs
    value_bytes: int = 2  # of an element of hidden states, 2 for bf16
    lora_bytes: int = FP32
    dropout: bool = False  # the adapters have dropout
    cuda: bool = True
    fp8_gemms: bool = True  # linears quantize what they multiply
    fp8_weights: bool = True
    weight_format: str = "e4m3"  # of these codes; what is not FP8 is decoded for a product
    kernels: bool = True  # casts and norms run as kernels; where not, they go through whole fp32 tensors
    frees_gradients: bool = False  # a gradient is used up in backward, as soon as it is there (`train.fused_backward`)

    def __post_init__(self) -> None:
        if self.flow not in FLOWS:
            raise ValueError(f"flow={self.flow!r}: must be one of {', '.join(FLOWS)}")


class BlockBytes(NamedTuple):
    """What a choice of recomputed blocks weighs, per block."""

    kept: int  # when the block is not recomputed, without its output
    recomputed: int  # kept when it is
    workspace: int  # needed for a moment of its forward or backward pass besides what is kept
    recomputation: int  # the same, when the block is recomputed
    gradients: int  # of what is trained in it; 0 where they are freed at once, and then in `workspace`


@functools.lru_cache(maxsize=1024)
@torch.inference_mode(False)  # `decide` may ask while images are drawn
@torch.enable_grad()
def flux_bytes(block: Block, tokens: Tokens, settings: FlowSettings) -> BlockBytes:
    """All numbers of a block; 0 kept and no backward pass where nothing up to it is trained."""
    if not block.trained_output:
        return BlockBytes(0, 0, forward_bytes(block, tokens, settings), 0, 0)
    module = _module_for(block, settings)
    eager = _run_of(module, replace(settings, flow="eager"))

    def recomputed(*args: Any) -> Any:
        if settings.fp8_checkpoint:
            return fp8_checkpoint(eager, *args, granularity=settings.packing)
        return checkpoint(eager, *args, use_reentrant=False)

    freed = trained_in(module) if settings.frees_gradients else []
    frees = [param.register_post_accumulate_grad_hook(_free) for param in freed]
    kept, peak = _count(_run_of(module, settings), block, tokens, settings)
    module.zero_grad()
    inputs, highest = _count(recomputed, block, tokens, settings)
    module.zero_grad()
    for hook in frees:
        hook.remove()
    random_state = 0 if settings.cuda else torch.get_rng_state().nbytes  # kept by `checkpoint`, in CPU memory
    gradients = 0 if settings.frees_gradients else lora_bytes(block) + trained_bytes(block, settings.value_bytes)
    return BlockBytes(kept, inputs + random_state, peak - kept, highest - inputs, gradients)


@functools.lru_cache(maxsize=1024)
@torch.no_grad()
def forward_bytes(block: Block, tokens: Tokens, settings: FlowSettings) -> int:
    """The most that a block's forward pass needs where nothing is kept: sampling."""
    streams, shared = _arguments(block, tokens, settings)
    with _counting(settings) as held:
        _run_of(_module_for(block, settings), settings)(*streams(), *shared)
    return held.peak


def kept_by_kind(block: Block, tokens: Tokens, settings: FlowSettings) -> dict[str, int]:
    """What of `BlockBytes.kept` is inputs of norms, what q, k, v and so on."""
    if not block.trained_output:
        return {}
    module = _module_for(block, settings)
    streams, shared = _arguments(block, tokens, settings)
    given = (*module.parameters(), *module.buffers(), *tree_leaves(shared))
    counted = {x.untyped_storage()._cdata for x in given}
    outputs = tree_leaves(_run_of(module, settings)(*streams(), *shared))
    found: dict[str, int] = {}
    for kind, tensor in saved_tensors(tuple(outputs), max(dict(block.ranks).values(), default=0)):
        storage = tensor.untyped_storage()
        if storage._cdata not in counted:
            counted.add(storage._cdata)
            found[kind] = found.get(kind, 0) + storage.nbytes()
    return {kind: found[kind] for kind in KINDS if kind in found}


def _count(run: Callable[..., Any], block: Block, tokens: Tokens, settings: FlowSettings) -> tuple[int, int]:
    """Bytes kept between a forward and a backward pass, outputs not counted, and the most at one moment of both."""
    streams, shared = _arguments(block, tokens, settings)
    with _counting(settings) as held:
        outputs = tree_leaves(run(*streams(), *shared))
        stays = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in outputs}
        kept = held.now - sum(stays.values())
        loss = _Loss.apply(*outputs)
        del outputs
        loss.backward()
    return kept, held.peak


@contextmanager
def _counting(settings: FlowSettings) -> Iterator[HeldTensors]:
    with _disable_current_modes(), HeldTensors() as held, nullcontext() if settings.kernels else _WithoutKernels():
        yield held


class _WithoutKernels(TorchDispatchMode):
    """Runs operators of `coat_core` as on a CPU, where what their references make for a moment is in memory too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        operator = launchers.get(func._schema.name)
        return func(*args, **(kwargs or {})) if operator is None else operator._init_fn(*args, **(kwargs or {}))


def trained_in(module: nn.Module) -> list[nn.Parameter]:
    """Parameters of a module that are trained."""
    return [param for param in module.parameters() if param.requires_grad]


def _free(param: Tensor) -> None:
    param.grad = None


class _Loss(torch.autograd.Function):
    """Lets its inputs go; backward makes their gradients, which belong to nobody else."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.like = [(x.shape, x.dtype) for x in outputs]
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.new_empty(shape, dtype=dtype) for shape, dtype in ctx.like)


def _arguments(
    block: Block, tokens: Tokens, settings: FlowSettings
) -> tuple[Callable[[], tuple[Tensor, Tensor | None]], list[Any]]:
    a, d, whole = VALUES[settings.value_bytes], block.hidden, tokens.image + tokens.text
    trained = torch.empty((), dtype=a, device="meta", requires_grad=True)
    joined = block.kind == "flux2_single"

    def stream(length: int) -> Tensor:
        shape = (tokens.batch, length, d)
        if not block.trained_input:
            return torch.empty(shape, dtype=a, device="meta")
        # made by an operator, as by the block before: a leaf would be held by its graph
        return trained.expand(shape) * 1

    def streams() -> tuple[Tensor, Tensor | None]:
        return stream(whole if joined else tokens.image), None if joined else stream(tokens.text)

    return streams, shared_arguments(block, tokens.batch, whole, a)


def _run_of(module: nn.Module, settings: FlowSettings) -> Callable[..., Any]:
    packing = PackingConfig("e4m3", settings.packing, settings.attention)
    if settings.flow == "fused":
        with suppress(NotFusable):  # with such a version of diffusers a run takes the generic flow, too
            return fused_block(module, None, packing)

    def run(*args: Any) -> Any:
        keep = [*module.parameters(), *module.buffers(), *tree_leaves(args[2:])]
        packs = nullcontext() if settings.flow == "eager" else PackedSavedTensors(packing, keep)
        with AsOnGPU(settings.cuda), packs:
            return module(*args)

    return run


def _module_for(block: Block, settings: FlowSettings) -> nn.Module:
    fixed = {"attention": "bf16", "packing": PER_GROUP, "fp8_checkpoint": True, "cuda": True, "kernels": True}
    settings = replace(settings, flow="eager", frees_gradients=False, **fixed)
    return _module(replace(block, trained_input=True, trained_embedding=False), settings)


@functools.lru_cache(maxsize=64)
@_disable_current_modes()  # its casts are none of a step that is watched
def _module(block: Block, settings: FlowSettings) -> nn.Module:
    from peft import LoraConfig, inject_adapter_in_model

    gemms = FP8LinearConfig(input_granularity=settings.inputs.name, use_fp8_gemm=settings.fp8_gemms)
    if settings.weight_format == "int8":
        gemms = replace(gemms, weight_format="int8", input_format="int8", grad_format="int8")
    with torch.device("meta"):
        module = make_block(block).to(VALUES[settings.value_bytes]).requires_grad_(False)
        for name, linear in [(n, m) for n, m in module.named_modules() if isinstance(m, nn.Linear)]:
            multiplies = settings.fp8_gemms and not modulates(name)  # `Architecture.weight_only`
            if f"{name}.weight" in block.trained:
                if multiplies:
                    FP8TrainableLinear.from_linear(linear, gemms)
            elif settings.fp8_weights:
                stored = replace(gemms, use_fp8_gemm=multiplies, weight_format=settings.weight_format)
                FP8Linear.from_linear(linear, stored)
            elif multiplies:
                FP8TrainableLinear.from_linear(linear, gemms)
        if block.ranks:
            ranks, dropout = dict(block.ranks), 0.5 if settings.dropout else 0.0
            lora = LoraConfig(rank_pattern=ranks, lora_dropout=dropout, target_modules=list(ranks))
            inject_adapter_in_model(lora, module, "default")
    for name, parameter in module.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.to(VALUES[settings.lora_bytes])
            parameter.requires_grad_()
        elif name in block.trained:
            parameter.requires_grad_()
    for layer in module.modules() if settings.fp8_adapters else ():
        if hasattr(layer, "lora_A"):
            shares = isinstance(layer.base_layer, FP8Linear | FP8TrainableLinear) and not settings.dropout
            source = layer.base_layer if shares else None
            FP8InputLinear.from_linear(layer.lora_A["default"], gemms.input_format, input_granularity(gemms), source)
    return module.train()


def around_bytes(block: Block, tokens: Tokens, settings: FlowSettings) -> int:
    """Bytes saved outside the blocks: the last output, rotary tables, final norm, prediction."""
    length, a = tokens.text + tokens.image, settings.value_bytes
    read = 2 * tokens.batch * tokens.image * block.hidden * a if block.trained else 0
    return tokens.rows * (block.hidden * a + 2 * FP32) + 2 * FP32 * block.head_dim * length + read


@functools.lru_cache(maxsize=64)
def trained_bytes(block: Block, value_bytes: int) -> int:
    """Bytes of the block's own parameters that are trained."""
    sizes = {name: param.numel() for name, param in make_block(block).named_parameters()} if block.trained else {}
    return value_bytes * sum(sizes[name] for name in block.trained)


def lora_bytes(block: Block) -> int:
    """Bytes of the block's fp32 adapters; their gradients take as much again."""
    return FP32 * sum(rank * sum(block.shape(name)) for name, rank in block.ranks)
