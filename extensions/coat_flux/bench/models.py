"""The models of one process, made on the device with random weights and fixed seeds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.apply import apply_coat
from ..blocks.lora import attach_lora
from ..config.coat import COATConfig
from ..mini_flux.geometry import FLUX_DEV_TRANSFORMER_CONFIG, make_flux_dev_geometry
from ..trainers.standalone.network import add_lora, lora_parameters, lora_targets
from .configurations import Configuration
from .flops import PIXELS_PER_TOKEN, TEXT_TOKENS, Geometry
from .timing import SEED

B_STD = 0.02  # of the adapters' B, which training leaves zero after the first step
BUILD_ROOM = 1.3  # a model is made on the GPU when so many times its bytes are free there


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
    elif configuration.quantizer:
        _QUANTIZERS[configuration.quantizer](model)
    model.to(device)
    add_lora(model, targets, geometry.rank, seed=SEED)
    if config is not None:
        attach_lora(model, config)
    elif configuration.checkpointing:
        model.enable_gradient_checkpointing()
    draw_b(lora_parameters(model).items(), device)
    if configuration.compiled == "blocks":
        model.compile_repeated_blocks()
    elif configuration.compiled == "model":
        model.compile()
    model.train()
    return list(lora_parameters(model).values())


@torch.no_grad()
def draw_b(named: Iterable[tuple[str, nn.Parameter]], device: torch.device) -> None:
    """Give every B random values: with B = 0 half of the backward pass would multiply zeros."""
    draw = torch.Generator(device).manual_seed(SEED + 1)
    for name, parameter in named:
        if ".lora_B." in name:
            parameter.normal_(0.0, B_STD, generator=draw)


def _to_quanto(model: Any) -> None:
    from optimum.quanto import freeze, qfloat8, quantize

    for blocks in (model.transformer_blocks, model.single_transformer_blocks):
        quantize(blocks, weights=qfloat8)
        freeze(blocks)


def _to_torchao(model: nn.Module) -> None:
    from torchao.float8 import convert_to_float8_training

    def sees_tokens(module: nn.Module, name: str) -> bool:
        """Linears of the blocks, but for modulation: torchao's GEMM takes no batch of fewer than 16 rows."""
        del module
        return not name or ("transformer_blocks." in name and ".norm" not in name)

    convert_to_float8_training(model, module_filter_fn=sees_tokens)


_QUANTIZERS = {"quanto": _to_quanto, "torchao": _to_torchao}


def make_linear(configuration: Configuration, k: int, n: int, device: torch.device) -> nn.Module:
    """One frozen bf16 linear [n, k] with bias, converted as the configuration says."""
    from coat_core.linear import FP8Linear

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
