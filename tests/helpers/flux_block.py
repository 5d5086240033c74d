"""One double and one single FLUX block of real width with random weights, a LoRA and COAT as asked.

Loops, all with fp32 adapters on bf16 blocks: "autocast" (PEFT, as accelerate runs it), "peft" (without), "toolkit".
"""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from coat_flux.blocks.runner import BlockRunner
from tests.helpers.toolkit_lora import attach_network, convert_linears

HEAD_DIM = 128  # FLUX.1's
OUTLIERS_EVERY = 256  # channels
B_STD = 0.02  # adapters then add about a tenth to what their linears give


def make_model(heads: int) -> nn.Module:
    """Return a frozen bf16 FLUX transformer with one double and one single block, diffusers' initialization."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        num_layers=1, num_single_layers=1, attention_head_dim=HEAD_DIM, num_attention_heads=heads,
        joint_attention_dim=256, pooled_projection_dim=64, guidance_embeds=True, in_channels=64,
    )  # fmt: skip
    return model.to(torch.bfloat16).requires_grad_(False)


def prepare(model: nn.Module, coat: dict[str, Any], loop: str, rank: int) -> nn.Module:
    """A copy of the model with COAT and an adapter, B nonzero, on every linear of the blocks."""
    from coat_flux.blocks.apply import apply_coat
    from coat_flux.blocks.lora import attach_lora
    from coat_flux.config.coat import COATConfig

    model, config = copy.deepcopy(model), COATConfig.from_dict(coat)
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and "transformer_blocks." in n]
    if loop == "toolkit" and config.enabled:
        convert_linears(model, config)
    apply_coat(model, config)
    if loop == "toolkit":
        root = attach_network(model, names, rank)
        vars(model)["toolkit_network"] = root  # held by the model, but not a part of it
    else:
        root = model
        _add_peft(model, names, rank)
    attach_lora(root, config)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, matrix in lora_parameters(model).items():
            if "lora_B." in name or "lora_up." in name:
                matrix.normal_(0.0, B_STD, generator=draw)
    return model.train()


def _add_peft(model: Any, names: list[str], rank: int) -> None:
    from peft import LoraConfig

    torch.manual_seed(1)
    model.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=names))
    for parameter in lora_parameters(model).values():
        parameter.data = parameter.data.float()


def lora_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    root = vars(model).get("toolkit_network", model)
    return {name: parameter for name, parameter in root.named_parameters() if ".lora_" in name}


def loop_context(loop: str) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if loop == "autocast" else contextlib.nullcontext()


def block_call(model: Any) -> Callable[..., Any]:
    """What runs each block: COAT's runner, where it is installed."""
    own = getattr(model, "_gradient_checkpointing_func", None) or (lambda block, *args: block(*args))
    return BlockRunner.of(model) or own


def block_inputs(
    model: Any, text: int, image: int, outliers: float = 1.0, batch: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw image [batch, image, d], text [batch, text, d] and time embedding [batch, d], the same at each call.

    `outliers` is a factor on one of `OUTLIERS_EVERY` channels, drawn at random, of image and text.
    """
    draw = torch.Generator().manual_seed(4)
    hidden: int = model.inner_dim
    channels = torch.randperm(hidden, generator=draw)[: max(hidden // OUTLIERS_EVERY, 1)]
    streams = []
    for tokens in (image, text):
        x = torch.randn(batch, tokens, hidden, generator=draw)
        x[..., channels] *= outliers
        streams.append(x.to(model.dtype))
    return streams[0], streams[1], torch.randn(batch, hidden, generator=draw).to(model.dtype)
