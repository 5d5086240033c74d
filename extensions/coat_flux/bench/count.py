"""How many launches, bytes and operations a training step of FLUX.1-dev is: counted on the meta device, without a GPU.

A transformer with a few blocks at full width, converted and adapted as a run does it, goes forward and backward in the
flow of its `coat:` block. A dispatch mode sees every operator with its shapes. Operators of `coat_core` run their CUDA
launchers, whose kernels are recorded and not started: no list of launches has to follow the code. The first and last
block of a kind count once, one between them as often as the model has such; gradient clipping, optimizer and EMA run
over as many parameters as the whole model trains.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import repeat
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from coat_core.kernels import scaled_mm
from coat_core.kernels.dispatch import launcher_of
from coat_core.kernels.gpu.runtime import recorded_launches

from ..base.errors import UserError
from ..blocks.apply import apply_coat
from ..blocks.gemms import set_transposed
from ..blocks.held import AsOnGPU
from ..blocks.lora import attach_lora
from ..blocks.runner import BlockRunner
from ..config.coat import COATConfig
from ..config.job_sections import TrainSection
from ..mini_flux.geometry import FLUX_DEV_TRANSFORMER_CONFIG, make_flux_dev_geometry
from ..trainers.optimizer import build_optimizer
from ..trainers.standalone.ema import LoraEMA
from ..trainers.standalone.flow_matching import Objective
from ..trainers.standalone.network import add_lora, lora_parameters, lora_targets
from ..trainers.standalone.steps import train_step
from ..watch.guard import RunGuard
from .limits import NARROW, TEXT_TOKENS, Geometry

META = torch.device("meta")
LATENT_CHANNELS, PIXELS_PER_LATENT = 16, 8
aten = torch.ops.aten


class Launch(NamedTuple):
    """GPU work of one operator.

    Attributes:
        region: of the step; see `Recorder`.
        category: of the table.
        operator: of torch or of `coat_core`, as the caller called it.
        part: what inside an operator of ours it is: a Triton kernel, or an operator of torch; else empty.
        reads: storage → bytes, each once.
        writes: likewise.
        flops: operations of matrix products.
        kind: "fp8" or "bf16" matrix product, "attention", "attention_backward"; empty where only bytes count.
        shape: (M, N, K) of a matrix product.
        count: kernels.
    """

    region: str
    category: str
    operator: str
    part: str
    reads: Mapping[int, int]
    writes: Mapping[int, int]
    flops: float = 0.0
    kind: str = ""
    shape: tuple[int, int, int] | None = None
    count: int = 1

    @property
    def bytes(self) -> int:
        """Read and written."""
        return sum(self.reads.values()) + sum(self.writes.values())


GEMM_FP8, GEMM_BF16, ATTENTION, GEMM_LORA = "FP8 GEMM", "bf16 GEMM", "attention", "LoRA GEMM"
FUSED = "norm, GELU, gate, rotary"
QUANTIZE, MOVE, PACK, CAST = "quantize for GEMM", "cat, add, zero", "pack and unpack", "casts of LoRA"
MODULATION, UPDATE, OUTSIDE = "modulation", "clip, optimizer, EMA", "embedders and loss"
CATEGORIES = (
    *(GEMM_FP8, GEMM_BF16, ATTENTION, GEMM_LORA, FUSED, QUANTIZE, MOVE, PACK, CAST, MODULATION, UPDATE, OUTSIDE),
)
BLOCK_LISTS = {"transformer_blocks": "double", "single_transformer_blocks": "single"}
# blocks of a kind that are run, by their place; "" stands for all between
PLACES = {"double": ("first ", ""), "single": ("first ", "", "last ")}
ONLY_METADATA = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"}
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "_scaled_mm": 0}  # where the first factor is among arguments
ATTENTION_PREFIX = "_scaled_dot_product_"
ATTENTION_KERNELS = {False: (1, 1.0), True: (3, 2.5)}  # backward: kernels of cuDNN's, and operations over 4·B·H·S²·d
OVERWRITING = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"}  # do not read what they write
FOREACH_TENSORS, FOREACH_CHUNKS, FOREACH_CHUNK = (110, 64, 48, 36, 30), 320, 65536  # of a launch, by number of lists


class Recorder(TorchDispatchMode):
    """Records what a GPU would be given inside the `with` block.

    Attributes:
        region: that what comes belongs to; set by whoever runs the step.
        times: region → how often a step has it; 1 where it is not given.
        launches: in order.
        host: region → calls of the dispatcher.
        reads: region → tensors that the host reads from the device (`.item()`, `.tolist()`); it waits for what is new.
    """

    def __init__(self, region: str) -> None:
        super().__init__()
        self.region = region
        self.times: dict[str, int] = {}
        self.launches: list[Launch] = []
        self.host: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self._operator, self._args = "", ()  # of ours, that runs
        self._storages: dict[int, Any] = {}  # kept, so that no other gets the same number
        self._read: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if self._operator and func._can_decompose():  # below autograd torch's composite operators come whole
            with self:
                return func.decompose(*args, **kwargs)
        self.host[self.region] += 1
        run = scaled_mm.scaled_mm_on_cuda if name == "coat::fp8_mm" else launcher_of(name)
        if run is None:
            return self._of_torch(func, args, kwargs)
        outer = self._operator, self._args
        if not self._operator:
            self._operator, self._args = name, args
        try:
            with self, recorded_launches(self._of_triton):
                return run(*args, **kwargs)
        finally:
            self._operator, self._args = outer

    def _of_triton(self, kernel: Any, grid: Any, args: tuple[Any, ...], options: Any) -> None:
        """A kernel reads or writes each of its tensors; which of both is the same for the bytes."""
        self._add(kernel.__name__, list(_tensors(args)), [])

    def _of_torch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.removeprefix("aten::")
        given = list(_tensors((*args, *kwargs.values())))
        on_device = any(x.device == META for x in given)
        is_read = name == "_local_scalar_dense" or (name == "_to_copy" and kwargs.get("device") == torch.device("cpu"))
        if on_device and is_read:  # answered with zeros in place of a tensor without memory
            if given[0].untyped_storage()._cdata not in self._read:
                self.reads[self.region] += 1
                self._add("copy to the host", given, [])
                self._read.update(self.launches[-1].reads)
            values = torch.zeros(given[0].shape, dtype=kwargs.get("dtype") or given[0].dtype)
            return values if name == "_to_copy" else values.item()
        result = func(*args, **kwargs)
        made = list(_tensors((result,)))
        if not (on_device or any(x.device == META for x in made)) or name in ONLY_METADATA or _is_view(func):
            return result
        if name.startswith(("_foreach", "_fused")):
            lists = [x for x in args if isinstance(x, list | tuple) and x and isinstance(x[0], Tensor)]
            count = _foreach_launches(lists) + ("norm" in name)  # partial norms are added up by one more
            reads = list(_tensors(lists[1:])) if name in OVERWRITING else given
            self._add(name, reads, [*made, *(lists[0] if name.endswith("_") else ())], count=count)
        elif name in PRODUCTS:
            a, b = given[PRODUCTS[name] : PRODUCTS[name] + 2]
            shape = math.prod(a.shape[:-1]), b.shape[-1], a.shape[-1]
            kind = "fp8" if name == "_scaled_mm" else "bf16"
            self._add(name, given, made, 2.0 * math.prod(shape), kind, shape)
        elif name.startswith(ATTENTION_PREFIX):
            backward = name.endswith("_backward")
            count, share = ATTENTION_KERNELS[backward]
            batch, heads, length, width = given[0].shape
            kind = "attention_backward" if backward else "attention"
            self._add(name, given, made, share * 4.0 * batch * heads * length**2 * width, kind, count=count)
        else:
            self._add(name, given[1:] if name in OVERWRITING else given, made)
        return result

    def _add(self, part: str, reads: list[Tensor], writes: list[Tensor], *work: Any, count: int = 1) -> None:
        operator, read, written = self._operator or part, self._bytes(reads), self._bytes(writes)
        category = self._category(operator, part, work[-1] if work and isinstance(work[-1], tuple) else None)
        part = part if self._operator else ""
        launch = Launch(self.region, category, operator, part, read, written, *work)
        self.launches.append(launch._replace(count=count))

    def _bytes(self, tensors: list[Tensor]) -> dict[int, int]:
        found: dict[int, int] = {}
        for x in tensors:
            storage = x.untyped_storage()
            self._storages[storage._cdata] = storage
            # elements that are repeated (expanded) once
            size = math.prod(size for size, step in zip(x.shape, x.stride(), strict=True) if step) * x.itemsize
            found[storage._cdata] = min(found.get(storage._cdata, 0) + size, max(storage.nbytes(), size))
        return found

    def _category(self, operator: str, part: str, shape: tuple[int, int, int] | None) -> str:
        if self.region in (UPDATE, OUTSIDE):
            return self.region
        if part.startswith(ATTENTION_PREFIX):
            return ATTENTION
        if shape is not None:
            if part == "_scaled_mm":
                return GEMM_FP8
            has_rank = min(shape[1:]) < NARROW or 1 < shape[0] < NARROW
            return GEMM_LORA if has_rank else MODULATION if shape[0] == 1 else GEMM_BF16
        if operator == "coat::dequantize" or (operator == "coat::quantize" and "per_group" in self._args):
            return PACK
        if operator in ("coat::quantize", "coat::fp8_mm") or "amax" in part:
            return QUANTIZE
        if operator == "coat::weight_only_linear":
            return MODULATION
        return FUSED if self._operator else CAST if part == "_to_copy" else MOVE


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (x for x in value if isinstance(x, Tensor))


def _is_view(func: Any) -> bool:
    results = func._schema.returns
    return bool(results) and all(x.alias_info is not None and not x.alias_info.is_write for x in results)


def _foreach_launches(lists: list[Any]) -> int:
    """Launches of a torch._foreach operator over lists of tensors."""
    launches = tensors = chunks = 0
    for x in lists[0]:
        tensors += 1
        for _ in range(-(-x.numel() // FOREACH_CHUNK)):
            chunks += 1
            if chunks == FOREACH_CHUNKS:
                launches, chunks, tensors = launches + 1, 0, 1
        if tensors == FOREACH_TENSORS[len(lists) - 1]:
            launches, chunks, tensors = launches + bool(chunks), 0, 0
    return launches + bool(chunks)


class _Boundary(torch.autograd.Function):
    """Hands tensors on; in backward, what comes next belongs to `region`."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, region: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.recorder, ctx.region = recorder, region
        with _disable_current_modes():
            return tuple(x.detach() for x in tensors)  # a view might get other strides where the batch is 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.recorder.region = ctx.region
        return None, None, *grads


