"""FP8Linear in INT8 with a rotation: what it multiplies by and holds, and both flows of a FLUX block with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coat_core import FP8Linear, FP8LinearConfig, FP8TrainableLinear
from coat_core.activation import FP8InputLinear
from coat_core.granularity import PER_ROW, Storage
from coat_core.int8 import quantize_int8, rotate
from coat_core.linear.function import keep_transposed, load_weight, stored_bytes
from coat_core.metrics import sqnr_db
from coat_core.ops.quantize import quantize
from coat_flux.blocks.fused.linears import read_group
from coat_flux.trainers.standalone.network import lora_parameters
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.helpers.flux import coat_flux_model, predict
from tests.helpers.linear_inputs import linear_inputs
from tests.helpers.option_run import GemmLog
from tests.tolerances import FP32_ORDER_FLOOR_DB, INT8_FLOOR_DB, INT8_FLUX_FLOOR_DB, INT8_GRADIENT_FLOOR_DB

N, K = 48, 320  # rotated in blocks of 64
INT8 = FP8LinearConfig(weight_format="int8", input_format="int8", grad_format="int8")
BF16_BACKWARD = FP8LinearConfig(weight_format="int8", input_format="int8", grad_format="bf16")
BF16 = FP8LinearConfig(weight_format="int8", input_format="int8", grad_format="int8", use_fp8_gemm=False)


def make(config: FP8LinearConfig, n: int = N, bias: bool = True) -> tuple[FP8Linear, Tensor]:
    linear = nn.Linear(K, n, bias)
    weight = linear.weight.detach().clone()
    return FP8Linear.from_linear(linear, config), weight


def dequantized(x: Tensor, size: int) -> Tensor:
    """X as its INT8 codes stand for it."""
    return rotate(quantize_int8(x, size).dequantize(), size)


@pytest.mark.parametrize("config", [INT8, BF16_BACKWARD, BF16], ids=["int8", "bf16 backward", "bf16"])
@pytest.mark.parametrize("copied", [False, True])
def test_products_are_those_of_the_dequantized_operands(config: FP8LinearConfig, copied: bool) -> None:
    layer, original = make(config)
    if copied:
        keep_transposed(layer, config)
    weight = layer.weight.data
    assert_sqnr(dequantized(original, 64), weight, FP32_ORDER_FLOOR_DB)
    x, dy = torch.randn(3, 5, K, requires_grad=True), torch.randn(3, 5, N)
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None
    x_hat = dequantized(x, 64) if config.use_fp8_gemm else x.detach()
    assert_sqnr(x_hat @ weight.t() + layer.bias.detach(), y.detach(), FP32_ORDER_FLOOR_DB)
    dx = dy @ weight
    if config.use_fp8_gemm and config.grad_format == "int8":
        scale = load_weight(layer, config).scale.t()
        dx = (dequantized(dy * scale, 1) / scale) @ weight
    assert_sqnr(dx, x.grad, FP32_ORDER_FLOOR_DB)


@pytest.mark.parametrize("kind", ["gaussian", "outlier channels", "after GELU"])
def test_a_layer_is_nearer_to_high_precision_than_in_e4m3(kind: str) -> None:
    x, weight = linear_inputs(kind, 32, 1024, 64)
    found = {}
    for name, config in {"int8": INT8, "e4m3": FP8LinearConfig(weight_granularity="per_row")}.items():
        linear = nn.Linear(1024, 64, False)
        linear.weight.data.copy_(weight)
        given = x.clone().requires_grad_()
        y = FP8Linear.from_linear(linear, config)(given)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        y.backward(dy)
        found[name] = sqnr_db(x @ weight.t(), y.detach()), sqnr_db(dy @ weight, given.grad)
    assert found["int8"][0] > max(INT8_FLOOR_DB, found["e4m3"][0] + 6)
    assert found["int8"][1] > max(INT8_GRADIENT_FLOOR_DB, found["e4m3"][1] + 6)


def test_what_it_holds() -> None:
    layer, _ = make(INT8)
    held = {name: (tuple(x.shape), x.dtype) for name, x in layer.named_buffers()}
    assert held == {"weight_codes": ((N, K), torch.uint8), "weight_scale_bits": ((N, 1), torch.int32)}
    assert stored_bytes(N, K, INT8) == sum(x.nbytes for x in layer.buffers()) == N * K + 4 * N
    before = layer.weight.data
    twin, _ = make(INT8)
    twin.load_state_dict(layer.state_dict())
    assert_bitwise(twin.weight.data, before)
    assert "weight=int8, input=int8/per_row, grad=int8" in repr(layer)
    assert_bitwise(layer.to_linear().weight.detach(), before)


def test_joined_weights_multiply_the_same() -> None:
    group = [make(INT8, width)[0] for width in (16, 48, 32)]
    x, dy = torch.randn(5, K), torch.randn(5, 96)
    apart = [linear(x) for linear in group]
    joined = read_group(group, join=True)
    assert len(joined.bases) == 1
    y, _ = joined.forward(x, quantize(x, joined.input_storage.format, joined.input_storage.granularity))
    assert_bitwise(y, torch.cat(apart, dim=-1).detach())
    separate = sum(linear(x).new_tensor(0) + read_group([linear], False).dgrad(part) for linear, part in
                   zip(group, dy.split([16, 48, 32], -1), strict=True))  # fmt: skip
    assert sqnr_db(separate, joined.dgrad(dy)) > INT8_GRADIENT_FLOOR_DB


def test_an_adapter_shares_the_codes_and_turns_its_gradient_back() -> None:
    base, down = make(INT8)[0], nn.Linear(K, 4, False)
    FP8InputLinear.from_linear(down, Storage("int8", PER_ROW), base)
    x, dh = torch.randn(7, K, requires_grad=True), torch.randn(7, 4)
    saved: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        base(x)
        h = down(x)
    h.backward(dh)
    assert [t.dtype for t in saved if t.shape == (7, K)] == [torch.int8]
    assert_sqnr(dh.t() @ dequantized(x, 64), down.weight.grad, FP32_ORDER_FLOOR_DB)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_format": "e4m3"}, "input_format='e4m3': must be one of int8"),
        ({"input_format": "int8", "grad_format": "e5m2"}, "grad_format='e5m2': must be one of int8, bf16"),
        ({"input_format": "int8", "grad_format": "int8", "input_granularity": "per_tensor"}, "must be one of per_row"),
        ({"weight_format": "e4m3", "input_format": "int8"}, "input_format='int8': must be one of e4m3, e5m2"),
        ({"weight_format": "e4m3", "grad_format": "int8"}, "grad_format='int8': must be one of e4m3, e5m2, bf16"),
    ],
)
def test_int8_is_refused_with_other_formats(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FP8LinearConfig(**{"weight_format": "int8", **options})


def test_trained_weights_are_not_in_int8() -> None:
    with pytest.raises(ValueError, match="weight_format='int8': is for frozen weights"):
        FP8TrainableLinear.from_linear(nn.Linear(K, N), INT8)


def gradients(options: dict[str, Any]) -> tuple[dict[str, Tensor], str]:
    """Of the LoRA of tiny FLUX in fp32, with the prediction; and the start table."""
    model, report, _ = coat_flux_model(options, dtype=torch.float32)
    with GemmLog() as forward:
        prediction = predict(model)
    with GemmLog() as backward:
        prediction.square().mean().backward()
    in_int8 = options.get("weight") == {"format": "int8"}
    assert {dtype for dtype, _ in (*forward.calls, *backward.calls)} == ({torch.int8} if in_int8 else set())
    assert not in_int8 or all(log.calls for log in (forward, backward))
    grads = {name: parameter.grad for name, parameter in lora_parameters(model).items()}
    return {"prediction": prediction.detach(), **grads}, report.table()


@pytest.fixture(scope="module")
def exact() -> dict[str, Tensor]:
    return gradients({"enabled": False})[0]


@pytest.mark.parametrize("flow", ["fused", "generic"])
def test_gradients_of_tiny_flux_come_near_those_without_coat(flow: str, exact: dict[str, Tensor]) -> None:
    activation = {"format": "int8", "flow": flow}
    options = {"weight": {"format": "int8"}, "activation": activation, "memory": {"checkpointing": "none"}}
    found, table = gradients(options)
    assert "W int8, x int8/per_row, dy int8" in table
    assert "INT8, forward int8, backward int8" in table
    for name, value in found.items():
        assert_sqnr(exact[name], value, INT8_FLUX_FLOOR_DB)
