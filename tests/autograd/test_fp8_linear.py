"""FP8Linear's fprop and dgrad: against the formula written out here, and against high precision."""

import itertools
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from coat_core import FP8Linear, FP8TrainableLinear
from coat_core.config import FP8LinearConfig
from coat_core.granularity import Granularity
from coat_core.ops.quantize import _copies, quantize
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.helpers.saved_tensors import saved_by
from tests.tolerances import BF16_ORDER_FLOOR_DB, product_floor_db

FORMATS = ("e4m3", "e5m2")
K, N = 64, 48
CONFIGS = [
    FP8LinearConfig(
        weight_format=weight, weight_granularity=rows, input_format=x, input_granularity=granularity,
        grad_format=grad,
    )
    for weight, rows, x, granularity, grad in itertools.product(
        FORMATS, ("per_tensor", "per_row"), FORMATS, ("per_tensor", "per_row"), (*FORMATS, "bf16")
    )
]  # fmt: skip


def expected_fprop(x: Tensor, weight: Tensor, bias: Tensor, config: FP8LinearConfig) -> Tensor:
    codes, scale, _ = quantize(weight, config.weight_format, Granularity(config.weight_granularity))
    x_codes, x_scale, _ = quantize(x, config.input_format, Granularity(config.input_granularity))
    return (x_codes.float() @ codes.float().t()) * x_scale * scale.reshape(-1) + bias


def expected_dgrad(dy: Tensor, weight: Tensor, config: FP8LinearConfig) -> Tensor:
    codes, scale, _ = quantize(weight, config.weight_format, Granularity(config.weight_granularity))
    if config.grad_format == "bf16":
        return dy @ (codes.float() * scale)
    if config.weight_granularity == "per_row":  # lies on the contraction axis: goes into dy
        dy, scale = dy * scale.reshape(-1), torch.ones(())
    dy_codes, dy_scale, _ = quantize(dy, config.grad_format, Granularity(config.input_granularity))
    return (dy_codes.float() @ codes.float()) * dy_scale * scale


def layer_of(weight: Tensor, bias: Tensor | None, config: FP8LinearConfig) -> FP8Linear:
    linear_layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, dtype=weight.dtype)
    linear_layer.weight.data.copy_(weight)
    if bias is not None:
        linear_layer.bias.data.copy_(bias)
    return FP8Linear.from_linear(linear_layer, config)


