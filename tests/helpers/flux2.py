"""FLUX.2's blocks as diffusers and as ai-toolkit have them, with drawn weights, adapters, and what they are given.

ai-toolkit's are made by its own file; where einops is missing, the three rearrangements that file asks for stand in.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from coat_core.config import FP8LinearConfig
from coat_core.linear.module import FP8Linear
from tests.helpers.toolkit_lora import Network

TEXT, IMAGE, RANK = 24, 40, 4
REARRANGEMENTS: dict[str, Callable[..., Tensor]] = {
    "B L (K H D) -> K B H L D": lambda x, K, H: x.unflatten(-1, (K, H, -1)).permute(2, 0, 3, 1, 4),
    "B H L D -> B L (H D)": lambda x: x.transpose(1, 2).flatten(2),
    "b n d (i j) -> b n d i j": lambda x, i, j: x.unflatten(-1, (i, j)),
}


class Given(NamedTuple):
    """What a block is called with, and those of it that have a gradient, by name."""

    args: tuple[Any, ...]
    leaves: dict[str, Tensor]


def diffusers_module() -> Any:
    """diffusers' FLUX.2; skips where that version has none."""
    name = "diffusers.models.transformers.transformer_flux2"
    return pytest.importorskip(name, reason="this diffusers has no FLUX.2")


@functools.cache
def toolkit_module() -> Any:
    """ai-toolkit's FLUX.2, of the checkout that AI_TOOLKIT_ROOT names."""
    path = Path(os.environ["AI_TOOLKIT_ROOT"]) / "extensions_built_in/diffusion_models/flux2/src/model.py"
    spec = importlib.util.spec_from_file_location("toolkit_flux2_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # its dataclasses ask for it
        if importlib.util.find_spec("einops") is None:
            stand_in = ModuleType("einops")
            stand_in.rearrange = lambda x, pattern, **sizes: REARRANGEMENTS[pattern](x, **sizes)  # type: ignore[attr-defined]
            patch.setitem(sys.modules, "einops", stand_in)
        spec.loader.exec_module(module)
    return module


def make_block(of: str, kind: str, hidden: int, heads: int, dtype: torch.dtype = torch.float32) -> Any:
    """A frozen block of "diffusers" or "ai-toolkit", "double" or "single", on the default device."""
    if of == "diffusers":
        module = diffusers_module()
        made = module.Flux2TransformerBlock if kind == "double" else module.Flux2SingleTransformerBlock
        block: nn.Module = made(hidden, heads, hidden // heads)
    else:
        module = toolkit_module()
        made = module.DoubleStreamBlock if kind == "double" else module.SingleStreamBlock
        block = made(hidden, heads, mlp_ratio=3.0)
    draw = torch.Generator().manual_seed(1)
    for parameter in block.parameters():
        if parameter.device.type == "cpu":  # elsewhere nobody has values
            noise = torch.randn(parameter.shape, generator=draw)
            parameter.data = noise * parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 1 + 0.2 * noise
    return block.to(dtype).requires_grad_(False).train()


def linears(block: nn.Module) -> list[str]:
    return [name for name, module in block.named_modules() if isinstance(module, nn.Linear)]


def in_fp8(block: nn.Module) -> nn.Module:
    """The block with FP8 linears that quantize x by row."""
    for name in linears(block):
        FP8Linear.from_linear(block.get_submodule(name), FP8LinearConfig(input_granularity="per_row"))
    return block


def adapt(block: nn.Module, by: str, rank: int = RANK) -> nn.Module:
    """Put adapters on every linear, of "peft" or as ai-toolkit's; return what holds their parameters."""
    names = linears(block)
    if by == "peft":
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names)
        holder: nn.Module = inject_adapter_in_model(config, block, "default")
    else:
        holder = Network([block.get_submodule(name) for name in names], rank).train()
    draw = torch.Generator().manual_seed(2)
    for name, parameter in holder.named_parameters():
        if "lora_" in name:
            parameter.requires_grad_()
            if parameter.device.type == "cpu":
                parameter.data = torch.randn(parameter.shape, generator=draw) * 0.1
    return holder


def given(of: str, kind: str, hidden: int, heads: int, dtype: torch.dtype = torch.float32, **options: Any) -> Given:
    """What the model hands to the block.

    Args:
        of: as of `make_block`.
        kind: likewise.
        hidden: d.
        heads: of attention.
        dtype: of streams and vectors.
        options: batch, tokens (of text and image), streams (whether they have a gradient), vectors (likewise).
    """
    batch, (text, image), device = options.get("batch", 2), options.get("tokens", (TEXT, IMAGE)), torch.empty(0).device
    sizes = {"image": (batch, image, hidden), "text": (batch, text, hidden)}
    sizes = sizes if kind == "double" else {"both": (batch, text + image, hidden)}
    vectors = ["of image", "of text"] if kind == "double" else ["vectors"]
    sizes |= dict.fromkeys(vectors, (batch, (6 if kind == "double" else 3) * hidden))
    drawn = {name: torch.randn(size, dtype=dtype) * (0.3 if len(size) == 2 else 1) for name, size in sizes.items()}
    for name, x in drawn.items():
        x.requires_grad_(options.get("vectors" if name in vectors else "streams", True))
    d = hidden // heads
    with torch.device("cpu"):
        ids = torch.zeros(text + image, 4)
        ids[text:, 1] = torch.arange(image, dtype=torch.float32)
        if of == "diffusers":
            rotary = tuple(x.to(device) for x in diffusers_module().Flux2PosEmbed(2000, [d // 4] * 4)(ids))
        else:
            tables = toolkit_module().EmbedND(d, 2000, [d // 4] * 4)(ids.expand(batch, -1, -1)).to(device)
    first, *second = drawn.values()
    if of == "diffusers":
        args = (first, *(second if kind == "double" else [None, *second]), rotary, None)
    else:
        cut = [x[:, None].chunk(x.shape[-1] // hidden, dim=-1) for name, x in drawn.items() if name in vectors]
        if kind == "double":
            modulations = [(parts[:3], parts[3:]) for parts in cut]
            args = (first, second[0], tables[:, :, text:], tables[:, :, :text], *modulations)
        else:
            args = (first, tables, cut[0])
    return Given(args, {name: x for name, x in drawn.items() if x.requires_grad})


def gradients(run: Callable[..., Any], call: Given, holder: nn.Module) -> dict[str, Tensor]:
    """Outputs, and gradients of streams, vectors and adapters, for fixed output gradients."""
    outputs, draw = tree_leaves(run(*call.args)), torch.Generator().manual_seed(5)
    drawn = [torch.randn(x.shape, generator=draw).to(x.dtype) if x.is_cpu else torch.ones_like(x) for x in outputs]
    torch.autograd.backward(outputs, drawn)
    found = {f"out {i}": x.detach() for i, x in enumerate(outputs)}
    trained = {name: p for name, p in holder.named_parameters() if p.requires_grad}
    for name, leaf in {**call.leaves, **trained}.items():
        assert leaf.grad is not None, name
        found[name], leaf.grad = leaf.grad.clone(), None
    return found
