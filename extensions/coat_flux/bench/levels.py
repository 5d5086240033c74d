"""What one process measures: linears, blocks or whole steps, of models with random weights and fixed seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from coat_core.linear import FP8Linear

from ..blocks.apply import apply_coat
from ..blocks.architectures import FLUX
from ..blocks.lora import attach_lora
from ..config.coat import COATConfig
from ..mini_flux.geometry import FLUX_DEV_TRANSFORMER_CONFIG, make_flux_dev_geometry
from ..trainers.standalone.network import add_lora, lora_parameters, lora_targets
from .configurations import Configuration
from .limits import PIXELS_PER_TOKEN, TEXT_TOKENS, Geometry, token_count
from .optimizers import make_optimizer, state_bytes
from .timing import SEED, Measurement, Setting

B_STD = 0.02  # of the adapters' B, which training leaves zero after the first step
BUILD_ROOM = 1.3  # a model is made on the GPU when so many times its bytes are free there
OP_SHAPES = ((1, 1), (1, 4), (4, 1), (5, 1))  # in and out features over d: q k v and output; MLP in, out; single output


def make_model(geometry: Geometry, device: torch.device) -> Any:
    """A frozen bf16 transformer; on the device if it fits there with room, else on the CPU, to be converted first."""
    sizes = {
        "num_layers": geometry.double,
        "num_single_layers": geometry.single,
        "num_attention_heads": geometry.heads,
    }
    place = device
    if device.type == "cuda":
        plain = make_flux_dev_geometry("meta", **sizes)
        needed = 2 * sum(parameter.numel() for parameter in plain.parameters())
        if BUILD_ROOM * needed > torch.cuda.mem_get_info(device)[0]:
            place = torch.device("cpu")
    return make_flux_dev_geometry(place, torch.bfloat16, seed=SEED, **sizes)


def prepare(model: Any, configuration: Configuration, geometry: Geometry, device: torch.device) -> list[nn.Parameter]:
    """Convert the model as the configuration says, in place, and add the LoRA.

    Returns:
        The trained parameters, fp32.
    """
    config = None if configuration.coat is None else COATConfig.from_dict(dict(configuration.coat))
    targets = lora_targets(model)
    if config is not None:
        apply_coat(model, config, device=device)
    elif configuration.quantizer == "quanto":
        from optimum.quanto import freeze, qfloat8, quantize

        for blocks in map(model.get_submodule, FLUX.blocks):
            quantize(blocks, weights=qfloat8)
            freeze(blocks)
    elif configuration.quantizer == "torchao":
        from torchao.float8 import convert_to_float8_training

        def sees_tokens(_: nn.Module, name: str) -> bool:
            """Linears of the blocks, but for modulation: torchao's GEMM takes no batch of fewer than 16 rows."""
            return not name or ("transformer_blocks." in name and ".norm" not in name)

        convert_to_float8_training(model, module_filter_fn=sees_tokens)
    model.to(device)
    add_lora(model, targets, geometry.rank, seed=SEED)
    if config is not None:
        attach_lora(model, config)
    elif configuration.checkpointing:
        model.enable_gradient_checkpointing()
    draw = torch.Generator(device).manual_seed(SEED + 1)
    for name, parameter in lora_parameters(model).items():
        if ".lora_B." in name:  # with B = 0 half of the backward pass would multiply zeros
            nn.init.normal_(parameter, 0.0, B_STD, generator=draw)
    if configuration.compiled == "blocks":
        model.compile_repeated_blocks()
    elif configuration.compiled == "model":
        model.compile()
    model.train()
    return list(lora_parameters(model).values())


def make_linear(configuration: Configuration, k: int, n: int, device: torch.device) -> nn.Module:
    """One frozen bf16 linear [n, k] with bias, converted as the configuration says."""
    draw = torch.Generator(device).manual_seed(SEED)
    holder = nn.Sequential(nn.Linear(k, n, device=device, dtype=torch.bfloat16)).requires_grad_(False)
    holder[0].weight.data.normal_(0.0, k**-0.5, generator=draw)
    holder[0].bias.data.normal_(0.0, 1.0, generator=draw)
    if configuration.coat is not None:
        FP8Linear.from_linear(holder[0], COATConfig.from_dict(dict(configuration.coat)).linear_config())
    elif configuration.quantizer == "torchao":
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(holder)
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
    model = make_model(geometry, device)
    trained = prepare(model, configuration, geometry, device)
    run = getattr(model, "_gradient_checkpointing_func", None) or (lambda block, *args: block(*args))
    blocks = {each.kind: model.get_submodule(each.pattern)[0] for each in FLUX.lists}
    for resolution, batch in setting.sizes:
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
                with torch.no_grad(), setting.autocast():
                    return block(*inputs)

            def both(block: nn.Module = block, inputs: list[Any] = inputs, gradients: list[Tensor] = gradients) -> None:
                with setting.autocast():
                    text, image = run(block, *inputs)
                torch.autograd.backward((image, text), gradients)
                for tensor in (*trained, *inputs[:2]):
                    tensor.grad = None

            yield Measurement(f"{kind} forward", resolution, batch, setting.timed("block", forward), {})
            yield Measurement(f"{kind} forward + backward", resolution, batch, setting.timed("block", both), {})


def measure_steps(configuration: Configuration, setting: Setting) -> Iterator[Measurement]:
    """The whole transformer: forward alone, and a training step (forward, loss, backward, optimizer)."""
    model = make_model(setting.geometry, setting.device)
    trained = prepare(model, configuration, setting.geometry, setting.device)
    optimizer = make_optimizer(configuration.optimizer, trained)
    for resolution, batch in setting.sizes:
        inputs, target = model_inputs(resolution, batch, setting.device)
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
        loss = torch.stack(losses).tolist()
        if not all(map(math.isfinite, loss)):
            raise FloatingPointError(f"loss={loss}: not finite; figures of a run that does not train are worth nothing")
        figures = {"loss": loss, "state_bytes": state_bytes(optimizer)}
        yield Measurement("step", resolution, batch, timing, figures)


MEASURE: dict[str, Callable[[Any, Setting], Iterator[Measurement]]] = {
    "op": measure_ops,
    "block": measure_blocks,
    "step": measure_steps,
}
