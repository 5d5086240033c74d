"""One configuration in its own process: `python -m coat_flux.bench.worker SPEC RESULT`, both JSON files.

SPEC: {"level", "configuration", "sizes": [[resolution, batch], ...], "geometry": {...}, "device", "repeats"}, or
{"level": "machine", "device"}. RESULT: {"status", ...}. Status is

    ok              "measurements"
    cannot          "reason": a baseline that does not run on this machine
    out of memory   "reason"
    failed          "reason", "traceback": an error of ours

GPU calls are timed by two events each without synchronizing until all are queued, so launches may run ahead as in
training.
"""

from __future__ import annotations

import json
import math
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from coat_core.ops.dispatch import triton_obstacle

from ..base.environment import version_of
from ..base.names import COAT_OPTIMIZER
from ..blocks.apply import apply_coat
from ..blocks.held import HeldParts, peak_bytes
from ..blocks.lora import attach_lora
from ..blocks.models.flux1 import FLUX_DEV_TRANSFORMER_CONFIG as SIZES
from ..blocks.models.flux1 import make_flux_dev_geometry
from ..config.check import is_installed
from ..config.coat import COATConfig
from ..config.job_sections import NetworkSection
from ..plan.speed import DEVICES
from ..trainers.optimizer import build_optimizer
from ..watch.oom import release_memory
from .limits import PIXELS_PER_TOKEN, TEXT_TOKENS, Geometry
from .runner import CALLS, CANNOT, CPU_CALLS, FAILED, OK, OPTIMIZER, OUT_OF_MEMORY, Configuration, named

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


Measure = Callable[..., Iterable[dict[str, Any]]]

REASON_LENGTH = 300
PACKAGES = (
    *("torch", "triton", "coat-flux", "diffusers", "transformers", "peft", "accelerate", "bitsandbytes"),
    *("optimum-quanto", "torchao"),
)


class MissingError(Exception):
    """The GPU, or a package that a baseline needs, is missing."""


def run(spec: dict[str, Any], measure: Measure | None = None) -> dict[str, Any]:
    """Execute a specification, with `measure` in place of its level's function; errors become results."""
    row = None if spec["level"] == "machine" else named(spec["level"])[spec["configuration"]]
    try:
        device = torch.device(spec["device"])
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)
        if row is None:
            return {"status": OK, "machine": _machine(device)}
        records_graphs = row.captures or row.compile_mode not in ("", "default")
        if records_graphs and device.type != "cuda":
            raise MissingError("needs a GPU")
        for package in row.needs:
            if not is_installed(package):
                raise MissingError(f"needs the package {package}, which is not installed")
        ours = row.coat is not None or row.name == COAT_OPTIMIZER
        if ours and device.type == "cuda":
            obstacle = triton_obstacle(torch.device("cuda", torch.cuda.current_device()))
            if obstacle is not None:
                raise RuntimeError(f"{obstacle}; the references of our kernels would be timed as COAT")
        torch.manual_seed(0)
        warmup, repeats = CALLS[spec["level"]] if device.type == "cuda" else CPU_CALLS
        if measure is None:
            measure = measure_optimizer if spec["level"] == OPTIMIZER else measure_steps
        calls = warmup, spec["repeats"] or repeats
        measured = measure(row, Geometry(**spec["geometry"]), spec["sizes"], device, calls)
        return {"status": OK, "measurements": list(measured)}
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        status = FAILED
        if isinstance(error, MissingError):
            status, reason = CANNOT, str(error)
        elif "out of memory" in str(error).lower():  # of any allocator
            status = OUT_OF_MEMORY
        elif row is not None and row.coat is None and (row.needs or row.compile_mode):
            status = CANNOT  # a baseline of others, which need not run on every machine
        return {"status": status, "reason": reason[:REASON_LENGTH], "traceback": traceback.format_exc()}


def _machine(device: torch.device) -> dict[str, Any]:
    about: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "device_type": device.type,
        "memory": "resident set of the process",
        "limit": None,
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {package: version_of(package) for package in PACKAGES} | {"torch": torch.__version__},
    }
    if device.type != "cuda":
        return about
    properties = torch.cuda.get_device_properties(device)
    card = DEVICES.get(properties.name)
    return about | {
        "device": properties.name,
        "memory": "allocated on the device",
        "limit": card and [card.bf16_tflops, card.fp8_tflops, card.gb_per_second],
        "device_memory_bytes": properties.total_memory,
        "capability": f"sm_{properties.major}{properties.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "kernels_refused": triton_obstacle(torch.device("cuda", torch.cuda.current_device())),
    }


def main(run: Callable[[dict[str, Any]], dict[str, Any]] = run) -> None:
    """Read the specification, run it, write the result."""
    spec_file, result_file = map(Path, sys.argv[1:3])
    result = run(json.loads(spec_file.read_text(encoding="utf-8")))
    result_file.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
