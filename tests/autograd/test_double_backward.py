"""create_graph=True is refused in the first backward pass, with the remedy; where nothing is FP8 it works."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from coat_core import FP8Linear, FP8TrainableLinear
from coat_core.activation import FP8InputLinear, PackedSavedTensors, Saving, fp8_checkpoint, keep_no_input
from coat_core.autograd import first_order_only
from coat_core.config import FP8LinearConfig
from coat_core.granularity import PER_TENSOR, Storage, per_group
from tests.helpers.asserts import assert_bitwise
from tests.helpers.flux import coat_flux_model, loss_of, predict

D = 32
PACKS = Saving(Storage(granularity=per_group(32)), min_elements=64)
REFUSAL = r"create_graph=True: .* coat\.activation\.use_fp8: false and coat\.memory\.enable_efficient_checkpoint: false"


def packed(x: Tensor, saving: Saving = PACKS) -> Tensor:
    with PackedSavedTensors(saving):
        return x.sigmoid() * x


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    @first_order_only
    def backward(ctx, grad: Tensor) -> Tensor:
        return 2 * grad


def frozen_convolution() -> Callable[[Tensor], Tensor]:
    layer = nn.Conv1d(D, D, 1).requires_grad_(False)
    keep_no_input(layer)
    return lambda x: layer(x.t()[None])


FUNCTIONS = {
    "decorated": lambda: Doubled.apply,
    "packed": lambda: packed,
    "checkpoint": lambda: lambda x: fp8_checkpoint(torch.sigmoid, x, min_elements=64),
    "linear": lambda: FP8Linear.from_linear(nn.Linear(D, D)),
    "linear, bf16 gradients": lambda: FP8Linear.from_linear(nn.Linear(D, D), FP8LinearConfig(grad_format="bf16")),
    "trainable linear": lambda: FP8TrainableLinear.from_linear(nn.Linear(D, D)),
    "frozen convolution": frozen_convolution,
    "adapter": lambda: FP8InputLinear.from_linear(nn.Linear(D, 4, bias=False), Storage("e4m3", PER_TENSOR)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_is_refused_at_once(name):
    function, x = FUNCTIONS[name](), torch.randn(8, D, requires_grad=True)
    loss = function(x * 1).square().sum()
    with pytest.raises(RuntimeError, match=REFUSAL):
        torch.autograd.grad(loss, x, create_graph=True, retain_graph=True)
    with pytest.raises(RuntimeError, match=REFUSAL):
        loss.backward(create_graph=True)
    with pytest.raises(RuntimeError, match=REFUSAL):  # where the gradient that arrives requires none
        torch.autograd.grad(function(x * 1).sum(), x, create_graph=True)
    assert x.grad is None
    (dx,) = torch.autograd.grad(loss, x, retain_graph=True)  # the graph is none the worse for it
    assert_bitwise(torch.autograd.grad(loss, x)[0], dx)
    assert dx.abs().sum() > 0


def weights_alone() -> tuple[nn.Module, nn.Module]:
    linear, layer = nn.Linear(D, D), FP8Linear.from_linear(nn.Linear(D, D), FP8LinearConfig(use_fp8_gemm=False))
    linear.weight.data, linear.bias.data = layer.weight.data, layer.bias.data
    return layer, linear


@pytest.mark.parametrize("exact", ["weights alone in FP8", "packs nothing", "checkpoint of a small input"])
def test_what_stays_exact_is_differentiated_twice(exact):
    function, expected = {
        "weights alone in FP8": weights_alone,
        "packs nothing": lambda: (lambda x: packed(x, Saving(min_elements=10**9)), lambda x: x.sigmoid() * x),
        "checkpoint of a small input": lambda: (lambda x: fp8_checkpoint(torch.sigmoid, x), torch.sigmoid),
    }[exact]()
    x, found = torch.randn(8, D, requires_grad=True), []
    for each in (function, expected):
        (dx,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), x)[0])
    assert_bitwise(*found)
    assert found[0].abs().max() > 0


def test_looking_at_a_saved_tensor_is_no_backward_pass():
    y = packed(torch.randn(8, D, requires_grad=True) * 1)
    assert y.grad_fn._saved_other.shape == (8, D)


def test_flux_refuses():
    model, _, _ = coat_flux_model({"memory": {"checkpointing": "none"}})
    weights = [p for p in model.parameters() if p.requires_grad]
    with pytest.raises(RuntimeError, match=REFUSAL):
        torch.autograd.grad(loss_of(predict(model)), weights, create_graph=True)
