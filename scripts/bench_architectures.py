"""Bytes other architectures than FLUX keep for backward: `python scripts/bench_architectures.py`.

Builds diffusers' own classes at about half their real width and with few layers, random weights, a rank-16 LoRA (fp32,
PEFT) on every linear that sees tokens, and runs them forward in bf16 without autocast. Counts every allocation still
alive afterwards as scripts/bench_memory.py does, less the output, and prints a Markdown table. Runs on a CPU.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

RANK = 16
ROW_PER_IMAGE = ("norm1.linear", "norm1_context.linear", "norm2.linear", "time_emb_proj")  # adapters there keep nothing
SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {"enabled": False},
    "COAT": {"memory": {"checkpointing": "none"}, "activation": {"flow": "generic"}},
    "recomputed": {"memory": {"checkpointing": "all"}},
}


@dataclass(frozen=True)
class Architecture:
    """How to build a model and call it.

    Attributes:
        build: returns the model with random weights, fp32; keyword arguments override its config.
        inputs: (model, side, batch) to the keyword arguments of its forward, fp32; side is the latents' height.
        options: config of the benchmark.
        side: of the benchmark's latents.
        size: the benchmark's sizes in words.
    """

    build: Callable[..., nn.Module]
    inputs: Callable[..., dict[str, Any]]
    options: dict[str, Any]
    side: int
    size: str


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


ARCHITECTURES = {
    "SDXL, Kolors": Architecture(
        unet,
        unet_inputs,
        {
            "block_out_channels": (160, 320, 640),
            "attention_head_dim": (2, 5, 10),
            "transformer_layers_per_block": (1, 1, 2),
            "cross_attention_dim": 1024,
        },
        64,
        "160/320/640 channels, 1 and 2 transformer layers, 64 x 64 latents, 77 text tokens",
    ),
    "SD 3.5": Architecture(
        sd3,
        sd3_inputs,
        {
            "num_layers": 3,
            "num_attention_heads": 12,
            "caption_projection_dim": 768,
            "joint_attention_dim": 1024,
            "dual_attention_layers": (0,),
        },
        64,
        "d = 768, 3 blocks (one with two attentions), 1024 image + 77 text tokens",
    ),
    "CogVideoX": Architecture(
        cogvideox,
        cogvideox_inputs,
        {"num_layers": 2, "num_attention_heads": 15, "text_embed_dim": 1024, "sample_width": 32, "sample_height": 32},
        32,
        "d = 960, 2 blocks, 768 video + 226 text tokens",
    ),
}


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


def prepare(model: nn.Module, setting: dict[str, Any], rank: int = RANK) -> tuple[nn.Module, Any, Any]:
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


@contextmanager
def without_dtype_warning() -> Iterator[None]:
    """Diffusers warns on `.to(bfloat16)` about modules that should stay fp32, also where there are none."""
    from diffusers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def frozen_model(architecture: Architecture, **options: Any) -> nn.Module:
    """Build the model, frozen, bf16, the same weights at each call."""
    torch.manual_seed(0)
    with without_dtype_warning():
        return architecture.build(**options).to(torch.bfloat16).requires_grad_(False)


def main() -> None:
    """Measure every architecture."""
    from bench_memory import kept_bytes

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ARCHITECTURES)} (default: all)")
    names = parser.parse_args().names or list(ARCHITECTURES)
    unknown = [name for name in names if name not in ARCHITECTURES]
    if unknown:
        parser.error(f"{unknown[0]!r}: not one of {', '.join(ARCHITECTURES)}")
    print(f"torch {torch.__version__}, rank {RANK} fp32, batch 1, MB (10^6) kept for backward\n")
    print("| architecture | sizes | bf16 | COAT generic | recomputed | bf16 / COAT | bf16 / recomputed |")
    print("|---|---|---|---|---|---|---|")
    for name in names:
        architecture = ARCHITECTURES[name]
        base = frozen_model(architecture, **architecture.options)
        kept = []
        for setting in SETTINGS.values():
            model, _, _ = prepare(base, setting)
            inputs = to_bf16(architecture.inputs(model, architecture.side))
            kept.append(kept_bytes(lambda model=model, inputs=inputs: model(**inputs, return_dict=False)) / 1e6)
        bf16, coat, recomputed = kept
        ratios = f"{bf16 / coat:.1f} | {bf16 / recomputed:.1f}"
        print(f"| {name} | {architecture.size} | {bf16:.0f} | {coat:.0f} | {recomputed:.1f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
