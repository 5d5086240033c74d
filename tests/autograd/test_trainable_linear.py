"""FP8TrainableLinear: fprop and dgrad as FP8Linear's, wgrad from the FP8 x, and it trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from coat_core.config import FP8LinearConfig
from coat_core.granularity import Granularity
from coat_core.linear import FP8Linear, FP8TrainableLinear, replace_linear_with_fp8, restore_linear
from coat_core.quantize import quantize
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.tolerances import REGRESSION_LOSS_FRACTION, REGRESSION_LOSS_RATIO, product_floor_db

K, N = 64, 48


def make(dtype: torch.dtype = torch.float32, **config: object) -> FP8TrainableLinear:
    return FP8TrainableLinear.from_linear(nn.Linear(K, N, dtype=dtype), FP8LinearConfig(**config))


@pytest.mark.parametrize("input_format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("granularity", ["per_tensor", "per_row", "per_group"])
@pytest.mark.parametrize("rows", ["per_tensor", "per_row"])
def test_gradients(input_format: str, granularity: str, rows: str) -> None:
    layer = make(input_format=input_format, input_granularity=granularity, weight_granularity=rows, group_size=16)
    frozen = FP8Linear.from_linear(nn.Linear(K, N), layer.config)
    frozen.load_state_dict(frozen_state(layer))
    x, dy = torch.randn(2, 64, K, requires_grad=True), torch.randn(2, 64, N)
    y = layer(x)
    dx, dw, db = torch.autograd.grad(y, (x, layer.weight, layer.bias), dy)
    (frozen_dx,) = torch.autograd.grad(frozen(x), x, dy)
    x_hat = quantize(x, input_format, Granularity(granularity, 16)).dequantize()
    rows_of_dy = dy.reshape(-1, N)
    assert_bitwise(y.detach(), frozen(x).detach())
    assert_bitwise(dx, frozen_dx)
    assert_bitwise(dw, rows_of_dy.t() @ x_hat.reshape(-1, K))
    assert_bitwise(db, rows_of_dy.sum(0))
    assert_sqnr(rows_of_dy.t() @ x.detach().reshape(-1, K), dw, product_floor_db(input_format))


def frozen_state(layer: FP8TrainableLinear) -> dict[str, torch.Tensor]:
    twin = nn.Linear(K, N)
    twin.load_state_dict(layer.state_dict())
    return FP8Linear.from_linear(twin, layer.config).state_dict()


def test_keeps_x_and_weight_as_codes_only() -> None:
    layer, saved = make(), []
    x = torch.randn(4, K, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    assert sorted((str(t.dtype), tuple(t.shape)) for t in saved) == [
        ("torch.float32", ()),
        ("torch.float32", (4, 1)),
        ("torch.float8_e4m3fn", (4, K)),
        ("torch.float8_e4m3fn", (N, K)),
    ]


def test_frozen_weight_keeps_no_x() -> None:
    layer, saved = make().requires_grad_(False), []
    x = torch.randn(4, K, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x)
    assert [tuple(t.shape) for t in saved] == [(N, K), ()]
    assert_bitwise(y.detach(), layer.requires_grad_(True)(x).detach())


def test_autocast_gives_gradients_in_the_parameters_dtype() -> None:
    layer = make()
    x, dy = torch.randn(64, K, requires_grad=True), torch.randn(64, N).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.backward(dy)
    assert (y.dtype, x.grad.dtype, layer.weight.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert_sqnr(dy.float().t() @ x.detach(), layer.weight.grad, product_floor_db("e4m3"))


def test_no_tokens_and_no_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make()
    layer(torch.randn(0, K)).sum().backward()
    assert_bitwise(layer.weight.grad, torch.zeros(N, K))
    monkeypatch.setattr("coat_core.linear.function.unsupported_reason", lambda *_: "cuda: no FP8 here")
    x = torch.randn(3, K)
    assert_bitwise(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_conversion_keeps_the_parameters() -> None:
    model = nn.Sequential(nn.Linear(K, N), nn.SiLU(), nn.Linear(N, 10))
    parameters = list(model.parameters())
    replace_linear_with_fp8(model, trainable=True)
    assert type(model[0]) is FP8TrainableLinear
    assert type(model[2]) is nn.Linear
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    restore_linear(model)
    assert type(model[0]) is nn.Linear


def train(trainable_fp8: bool) -> list[float]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(K, 128), nn.GELU(), nn.Linear(128, 16))
    teacher = nn.Sequential(nn.Linear(K, 128), nn.GELU(), nn.Linear(128, 16)).requires_grad_(False)
    if trainable_fp8:
        replace_linear_with_fp8(model, trainable=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x = torch.randn(256, K)
    losses = []
    for _ in range(80):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        loss = (out.float() - teacher(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_trains_as_bf16_does() -> None:
    bf16, fp8 = train(False), train(True)
    assert bf16[-1] < REGRESSION_LOSS_FRACTION * bf16[0]
    assert fp8[-1] < REGRESSION_LOSS_RATIO * bf16[-1]
