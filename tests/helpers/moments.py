"""Exact moments of a small training of a real FLUX class, and the error of AdamW's update after storing them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from coat_core.config import FP8QuantizationConfig
from coat_core.optim.state import convert_state, read_state, storages
from coat_flux.trainers.standalone.flow_matching import (
    draw_sigmas,
    noisy_latents,
    predict_velocity,
    sample_losses,
    sigma_table,
)
from scripts.mini_flux.models import initialise
from tests.helpers.tiny_flux import TINY_TRANSFORMER_CONFIG

EPS = 1e-8
Method = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # m, v -> both as they come back
Moments = dict[str, Tensor]


def build_flux(blocks: int, heads: int, head_dim: int, seed: int = 0) -> nn.Module:
    """Return a FLUX transformer of `blocks` double and `blocks` single blocks with random weights."""
    from diffusers import FluxTransformer2DModel

    rope = (head_dim // 4, head_dim // 8 * 3, head_dim // 8 * 3)
    geometry = {
        "num_layers": blocks,
        "num_single_layers": blocks,
        "num_attention_heads": heads,
        "attention_head_dim": head_dim,
        "axes_dims_rope": rope,
    }
    return initialise(FluxTransformer2DModel(**{**TINY_TRANSFORMER_CONFIG, **geometry}), f"moments-{seed}")


def add_lora(model: nn.Module, rank: int, seed: int = 0) -> nn.Module:
    """Freeze the model and give every linear of its blocks a fp32 adapter, B = 0."""
    model.requires_grad_(False)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    targets = [name for name in names if name.startswith(("transformer_blocks.", "single_transformer_blocks."))]
    torch.manual_seed(seed)
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=targets), model)
    return model


def build_lora_flux(blocks: int, heads: int, head_dim: int, rank: int, seed: int = 0) -> nn.Module:
    """Return `build_flux` with `add_lora`, ready to train."""
    return add_lora(build_flux(blocks, heads, head_dim, seed), rank, seed).train()


def losses(model: nn.Module, data: dict[str, Tensor], batch: int, seed: int) -> Iterator[Tensor]:
    """Yield FLUX's flow-matching loss of one random batch after another."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(data["latents"]), (batch,), generator=generator)
        latents = data["latents"][chosen]
        _, sigmas = draw_sigmas(sigma_table("sigmoid", tokens=0, generator=generator), batch, generator=generator)
        noise = torch.randn(latents.shape, generator=generator)
        x_t = noisy_latents(latents, noise, sigmas)
        embeds, pooled = data["prompt_embeds"][chosen], data["pooled"][chosen]
        prediction = predict_velocity(model, x_t, sigmas, embeds, pooled, dtype=torch.float32)
        yield sample_losses(prediction, latents, noise, None).mean()


def train_and_capture(
    model: nn.Module, data: dict[str, Tensor], steps: list[int], *, lr: float, batch: int, seed: int = 0
) -> Iterator[tuple[int, float, dict[str, Tensor]]]:
    """Train with fp32 AdamW; yield (step, loss, {"<parameter>.exp_avg" | "….exp_avg_sq": fp32}) at each of `steps`."""
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    optimizer = torch.optim.AdamW(named.values(), lr=lr, betas=(0.9, 0.999), weight_decay=1e-4)
    for step, loss in enumerate(losses(model, data, batch, seed), start=1):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in steps:
            moments = {
                f"{name}.{key}": optimizer.state[param][key].clone()
                for name, param in named.items()
                for key in ("exp_avg", "exp_avg_sq")
            }
            yield step, loss.item(), moments
        if step == max(steps):
            return


def stored(**options: object) -> Method:
    """What FP8AdamW with these options keeps of the moments of one parameter."""
    exact, asked = (
        storages(FP8QuantizationConfig(**kind)) for kind in ({"use_fp8_m1": False, "use_fp8_m2": False}, options)
    )
    return lambda m, v: read_state(convert_state({"exp_avg": m, "exp_avg_sq": v}, exact, asked), asked)


def bitsandbytes_method() -> Method:
    """Dynamic 8-bit of bitsandbytes' AdamW8bit: signed map for m, unsigned for v, blocks of 256."""
    from bitsandbytes.functional import create_dynamic_map, dequantize_blockwise, quantize_blockwise

    def round_trip(x: Tensor, signed: bool) -> Tensor:
        code = create_dynamic_map(signed=signed)
        return dequantize_blockwise(*quantize_blockwise(x.contiguous(), code=code, blocksize=256)).view_as(x)

    return lambda m, v: (round_trip(m, signed=True), round_trip(v, signed=False))


def update(m: Tensor, v: Tensor) -> Tensor:
    """The direction of AdamW's step without bias correction."""
    return m / (v.sqrt() + EPS)


def measure(moments: Moments, method: Method) -> tuple[float, float]:
    """Return (mean squared error of the update, share of nonzero v that come back as zero) over all parameters."""
    error, count, lost, nonzero = 0.0, 0, 0, 0
    for key, m in moments.items():
        if not key.endswith(".exp_avg"):
            continue
        v = moments[f"{key}_sq"]
        m_hat, v_hat = method(m, v)
        error += (update(m.double(), v.double()) - update(m_hat.double(), v_hat.double())).square().sum().item()
        count += m.numel()
        nonzero += int((v != 0).sum())
        lost += int(((v != 0) & (v_hat == 0)).sum())
    return error / count, lost / max(nonzero, 1)


def depth_of(key: str) -> str:
    """Where in the transformer a parameter is: "double 0", "single 5" or, of no block, "outside"."""
    found = re.match(r"(single_)?transformer_blocks\.(\d+)\.", key)
    return f"{'single' if found[1] else 'double'} {int(found[2]):2}" if found else "outside"
