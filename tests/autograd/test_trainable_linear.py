"""FP8TrainableLinear: fprop and dgrad as FP8Linear's, wgrad from codes or in FP8, codes kept while W is the same."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from coat_core import FP8AdamW, FP8Linear, FP8TrainableLinear
from coat_core.activation import PackedSavedTensors, Saving
from coat_core.config import FP8LinearConfig
from coat_core.granularity import PER_ROW, Granularity
from coat_core.linear import function
from coat_core.linear.function import forget_codes, quantize_weight, wgrad
from coat_core.quantize import quantize
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.helpers.saved_tensors import saved_by
from tests.tolerances import FP32_ORDER_FLOOR_DB, WGRAD_FEATURE_FLOOR_DB, product_floor_db

K, N = 64, 48


def make(dtype: torch.dtype = torch.float32, **config: object) -> FP8TrainableLinear:
    return FP8TrainableLinear.from_linear(nn.Linear(K, N, dtype=dtype), FP8LinearConfig(**config))


@pytest.mark.parametrize(
    ("input_format", "granularity", "rows"),
    [("e4m3", "per_row", "per_tensor"), ("e4m3", "per_tensor", "per_row"), ("e5m2", "per_row", "per_row")],
)
def test_gradients(input_format, granularity, rows):
    layer = make(input_format=input_format, input_granularity=granularity, weight_granularity=rows)
    frozen = FP8Linear.from_linear(copy.deepcopy(layer).to_linear(), layer.config)
    x, dy = torch.randn(2, 64, K, requires_grad=True), torch.randn(2, 64, N)
    y = layer(x)
    dx, dw, db = torch.autograd.grad(y, (x, layer.weight, layer.bias), dy)
    (frozen_dx,) = torch.autograd.grad(frozen(x), x, dy)
    x_hat = quantize(x, input_format, Granularity(granularity)).dequantize()
    rows_of_dy = dy.reshape(-1, N)
    assert_bitwise(y.detach(), frozen(x).detach())
    assert_bitwise(dx, frozen_dx)
    assert_bitwise(dw, rows_of_dy.t() @ x_hat.reshape(-1, K))
    assert_bitwise(db, rows_of_dy.sum(0))
    assert_sqnr(rows_of_dy.t() @ x.detach().reshape(-1, K), dw, product_floor_db(input_format))


@pytest.mark.parametrize("cache", [False, True])
def test_keeps_x_as_codes_and_the_weight_itself(cache):
    layer, x = make(cache_weight=cache), torch.randn(4, K, requires_grad=True)
    own, weight = saved_by(lambda: layer(x))[1]
    assert own.data_ptr() == x.data_ptr()  # of an input x itself
    codes, scale, weight = saved_by(lambda: layer(x * 1))[1]
    assert (codes.dtype, codes.shape, scale.shape) == (torch.float8_e4m3fn, (4, K), (4, 1))
    assert weight.untyped_storage().data_ptr() == layer.weight.data_ptr()
    assert (layer.trained_codes.codes is None) == (not cache)


# -- codes of W ------------------------------------------------------------------------------------------------------
@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The weights that are cast, as they are."""
    found: list[Tensor] = []
    monkeypatch.setattr(
        function, "quantize_weight", lambda weight, c: found.append(weight) or quantize_weight(weight, c)
    )
    return found


