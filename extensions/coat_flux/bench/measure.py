"""A process's measurements: training steps of a transformer with random weights and fixed seeds, or an optimizer.

GPU calls are timed by two events each without synchronizing until all are queued, so launches may run ahead as in
training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..base.names import COAT_OPTIMIZER
from ..blocks.held import HeldParts, peak_bytes
from ..config.coat import COATConfig
from ..config.job_sections import NetworkSection
from ..watch.oom import release_memory
from .configurations import Configuration
from .limits import PIXELS_PER_TOKEN, TEXT_TOKENS, Geometry

SEED = 0
FLUSHED_BYTES = 1 << 28  # more than an L2 cache
B_STD = 0.02  # of the adapters' B: with zeros half of the backward pass would multiply them
BUILD_ROOM = 1.3  # a model is made on the GPU when so many times its bytes are free there
TORCHS_PRECISION = "highest"  # of fp32 products; the stand-alone trainer allows TF32 with COAT, ai-toolkit does not
LEARNING_RATE, EPS = 1e-4, 1e-6  # ai-toolkit's eps
PARAMETER_STD, GRADIENT_STD = 0.02, 1e-3
Sizes: TypeAlias = Sequence[tuple[int, int]]  # (resolution, batch)


def measure_steps(
    row: Configuration, geometry: Geometry, sizes: Sizes, device: torch.device, calls: tuple[int, int]
) -> Iterator[dict[str, Any]]:
    """Training steps of the whole transformer: forward, loss, backward, optimizer."""
    model, trained = make_model(row, geometry, device)
    optimizer = make_optimizer(row.optimizer, trained, capturable=row.captures)
    for resolution, batch in sizes:
        torch.compiler.reset()  # frees compiled code and recorded graphs
        release_memory()
        inputs, target = model_inputs(resolution, batch, device)
        losses = []

        def step(inputs: dict[str, Tensor] = inputs, target: Tensor = target, losses: list[Tensor] = losses) -> None:
            if row.compile_mode:  # torch may record CUDA graphs, and must know where a step begins
                torch.compiler.cudagraph_mark_step_begin()
            with torch.autocast(device.type, torch.bfloat16, enabled=row.autocast):
                output = model(**inputs, return_dict=False)[0]
            loss = nn.functional.mse_loss(output.float(), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())

        call, capture_bytes = step, 0
        if row.captures:  # only the capture shows a step's peak bytes
            from ..trainers.standalone.step_graph import capture

            for _ in range(3):
                step()
            torch.cuda.reset_peak_memory_stats(device)
            call, capture_bytes = capture(step)[0].replay, peak_bytes(device)
        timing = time_calls(call, device, *calls)
        timing["peak_bytes"] = max(timing["peak_bytes"], capture_bytes)
        loss = torch.stack(losses).tolist()
        if not all(map(math.isfinite, loss)):
            rule = "not finite; figures of a run that does not train are worth nothing"
            raise FloatingPointError(f"loss={loss}: {rule}")
        figures = {"loss": loss, "state_bytes": state_bytes(optimizer, device)}
        yield {**timing, "what": "step", "resolution": resolution, "batch": batch, "figures": figures}


def make_model(row: Configuration, geometry: Geometry, device: torch.device) -> tuple[Any, list[nn.Parameter]]:
    """The transformer of a row, converted as configured, and its trained parameters."""
    from ..blocks.apply import apply_coat
    from ..blocks.lora import attach_lora
    from ..blocks.models.flux1 import make_flux_dev_geometry
    from ..trainers.standalone.network import add_lora

    torch.set_float32_matmul_precision(TORCHS_PRECISION if row.coat is None else "high")
    sizes, place = geometry.sizes(), device
    if device.type == "cuda":  # a model that does not fit in bf16 is converted on the CPU first
        meta = make_flux_dev_geometry("meta", **sizes)
        needed = 2 * sum(parameter.numel() for parameter in meta.parameters())
        if BUILD_ROOM * needed > torch.cuda.mem_get_info(device)[0]:
            place = torch.device("cpu")
    model: Any = make_flux_dev_geometry(place, torch.bfloat16, seed=SEED, **sizes)
    config = COATConfig.from_dict(dict(row.coat)) if row.coat is not None else COATConfig(enabled=False)
    apply_coat(model, config, device=device)
    if row.quantizer:
        quantize_linears(model, row.quantizer)
    model.to(device)
    parameters = add_lora(model, NetworkSection(linear=geometry.rank), SEED)
    attach_lora(model, config)
    draw = torch.Generator(device).manual_seed(SEED + 1)
    for name, parameter in parameters.items():
        if ".lora_B." in name:
            nn.init.normal_(parameter, 0.0, B_STD, generator=draw)
        if row.adapters == "bf16":
            parameter.data = parameter.data.to(torch.bfloat16)
    if row.checkpointing:
        model.enable_gradient_checkpointing()
    if row.compile_mode:
        model.compile_repeated_blocks(mode=row.compile_mode)
    return model.train(), list(parameters.values())


def model_inputs(resolution: int, batch: int, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    """Random keyword arguments of the transformer for square images, and a target fp32 [B, T, 64]."""
    from ..blocks.models.flux1 import FLUX_DEV_TRANSFORMER_CONFIG as SIZES

    draw = torch.Generator(device).manual_seed(SEED + 2)
    side = resolution // PIXELS_PER_TOKEN

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=draw)

    rows = torch.arange(side, device=device, dtype=torch.float32)
    inputs = {
        "hidden_states": normal(batch, side * side, SIZES["in_channels"]).to(torch.bfloat16),
        "encoder_hidden_states": normal(batch, TEXT_TOKENS, SIZES["joint_attention_dim"]).to(torch.bfloat16),
        "pooled_projections": normal(batch, SIZES["pooled_projection_dim"]).to(torch.bfloat16),
        "timestep": torch.rand(batch, device=device, generator=draw),
        "guidance": torch.ones(batch, device=device),
        "img_ids": torch.cartesian_prod(torch.zeros(1, device=device), rows, rows),
        "txt_ids": torch.zeros(TEXT_TOKENS, 3, device=device),
    }
    return inputs, normal(batch, side * side, SIZES["in_channels"])


def quantize_linears(model: nn.Module, quantizer: str) -> None:
    """Convert the linears of a baseline's model: `Configuration.quantizer`."""
    if quantizer == "quanto":
        from optimum.quanto import freeze, qfloat8, quantize

        quantize(model, weights=qfloat8)
        freeze(model)
    elif quantizer == "convrot8":
        from ..trainers.ai_toolkit.quantizer import convert_linears

        convert_linears(model, "convrot8")
    else:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        recipe = "rowwise" if quantizer == "torchao_rowwise" else "tensorwise"
        convert_to_float8_training(
            model,  # its GEMM needs at least 16 rows, more than modulation has
            module_filter_fn=lambda _, name: "transformer_blocks." in name and ".norm" not in name,
            config=Float8LinearConfig.from_recipe_name(recipe),
        )