def tensors(*lead: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x requiring grad, W, b, dy."""
    x = torch.randn(*lead, K, dtype=dtype).requires_grad_()
    return x, torch.randn(N, K, dtype=dtype), torch.randn(N, dtype=dtype), torch.randn(*lead, N, dtype=dtype)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(map(str, vars(c).values())))
def test_equals_the_formula_and_stays_near_high_precision(config):
    x, weight, bias, dy = tensors(2, 96)
    y = layer_of(weight, bias, config)(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert_bitwise(y.detach(), expected_fprop(x.detach(), weight, bias, config))
    assert_bitwise(dx, expected_dgrad(dy, weight, config))
    assert_sqnr(linear(x, weight, bias) - bias, y - bias, product_floor_db(config.input_format, config.weight_format))
    assert_sqnr(dy @ weight, dx, product_floor_db(config.grad_format, config.weight_format))


@pytest.mark.parametrize("lead", [(), (1,), (17,), (2, 3, 4), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("granularity", ["per_tensor", "per_row"])
def test_leading_shapes_are_rows(device, lead, granularity):
    config = FP8LinearConfig(input_granularity=granularity, grad_format="bf16")
    x, weight, bias, dy = (t.detach().to(device) for t in tensors(*lead))
    x.requires_grad_()
    layer = layer_of(weight.cpu(), bias.cpu(), config).to(device)
    y = layer(x)
    y.backward(dy)
    flat = x.detach().reshape(-1, K).requires_grad_()
    layer(flat).backward(dy.reshape(-1, N))
    assert y.shape == (*lead, N)
    assert_bitwise(y.detach().reshape(-1, N), layer(flat).detach())
    assert_bitwise(x.grad.reshape(-1, K), flat.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("granularity", ["per_tensor", "per_row"])
def test_low_precision_inputs(dtype, granularity):
    config = FP8LinearConfig(input_granularity=granularity, weight_granularity="per_row")
    x, weight, bias, dy = tensors(2, 33, dtype=dtype)
    y = layer_of(weight, bias, config)(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert (y.dtype, dx.dtype) == (dtype, dtype)
    assert_sqnr(expected_fprop(x.detach().float(), weight.float(), bias.float(), config), y, BF16_ORDER_FLOOR_DB)
    assert_sqnr(expected_dgrad(dy.float(), weight.float(), config), dx, BF16_ORDER_FLOOR_DB)


def test_autocast_writes_its_dtype_and_returns_gradients_in_that_of_x(device):
    x, weight, bias, dy = (t.detach().to(device) for t in tensors(4, 8))
    x.requires_grad_()
    layer = layer_of(weight.cpu(), bias.cpu(), FP8LinearConfig()).to(device)
    plain = layer(x)
    with torch.autocast(device.type, torch.bfloat16):
        y = layer(x)
        (inside,) = torch.autograd.grad(y, x, dy.bfloat16(), retain_graph=True)
    (dx,) = torch.autograd.grad(y, x, dy.bfloat16())
    assert_bitwise(y.detach(), plain.detach().bfloat16())
    assert dx.dtype == torch.float32
    assert_bitwise(dx, inside)
    assert_sqnr(dy @ weight, dx, product_floor_db("e5m2", "e4m3"))


@pytest.mark.parametrize("use_fp8_gemm", [True, False])
def test_bias_gradient(use_fp8_gemm):
    x, weight, bias, dy = tensors(3, 7)
    layer = layer_of(weight, bias, FP8LinearConfig(use_fp8_gemm=use_fp8_gemm))
    assert not layer.bias.requires_grad
    layer.bias.requires_grad_()
    layer(x).backward(dy)
    assert_bitwise(layer.bias.grad, dy.reshape(-1, N).sum(0))


@pytest.mark.parametrize("why", ["use_fp8_gemm: false", "no FP8 on this device"])
def test_without_fp8_gemm_it_multiplies_by_the_dequantized_weight(why, monkeypatch):
    x, weight, bias, dy = tensors(3, 7)
    layer = layer_of(weight, bias, FP8LinearConfig(use_fp8_gemm=why != "use_fp8_gemm: false"))
    if layer.config.use_fp8_gemm:
        monkeypatch.setattr("coat_core.linear.function.unsupported_reason", lambda *_: "cuda: no FP8 here")
    w_hat = quantize(weight).dequantize()
    y = layer(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert_bitwise(y.detach(), linear(x.detach(), w_hat, bias))
    assert_bitwise(dx, dy @ w_hat)
    assert x not in _copies
    if layer.config.use_fp8_gemm:
        layer.config = FP8LinearConfig(fallback="error")
        with pytest.raises(RuntimeError, match="fallback='error': cuda: no FP8 here; set fallback: bf16 or change"):
            layer(x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_torch_checkpoint_gives_the_same_gradients(reentrant):
    x, weight, bias, dy = tensors(2, 9)
    layer = layer_of(weight, bias, FP8LinearConfig())
    (plain,) = torch.autograd.grad(layer(x), x, dy)
    checkpoint(layer, x, use_reentrant=reentrant).backward(dy)
    assert_bitwise(x.grad, plain)


def test_a_frozen_layer_saves_nothing_and_reads_its_weight_again_in_backward():
    x, weight, bias, dy = tensors(2, 9)
    layer = layer_of(weight, bias, FP8LinearConfig())
    y, saved = saved_by(lambda: layer(x))
    assert not saved
    codes = weakref.ref(layer.weight_codes)
    layer.weight_codes = layer.weight_codes * 0  # elsewhere from here on, as when weights are moved
    assert codes() is None
    assert not torch.autograd.grad(y, x, dy)[0].any()


def test_linears_share_one_quantized_input_until_it_changes():
    x, weight, _, _ = tensors(2, 9)
    x = x * 1
    layers = [layer_of(weight, None, FP8LinearConfig()) for _ in range(3)]
    outputs, shared = [], set()
    for layer in layers:
        outputs.append(layer(x))
        shared.add(_copies[x][1].codes.data_ptr())
    assert len(shared) == 1
    x.mul_(2)
    assert_bitwise(layers[0](x), 2 * outputs[0])
    layer_of(weight, None, FP8LinearConfig(input_format="e5m2"))(x)
    assert _copies[x][1].codes.dtype == torch.float8_e5m2
    codes = weakref.ref(_copies[x][1].codes)
    del x, outputs
    assert codes() is None


@pytest.mark.parametrize("trained", [False, True])
def test_an_input_that_changes_without_a_new_version_is_cast_again(trained):
    """A parameter by a fused optimizer, a batch by NumPy, and one that inference mode read before."""
    kind = FP8TrainableLinear if trained else FP8Linear
    layer = kind.from_linear(nn.Linear(K, N, bias=False), FP8LinearConfig())
    p = nn.Parameter(torch.randn(16, K))
    optimizer, losses = torch.optim.AdamW([p], lr=0.1, fused=True), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (layer(p) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
    batch = np.random.default_rng(0).standard_normal((16, K), dtype=np.float32)
    x = torch.from_numpy(batch)
    with torch.inference_mode():
        first = layer(x).clone()
        made_inside = x.clone()
        assert_bitwise(layer(made_inside), first)
        assert_bitwise(layer(made_inside.mul_(2)), 2 * first)
    batch *= 2
    assert_bitwise(layer(x).detach(), 2 * first)
    layer(x.requires_grad_()).sum().backward()
    assert x.grad.any()
