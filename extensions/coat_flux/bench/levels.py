"""What one process measures: linears, blocks or whole steps, of models with random weights and fixed seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from coat_core.linear import FP8Linear

from ..blocks.models import FLUX
from ..config.coat import COATConfig
from ..mini_flux.geometry import FLUX_DEV_TRANSFORMER_CONFIG
from ..trainers.standalone.step_graph import capture
from .configurations import ENGINE, RATES, Configuration
from .engine import measure_engine
from .limits import PIXELS_PER_TOKEN, TEXT_TOKENS, Geometry, token_count
from .models import QUANTIZERS, model_of, release, runner_of
from .optimizers import make_optimizer, state_bytes
from .rates import measure_rates
from .timing import SEED, Measurement, Setting, peak_bytes

OP_SHAPES = ((1, 1), (1, 4), (4, 1), (5, 1))  # in and out features over d: q k v and output; MLP in, out; single output


def make_linear(configuration: Configuration, k: int, n: int, device: torch.device) -> nn.Module:
    """One frozen bf16 linear [n, k] with bias, converted as the configuration says."""
    draw = torch.Generator(device).manual_seed(SEED)
    holder = nn.Sequential(nn.Linear(k, n, device=device, dtype=torch.bfloat16)).requires_grad_(False)
    holder[0].weight.data.normal_(0.0, k**-0.5, generator=draw)
    holder[0].bias.data.normal_(0.0, 1.0, generator=draw)
    if configuration.coat is not None:
        FP8Linear.from_linear(holder[0], COATConfig.from_dict(dict(configuration.coat)).linear_config())
    elif configuration.quantizer:
        QUANTIZERS[configuration.quantizer](holder)
    return holder[0]


def model_inputs(resolution: int, batch: int, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    """Random inputs of the transformer for square images, and the target its output is compared with.

    Returns:
        (keyword arguments: hidden_states bf16 [B, T, 64], encoder_hidden_states bf16 [B, 512, 4096], pooled_projections
        bf16 [B, 768], timestep and guidance [B], ids [tokens, 3]; target fp32 [B, T, 64]).
    """
    draw = torch.Generator(device).manual_seed(SEED + 2)
    side, sizes = resolution // PIXELS_PER_TOKEN, FLUX_DEV_TRANSFORMER_CONFIG

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=draw)

    rows = torch.arange(side, device=device, dtype=torch.float32)
    image_ids = torch.cartesian_prod(torch.zeros(1, device=device), rows, rows)
    inputs = {
        "hidden_states": normal(batch, side * side, sizes["in_channels"]).to(torch.bfloat16),
        "encoder_hidden_states": normal(batch, TEXT_TOKENS, sizes["joint_attention_dim"]).to(torch.bfloat16),
        "pooled_projections": normal(batch, sizes["pooled_projection_dim"]).to(torch.bfloat16),
        "timestep": torch.rand(batch, device=device, generator=draw),
        "guidance": torch.ones(batch, device=device),
        "img_ids": image_ids,
        "txt_ids": torch.zeros(TEXT_TOKENS, 3, device=device),
    }
    return inputs, normal(batch, side * side, sizes["in_channels"])


def measure_ops(configuration: Configuration, setting: Setting) -> Iterator[Measurement]:
    """FLUX's linears: forward and dX, with all that quantization costs; the weight is quantized beforehand."""
    draw = torch.Generator(setting.device).manual_seed(SEED + 3)
    for wide_in, wide_out in OP_SHAPES:
        k, n = wide_in * setting.geometry.hidden, wide_out * setting.geometry.hidden
        linear = make_linear(configuration, k, n, setting.device)
        for resolution, batch in setting.sizes:
            m = batch * token_count(resolution)
            x, grad = (
                torch.randn(m, width, device=setting.device, generator=draw).to(torch.bfloat16) for width in (k, n)
            )
            figures = {"m": m, "k": k, "n": n}

            def forward(linear: nn.Module = linear, x: Tensor = x) -> Tensor:
                with torch.no_grad():
                    return linear(x.detach())  # another tensor each time: codes are remembered by tensor

            timing = setting.timed("op", forward, cold=True)
            yield Measurement(f"forward {k} -> {n}", resolution, batch, timing, figures)
            leaf = x.detach().requires_grad_()
            y = linear(leaf)

            def backward(y: Tensor = y, leaf: Tensor = leaf, grad: Tensor = grad) -> object:
                return torch.autograd.grad(y, leaf, grad.detach(), retain_graph=True)

            timing = setting.timed("op", backward, cold=True)
            yield Measurement(f"dX {k} -> {n}", resolution, batch, timing, figures)


