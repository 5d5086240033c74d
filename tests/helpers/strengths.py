"""FLUX blocks with ai-toolkit's LoRA at a strength per image: fused, and as the LoRA's own forward computes them.

Run as a program inside ai-toolkit's environment it uses ai-toolkit's own LoRA and prints what it found as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn

from coat_flux.blocks.fused.chooser import fused_block
from coat_flux.blocks.fused.forms import Form
from tests.helpers.flux import tiny_flux
from tests.helpers.toolkit_lora import attach_network

TEXT, IMAGE, RANK, B_STD = 24, 40, 4, 0.1
CASES = {  # strengths as ai-toolkit sets them, and the batch; guidance doubles it
    "one image": ([1.0], 1),
    "the same for all": ([0.7, 0.7, 0.7, 0.7], 4),
    "others": ([1.0, 0.25], 2),
    "others, doubled batch": ([1.0, -0.5], 4),
}


def toolkit_model(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The tiny FLUX and the network on all linears of its blocks, B nonzero."""
    model = tiny_flux(dtype)
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and "transformer_blocks." in n]
    network = attach_network(model, names, RANK)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "lora_up" in name:
                parameter.normal_(0.0, B_STD, generator=draw)
    return model, network


def strength_differences(model: Any, network: Any, strengths: list[float], batch: int) -> dict[str, float]:
    """Largest relative difference, in norms, of outputs and gradients of both kinds of block, by kind."""
    network.multiplier = strengths
    draw = torch.Generator().manual_seed(2)
    shapes = (batch, IMAGE, model.inner_dim), (batch, TEXT, model.inner_dim), (batch, model.inner_dim)
    inputs = [torch.randn(shape, generator=draw).to(model.dtype) for shape in shapes]
    ids = torch.zeros(TEXT + IMAGE, 3)
    ids[TEXT:, 1] = torch.arange(IMAGE)
    found = {}
    for block in (model.transformer_blocks[0], model.single_transformer_blocks[0]):
        leaves = [x.clone().requires_grad_() for x in inputs]
        args = (*leaves, model.pos_embed(ids), None)
        parameters = [*leaves, *network.parameters()]
        expected, got = (_outputs_and_gradients(run, args, parameters) for run in (block, fused_block(block)))
        found[type(block).__name__] = max(
            float((one - other).norm() / one.norm()) for one, other in zip(expected, got, strict=True)
        )
    return found


def _outputs_and_gradients(run: Any, args: tuple[Any, ...], leaves: list[Tensor]) -> list[Tensor]:
    outputs = run(*args)
    draw = torch.Generator().manual_seed(3)
    torch.autograd.backward(outputs, [torch.randn(y.shape, generator=draw).to(y.dtype) for y in outputs])
    found = [*(y.detach().float() for y in outputs), *(x.grad.float() for x in leaves if x.grad is not None)]
    for leaf in leaves:
        leaf.grad = None
    return found


def strengths_in(fused: Form) -> set[bool]:
    """Whether adapters of a fused block have strengths per image."""
    groups = [*fused.groups, *(modulation.linear for modulation in fused.modulations)]
    return {group.strengths is not None for group in groups}


if __name__ == "__main__":
    model, network = toolkit_model()
    json.dump({case: strength_differences(model, network, *of) for case, of in CASES.items()}, sys.stdout)
