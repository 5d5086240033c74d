"""The precision of the gradients of a block as scripts/bench_memory.py makes it."""

import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from coat_core import sqnr_db
from tests.helpers.asserts import assert_sqnr
from tests.helpers.flux_block import block_call, block_inputs, lora_parameters, make_model, prepare
from tests.tolerances import BLOCK_GRADIENT_FLOOR_DB, BLOCK_OUTPUT_FLOOR_DB, SMALL_BLOCK_GRADIENT_FLOOR_DB

RANK = 16
TEXT, IMAGE = 32, 96


@pytest.mark.parametrize("outliers", [1.0, 30.0], ids=["plain", "outlier channels"])
@pytest.mark.parametrize("kind", ["double", "single"])
def test_gradient_errors_of_every_adapter(kind, outliers):
    """The fused flow with every scale per row, next to the same block in bf16."""
    rows = {"activation": {"linear_granularity": "per_row"}, "weight": {"granularity": "per_row"}}
    coat = {"memory": {"checkpointing": "none"}, **rows}
    base = make_model(2)
    expected, exact = run_block(prepare(base, {"enabled": False}, "peft", RANK), kind, outliers)
    output, gradients = run_block(prepare(base, coat, "peft", RANK), kind, outliers)
    assert_sqnr(output, expected, BLOCK_OUTPUT_FLOOR_DB)
    assert len(gradients) == {"double": 2 * 14, "single": 2 * 6}[kind]  # A and B of each linear
    decibels = [float(sqnr_db(exact[name], gradient)) for name, gradient in gradients.items()]
    assert statistics.median(decibels) > BLOCK_GRADIENT_FLOOR_DB
    assert min(decibels) > SMALL_BLOCK_GRADIENT_FLOOR_DB


def run_block(model: Any, kind: str, outliers: float) -> tuple[Tensor, dict[str, Tensor]]:
    block = {"double": model.transformer_blocks, "single": model.single_transformer_blocks}[kind][0]
    hidden, encoder, temb = block_inputs(model, TEXT, IMAGE, outliers)
    hidden.requires_grad_(), encoder.requires_grad_()
    streams = block_call(model)(block, hidden, encoder, temb, model.pos_embed(torch.zeros(TEXT + IMAGE, 3)))
    output = torch.cat(streams, dim=1)
    draw = torch.Generator().manual_seed(3)
    output.backward(torch.randn(output.shape, generator=draw).to(output.dtype))
    gradients = {name: p.grad for name, p in lora_parameters(model).items() if p.grad is not None}
    return output.detach(), gradients
