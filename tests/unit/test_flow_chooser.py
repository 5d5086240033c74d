"""Which blocks take the fused flow, and what is said about the others."""

from __future__ import annotations

import logging
from typing import Any

import diffusers.models.transformers.transformer_flux as transformer_flux
import pytest
import torch
from torch import Tensor, nn

from coat_core.activation import PackingConfig
from coat_flux.blocks.fused.chooser import FusedForms
from coat_flux.blocks.fused.frozen import NotFusable
from coat_flux.blocks.runner import BlockRunner
from tests.helpers.asserts import assert_bitwise
from tests.helpers.flux import coat_flux_model, lora_gradients, tiny_flux


class FluxSingleTransformerBlock(transformer_flux.FluxSingleTransformerBlock):
    """A later diffusers whose block computes something else under the same names."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Any = None,
        joint_attention_kwargs: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """1.1 times the block's change."""
        text, image = super().forward(hidden_states, encoder_hidden_states, temb, image_rotary_emb)
        return text + 0.1 * (text - encoder_hidden_states), image + 0.1 * (image - hidden_states)


def arguments(model: Any) -> tuple[Any, ...]:
    hidden, text = (torch.randn(1, n, model.inner_dim).to(model.dtype) for n in (40, 24))
    return hidden, text, torch.randn(1, model.inner_dim).to(model.dtype), model.pos_embed(torch.zeros(64, 3)), None


def test_a_block_that_computes_something_else_is_noticed() -> None:
    model = tiny_flux()
    changed, same = model.single_transformer_blocks
    changed.__class__ = FluxSingleTransformerBlock
    forms, args = FusedForms(), arguments(model)
    assert forms.obstacle(changed, args) is None
    for _ in range(2):
        with pytest.raises(NotFusable, match=r"its output differs from its own code's by \d"):
            forms.form_of(changed, args, {}, PackingConfig())
    assert forms.obstacle(changed, args).startswith("its output differs")
    fused = forms.form_of(same, args, {}, PackingConfig())
    with torch.no_grad():
        for found, expected in zip(fused(*args), same(*args), strict=True):
            assert_bitwise(found, expected)


def test_it_is_warned_of_once_and_trained_through_diffusers_code(caplog: pytest.LogCaptureFixture) -> None:
    model, _, _ = coat_flux_model()
    model.single_transformer_blocks[0].__class__ = FluxSingleTransformerBlock
    caplog.clear()  # diffusers' own
    with caplog.at_level(logging.WARNING, logger="coat_flux"):
        lora_gradients(model)
        lora_gradients(model)
    (warning,) = caplog.messages
    assert warning.startswith(
        "FluxSingleTransformerBlock: generic flow in place of the fused one, which keeps less: its output differs from "
        "its own code's by "
    )
    flows = [choice.flow for choice in BlockRunner.of(model).plan.blocks]
    assert flows == ["fused", "fused", "generic", "fused"]


def test_keywords_and_other_blocks_are_not_fused() -> None:
    model = tiny_flux()
    forms, args = FusedForms(), arguments(model)
    with pytest.raises(NotFusable, match="a Linear has no reader"):
        forms.form_of(nn.Linear(16, 16), args, {}, None)
    with pytest.raises(NotFusable, match=r"called with keywords \(attention_mask\)"):
        forms.form_of(model.transformer_blocks[0], args, {"attention_mask": None}, None)


def test_a_block_whose_hook_goes_is_fused_again() -> None:
    model, _, _ = coat_flux_model()
    runner = BlockRunner.of(model)
    for flow in ("generic", "fused"):
        hook = model.transformer_blocks[0].register_forward_hook(lambda *_: None) if flow == "generic" else None
        lora_gradients(model)
        lora_gradients(model)
        assert [choice.flow for choice in runner.plan.blocks] == [flow, "fused", "fused", "fused"]
        if hook is not None:
            hook.remove()


def test_a_run_says_what_its_blocks_got(caplog: pytest.LogCaptureFixture) -> None:
    model, _, _ = coat_flux_model()
    with caplog.at_level(logging.INFO, logger="coat_flux"):
        lora_gradients(model)
        lora_gradients(model)
        model.transformer_blocks[1].register_forward_hook(lambda *_: None)
        lora_gradients(model)
    lines = [r.getMessage() for r in caplog.records if "blocks:" in r.getMessage() or "in place of" in r.getMessage()]
    assert lines == [
        "blocks: 4 kept in FP8, fused flow, attention fp8",
        "FluxTransformerBlock: generic flow in place of the fused one, which keeps less: hooks on the block; "
        "such a block keeps 0.21 MB instead of 0.11 MB (26.1 instead of 13.7 bytes per token and channel)",
        "blocks: 3 kept in FP8, fused flow, attention fp8; 1 kept in FP8, generic flow, attention fp8",
    ]
