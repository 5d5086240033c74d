"""A second copy of the weight's codes, transposed for dgrad: same gradients, never saved, gone with its weight."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from coat_core import FP8Linear, FP8LinearConfig
from coat_core.linear.function import keep_transposed, load_weight, store_weight
from tests.tolerances import FP32_ORDER_ATOL, FP32_ORDER_RTOL

CONFIGS = [
    FP8LinearConfig(),
    FP8LinearConfig(weight_granularity="per_row", input_granularity="per_row", grad_format="e4m3"),
    FP8LinearConfig(input_granularity="per_tensor"),
]


def make(config: FP8LinearConfig) -> FP8Linear:
    torch.manual_seed(1)
    return FP8Linear.from_linear(nn.Linear(48, 32), config)


def gradient(layer: FP8Linear) -> torch.Tensor:
    torch.manual_seed(2)
    x = torch.randn(5, 48, requires_grad=True)
    layer(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.weight_granularity} {c.input_granularity}")
def test_gradients_are_those_without_the_copy(config: FP8LinearConfig) -> None:
    layer = make(config)
    expected = gradient(layer)
    keep_transposed(layer, config)
    found = load_weight(layer, config).transposed
    assert found is not None
    assert found.is_contiguous()
    assert torch.equal(found.view(torch.uint8), load_weight(layer, config).codes.view(torch.uint8).t())
    # a CPU's products of fp32 add in the order their layout suggests, with the number of threads
    torch.testing.assert_close(gradient(layer), expected, rtol=FP32_ORDER_RTOL, atol=FP32_ORDER_ATOL)


def test_the_copy_is_what_dgrad_reads() -> None:
    layer = make(CONFIGS[0])
    keep_transposed(layer, layer.config)
    layer.weight_codes_transposed.zero_()
    assert torch.equal(gradient(layer), torch.zeros(5, 48))


def test_the_copy_survives_casts_and_is_not_saved() -> None:
    layer = make(CONFIGS[0])
    keys = set(layer.state_dict())
    keep_transposed(layer, layer.config)
    layer.to(torch.bfloat16)
    assert layer.weight_codes_transposed.dtype == torch.uint8
    assert set(layer.state_dict()) == keys


def test_the_copy_goes_with_its_weight() -> None:
    layer = make(CONFIGS[0])
    keep_transposed(layer, layer.config)
    store_weight(layer, torch.randn(32, 48), layer.config)
    assert load_weight(layer, layer.config).transposed is None
    keep_transposed(layer, layer.config)
    restored = layer.to_linear()
    assert not list(restored.buffers())
