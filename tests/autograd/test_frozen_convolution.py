"""Convolutions with frozen weights: torch's own values, and nothing of the input is kept for backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from coat_core.activation import PackedSavedTensors, Saving, keep_no_input
from coat_core.granularity import Storage, per_group
from tests.helpers.asserts import assert_bitwise
from tests.helpers.saved_tensors import SavedTensors, recording

SMALL = Saving(Storage(granularity=per_group(32)), min_elements=64)
LAYERS = {
    "3x3": (nn.Conv2d, {"padding": 1}, (2, 32, 8, 8)),
    "channels last": (nn.Conv2d, {"padding": 1}, (2, 32, 8, 8)),
    "stride": (nn.Conv2d, {"stride": 2, "padding": 1}, (2, 32, 8, 8)),
    "groups, dilated, no bias": (nn.Conv2d, {"groups": 4, "dilation": 2, "bias": False}, (1, 32, 8, 8)),
    "1d": (nn.Conv1d, {"stride": 2}, (2, 32, 64)),
    "3d": (nn.Conv3d, {"padding": 1}, (1, 32, 3, 8, 8)),
}


def frozen(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    """A layer and its input."""
    kind, options, shape = LAYERS[name]
    layer = kind(32, 64, 3, **options).to(dtype).requires_grad_(False)
    memory_format = torch.channels_last if name == "channels last" else torch.contiguous_format
    return layer, torch.randn(shape, dtype=dtype).to(memory_format=memory_format).requires_grad_()


def run(layer: nn.Module, x: Tensor) -> tuple[Tensor, SavedTensors]:
    layer = copy.deepcopy(layer)  # `layer` stays torch's own
    keep_no_input(layer)
    with recording() as saved, PackedSavedTensors(SMALL, keep=layer.parameters()):
        return layer(x * 1), saved


@pytest.mark.parametrize("name", list(LAYERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_values_are_torchs_own_and_the_input_is_not_kept(name: str, dtype: torch.dtype, autocast: bool) -> None:
    layer, x = frozen(name, dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        exact, (y, saved) = layer(x), run(layer, x)
    dy = torch.randn_like(exact)
    assert_bitwise(y, exact)
    dx, expected = (torch.autograd.grad(out, x, dy)[0] for out in (y, exact))
    assert_bitwise(dx, expected)
    assert dx.stride() == expected.stride()
    assert [kept.shape for kept in saved.tensors] == [tuple(layer.weight.shape)]
    assert not saved.packed


@pytest.mark.parametrize("trained", ["weight", "bias"])
def test_what_is_trained_gets_its_gradient(trained: str) -> None:
    layer, x = frozen("3x3")
    own = copy.deepcopy(layer)
    keep_no_input(layer)
    for each in (layer, own):
        getattr(each, trained).requires_grad_()
    y, exact = layer(x), own(x)
    dy = torch.randn_like(y)
    assert_bitwise(*(torch.autograd.grad(out, getattr(of, trained), dy)[0] for out, of in ((y, layer), (exact, own))))


def test_a_copy_of_a_layer_has_its_own_weights() -> None:
    layer, x = frozen("3x3")
    keep_no_input(layer)
    other = copy.deepcopy(layer)
    other.weight.data.zero_()
    other.stride = (2, 2)
    assert other(x).shape[-1] == x.shape[-1] // 2
    assert_bitwise(other(x)[0, :, 0, 0], layer.bias)


@pytest.mark.parametrize("case", ["padding in words", "no batch", "no gradient"])
def test_what_runs_as_ever(case: str) -> None:
    layer, x = frozen("3x3")
    layer.padding = "same" if case == "padding in words" else layer.padding
    x = {"no batch": x[0], "no gradient": x.detach()}.get(case, x)
    y, _ = run(layer, x)
    assert_bitwise(y, layer(x))
    assert y.requires_grad == (case != "no gradient")
    if y.requires_grad:
        assert type(y.grad_fn).__name__ == ("SqueezeBackward1" if case == "no batch" else "ConvolutionBackward0")
