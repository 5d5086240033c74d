"""One training step of FLUX.1-dev on the meta device, under the recorder of `count`.

A transformer with a few blocks at full width, prepared as in a run, goes through the stand-alone engine's own
`train_step`. The first and last block of a kind count once, one between them as often as the model has such; gradient
clipping, optimizer and EMA run over as many parameters as the whole model trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import repeat
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import _disable_current_modes

from ..base.errors import UserError
from ..blocks.apply import apply_coat
from ..blocks.fused.modulation import Modulation, modulate_ahead
from ..blocks.gemms import set_transposed
from ..blocks.held import AsOnGPU
from ..blocks.hook import hook_of
from ..blocks.lora import attach_lora
from ..blocks.runner import BlockRunner
from ..config.coat import COATConfig
from ..config.job_sections import TrainSection
from ..mini_flux.geometry import FLUX_DEV_TRANSFORMER_CONFIG, make_flux_dev_geometry
from ..trainers.optimizer import build_optimizer
from ..trainers.standalone.ema import LoraEMA
from ..trainers.standalone.network import add_lora, lora_parameters, lora_targets
from ..trainers.standalone.objective import Objective
from ..trainers.standalone.steps import train_step
from ..watch.guard import RunGuard
from .count import META, MODULATION, OUTSIDE, UPDATE, Recorder
from .limits import TEXT_TOKENS, Geometry

LATENT_CHANNELS, PIXELS_PER_LATENT = 16, 8
BLOCK_LISTS = {"transformer_blocks": "double", "single_transformer_blocks": "single"}
# blocks of a kind that are run, by position; "" stands for all between
PLACES = {"double": ("first ", ""), "single": ("first ", "", "last ")}


class _Boundary(torch.autograd.Function):
    """Identity; in backward, switches the recorder to `region`."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, region: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.recorder, ctx.region = recorder, region
        with _disable_current_modes():
            return tuple(x.detach() for x in tensors)  # a view might get other strides for a batch of 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.recorder.region = ctx.region
        return None, None, *grads


class _Modulated(torch.autograd.Function):
    """Identity on all modulation vectors; those of blocks that are not run get made-up gradients."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, *vectors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.recorder, ctx.like = recorder, [(x.shape, x.dtype) for x in vectors]
        with _disable_current_modes():
            return tuple(x.detach() for x in vectors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.recorder.region = MODULATION
        made = (torch.empty(shape, dtype=dtype, device=META) for shape, dtype in ctx.like)
        return None, *(empty if grad is None else grad for grad, empty in zip(grads, made, strict=True))


def make_model(config: COATConfig, geometry: Geometry) -> Any:
    """A transformer with the blocks of `PLACES` on the meta device, prepared as in a run."""
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
    """GPU autocast, which the meta device lacks: linears multiply in bf16, each tensor is cast once."""

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

    If `config` is not enabled: diffusers' blocks in bf16 under autocast. The block counts of `geometry` size the
    update. The recorder's regions are "double forward", "first single backward" and so on, `OUTSIDE` and `UPDATE`.
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

    def share(runner: BlockRunner, args: tuple[Any, ...]) -> None:
        region, recorder.region = recorder.region, MODULATION
        _modulate(runner, names, recorder, args[2])  # adapters are copied before the step, see below
        recorder.region = region

    side, sizes = resolution // PIXELS_PER_LATENT, FLUX_DEV_TRANSFORMER_CONFIG
    batch = {
        "latents": torch.empty(1, LATENT_CHANNELS, side, side, device=META),
        "prompt_embeds": torch.empty(1, TEXT_TOKENS, sizes["joint_attention_dim"], device=META),
        "pooled": torch.empty(1, sizes["pooled_projection_dim"], device=META),
    }
    objective = Objective(model, TrainSection(), None, 0, torch.bfloat16)  # type: ignore[arg-type]

    lora = _parameters(model, geometry)
    copies = [torch.empty_like(parameter, dtype=torch.bfloat16) for parameter in lora.values()]

    def loss_of(tensors: Any, draw: int) -> Tensor:
        model.zero_grad()  # its parameters represent the whole model's, which the session has
        if runner is not None:
            torch._foreach_copy_(copies, list(lora.values()))  # in place of `AdapterCopies.refresh`
        return objective(batch, draw)

    session = _session(config, lora, loss_of, recorder)
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
            with Recorder(OUTSIDE):
                for _ in range(2):  # the first pass reads the blocks, the second copies their adapters
                    train_step(session, batches, nothing_asked)  # type: ignore[arg-type]
        for block in names if runner is not None else ():
            hook_of(block).run = run
        if runner is None:
            model.enable_gradient_checkpointing(run)
        recorder.region = OUTSIDE
        with mock.patch.object(BlockRunner, "share", share), recorder:
            train_step(session, batches, nothing_asked)  # type: ignore[arg-type]
    return recorder


def _session(
    config: COATConfig, lora: dict[str, nn.Parameter], objective: Callable[..., Tensor], recorder: Recorder
) -> Any:
    """A stand-in for the session, with the members that a step without logging uses in one process."""
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
        job=SimpleNamespace(train=TrainSection(), training_seed=0),
        workers=workers,
        watch=watch,
        lora=lora,
        dataset=SimpleNamespace(batch=lambda drawn: {}),
        objective=objective,
        optimizer=optimizer,
        fused=None,
        lr_scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer),
        ema=LoraEMA(lora),
        live=SimpleNamespace(poll=frozenset),
        log=SimpleNamespace(step=lambda stats: None),
        epoch=0,
        step=0,
        outstanding=None,
        captures=False,
        graphs=None,
    )


def _modulate(runner: BlockRunner, names: dict[nn.Module, tuple[str, int]], recorder: Recorder, temb: Tensor) -> None:
    modulations: list[Modulation] = []
    for form, (_, number) in zip(runner.forms, names.values(), strict=True):
        own = form.block.modulations
        modulations += own
        for _ in range(number - 1):
            modulations += [_like(modulation) for modulation in own]
    modulate_ahead(modulations, temb)
    vectors = _Modulated.apply(recorder, *(modulation.ahead.vectors for modulation in modulations))
    for modulation, found in zip(modulations, vectors, strict=True):
        modulation.ahead.vectors = found


def _like(modulation: Modulation) -> Modulation:
    linear = modulation.linear
    adapters = tuple(
        tuple(replace(x, down=nn.Parameter(x.down.detach()), up=nn.Parameter(x.up.detach())) for x in found)
        for found in linear.adapters
    )
    return Modulation(replace(linear, adapters=adapters))


def _places(model: Any, geometry: Geometry) -> dict[nn.Module, tuple[str, int]]:
    """Block → its region name, and the number of blocks in the whole model that it represents."""
    found = {}
    for blocks, kind in BLOCK_LISTS.items():
        places, number = PLACES[kind], getattr(geometry, kind)
        run = getattr(model, blocks)
        for place, block in zip(places if len(run) == len(places) else places[:1] + places[2:], run, strict=False):
            found[block] = f"{place}{kind}", 1 if place else number - len(places) + 1
    return found


def _parameters(model: Any, geometry: Geometry) -> dict[str, nn.Parameter]:
    return {
        f"{name}.{i}": nn.Parameter(torch.empty_like(parameter))
        for name, parameter in lora_parameters(model).items()
        if name.split(".")[2] == "0"
        for i in range(getattr(geometry, BLOCK_LISTS[name.split(".")[1]]))
    }
