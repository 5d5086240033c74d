"""Which blocks take the fused flow, and what is said about the others."""

from __future__ import annotations

import logging
from typing import Any

import diffusers.models.transformers.transformer_flux as transformer_flux
import pytest
from torch import Tensor

from coat_flux.blocks.runner import BlockRunner
from tests.helpers.flux import coat_flux_model, flux_inputs, predict


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


def test_it_is_warned_of_once_and_trained_through_diffusers_code(caplog: pytest.LogCaptureFixture) -> None:
    model, _, _ = coat_flux_model()
    model.single_transformer_blocks[0].__class__ = FluxSingleTransformerBlock
    caplog.clear()  # diffusers' own
    with caplog.at_level(logging.WARNING, logger="coat_flux"):
        predict(model)
        predict(model)
    (warning,) = caplog.messages
    assert warning.startswith(
        "FluxSingleTransformerBlock: generic flow in place of the fused one, which keeps less: its output differs from "
        "its own code's by "
    )
    flows = [choice.flow for choice in BlockRunner.of(model).plan.blocks]
    assert flows == ["fused", "fused", "generic", "fused"]


def test_arguments_that_a_reader_does_not_know_run_the_blocks_own_code_in_that_pass(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model: Any = coat_flux_model()[0]
    runner = BlockRunner.of(model)
    assert runner is not None
    for keywords, flows in (
        ({}, {"fused"}),
        ({"joint_attention_kwargs": {"unknown": 1}}, {"generic"}),
        ({}, {"fused"}),
    ):
        with caplog.at_level(logging.WARNING, logger="coat_flux"):
            model(**flux_inputs(), **keywords, return_dict=False)
        assert {choice.flow for choice in runner.plan.blocks} == flows
    assert sum("joint_attention_kwargs unknown" in line for line in caplog.messages) == 2  # once for each kind


def test_a_run_says_what_its_blocks_got(caplog: pytest.LogCaptureFixture) -> None:
    model, _, _ = coat_flux_model()
    with caplog.at_level(logging.INFO, logger="coat_flux"):
        predict(model)
        predict(model)
        model.transformer_blocks[1].register_forward_hook(lambda *_: None)
        predict(model)
    lines = [r.getMessage() for r in caplog.records if "blocks:" in r.getMessage() or "in place of" in r.getMessage()]
    assert lines == [
        "blocks: 4 kept in FP8, fused flow, attention fp8",
        "FluxTransformerBlock: generic flow in place of the fused one, which keeps less: hooks on the block",
        "blocks: 3 kept in FP8, fused flow, attention fp8; 1 kept in FP8, generic flow, attention fp8",
    ]
