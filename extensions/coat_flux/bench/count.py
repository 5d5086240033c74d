"""The launches of a training step of FLUX.1-dev, counted on the meta device without a GPU, and what they should take.

A dispatch mode sees every operator with its shapes. Operators of `coat_core` run their CUDA launchers, whose kernels
are recorded instead of started.

A transformer with a few blocks at full width goes through the stand-alone engine's own `train_step`. The first and
last block of a kind count once, one between them as often as the model has such; gradient clipping, optimizer and EMA
run over as many parameters as the whole model trains.

`limits.kernel_ms` turns launches into milliseconds. COAT is compared with bf16 and torch.compile at the same costs:
everything between matrix products and attention is fused as far as dependencies allow.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product, repeat
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from coat_core.ops import scaled_mm
from coat_core.ops.dispatch import launcher_of, launchers
from coat_core.ops.launch import recorded_launches

from ..base.errors import UserError
from ..base.text import markdown_table
from ..blocks.apply import apply_coat
from ..blocks.fused.linears import LinearGroup
from ..blocks.fused.parts import Modulation, modulate_ahead
from ..blocks.gemms import set_transposed
from ..blocks.held import AsOnGPU, tensors_in
from ..blocks.hook import hook_of
from ..blocks.lora import attach_lora
from ..blocks.models.flux1 import FLUX_DEV_TRANSFORMER_CONFIG, make_flux_dev_geometry
from ..blocks.runner import BlockRunner
from ..config.coat import COATConfig
from ..config.job_sections import EMASection, NetworkSection, SaveSection, TrainSection
from ..plan.speed import MODELLED, Card
from ..trainers.optimizer import build_optimizer
from ..trainers.standalone.flow_matching import Objective
from ..trainers.standalone.network import LoraEMA, add_lora, lora_parameters
from ..trainers.standalone.trainer import train_step
from ..watch.guard import RunGuard
from .limits import ENOUGH_WARPS, NARROW, TEXT_TOKENS, Geometry, Launched, issue, kernel_ms

META = torch.device("meta")


class Launch(NamedTuple):
    """GPU work of one operator."""

    region: str
    category: str
    operator: str
    part: str  # Triton kernel, or torch operator, inside an operator of ours; else empty
    reads: Mapping[int, int]  # storage → bytes, each once
    writes: Mapping[int, int]
    flops: float = 0.0  # this and the next two of matrix products and attention, see `kernel_ms`
    kind: str = ""
    shape: tuple[int, int, int] | None = None
    count: int = 1
    launched: Launched | None = None  # the Triton kernel with its grid, arguments and options

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return sum(self.reads.values()) + sum(self.writes.values())


GEMM_FP8 = "FP8 GEMM"
GEMM_INT8 = "INT8 GEMM"
GEMM_BF16 = "bf16 GEMM"
ATTENTION = "attention"
GEMM_LORA = "LoRA GEMM"
FUSED = "norm, GELU, gate, rotary"
QUANTIZE = "quantize for GEMM"
MOVE = "cat, add, zero"
PACK = "pack and unpack"
CAST = "casts of LoRA"
MODULATION = "modulation"
UPDATE = "clip, optimizer, EMA"
OUTSIDE = "embedders and loss"
CATEGORIES = (
    *(GEMM_FP8, GEMM_INT8, GEMM_BF16, ATTENTION, GEMM_LORA, FUSED, QUANTIZE, MOVE, PACK, CAST),
    *(MODULATION, UPDATE, OUTSIDE),
)
ONLY_METADATA = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"}
OTHERS = {  # operators of ours that are not `FUSED`
    "coat::weight_only_linear": MODULATION,
    "coat::lora_up_gradients": GEMM_LORA,
    "coat::mlp_down_gradient": GEMM_LORA,
}
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "_scaled_mm": 0}  # index of the first factor
INT8_PRODUCT = "_int8_mm_fwd_kernel"
QUANTIZES = {"coat::quantize", "coat::quantize_int8", "coat::fp8_mm", "coat::int8_mm"}  # or transposes codes
ATTENTION_PREFIX = "_scaled_dot_product_"
ATTENTION_KERNELS = {"attention": (1, 1.0), "attention_backward": (3, 2.5)}  # of cuDNN; operations over 4·B·H·S²·d
OVERWRITING = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"}  # do not read their outputs
FOREACH_TENSORS = (110, 64, 48, 36, 30)  # of a launch, by number of lists
FOREACH_CHUNKS = 320
FOREACH_CHUNK = 65536


class Recorder(TorchDispatchMode):
    """Records launches inside the `with` block."""

    def __init__(self, region: str) -> None:
        super().__init__()
        self.region = region  # the current one; set by the code that runs the step
        self.times: dict[str, int] = {}  # region → its number per step, by default 1
        self.launches: list[Launch] = []
        self.host: Counter[str] = Counter()  # region → calls of the dispatcher
        self.reads: Counter[str] = Counter()  # region → tensors that the host reads (`.item()`, `.tolist()`)
        self._operator, self._args = "", ()  # of ours, that runs
        self._storages: dict[int, Any] = {}  # kept alive, so that its id is not reused
        self._read: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if self._operator and func._can_decompose():  # below autograd torch's composite operators come whole
            with self:
                return func.decompose(*args, **kwargs)
        self.host[self.region] += 1
        if name == "coat::fp8_mm":
            run = scaled_mm.scaled_mm_on_cuda
        elif name in launchers:
            run = launcher_of(name)
        else:
            return self._of_torch(func, args, kwargs)
        outer = self._operator, self._args
        if not self._operator:
            self._operator, self._args = name, args
        try:
            # for the bytes it does not matter whether a kernel reads or writes a tensor
            with self, recorded_launches(self._add_kernel):
                return run(*args, **kwargs)
        finally:
            self._operator, self._args = outer

    def _of_torch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.removeprefix("aten::")
        inputs = list(tensors_in((*args, *kwargs.values())))
        on_device = any(x.device == META for x in inputs)
        to_host = name == "_to_copy" and kwargs.get("device") == torch.device("cpu")
        is_read = to_host or name == "_local_scalar_dense"
        if on_device and is_read:  # answered with zeros in place of a tensor without memory
            if inputs[0].untyped_storage()._cdata not in self._read:
                self.reads[self.region] += 1
                self._add("copy to the host", inputs, [])
                self._read.update(self.launches[-1].reads)
            values = torch.zeros(inputs[0].shape, dtype=kwargs.get("dtype") or inputs[0].dtype)
            return values if to_host else values.item()
        result = func(*args, **kwargs)
        outputs, returns = list(tensors_in((result,))), func._schema.returns
        is_view = bool(returns) and all(x.alias_info is not None and not x.alias_info.is_write for x in returns)
        if not (on_device or any(x.device == META for x in outputs)) or name in ONLY_METADATA or is_view:
            return result
        if name.startswith(("_foreach", "_fused")):
            lists = [x for x in args if isinstance(x, list | tuple) and x and isinstance(x[0], Tensor)]
            count = _foreach_launches(lists) + ("norm" in name)  # partial norms are added up by one more
            reads = [x for tensors in lists[1:] for x in tensors] if name in OVERWRITING else inputs
            self._add(name, reads, [*outputs, *(lists[0] if name.endswith("_") else ())], count=count)
        elif name in PRODUCTS:
            a, b = inputs[PRODUCTS[name] : PRODUCTS[name] + 2]
            shape = math.prod(a.shape[:-1]), b.shape[-1], a.shape[-1]
            kind = "fp8" if name == "_scaled_mm" else "bf16"
            self._add(name, inputs, outputs, flops=2.0 * math.prod(shape), kind=kind, shape=shape)
        elif name.startswith(ATTENTION_PREFIX):
            kind = "attention_backward" if name.endswith("_backward") else "attention"
            count, share = ATTENTION_KERNELS[kind]
            batch, heads, length, width = inputs[0].shape
            flops = share * 4.0 * batch * heads * length**2 * width
            self._add(name, inputs, outputs, flops=flops, kind=kind, count=count)
        else:
            self._add(name, inputs[1:] if name in OVERWRITING else inputs, outputs)
        return result

    def _add_kernel(self, *launched: Any) -> None:
        kernel, _, arguments, _ = launched
        work = {}
        if kernel.__name__ == INT8_PRODUCT:
            sizes = dict(zip(kernel.arg_names, arguments, strict=False))
            shape = sizes["M"], sizes["N"], sizes["K"]
            work = {"flops": 2.0 * math.prod(shape), "kind": "int8", "shape": shape}
        self._add(kernel.__name__, arguments, [], launched=launched, **work)

    def _add(self, part: str, reads: Iterable[Any], writes: Iterable[Any], **work: Any) -> None:
        """Record a launch; `work` are fields of `Launch`."""
        operator, category = self._operator or part, self._category(part, work.get("shape"))
        part = part if self._operator else ""
        self.launches.append(
            Launch(self.region, category, operator, part, self._bytes(reads), self._bytes(writes), **work)
        )

    def _bytes(self, tensors: Iterable[Any]) -> dict[int, int]:
        sizes: dict[int, int] = {}
        for x in tensors_in(tensors):
            storage = x.untyped_storage()
            self._storages[storage._cdata] = storage
            # repeated (expanded) elements count once
            size = math.prod(size for size, step in zip(x.shape, x.stride(), strict=True) if step) * x.itemsize
            sizes[storage._cdata] = min(sizes.get(storage._cdata, 0) + size, max(storage.nbytes(), size))
        return sizes

    def _category(self, part: str, shape: tuple[int, int, int] | None) -> str:
        operator = self._operator
        if self.region in (UPDATE, OUTSIDE, MODULATION):
            return self.region
        if part.startswith(ATTENTION_PREFIX):
            return ATTENTION
        if shape is not None:
            if part == "_scaled_mm":
                return GEMM_FP8
            if part == INT8_PRODUCT:
                return GEMM_INT8
            if min(shape[1:]) < NARROW or 1 < shape[0] < NARROW:  # the rank
                return GEMM_LORA
            return MODULATION if shape[0] == 1 else GEMM_BF16
        if operator == "coat::dequantize" or (operator == "coat::quantize" and "per_group" in self._args):
            return PACK
        if operator in QUANTIZES or "amax" in part:
            return QUANTIZE
        if not operator:
            return CAST if part == "_to_copy" else MOVE
        return OTHERS.get(operator, FUSED)


def _foreach_launches(lists: list[Any]) -> int:
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


LATENT_CHANNELS, PIXELS_PER_LATENT = 16, 8
BLOCK_LISTS = {"transformer_blocks": "double", "single_transformer_blocks": "single"}
# blocks of a kind that are run, by position; "" stands for all between
PLACES = {"double": ("first ", ""), "single": ("first ", "", "last ")}


class _Boundary(torch.autograd.Function):
    """Identity; backward switches to `region`, and makes up gradients of blocks that are not run."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, region: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.recorder, ctx.region = recorder, region
        ctx.like = [(x.shape, x.dtype) for x in tensors]
        with _disable_current_modes():
            return tuple(x.detach() for x in tensors)  # a view might get other strides for a batch of 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.recorder.region = ctx.region
        if ctx.region == MODULATION:
            stand_ins = (torch.empty(shape, dtype=dtype, device=META) for shape, dtype in ctx.like)
            grads = tuple(empty if grad is None else grad for grad, empty in zip(grads, stand_ins, strict=True))
        return None, None, *grads


