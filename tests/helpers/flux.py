"""The embedded tiny FLUX transformer with COAT and a LoRA, made in memory, and one training step of it."""

from typing import Any

import torch
from torch import Tensor, nn

from coat_flux.blocks.apply import apply_coat
from coat_flux.blocks.lora import attach_lora
from coat_flux.blocks.report import CoatReport
from coat_flux.config.coat import COATConfig
from coat_flux.config.job_sections import NetworkSection
from coat_flux.trainers.standalone.network import add_lora, lora_parameters
from tests.helpers.tiny_flux import build_transformer

IMAGE_SIDE, TEXT_TOKENS = 8, 64  # 64 tokens of 64 channels per stream: what a block saves is large enough to be packed


def tiny_flux(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The frozen transformer, in training mode."""
    return build_transformer(seed=0).to(dtype).requires_grad_(False).train()


def tiny_lora(model: nn.Module, config: COATConfig, rank: int = 4, dropout: float = 0.0) -> dict[str, str]:
    """Adapters on all linears of the blocks, B nonzero so that every gradient is, attached to COAT."""
    parameters = add_lora(model, NetworkSection(linear=rank, dropout=dropout), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in parameters.items():
            if ".lora_B." in name:
                param.normal_(0.0, 0.05, generator=generator)
    return attach_lora(model, config)


def coat_flux_model(
    block: dict[str, Any] | None = None, **options: Any
) -> tuple[nn.Module, CoatReport, dict[str, str]]:
    """Tiny FLUX under a coat block (None: no checkpointing, else the defaults) with its LoRA."""
    config = COATConfig.from_dict({"memory": {"checkpointing": "none"}} if block is None else block)
    model = tiny_flux(options.pop("dtype", torch.bfloat16))
    report = apply_coat(model, config, **options)
    return model, report, tiny_lora(model, config)


def flux_inputs(dtype: torch.dtype = torch.bfloat16, batch: int = 1, side: int = IMAGE_SIDE) -> dict[str, Tensor]:
    """Arguments of the transformer's forward, the same at each call."""
    draw = torch.Generator().manual_seed(2)
    image_ids = torch.zeros(side, side, 3)
    image_ids[..., 1], image_ids[..., 2] = torch.arange(side)[:, None], torch.arange(side)[None]
    return {
        "hidden_states": torch.randn(batch, side * side, 64, generator=draw).to(dtype),
        "encoder_hidden_states": torch.randn(batch, TEXT_TOKENS, 64, generator=draw).to(dtype),
        "pooled_projections": torch.randn(batch, 64, generator=draw).to(dtype),
        "timestep": torch.linspace(0.4, 0.6, batch).to(dtype),
        "guidance": torch.full((batch,), 3.5),
        "img_ids": image_ids.flatten(0, 1),
        "txt_ids": torch.zeros(TEXT_TOKENS, 3),
    }


def predict(model: nn.Module, **options: Any) -> Tensor:
    prediction: Tensor = model(**flux_inputs(model.dtype, **options), return_dict=False)[0]
    return prediction


def loss_of(prediction: Tensor) -> Tensor:
    """Mean squared error against a fixed random target."""
    target = torch.randn(prediction.shape, generator=torch.Generator().manual_seed(3))
    return (prediction.float() - target).square().mean()


def lora_gradients(model: nn.Module, **options: Any) -> dict[str, Tensor]:
    """Gradients of one step, by saved LoRA name."""
    return step_of(model, **options)[1]


def step_of(model: nn.Module, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    output = predict(model, **options)
    loss_of(output).backward()
    gradients = {name: param.grad.detach().clone() for name, param in lora_parameters(model).items()}
    model.zero_grad(set_to_none=True)
    return output.detach(), gradients