def make_model(config: COATConfig, geometry: Geometry) -> Any:
    """A transformer with the blocks of `PLACES` on the meta device, as a run prepares it."""
    double, single = (min(getattr(geometry, kind), len(places)) for kind, places in PLACES.items())
    sizes = {"num_layers": double, "num_single_layers": single, "num_attention_heads": geometry.heads}
    model = make_flux_dev_geometry("meta", torch.bfloat16, **sizes)
    targets = lora_targets(model)
    apply_coat(model, config, device=META)
    add_lora(model, targets, geometry.rank, seed=0)
    if config.enabled:
        attach_lora(model, config)
    return model.train()


class _Autocast(TorchFunctionMode):
    """What autocast does on a GPU, and the meta device has not: linears multiply in bf16, each tensor is cast once."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            args = tuple(self._cast(x) if isinstance(x, Tensor) else x for x in args)
        return func(*args, **(kwargs or {}))

    def _cast(self, x: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16:
            return x
        return self._copies.setdefault(id(x), (x, x.to(torch.bfloat16)))[1]


def count_step(config: COATConfig, geometry: Geometry, resolution: int) -> Recorder:
    """Record one training step of batch 1 in the stand-alone engine, nothing recomputed.

    Args:
        config: the `coat:` block; where it is not enabled, diffusers' blocks in bf16 under autocast.
        geometry: heads and rank of the blocks; their numbers count for the parameters of the update.
        resolution: pixels along a side.

    Returns:
        What was recorded, in the regions "double forward", "first single backward" and so on, `OUTSIDE` and `UPDATE`.
    """
    model = make_model(config, geometry)
    runner, recorder, names = BlockRunner.of(model), Recorder(OUTSIDE), _places(model, geometry)
    recorder.times = {f"{name} {way}": n for name, n in names.values() for way in ("forward", "backward")}

    def run(block: nn.Module, *args: Any) -> Any:
        name = names[block][0]
        args = (*_Boundary.apply(recorder, OUTSIDE, *args[:2]), *args[2:])
        recorder.region = f"{name} forward"
        if runner is None:
            with _Autocast(), AsOnGPU():
                outputs = block(*args)
        else:
            outputs = runner(block, *args)
        recorder.region = OUTSIDE
        return _Boundary.apply(recorder, f"{name} backward", *outputs)

    side, sizes = resolution // PIXELS_PER_LATENT, FLUX_DEV_TRANSFORMER_CONFIG
    batch = {
        "latents": torch.empty(1, LATENT_CHANNELS, side, side, device=META),
        "prompt_embeds": torch.empty(1, TEXT_TOKENS, sizes["joint_attention_dim"], device=META),
        "pooled": torch.empty(1, sizes["pooled_projection_dim"], device=META),
    }
    objective = Objective(model, TrainSection(), None, 0, torch.bfloat16)  # type: ignore[arg-type]

    def loss_of(tensors: Any, draw: int) -> Tensor:
        model.zero_grad()  # its parameters stand for those of the whole model, which the session has
        return objective(batch, draw)

    session = _session(config, _parameters(model, geometry), loss_of, recorder)
    batches, nothing_asked = repeat(SimpleNamespace(draw=0)), SimpleNamespace(asked=False)
    # as a GPU, which has such kernels
    foreach = mock.patch.object(_foreach_utils, "_get_foreach_kernels_supported_devices", return_value=["meta"])
    with foreach:
        with Recorder(OUTSIDE):  # blocks are decided on, and compared with diffusers' own code; the optimizer's state
            train_step(session, batches, nothing_asked)  # type: ignore[arg-type]
        if runner is not None:
            others = {choice.flow for choice in runner.plan.blocks} - {"fused"}
            if others:
                raise UserError(f"blocks would run in the {others.pop()} flow: only the fused flow is counted")
            if config.memory.transposed_weights != "never":
                set_transposed([*model.transformer_blocks, *model.single_transformer_blocks], True)
        model.enable_gradient_checkpointing(run)
        recorder.region = OUTSIDE
        with recorder:
            train_step(session, batches, nothing_asked)  # type: ignore[arg-type]
    return recorder


def _session(
    config: COATConfig, lora: dict[str, nn.Parameter], objective: Callable[..., Tensor], recorder: Recorder
) -> Any:
    """What a step touches of a session, in a run that nobody watches closely at this step, with one process."""
    optimizer, guard = (
        build_optimizer(lora.values(), 1e-4, config, capturable=True),
        RunGuard(config.guard, lora, print),
    )
    with Recorder(UPDATE):
        guard.allows_update(0, 1.0, 1.0)  # at the start of a run it measures the parameters

    def after_backward(parameters: Sequence[nn.Parameter]) -> None:
        recorder.region = UPDATE
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)

    workers = SimpleNamespace(
        device=META, average_gradients=after_backward, agree=lambda loss, asked: (loss, list(asked))
    )
    watch = SimpleNamespace(
        guard=guard,
        allows_update=guard.allows_update,
        reads_at_once=lambda step: False,
        casts=lambda step: nullcontext(),
        retry=lambda step, attempt, reset: attempt(),
        mark=lambda moment, step: None,
        end_step=lambda step, seconds: None,
    )
    return SimpleNamespace(
        job=SimpleNamespace(train=TrainSection(), training_seed=0),
        workers=workers,
        watch=watch,
        lora=lora,
        dataset=SimpleNamespace(batch=lambda drawn: {}),
        objective=objective,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer),
        ema=LoraEMA(lora),
        live=SimpleNamespace(poll=frozenset),
        log=SimpleNamespace(step=lambda stats: None),
        epoch=0,
        step=0,
        outstanding=None,
    )


def _places(model: Any, geometry: Geometry) -> dict[nn.Module, tuple[str, int]]:
    """Block → its name as a region, and how many blocks of the whole model it stands for."""
    found = {}
    for blocks, kind in BLOCK_LISTS.items():
        places, number = PLACES[kind], getattr(geometry, kind)
        run = getattr(model, blocks)
        for place, block in zip(places if len(run) == len(places) else places[:1] + places[2:], run, strict=False):
            found[block] = f"{place}{kind}", 1 if place else number - len(places) + 1
    return found


def _parameters(model: Any, geometry: Geometry) -> dict[str, nn.Parameter]:
    """Adapters of the whole model, as the first block of each kind has them."""
    return {
        f"{name}.{i}": nn.Parameter(torch.empty_like(parameter))
        for name, parameter in lora_parameters(model).items()
        if name.split(".")[2] == "0"
        for i in range(getattr(geometry, BLOCK_LISTS[name.split(".")[1]]))
    }