def measure_optimizer(
    row: Configuration, geometry: Geometry, sizes: Sizes, device: torch.device, calls: tuple[int, int]
) -> Iterator[dict[str, Any]]:
    """One step over parameters of a LoRA's shapes, with constant gradients."""
    from ..blocks.models.flux1 import make_flux_dev_geometry
    from ..trainers.standalone.network import lora_targets

    model = make_flux_dev_geometry("meta", **geometry.sizes())
    draw = torch.Generator(device).manual_seed(SEED)
    parameters = []
    for linear in map(model.get_submodule, lora_targets(model, NetworkSection())):
        for shape in ((geometry.rank, linear.in_features), (linear.out_features, geometry.rank)):
            parameter = nn.Parameter(torch.randn(shape, device=device, generator=draw) * PARAMETER_STD)
            parameter.grad = torch.randn(shape, device=device, generator=draw) * GRADIENT_STD
            parameters.append(parameter)
    optimizer = make_optimizer(row.name, parameters)
    timing = time_calls(optimizer.step, device, *calls)
    figures = {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "tensors": len(parameters),
        "state_bytes": state_bytes(optimizer, device),
    }
    yield {**timing, "what": "optimizer step", "resolution": 0, "batch": 0, "figures": figures}


def make_optimizer(name: str, parameters: list[nn.Parameter], *, capturable: bool = False) -> torch.optim.Optimizer:
    """The optimizer of this name, with the same settings for all."""
    settings = {"lr": LEARNING_RATE, "eps": EPS}
    if name == COAT_OPTIMIZER:
        from ..trainers.optimizer import build_optimizer

        return build_optimizer(parameters, LEARNING_RATE, COATConfig(), capturable=capturable)
    if name == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(parameters, **settings)
    if name == "adamw_fp8_torchao":
        from torchao.optim import AdamWFp8

        return AdamWFp8(parameters, **settings)
    return torch.optim.AdamW(parameters, fused=True, **settings)


def state_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Bytes of all tensors of the optimizer's state, each storage once."""
    parts = HeldParts(device)
    parts.add("optimizer", optimizer)
    return parts.count()["optimizer"]


def time_calls(
    call: Callable[[], object], device: torch.device, warmup: int, repeats: int, *, cold: bool = False
) -> dict[str, Any]:
    """Time `repeats` calls after `warmup` others.

    With `cold` a GPU's cache is overwritten before each call, so that weights come from memory, as after other layers.

    Returns:
        `samples_ms`; `peak_bytes`, of the allocator on a GPU, of the process on a CPU; `first_ms`, the first warm-up
            call with compilation and allocation; `host_ms`, the shortest time until a call returned, GPU work still
            queued.
    """
    started = time.perf_counter()
    call()
    wait(device)
    first_ms = 1e3 * (time.perf_counter() - started)
    for _ in range(warmup - 1):
        call()
    wait(device)
    host, flushed, events = [], torch.empty(0), []
    if device.type == "cuda":
        flushed = torch.empty(FLUSHED_BYTES if cold else 0, dtype=torch.uint8, device=device)
        torch.cuda.reset_peak_memory_stats(device)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for number in range(repeats):
        if events:
            flushed.fill_(1)
            events[number][0].record()
        started = time.perf_counter()
        call()
        host.append(1e3 * (time.perf_counter() - started))
        if events:
            events[number][1].record()
    wait(device)
    samples = [start.elapsed_time(stop) for start, stop in events] or host
    peak = peak_bytes(device) - flushed.nbytes
    return {"samples_ms": samples, "peak_bytes": peak, "first_ms": first_ms, "host_ms": min(host)}


def wait(device: torch.device) -> None:
    """Synchronize with the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
