"""Small random diffusers models of other architectures than FLUX, with LoRA and COAT, and one training step of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

ROW_PER_IMAGE = ("norm1.linear", "norm1_context.linear", "norm2.linear", "time_emb_proj")  # adapters there keep nothing
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


@dataclass(frozen=True)
class Architecture:
    """How to build a model and call it.

    Attributes:
        build: returns the model with random weights, fp32; keyword arguments override its config.
        inputs: (model, side, batch) to the keyword arguments of its forward, fp32; side is the latents' height.
        options: config of the model.
        side: of the latents.
    """

    build: Callable[..., nn.Module]
    inputs: Callable[..., dict[str, Any]]
    options: dict[str, Any]
    side: int


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def unet(**options: Any) -> nn.Module:
    """SDXL's UNet: no attention at the first level, linear projections, size and pooled text added to the time's."""
    from diffusers import UNet2DConditionModel

    settings: dict[str, Any] = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 80,
    }
    return UNet2DConditionModel(**(settings | options))


def unet_inputs(model: Any, side: int, batch: int = 1) -> dict[str, Any]:
    """Latents, 77 text tokens, pooled text and sizes."""
    text_width = model.config.encoder_hid_dim or model.config.cross_attention_dim
    times = 6 * model.config.addition_time_embed_dim
    return {
        "sample": _draw(batch, 4, side, side),
        "timestep": torch.linspace(400.0, 600.0, batch),
        "encoder_hidden_states": _draw(batch, 77, text_width),
        "added_cond_kwargs": {
            "text_embeds": _draw(batch, model.config.projection_class_embeddings_input_dim - times),
            "time_ids": torch.tensor([[1024.0, 1024.0, 0.0, 0.0, 1024.0, 1024.0]]).repeat(batch, 1),
        },
    }


def sd3(**options: Any) -> nn.Module:
    """SD 3.5's transformer: RMSNorm on q and k, a second attention in some blocks; the last has no text output."""
    from diffusers import SD3Transformer2DModel

    settings = {"sample_size": 64, "pos_embed_max_size": 64, "qk_norm": "rms_norm", "pooled_projection_dim": 32}
    return SD3Transformer2DModel(**(settings | options))


def sd3_inputs(model: Any, side: int, batch: int = 1) -> dict[str, Any]:
    """Latents, 77 text tokens, pooled text."""
    return {
        "hidden_states": _draw(batch, model.config.in_channels, side, side),
        "encoder_hidden_states": _draw(batch, 77, model.config.joint_attention_dim),
        "pooled_projections": _draw(batch, model.config.pooled_projection_dim),
        "timestep": torch.linspace(400.0, 600.0, batch),
    }


def cogvideox(**options: Any) -> nn.Module:
    """CogVideoX' transformer with rotary positions, as the 5B model has them."""
    from diffusers import CogVideoXTransformer3DModel

    settings: dict[str, Any] = {
        "in_channels": 16,
        "out_channels": 16,
        "sample_frames": 9,
        "use_rotary_positional_embeddings": True,
    }
    return CogVideoXTransformer3DModel(**(settings | options))


def cogvideox_inputs(model: Any, side: int, batch: int = 1) -> dict[str, Any]:
    """Latents of three frames, text tokens, rotary tables."""
    frames, patch, head_dim = 3, model.config.patch_size, model.config.attention_head_dim
    angles = _draw(frames * (side // patch) ** 2, head_dim)
    return {
        "hidden_states": _draw(batch, frames, model.config.in_channels, side, side),
        "encoder_hidden_states": _draw(batch, model.config.max_text_seq_length, model.config.text_embed_dim),
        "timestep": torch.linspace(400.0, 600.0, batch),
        "image_rotary_emb": (angles.cos(), angles.sin()),
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
    "SDXL": Architecture(unet, unet_inputs, SMALL_UNET, 64),
    "Kolors": Architecture(
        unet,
        unet_inputs,
        SMALL_UNET | {"encoder_hid_dim": 96, "encoder_hid_dim_type": "text_proj"},
        64,
    ),
    "SD3": Architecture(sd3, sd3_inputs, SMALL_SD3, 32),
    "CogVideoX": Architecture(cogvideox, cogvideox_inputs, SMALL_COGVIDEOX, 16),
}
WAN = Architecture(wan, wan_inputs, {}, 16)


def to_bf16(value: Any) -> Any:
    """Cast the floating tensors of nested inputs."""
    if isinstance(value, Tensor):
        return value.to(torch.bfloat16) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: to_bf16(item) for key, item in value.items()}
    return tuple(to_bf16(item) for item in value) if isinstance(value, tuple) else value


def lora_targets(model: nn.Module) -> list[str]:
    """Full names of the linears inside the blocks that see tokens."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "block" in name.split(".")[0] and not name.endswith(ROW_PER_IMAGE)
    ]


def prepare(model: nn.Module, setting: dict[str, Any], rank: int) -> tuple[nn.Module, Any, Any]:
    """Return a copy of the model with COAT as set and an fp32 LoRA, and the reports of both."""
    from peft import LoraConfig

    from coat_flux.blocks.apply import apply_coat
    from coat_flux.blocks.lora import attach_lora
    from coat_flux.config.coat import COATConfig

    model, config = copy.deepcopy(model), COATConfig.from_dict(setting)
    converted = apply_coat(model, config)
    model.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=lora_targets(model)))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model.train(), converted, attach_lora(model, config)


def frozen_model(architecture: Architecture) -> nn.Module:
    """Build the model, frozen, bf16, the same weights at each call."""
    from diffusers.utils import logging

    torch.manual_seed(0)
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # `.to(bfloat16)` warns of modules that stay fp32, also where there are none
    try:
        return architecture.build(**architecture.options).to(torch.bfloat16).requires_grad_(False)
    finally:
        logging.set_verbosity(level)


def with_options(architecture: Architecture, **options: Any) -> Architecture:
    """The architecture with other values in its config."""
    return replace(architecture, options=architecture.options | options)


def coat_model(architecture: Architecture, block: dict[str, Any]) -> tuple[nn.Module, Any, Any]:
    """The model under a coat block, in the generic flow, with a LoRA whose A and B are random: no gradient is zero."""
    block = {**block, "activation": {"flow": "generic", **block.get("activation", {})}}
    model, converted, attached = prepare(frozen_model(architecture), block, RANK)
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