def measure_blocks(configuration: Configuration, setting: Setting) -> Iterator[Measurement]:
    """One double and one single block: forward alone, and forward with backward to input and adapters."""
    geometry, device = Geometry(1, 1, setting.geometry.heads, setting.geometry.rank), setting.device
    model, trained = model_of(configuration, geometry, device, setting.kept)
    run = runner_of(model)
    blocks = {each.kind: model.get_submodule(each.pattern)[0] for each in FLUX.lists}
    for resolution, batch in setting.sizes:
        release(device)  # each size is compiled for itself
        draw = torch.Generator(device).manual_seed(SEED + 4)

        def normal(*shape: int, draw: torch.Generator = draw) -> Tensor:
            return torch.randn(*shape, device=device, generator=draw).to(torch.bfloat16)

        plain, _ = model_inputs(resolution, batch, device)
        shapes = [(batch, plain[ids].shape[0], model.inner_dim) for ids in ("img_ids", "txt_ids")]
        streams, gradients = ([normal(*shape) for shape in shapes] for _ in range(2))  # image [B, T, d], text
        streams = [stream.requires_grad_() for stream in streams]
        rotary = model.pos_embed(torch.cat((plain["txt_ids"], plain["img_ids"])))
        inputs = [*streams, normal(batch, model.inner_dim), rotary]
        for kind, block in blocks.items():

            def forward(block: nn.Module = block, inputs: list[Any] = inputs) -> object:
                with torch.no_grad(), setting.autocast(configuration):
                    return block(*inputs)

            def both(block: nn.Module = block, inputs: list[Any] = inputs, gradients: list[Tensor] = gradients) -> None:
                with setting.autocast(configuration):
                    text, image = run(block, *inputs)
                torch.autograd.backward((image, text), gradients)
                for tensor in (*trained, *inputs[:2]):
                    tensor.grad = None

            if not setting.training_only:
                yield Measurement(f"{kind} forward", resolution, batch, setting.timed("block", forward), {})
            yield Measurement(f"{kind} forward + backward", resolution, batch, setting.timed("block", both), {})


def measure_steps(configuration: Configuration, setting: Setting) -> Iterator[Measurement]:
    """The whole transformer: forward alone, and a training step (forward, loss, backward, optimizer)."""
    model, trained = model_of(configuration, setting.geometry, setting.device, setting.kept)
    optimizer = make_optimizer(configuration.optimizer, trained, capturable=configuration.captures)
    for resolution, batch in setting.sizes:
        release(setting.device)
        inputs, target = model_inputs(resolution, batch, setting.device)
        losses: list[Tensor] = []

        def forward(inputs: dict[str, Tensor] = inputs) -> Tensor:
            with setting.autocast(configuration):
                return model(**inputs, return_dict=False)[0]

        def step(target: Tensor = target, losses: list[Tensor] = losses) -> None:
            loss = nn.functional.mse_loss(forward().float(), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())

        if not setting.training_only:
            with torch.no_grad():
                timing = setting.timed("step", forward)
            yield Measurement("forward", resolution, batch, timing, {})
        call, held = _captured(step, setting.device) if configuration.captures else (step, 0)
        timing = setting.timed("step", call)
        timing = replace(timing, peak_bytes=max(timing.peak_bytes, held))
        loss = torch.stack(losses).tolist()
        if not all(map(math.isfinite, loss)):
            raise FloatingPointError(f"loss={loss}: not finite; figures of a run that does not train are worth nothing")
        figures = {"loss": loss, "state_bytes": state_bytes(optimizer)}
        yield Measurement("step", resolution, batch, timing, figures)


def _captured(step: Callable[[], None], device: torch.device) -> tuple[Callable[[], None], int]:
    """The step as a CUDA graph, after the first ones, which compile kernels and make the optimizer's state.

    Returns:
        A replay, and the peak of memory in bytes, which the allocator shows only while it is captured.
    """
    for _ in range(3):
        step()
    torch.cuda.reset_peak_memory_stats(device)
    graph, _ = capture(step)
    return graph.replay, peak_bytes(device)


MEASURE: dict[str, Callable[[Any, Setting], Iterator[Measurement]]] = {
    RATES: measure_rates,
    "op": measure_ops,
    "block": measure_blocks,
    "step": measure_steps,
    ENGINE: measure_engine,
}