def micro_batches(layer: nn.Module, recompute: bool = False, steps: int = 3) -> None:
    for seed in range(steps):
        x = torch.randn(32, K, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        x = x.to(next(layer.parameters()).dtype)
        y = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        y.square().mean().backward()


@pytest.mark.parametrize("recompute", [False, True])
def test_cast_once_for_all_micro_batches_with_the_same_bits(casts, recompute):
    kept, cast = make(cache_weight=True), make()
    cast.load_state_dict(kept.state_dict())
    with PackedSavedTensors(Saving(min_elements=1)):  # backward gets another tensor object for the weight
        micro_batches(kept, recompute)
        assert len(casts) == 1
        micro_batches(cast, recompute)
    assert len(casts) == 1 + 3 * (3 if recompute else 2)
    assert_bitwise(kept.weight.grad, cast.weight.grad)


class WritesData(torch.optim.Optimizer):
    """Writes as many optimizers do, so that autograd counts nothing."""

    def step(self) -> None:
        for param in self.param_groups[0]["params"]:
            param.data.sub_(param.grad)


CHANGES: dict[str, Callable[[FP8TrainableLinear], object]] = {
    "AdamW": lambda layer: torch.optim.AdamW(layer.parameters()).step(),
    "AdamW, fused": lambda layer: torch.optim.AdamW(layer.parameters(), fused=True).step(),
    "FP8AdamW": lambda layer: FP8AdamW(layer.parameters()).step(),
    "state dict": lambda layer: layer.load_state_dict(make(layer.weight.dtype).state_dict()),
    "in place": lambda layer: layer.weight.detach().mul_(2),
    "another storage": lambda layer: setattr(layer.weight, "data", 2 * layer.weight.data),
    "another parameter": lambda layer: setattr(layer, "weight", nn.Parameter(2 * layer.weight.detach())),
    "`.data` in a step": lambda layer: WritesData(layer.parameters(), {}).step(),
    "unseen, and reported": lambda layer: (layer.weight.data.mul_(2), forget_codes(nn.Sequential(layer))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_cast_again_after_every_change(casts, change):
    layer = make(torch.bfloat16, cache_weight=True)
    micro_batches(layer)
    CHANGES[change](layer)
    x = torch.randn(8, K, dtype=torch.bfloat16)
    y = layer(x)
    assert len(casts) == 2
    fresh = make(torch.bfloat16)
    fresh.load_state_dict(layer.state_dict())
    assert_bitwise(y.detach(), fresh(x).detach())


def test_other_formats_are_cast_again_and_codes_are_freed():
    layer = make(cache_weight=True)
    x = torch.randn(4, K)
    layer(x)
    layer.config = FP8LinearConfig(cache_weight=True, weight_format="e5m2", weight_granularity="per_row")
    layer(x)
    codes, scale = layer.trained_codes.codes, layer.trained_codes.scale
    assert (codes.dtype, scale.shape) == (torch.float8_e5m2, (N, 1))
    layer.config = FP8LinearConfig()
    layer(x)
    assert layer.trained_codes.codes is None


def test_codes_are_no_part_of_the_state_or_of_copies():
    layer = make(cache_weight=True)
    layer(torch.randn(4, K))
    assert set(layer.state_dict()) == {"weight", "bias"}
    assert copy.deepcopy(layer).trained_codes.codes is None
    assert layer.trained_codes.codes is not None


def test_a_frozen_weight_is_cast_once_also_after_inference_mode(casts):
    layer = make(cache_weight=True).requires_grad_(False)
    with torch.inference_mode():
        layer(torch.randn(4, K))  # its codes could not be saved for backward
    micro_batches(layer)
    assert len(casts) == 2


@pytest.mark.filterwarnings("ignore:Dynamo detected a call")
def test_compiled_whole_it_casts_the_weight_it_has():
    torch._dynamo.reset()
    layer = make(cache_weight=True, wgrad_format="e4m3")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(20, K, requires_grad=True)
    for _ in range(2):
        expected = torch.autograd.grad(layer(x).square().sum(), (x, layer.weight))
        found = torch.autograd.grad(compiled(x).square().sum(), (x, layer.weight))
        for one, other in zip(expected, found, strict=True):
            assert_bitwise(one, other)
        with torch.no_grad():
            layer.weight.mul_(1.5)


# -- wgrad in FP8 ----------------------------------------------------------------------------------------------------
def spread(rows: int, columns: int, across: str, seed: int) -> Tensor:
    """Gaussian [rows, columns], its rows (tokens) or columns (features) of very different size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    sizes = {"tokens": (rows, 1), "features": (1, columns)}.get(across)
    return x if sizes is None else x * torch.exp(2 * torch.randn(*sizes, generator=generator))


@pytest.mark.parametrize(
    ("wgrad_format", "granularity", "across"),
    [("e4m3", "per_row", "tokens"), ("e4m3", "per_tensor", "features"), ("e5m2", "per_row", "features")],
)
def test_wgrad_in_fp8_adds_the_rounding_of_dy(wgrad_format, granularity, across):
    config = FP8LinearConfig(wgrad_format=wgrad_format, input_granularity=granularity)
    x = quantize(spread(509, K, across, 0), "e4m3", Granularity(granularity))  # not a multiple of 16 tokens
    dy = 1e-6 * spread(509, N, across, 1)
    x_hat, dw = x.dequantize(), wgrad(dy, x, config)
    noise = (dw - dy.t() @ x_hat).square() / (dy.square().t() @ x_hat.square())
    decibels = -10 * noise.mean(1).log10()  # of each feature: AdamW makes them equally large
    assert decibels.min() > WGRAD_FEATURE_FLOOR_DB[wgrad_format]
    folded = dy * x.scale if granularity == "per_row" else dy
    by_feature = quantize(folded.t(), wgrad_format, PER_ROW).dequantize()
    values = x.codes.float() * (1 if granularity == "per_row" else x.scale)
    assert_sqnr(by_feature @ values, dw, FP32_ORDER_FLOOR_DB)


def test_wgrad_in_fp8_of_what_a_layer_saved():
    layer = make(wgrad_format="e4m3")
    x, dy = torch.randn(2, 3, 5, K), torch.randn(2, 3, 5, N)
    layer(x).backward(dy)
    assert_bitwise(layer.weight.grad, wgrad(dy, quantize(x, "e4m3", PER_ROW), layer.config))
    assert_sqnr(dy.view(-1, N).t() @ x.view(-1, K), layer.weight.grad, product_floor_db("e4m3", "e4m3") - 1)


def test_where_wgrad_cannot_be_in_fp8(monkeypatch):
    monkeypatch.setattr(
        "coat_core.linear.function.unsupported_reason",
        lambda _, *pair: "cuda: no" if pair[:2] == (torch.float8_e5m2, torch.float8_e5m2) else None,
    )
    formats = {"input_format": "e5m2", "grad_format": "e4m3", "fallback": "error"}
    make(wgrad_format="e4m3", **formats)(torch.randn(3, K))
    with pytest.raises(RuntimeError, match="cuda: no"):
        make(wgrad_format="e5m2", **formats)(torch.randn(3, K))


def test_frozen_weight_keeps_no_x():
    layer, x = make().requires_grad_(False), torch.randn(4, K, requires_grad=True)
    y, saved = saved_by(lambda: layer(x))
    assert [tuple(t.shape) for t in saved] == [(N, K), ()]
    assert_bitwise(y.detach(), layer.requires_grad_(True)(x).detach())


def test_autocast_gives_gradients_in_the_parameters_dtype():
    layer = make()
    x, dy = torch.randn(64, K, requires_grad=True), torch.randn(64, N).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.backward(dy)
    assert (y.dtype, x.grad.dtype, layer.weight.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert_sqnr(dy.float().t() @ x.detach(), layer.weight.grad, product_floor_db("e4m3"))


def test_no_tokens_and_no_fp8(monkeypatch):
    layer = make()
    layer(torch.randn(0, K)).sum().backward()
    assert_bitwise(layer.weight.grad, torch.zeros(N, K))
    monkeypatch.setattr("coat_core.linear.function.unsupported_reason", lambda *_: "cuda: no FP8 here")
    x = torch.randn(3, K)
    assert_bitwise(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
