"""One double and one single FLUX block of real width with random weights, a LoRA and COAT as asked."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import _toolkit_lora

HEAD_DIM = 128  # FLUX.1's
RANK = 16
PEFT, TOOLKIT = "PEFT, autocast", "ai-toolkit, fp32"

Block = Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Tensor]]


def make_model(heads: int, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return a frozen FLUX transformer with one double and one single block, diffusers' initialization."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=heads,
        joint_attention_dim=256,
        pooled_projection_dim=64,
        guidance_embeds=True,
        in_channels=64,
    )
    return model.to(dtype).requires_grad_(False)


def block_linears(model: nn.Module) -> list[str]:
    """Full names of all linears in the blocks, adaLN modulation included."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "transformer_blocks." in name
    ]


@dataclass
class Blocks:
    """The two blocks, ready to run.

    Attributes:
        model: that they belong to.
        double: (image, text, temb, rotary) to (text, image), as the model would call it.
        single: the same.
        adapters: name of the linear → (A, B).
        alive: what the model itself does not hold.
    """

    model: Any
    double: Block
    single: Block
    adapters: dict[str, tuple[nn.Parameter, nn.Parameter]]
    alive: Any = None


def prepare(model: nn.Module, coat: dict[str, Any], adapters: str = PEFT, recompute: bool = False) -> Blocks:
    """Return the blocks of a copy of the model.

    Args:
        model: from `make_model`.
        coat: the `coat:` block; `{"enabled": False}` for plain blocks.
        adapters: `PEFT` (fp32 parameters under bf16 autocast) or `TOOLKIT` (fp32, no autocast); "PEFT" alone is PEFT
            without autocast, as the stand-alone trainer runs it.
        recompute: plain blocks under torch.utils.checkpoint.
    """
    from coat_flux.config import COATConfig
    from coat_flux.flux import apply_coat
    from coat_flux.lora import attach_lora

    model, config, names = copy.deepcopy(model), COATConfig.from_dict(coat), block_linears(model)
    if adapters == TOOLKIT and config.enabled:
        _toolkit_lora.convert_linears(model, config)
    apply_coat(model, config)
    if adapters == TOOLKIT:
        network = _toolkit_lora.attach_network(model, names, RANK)
        found = {name: _toolkit_matrices(model.get_submodule(name)) for name in names}
    else:
        network = None
        found = _add_peft(model, names)
    attach_lora(network or model, config)
    call = getattr(model, "_gradient_checkpointing_func", None) if config.enabled else None
    if call is None:
        call = _recomputed if recompute else _plain
    autocast = adapters == PEFT
    double, single = model.train().transformer_blocks[0], model.single_transformer_blocks[0]
    return Blocks(model, _runner(call, double, autocast), _runner(call, single, autocast), found, network)


def _plain(block: nn.Module, *args: Any) -> Any:
    return block(*args)


def _recomputed(block: nn.Module, *args: Any) -> Any:
    return checkpoint(block, *args, use_reentrant=False)


def _runner(call: Callable[..., Any], block: nn.Module, autocast: bool) -> Block:
    def run(*args: Any) -> tuple[Tensor, Tensor]:
        context = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
        with context:
            return call(block, *args)

    return run


def _add_peft(model: Any, names: list[str]) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=names))
    found = {}
    for name in names:
        layer = model.get_submodule(name)
        pair = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        for matrix in pair:
            matrix.data = matrix.data.float()
        found[name] = pair
    return found


def _toolkit_matrices(linear: Any) -> tuple[nn.Parameter, nn.Parameter]:
    module = linear.forward.__self__
    return module.lora_down.weight, module.lora_up.weight


@dataclass(frozen=True)
class Inputs:
    """What both blocks are called with: image and text [1, S, d], temb [1, d], rotary tables."""

    image: Tensor
    text: Tensor
    temb: Tensor
    rotary: Any


def make_inputs(model: Any, text_tokens: int, image_tokens: int) -> Inputs:
    """Draw Gaussian inputs of the model's dtype; image and text require a gradient, as inside a model."""
    draw = torch.Generator().manual_seed(1)
    hidden, dtype = model.inner_dim, model.dtype
    image, text, temb = (
        torch.randn(*shape, hidden, generator=draw).to(dtype) for shape in ((1, image_tokens), (1, text_tokens), (1,))
    )
    ids = torch.zeros(text_tokens + image_tokens, 3)
    ids[text_tokens:, 1] = torch.arange(image_tokens)
    return Inputs(image.requires_grad_(), text.requires_grad_(), temb, model.pos_embed(ids))
