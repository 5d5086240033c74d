"""`weight.format: nvfp4` on the tiny FLUX: it is fused, layers have names, the decoded weight is what multiplies."""

from __future__ import annotations

from typing import Any

import torch

from coat_core import FP8Linear, restore_linear
from coat_core.formats import NVFP4
from coat_core.metrics import sqnr_db
from coat_flux.blocks.runner import BlockRunner
from coat_flux.blocks.sizes import Block, FlowSettings, Tokens, block_bytes
from coat_flux.watch.casts import CastProbe
from coat_flux.watch.precision import INPUT, weight_rows
from tests.helpers.asserts import assert_bitwise
from tests.helpers.flux import coat_flux_model, flux_inputs, loss_of, predict


def block(**activation: Any) -> dict[str, Any]:
    return {"weight": {"format": "nvfp4"}, "memory": {"checkpointing": "none"}, "activation": activation}


def test_layers_are_fused_and_have_names() -> None:
    model, report, _ = coat_flux_model(block())
    predict(model)  # weights are joined
    assert all(choice.flow == "fused" for choice in BlockRunner.of(model).plan.blocks)
    linears = {name.removesuffix(".base_layer"): m for name, m in model.named_modules() if isinstance(m, FP8Linear)}
    assert {m.config.weight_format for m in linears.values()} == {NVFP4}
    assert "W nvfp4, x e4m3/per_row, dy e5m2" in report.table(1000)
    with CastProbe(model, {}) as probe:
        loss_of(model(**flux_inputs())[0]).backward()
    layers = {row.layer for row in probe.rows(2) if row.kind == INPUT}
    assert layers == {name for name, m in linears.items() if m.config.use_fp8_gemm}
    weights = weight_rows(model)
    assert {row.layer for row in weights} == set(linears)
    assert all(19 < row.sqnr_db < 23 for row in weights)
    assert all(row.saturation == 0 for row in weights)


def test_a_plan_counts_the_weight_that_is_decoded_for_a_product() -> None:
    """With few tokens that is the largest thing of a moment: q, k, v and the MLP's first linear, joined."""
    single, tokens = Block("single", 768, 6, 3072, (("attn.to_q", 4),)), Tokens(1, 8, 8)
    e4m3, four_bits = (block_bytes(single, tokens, FlowSettings(weight_format=name)) for name in ("e4m3", "nvfp4"))
    joined = 768 * (3 * 768 + 3072)
    assert 0.9 * joined < four_bits.workspace - e4m3.workspace <= joined
    assert four_bits.kept == e4m3.kept


def test_high_precision_products_are_those_of_the_decoded_weights() -> None:
    text = block(use_fp8=False)
    model, _, _ = coat_flux_model(text, dtype=torch.float32)
    expected = predict(model).detach()
    plain, _, _ = coat_flux_model(text, dtype=torch.float32)
    original = coat_flux_model({"enabled": False}, dtype=torch.float32)[0]
    weight = original.transformer_blocks[0].attn.to_q.base_layer.weight
    restore_linear(plain)
    found = plain.transformer_blocks[0].attn.to_q.base_layer.weight
    assert 19 < sqnr_db(weight, found) < 23
    assert_bitwise(predict(plain).detach(), expected)