def make_model(config: COATConfig, geometry: Geometry) -> Any:
    """A transformer with the blocks of `PLACES` on the meta device, prepared as in a run."""
    numbers = {kind: min(getattr(geometry, kind), len(places)) for kind, places in PLACES.items()}
    model = make_flux_dev_geometry("meta", torch.bfloat16, **geometry._replace(**numbers).sizes())
    apply_coat(model, config, device=META)
    add_lora(model, NetworkSection(linear=geometry.rank), 0)
    if config.enabled:
        attach_lora(model, config)
    return model.train()


class _Autocast(TorchFunctionMode):
    """GPU autocast, which the meta device lacks: linears multiply in bf16, each tensor is cast once."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            args = list(args)
            for i, x in enumerate(args):
                if isinstance(x, Tensor) and x.dtype != torch.bfloat16:
                    args[i] = self._copies.setdefault(id(x), (x, x.to(torch.bfloat16)))[1]
        return func(*args, **(kwargs or {}))


def count_step(config: COATConfig, geometry: Geometry, resolution: int) -> Recorder:
    """Record one training step of batch 1 in the stand-alone engine, nothing recomputed.

    If `config` is not enabled: diffusers' blocks in bf16 under autocast. Regions are "double forward", "first single
    backward" and so on, `OUTSIDE`, `MODULATION` and `UPDATE`.
    """
    model = make_model(config, geometry)
    runner = BlockRunner.of(model)
    recorder = Recorder(OUTSIDE)
    names = _places(model, geometry)
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
    objective = Objective(model, TrainSection(), None, 0, torch.bfloat16)

    lora: dict[str, nn.Parameter] = {}  # of all blocks
    for name, parameter in lora_parameters(model).items():
        _, blocks, number, *_ = name.split(".")
        if number == "0":
            for i in range(getattr(geometry, BLOCK_LISTS[blocks])):
                lora[f"{name}.{i}"] = nn.Parameter(torch.empty_like(parameter))
    copies = [torch.empty_like(parameter, dtype=torch.bfloat16) for parameter in lora.values()]

    def loss_of(tensors: Any, draw: int) -> Tensor:
        model.zero_grad()  # its parameters represent the whole model's, which the session has
        if runner is not None:
            torch._foreach_copy_(copies, list(lora.values()))  # in place of `AdapterCopies.refresh`
        return objective(batch, draw)

    session = _session(config, lora, loss_of, recorder)
    batches = repeat(SimpleNamespace(draw=0))
    interrupts = SimpleNamespace(asked=False)
    # as a GPU, which has such kernels
    foreach = mock.patch.object(_foreach_utils, "_get_foreach_kernels_supported_devices", return_value=["meta"])
    with foreach:
        # blocks are decided on, and compared with diffusers' own code; the optimizer's state is made
        with Recorder(OUTSIDE):
            train_step(session, batches, interrupts)
        if runner is not None:
            others = {choice.flow for choice in runner.plan.blocks} - {"fused"}
            if others:
                raise UserError(f"blocks would run in the {others.pop()} flow: only the fused flow is counted")
            if config.memory.transposed_weights != "never":
                set_transposed([*model.transformer_blocks, *model.single_transformer_blocks], True)
            with Recorder(OUTSIDE):
                for _ in range(2):  # the first pass reads the blocks, the second copies their adapters
                    train_step(session, batches, interrupts)
        for block in names if runner is not None else ():
            hook_of(block).run = run
        if runner is None:
            model.enable_gradient_checkpointing(run)
        recorder.region = OUTSIDE
        # adapters are copied before the step, see `loss_of`
        share = mock.patch.object(
            BlockRunner, "share", lambda runner, args: _modulate(runner, names, recorder, args[2])
        )
        with share, recorder:
            train_step(session, batches, interrupts)
    return recorder


def _session(
    config: COATConfig, lora: dict[str, nn.Parameter], objective: Callable[..., Tensor], recorder: Recorder
) -> Any:
    """A stand-in for the session in one process, without logging."""
    optimizer = build_optimizer(lora.values(), 1e-4, config, capturable=True)
    guard = RunGuard(config.guard, lora, print)
    with Recorder(UPDATE):
        guard.allows_update(0, 1.0, 1.0)  # at the start of a run it measures the parameters
    guard.compares(0, SaveSection.save_every, TrainSection.steps)  # and runs that step without the LoRA too

    def after_backward(parameters: Sequence[nn.Parameter]) -> None:
        recorder.region = UPDATE
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)

    workers = SimpleNamespace(
        device=META,
        size=1,
        shares_weights=False,
        sum_gradients=after_backward,
        agree=lambda numbers, asked: (numbers, list(asked)),
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
        job=SimpleNamespace(train=TrainSection(), save=SaveSection(), seed=0),
        workers=workers,
        watch=watch,
        lora=lora,
        dataset=SimpleNamespace(batch=lambda drawn: {}),
        objective=objective,
        optimizer=optimizer,
        fused=None,
        lr_scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer),
        ema=LoraEMA(lora, EMASection()),
        live=SimpleNamespace(poll=frozenset),
        log=SimpleNamespace(step=lambda stats: None),
        epoch=0,
        step=0,
        outstanding=None,
        skips_on_device=optimizer.defaults["capturable"],
        captures=False,
        graphs=None,
    )


def _modulate(runner: BlockRunner, names: dict[nn.Module, tuple[str, int]], recorder: Recorder, temb: Tensor) -> None:
    """Modulate ahead as many blocks as the whole model has, each with its adapters."""
    region, recorder.region = recorder.region, MODULATION
    modulations = []
    for form, (_, number) in zip(runner.forms.values(), names.values(), strict=True):
        modulations += form.modulations
        for linear in [modulation.linear for modulation in form.modulations] * (number - 1):
            adapters = []
            for group in linear.adapters:
                copies = [(nn.Parameter(x.down.detach()), nn.Parameter(x.up.detach())) for x in group]
                pairs = zip(group, copies, strict=True)
                adapters.append(tuple(replace(x, down=down, up=up) for x, (down, up) in pairs))
            other = LinearGroup(linear.bases, linear.widths, tuple(adapters), linear.parts)
            other.copies = linear.copies
            modulations.append(Modulation(other))
    modulate_ahead(modulations, temb)
    vectors = _Boundary.apply(recorder, MODULATION, *(modulation.vectors for modulation in modulations))
    for modulation, own in zip(modulations, vectors, strict=True):
        modulation.vectors = own
    recorder.region = region


def _places(model: Any, geometry: Geometry) -> dict[nn.Module, tuple[str, int]]:
    """Block → its region name, and the number of blocks in the whole model that it represents."""
    names = {}
    for blocks, kind in BLOCK_LISTS.items():
        places, number = PLACES[kind], getattr(geometry, kind)
        run = getattr(model, blocks)
        if len(run) < len(places):
            places = places[:1] + places[2:]
        for place, block in zip(places, run, strict=False):
            names[block] = f"{place}{kind}", 1 if place else number - len(places) + 1
    return names


POINTWISE = "fused pointwise"
SHOWN = "h200"
TITLES = {"coat": "as configured", "coat_int8": "INT8"}
OPERATIONS_A_BYTE = 500  # that a card multiplies, about, while it moves a byte: 300 (RTX 3090) to 700 (4090)
KERNELS_OF = ((SHOWN, "coat"), ("rtx4090", "coat"), ("rtx4090", "coat_int8"), ("rtx3090", "coat_int8"))
FIGURES = ("launches", "modelled_ms", "bytes_ms", "issue_ms", "bytes", "flops")


def count(config: COATConfig, geometry: Geometry, resolutions: Sequence[int]) -> dict[str, Any]:
    """Count COAT, also with weights in INT8, and bf16 + torch.compile, and cost them on each card.

    Returns:
        Card ("h200") → resolution in pixels a side ("1024") → "coat" (where the card has FP8), "coat_int8" or
            "bf16_compile" → sums (`FIGURES`, `host_ops`: calls of torch's dispatcher, `host_reads`: of tensors on the
            device) of the step, `by_category`, of all `blocks`, `by_region` (once), `by_kernel` (ours, with the fewest
            resident warps of its launches, 0 where one was not counted); `operators`: region → lines of (count,
            category, operator, part).
    """
    counts: dict[str, Any] = {name: {} for name in MODELLED}
    for resolution in resolutions:
        coat = count_step(config, geometry, resolution)
        in_int8 = count_step(config.with_weights_in("int8"), geometry, resolution)
        plain = count_step(COATConfig(enabled=False), geometry, resolution)
        plain.launches = as_compiled(plain.launches)
        steps = {"coat": coat, "coat_int8": in_int8, "bf16_compile": plain}
        for name, card in MODELLED.items():
            runs = {key: _costed(step, card) for key, step in steps.items() if key != "coat" or card.fp8_tflops}
            counts[name][str(resolution)] = runs
    return counts


def _costed(recorder: Recorder, card: Card) -> dict[str, Any]:
    whole, blocks = dict.fromkeys(FIGURES, 0), dict.fromkeys(FIGURES, 0)
    categories: dict[str, dict[str, float]] = {}
    regions: dict[str, dict[str, float]] = {}
    kernels: dict[str, dict[str, float]] = {}
    operators: dict[str, Counter[tuple[str, str, str]]] = {}
    for launch in recorder.launches:
        by_bytes = kernel_ms(card, launch.bytes, launch.flops, launch.kind, launch.shape, launch.count)
        by_issue, warps = (0.0, 0) if launch.launched is None else issue(card, launch.launched)
        ms = max(by_bytes, by_issue)
        values = launch.count, ms, by_bytes, by_issue, launch.bytes, launch.flops
        figures = dict(zip(FIGURES, values, strict=True))
        times = recorder.times.get(launch.region, 1)
        sums = [(categories.setdefault(launch.category, dict.fromkeys(FIGURES, 0)), times), (whole, times)]
        sums.append((regions.setdefault(launch.region, dict.fromkeys(FIGURES, 0)), 1))
        if launch.category not in (OUTSIDE, UPDATE):
            sums.append((blocks, times))
        if launch.launched is not None:
            kernel = kernels.setdefault(launch.part, {**dict.fromkeys(FIGURES, 0), "resident_warps": warps})
            kernel["resident_warps"] = min(kernel["resident_warps"], warps)
            sums.append((kernel, times))
        for total, number in sums:
            for name, value in figures.items():
                total[name] += number * value
        line = launch.category, launch.operator, launch.part
        operators.setdefault(launch.region, Counter())[line] += launch.count
    for region, total in regions.items():
        total["host_ops"] = recorder.host[region]
    return {
        **whole,
        "host_ops": sum(calls * recorder.times.get(region, 1) for region, calls in recorder.host.items()),
        "host_reads": sum(recorder.reads.values()),
        "blocks": blocks,
        "by_category": {name: categories[name] for name in (*CATEGORIES, POINTWISE) if name in categories},
        "by_region": regions,
        "by_kernel": dict(sorted(kernels.items(), key=lambda item: -item[1]["modelled_ms"])),
        "operators": {region: [[n, *key] for key, n in lines.most_common()] for region, lines in operators.items()},
    }


def as_compiled(launches: Sequence[Launch]) -> list[Launch]:
    """Fuse launches between products that share a tensor: the best torch.compile could do."""
    groups: list[list[Launch]] = []
    for region in dict.fromkeys(launch.region for launch in launches):
        inside = [launch for launch in launches if launch.region == region]
        groups += [[launch] for launch in inside] if region in (OUTSIDE, UPDATE) else _groups(inside)
    readers: dict[int, set[int]] = {}
    for i, group in enumerate(groups):
        for storage in {storage for launch in group for storage in launch.reads}:
            readers.setdefault(storage, set()).add(i)
    return [_fused(group, i, readers) for i, group in enumerate(groups)]


def _groups(launches: Sequence[Launch]) -> list[list[Launch]]:
    depth: dict[int, int] = {}  # storage → products between the graph's inputs and it
    members: dict[int, list[Launch]] = {}
    kernel_of: dict[tuple[int, int], int] = {}  # (depth, storage) → kernel that reads or writes it
    for i, launch in enumerate(launches):
        level = max((depth.get(storage, 0) for storage in launch.reads), default=0)
        members[i] = [launch]
        if launch.flops:
            depth.update(dict.fromkeys(launch.writes, level + 1))
            continue
        depth.update(dict.fromkeys(launch.writes, level))
        keys = [(level, storage) for storage in (*launch.reads, *launch.writes)]
        for joined in {kernel_of[key] for key in keys if key in kernel_of} - {i}:
            members[i] = members.pop(joined) + members[i]
            kernel_of.update({key: i for key, kernel in kernel_of.items() if kernel == joined})
        kernel_of.update(dict.fromkeys(keys, i))
    return list(members.values())


def _fused(group: Sequence[Launch], number: int, readers: dict[int, set[int]]) -> Launch:
    if len(group) == 1:
        return group[0]._replace(category=POINTWISE) if group[0].category == MOVE else group[0]
    written: dict[int, int] = {}
    reads: dict[int, int] = {}
    for launch in group:
        for storage, size in launch.reads.items():
            if storage not in written:
                reads[storage] = max(size, reads.get(storage, 0))
        written.update(launch.writes)
    writes = {storage: size for storage, size in written.items() if readers.get(storage) != {number}}
    return Launch(group[0].region, POINTWISE, "torch.compile", "", reads, writes)


def report(counts: dict[str, Any], verbose: bool) -> str:
    """A step by category, its time on every card; verbose: every operator of a block."""
    sizes = counts[SHOWN]
    columns, titles = [], []
    for name in ("coat", "bf16_compile"):
        columns += [names[name] for names in sizes.values()]
        for size in sizes:
            titles += [f"{name} {size} px: launches", "ms"]
    lines = [["ms a step", *titles]]
    rows = {name: [column["by_category"].get(name) for column in columns] for name in (*CATEGORIES, POINTWISE)}
    rows |= {"blocks": [column["blocks"] for column in columns], "whole step": columns}
    for label, cells in rows.items():
        if any(cells):
            line = [label]
            for cell in cells:
                line += [f"{cell['launches']:,}", f"{cell['modelled_ms']:.1f}"] if cell else ["", ""]
            lines.append(line)
    host = []
    for size, names in sizes.items():
        calls, reads = names["coat"]["host_ops"], names["coat"]["host_reads"]
        host.append(f"{size} px: {calls:,} calls of torch's dispatcher, {reads} reads from the device")
    cards = [["card", "px", "products", "launches", "coat ms", "without instructions", "bf16 + compile ms", "ratio"]]
    for card, by_size in counts.items():
        for size, names in by_size.items():
            theirs = names["bf16_compile"]["modelled_ms"]
            for name, products in TITLES.items():
                if name not in names:
                    continue
                coat = names[name]
                ours = coat["modelled_ms"]
                row = [card, size, products, f"{coat['launches']:,}", f"{ours:.1f}", f"{coat['bytes_ms']:.1f}"]
                cards.append([*row, f"{theirs:.1f}", f"{theirs / ours:.2f}"])
    kernels = [["card", "products", "kernel", "px", "launches", "ms", "by bytes", "by instructions", "bound"]]
    for (card, name), size in product(KERNELS_OF, sizes):
        for kernel, sums in counts[card][size][name]["by_kernel"].items():
            ms = (f"{sums[key]:.1f}" for key in ("modelled_ms", "bytes_ms", "issue_ms"))
            kernels.append([card, TITLES[name], kernel, size, f"{sums['launches']:,}", *ms, bound_of(sums)])
    parts = [f"modelled for {SHOWN}, not measured:", markdown_table(*lines), f"host, {'; '.join(host)}"]
    parts += [markdown_table(*cards), markdown_table(*kernels)]
    first = next(iter(sizes.values()))["coat"]["operators"]
    for region, rows in first.items() if verbose else ():
        if region.removeprefix("first ").removeprefix("last ") in first.keys() - {region}:
            continue  # a block between them is much the same
        operators = [f"{n:6}  {category:26} {operator} {part}".rstrip() for n, category, operator, part in rows]
        parts.append("\n".join([f"{region}: {sum(row[0] for row in rows)} launches", *operators]))
    return "\n\n".join(parts)


def bound_of(kernel: Mapping[str, float]) -> str:
    """What a kernel waits for: bytes, operations, issue, or with few warps latency, which the model has not."""
    if not kernel["resident_warps"]:
        return "not counted, see bench/limits.py"
    bound = "operations" if kernel["flops"] > OPERATIONS_A_BYTE * kernel["bytes"] else "bytes"
    if kernel["issue_ms"] > kernel["bytes_ms"]:
        bound = "issue"
    if kernel["resident_warps"] < ENOUGH_WARPS:
        bound += f", latency: {kernel['resident_warps']} warps a multiprocessor"
    return bound
