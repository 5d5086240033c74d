"""What one process measures: linears, blocks or whole steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from . import models
from .configurations import Configuration
from .flops import Geometry, token_count
from .optimizers import make_optimizer, state_bytes
from .timing import SEED, Measurement, Setting

OP_SHAPES = ((1, 1), (1, 4), (4, 1), (5, 1))  # in and out features over d: q k v and output; MLP in, out; single output


def measure_ops(configuration: Configuration, setting: Setting) -> Iterator[Measurement]:
    """FLUX's linears: forward and dX, with all that quantization costs; the weight is quantized beforehand."""
    draw = torch.Generator(setting.device).manual_seed(SEED + 3)
    for wide_in, wide_out in OP_SHAPES:
        k, n = wide_in * setting.geometry.hidden, wide_out * setting.geometry.hidden
        linear = models.make_linear(configuration, k, n, setting.device)
        for resolution, batch in setting.sizes:
            m = batch * token_count(resolution)
            x, grad = (
                torch.randn(m, width, device=setting.device, generator=draw).to(torch.bfloat16) for width in (k, n)
            )
            figures = {"m": m, "k": k, "n": n}
            for what, call in _op_calls(linear, x, grad):
                timing = setting.timed("op", call, cold=True)
                yield Measurement(f"{what} {k} -> {n}", resolution, batch, timing, figures)


def _op_calls(linear: nn.Module, x: Tensor, grad: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    def forward() -> Tensor:
        with torch.no_grad():
            return linear(x.detach())  # another tensor each time: codes are remembered by tensor

    yield "forward", forward
    leaf = x.detach().requires_grad_()
    y = linear(leaf)
    yield "dX", lambda: torch.autograd.grad(y, leaf, grad.detach(), retain_graph=True)


def measure_blocks(configuration: Configuration, setting: Setting) -> Iterator[Measurement]:
    """One double and one single block: forward alone, and forward with backward to input and adapters."""
    geometry = Geometry(1, 1, setting.geometry.heads, setting.geometry.rank)
    model = models.make_model(geometry, setting.device)
    trained = models.prepare(model, configuration, geometry, setting.device)
    blocks = {"double": model.transformer_blocks[0], "single": model.single_transformer_blocks[0]}
    for resolution, batch in setting.sizes:
        inputs, gradients = _block_inputs(model, resolution, batch, setting.device)
        for kind, block in blocks.items():
            for what, call in _block_calls(model, block, inputs, gradients, trained, setting):
                yield Measurement(f"{kind} {what}", resolution, batch, setting.timed("block", call), {})


def _block_inputs(model: Any, resolution: int, batch: int, device: torch.device) -> tuple[list[Any], list[Tensor]]:
    """Arguments of a block (image [B, T, d], text [B, 512, d], time [B, d], rotary) and gradients of image and text."""
    draw = torch.Generator(device).manual_seed(SEED + 4)
    plain, _ = models.model_inputs(resolution, batch, device)
    lengths = (plain["img_ids"].shape[0], plain["txt_ids"].shape[0])
    streams, gradients = (
        [torch.randn(batch, n, model.inner_dim, device=device, generator=draw).to(torch.bfloat16) for n in lengths]
        for _ in range(2)
    )
    time = torch.randn(batch, model.inner_dim, device=device, generator=draw).to(torch.bfloat16)
    rotary = model.pos_embed(torch.cat((plain["txt_ids"], plain["img_ids"])))
    return [*(stream.requires_grad_() for stream in streams), time, rotary], gradients


def _block_calls(
    model: Any,
    block: nn.Module,
    inputs: list[Any],
    gradients: list[Tensor],
    trained: list[nn.Parameter],
    setting: Setting,
) -> Iterator[tuple[str, Callable[[], object]]]:
    run = getattr(model, "_gradient_checkpointing_func", None) or (lambda block, *args: block(*args))

    def forward() -> object:
        with torch.no_grad(), setting.autocast():
            return block(*inputs)

    def forward_backward() -> None:
        with setting.autocast():
            text, image = run(block, *inputs)
        torch.autograd.backward((image, text), gradients)
        for tensor in (*trained, *inputs[:2]):
            tensor.grad = None

    yield "forward", forward
    yield "forward + backward", forward_backward


def measure_steps(configuration: Configuration, setting: Setting) -> Iterator[Measurement]:
    """The whole transformer: forward alone, and a training step (forward, loss, backward, optimizer)."""
    model = models.make_model(setting.geometry, setting.device)
    trained = models.prepare(model, configuration, setting.geometry, setting.device)
    optimizer = make_optimizer(configuration.optimizer, trained)
    for resolution, batch in setting.sizes:
        inputs, target = models.model_inputs(resolution, batch, setting.device)
        losses: list[Tensor] = []

        def forward(inputs: dict[str, Tensor] = inputs) -> Tensor:
            with setting.autocast():
                return model(**inputs, return_dict=False)[0]

        def step(target: Tensor = target, losses: list[Tensor] = losses) -> None:
            loss = nn.functional.mse_loss(forward().float(), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())

        with torch.no_grad():
            timing = setting.timed("step", forward)
        yield Measurement("forward", resolution, batch, timing, {})
        timing = setting.timed("step", step)
        loss = _finite(torch.stack(losses))
        figures = {"loss": loss, "state_bytes": state_bytes(optimizer)}
        yield Measurement("step", resolution, batch, timing, figures)


def _finite(losses: Tensor) -> list[float]:
    values: list[float] = losses.tolist()
    if not torch.isfinite(losses).all():
        raise FloatingPointError(f"loss={values}: not finite; figures of a run that does not train are worth nothing")
    return values


MEASURE: dict[str, Callable[[Any, Setting], Iterator[Measurement]]] = {
    "op": measure_ops,
    "block": measure_blocks,
    "step": measure_steps,
}
