"""FP8Linear with a weight in NVFP4: what it multiplies by and holds, joined with others, and where it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coat_core import FP8Linear, FP8LinearConfig, FP8TrainableLinear, nvfp4
from coat_core.formats import NVFP4
from coat_core.granularity import Granularity
from coat_core.linear.function import BUFFERS, load_weight, stored_bytes
from coat_core.metrics import sqnr_db
from coat_core.ops.quantize import quantize
from coat_flux.blocks.fused.linears import read_group
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.tolerances import FP32_ORDER_FLOOR_DB, product_floor_db

N, K = 48, 64
CONFIGS = [
    FP8LinearConfig(weight_format=NVFP4, input_granularity=granularity, grad_format=grad, use_fp8_gemm=in_fp8)
    for granularity, grad, in_fp8 in [
        ("per_row", "e5m2", True),
        ("per_tensor", "e4m3", True),
        ("per_row", "bf16", True),
        ("per_row", "e5m2", False),
    ]
]


def make(config: FP8LinearConfig, n: int = N) -> tuple[FP8Linear, Tensor]:
    torch.manual_seed(n)
    linear = nn.Linear(K, n)
    weight = linear.weight.detach().clone()
    return FP8Linear.from_linear(linear, config), weight


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.input_granularity} {c.grad_format} {c.use_fp8_gemm}")
def test_products_are_those_of_the_decoded_weight(config: FP8LinearConfig) -> None:
    layer, original = make(config)
    weight = layer.weight.data
    assert sqnr_db(original, weight) > 20
    x, dy = torch.randn(3, 5, K, requires_grad=True), torch.randn(3, 5, N)
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None
    x_hat, dy_hat = x.detach(), dy
    if config.use_fp8_gemm:
        x_hat = quantize(x, config.input_format, Granularity(config.input_granularity)).dequantize()
    if config.use_fp8_gemm and config.grad_format != "bf16":
        dy_hat = quantize(dy, config.grad_format, Granularity(config.input_granularity)).dequantize()
    assert_sqnr(x_hat @ weight.t() + layer.bias.detach(), y.detach(), FP32_ORDER_FLOOR_DB)
    assert_sqnr(dy_hat @ weight, x.grad, FP32_ORDER_FLOOR_DB)


def test_what_it_holds() -> None:
    layer, original = make(CONFIGS[0])
    held = {name: (tuple(x.shape), x.dtype) for name, x in layer.named_buffers()}
    assert held == {
        "weight_codes": ((N, K // 2), torch.uint8),
        "weight_scale_bits": ((), torch.int32),
        "weight_block_scales": ((N, K // 16), torch.uint8),
    }
    assert set(held) < set(BUFFERS)
    assert stored_bytes(N, K, layer.config) == sum(x.nbytes for x in layer.buffers()) == N * K * 9 // 16 + 4
    assert_bitwise(layer.weight_codes, nvfp4.quantize(original)[0])
    before = layer.weight.data
    layer.to(torch.bfloat16)
    assert_bitwise(layer.weight.data, before.to(torch.bfloat16))
    twin, _ = make(CONFIGS[0], n=N)
    twin.weight_codes.zero_()
    twin.load_state_dict(layer.state_dict())
    assert_bitwise(twin.weight.data, before)
    with pytest.raises(ValueError, match="weight_format='e4m3': the loaded weight is 'nvfp4'"):
        FP8Linear.from_linear(nn.Linear(K, N)).set_extra_state(layer.get_extra_state())
    assert "weight=nvfp4, input=e4m3/per_row" in repr(layer)
    restored = layer.to_linear()
    assert type(restored) is nn.Linear
    assert not list(restored.buffers())
    assert_bitwise(restored.weight.detach(), before.to(torch.bfloat16))


def test_decoded_codes_live_no_longer_than_their_product() -> None:
    """Neither in the graph, nor held by the layer."""
    layer, _ = make(CONFIGS[0])
    saved: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(torch.randn(3, K, requires_grad=True))
    assert not saved


@pytest.mark.parametrize("bias", [True, False])
def test_joined_weights_are_views_and_multiply_the_same(bias: bool) -> None:
    config = CONFIGS[0]
    group = [FP8Linear.from_linear(nn.Linear(K, width, bias), config) for width in (16, 48, 32)]
    before = [linear.weight.data for linear in group]
    x, dy = torch.randn(2, 5, K), torch.randn(2, 5, 96)
    expected = torch.cat([linear(x) for linear in group], dim=-1)
    apart = read_group(group, join=False)
    joined = read_group(group, join=True)
    assert (len(apart.bases), len(joined.bases)) == (3, 1)
    codes, scales = ({x._buffers[name].untyped_storage().data_ptr() for x in group} for name in BUFFERS[:3:2])
    assert (len(codes), len(scales)) == (1, 1)
    for linear, weight in zip(group, before, strict=True):
        assert_bitwise(linear.weight.data, weight)
    y, _ = joined.forward(x, quantize(x, joined.input_storage.format, joined.input_storage.granularity))
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    weight = torch.cat(before)
    assert_sqnr(dy @ weight, joined.dgrad(dy), product_floor_db("e5m2"))
    assert_sqnr(dy @ weight, apart.dgrad(dy), product_floor_db("e5m2"))


def test_a_trained_weight_is_not_cast_to_it() -> None:
    with pytest.raises(ValueError, match="weight_format='nvfp4': is for frozen weights; write e4m3 or e5m2"):
        FP8TrainableLinear.from_linear(nn.Linear(K, N), CONFIGS[0])


def test_a_weight_on_the_meta_device_has_its_sizes() -> None:
    layer = FP8Linear.from_linear(nn.Linear(K, N, device="meta"), CONFIGS[0])
    assert load_weight(layer, layer.config).shape == (N, K)
    assert layer.weight.shape == (N, K)
    assert stored_bytes(N, K, layer.config) == sum(x.nbytes for x in layer.buffers())
