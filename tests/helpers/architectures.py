"""Small random diffusers models of other architectures than FLUX, with LoRA and COAT, and one training step of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from scripts.bench_architectures import (
    Architecture,
    cogvideox,
    cogvideox_inputs,
    frozen_model,
    prepare,
    sd3,
    sd3_inputs,
    to_bf16,
    unet,
    unet_inputs,
)

RANK = 4
SMALL_UNET: dict[str, Any] = {
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": 1,
    "attention_head_dim": (1, 2),
    "cross_attention_dim": 64,
}
SMALL_SD3 = {
    "num_layers": 3,
    "num_attention_heads": 2,
    "caption_projection_dim": 128,
    "joint_attention_dim": 64,
    "dual_attention_layers": (0,),
}
SMALL_COGVIDEOX = {
    "num_attention_heads": 2,
    "time_embed_dim": 32,
    "text_embed_dim": 64,
    "num_layers": 2,
    "sample_width": 16,
    "sample_height": 16,
    "max_text_seq_length": 32,
}


def wan(**options: Any) -> nn.Module:
    """Wan's video transformer, a class COAT has no entry for."""
    from diffusers import WanTransformer3DModel

    settings = {"num_attention_heads": 2, "attention_head_dim": 64, "in_channels": 4, "out_channels": 4}
    settings |= {"text_dim": 64, "freq_dim": 32, "ffn_dim": 256, "num_layers": 2}
    return WanTransformer3DModel(**(settings | options))


def wan_inputs(model: Any, side: int, batch: int = 1) -> dict[str, Any]:
    """Latents of three frames and text tokens."""
    draw = torch.Generator().manual_seed(side)
    return {
        "hidden_states": torch.randn(batch, 4, 3, side, side, generator=draw),
        "encoder_hidden_states": torch.randn(batch, 32, model.config.text_dim, generator=draw),
        "timestep": torch.full((batch,), 500),
    }


ARCHITECTURES = {
    "SDXL": Architecture(unet, unet_inputs, SMALL_UNET, 64, "widths 32 and 64"),
    "Kolors": Architecture(
        unet,
        unet_inputs,
        SMALL_UNET | {"encoder_hid_dim": 96, "encoder_hid_dim_type": "text_proj"},
        64,
        "text states projected inside the model",
    ),
    "SD3": Architecture(sd3, sd3_inputs, SMALL_SD3, 32, "d = 128"),
    "CogVideoX": Architecture(cogvideox, cogvideox_inputs, SMALL_COGVIDEOX, 16, "d = 128"),
}
WAN = Architecture(wan, wan_inputs, {}, 16, "d = 128")


def with_options(architecture: Architecture, **options: Any) -> Architecture:
    """The architecture with other values in its config."""
    return replace(architecture, options=architecture.options | options)


def coat_model(architecture: Architecture, block: dict[str, Any]) -> tuple[nn.Module, Any, Any]:
    """The model under a coat block, in the generic flow, with a LoRA whose A and B are random: no gradient is zero."""
    block = {**block, "activation": {"flow": "generic", **block.get("activation", {})}}
    model, converted, attached = prepare(frozen_model(architecture, **architecture.options), block, RANK)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in lora_parameters(model).items():
            param.normal_(0.0, 0.05 if ".lora_B." in name else 0.1, generator=draw)
    return model, converted, attached


def lora_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' parameters."""
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def predict(architecture: Architecture, model: nn.Module, batch: int = 1) -> Tensor:
    """The model's output for the same inputs at each call."""
    inputs = to_bf16(architecture.inputs(model, architecture.side, batch))
    output: Tensor = model(**inputs, return_dict=False)[0]
    return output


def loss_of(prediction: Tensor) -> Tensor:
    """Mean squared error against a fixed random target."""
    target = torch.randn(prediction.shape, generator=torch.Generator().manual_seed(3))
    return (prediction.float() - target).square().mean()


def step(architecture: Architecture, model: nn.Module, batch: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and LoRA gradients of one step."""
    prediction = predict(architecture, model, batch)
    loss_of(prediction).backward()
    gradients = {name: param.grad.detach().clone() for name, param in lora_parameters(model).items()}
    model.zero_grad(set_to_none=True)
    return prediction.detach(), gradients
