"""FLUX.1-dev's exact transformer geometry with random weights, for measurements on a real device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from diffusers import FluxTransformer2DModel

FLUX_DEV_TRANSFORMER_CONFIG: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
    "axes_dims_rope": (16, 56, 56),
}


def make_flux_dev_geometry(
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    seed: int = 0,
    **overrides: Any,
) -> FluxTransformer2DModel:
    """Build a FLUX.1-dev sized transformer with random weights directly on `device`, frozen and in eval mode.

    Modules get memory one at a time, so nothing beyond the model's own bytes (23.8 GB in bf16) is allocated, and
    nothing on `meta`. Linears are N(0, 1/fan-in), biases 0, norms 1. `overrides` change entries of
    `FLUX_DEV_TRANSFORMER_CONFIG`, e.g. `num_layers=1`.

    Raises:
        ValueError: an override is not part of the geometry.
    """
    from diffusers import FluxTransformer2DModel

    unknown = sorted(set(overrides) - set(FLUX_DEV_TRANSFORMER_CONFIG))
    if unknown:
        raise ValueError(f"overrides={unknown}: allowed are {', '.join(FLUX_DEV_TRANSFORMER_CONFIG)}")
    with torch.device("meta"):
        model = FluxTransformer2DModel(**{**FLUX_DEV_TRANSFORMER_CONFIG, **overrides})
    device = torch.device(device)
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
    for module in model.modules():
        _materialise(module, device, dtype, generator)
    return model.eval()


@torch.no_grad()
def _materialise(
    module: nn.Module, device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        tensor = torch.empty(parameter.shape, device=device, dtype=dtype)
        if parameter.ndim == 2:
            tensor.normal_(0.0, 1.0 / math.sqrt(parameter.shape[1]), generator=generator)
        else:
            tensor.fill_(0.0 if name == "bias" else 1.0)
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
