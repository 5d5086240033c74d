"""Text encoders that do not fit the device come to it one layer at a time, and make the same embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import T5Config, T5EncoderModel

from coat_flux.data.cache import PROMPT_BYTES, by_layer, input_device, on_device


@pytest.mark.parametrize(
    ("room", "expected"),
    [(None, [False, False]), (12e9, [False, False]), (9.9e9, [False, True]), (1e9, [False, True]), (0, [True, True])],
)
def test_the_largest_comes_by_layer_where_all_are_too_much(room: float | None, expected: list[bool]) -> None:
    """CLIP and T5-XXL in bf16, and what a prompt takes."""
    assert by_layer([246_000_000, 9_524_000_000], room) == expected
    assert by_layer([9_524_000_000, 246_000_000], room) == expected[::-1]


def test_embeddings_are_those_of_the_whole_model() -> None:
    config = T5Config(
        d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=100, feed_forward_proj="gated-gelu"
    )
    torch.manual_seed(0)
    model: Any = T5EncoderModel(config).eval().to(torch.bfloat16)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        expected = model(tokens).last_hidden_state
        with on_device([model], torch.device("cpu"), PROMPT_BYTES):
            assert {p.device.type for p in model.parameters()} == {"meta"}
            assert torch.equal(model(tokens.to(input_device(model))).last_hidden_state, expected)
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        assert torch.equal(model(tokens).last_hidden_state, expected)
