"""FP8Linear as a module: what it stores, casts, copies, state_dict, PEFT around it."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from coat_core.config import FP8LinearConfig
from coat_core.linear import FP8Linear, allow_merging, replace_linear_with_fp8, restore_linear
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.tolerances import GAUSSIAN_FLOOR_DB

K, N = 64, 48


def make(dtype: torch.dtype = torch.float32, **config: str) -> FP8Linear:
    return FP8Linear.from_linear(nn.Linear(K, N, dtype=dtype), FP8LinearConfig(**config))


def test_constructor_and_refused_sizes() -> None:
    layer = FP8Linear(K, N, bias=False, dtype=torch.bfloat16, config=FP8LinearConfig(weight_format="e5m2"))
    assert (layer.weight_codes.dtype, layer.config.weight_format) == (torch.uint8, "e5m2")
    assert layer(torch.randn(2, K, dtype=torch.bfloat16)).shape == (2, N)
    with pytest.raises(ValueError, match=r"Linear\(24, 48\): in and out features must be multiples of 16"):
        FP8Linear(24, 48)
    with pytest.raises(ValueError, match="its weight is not a plain floating parameter"):
        FP8Linear.from_linear(make())


def test_state_of_another_kind_of_weight_is_refused() -> None:
    with pytest.raises(RuntimeError, match="weight_scale_bits"):
        make(weight_granularity="per_row").load_state_dict(make().state_dict())
    (layer := make()).load_state_dict((linear := nn.Linear(K, N)).state_dict())  # quantized
    assert_bitwise(layer.weight, FP8Linear.from_linear(linear).weight)


def test_restore_gives_what_was_multiplied_by() -> None:
    model = replace_linear_with_fp8(nn.Sequential(nn.Linear(K, N, dtype=torch.bfloat16), nn.SiLU()))
    weight = model[0].weight.clone()
    model.to(torch.float32)  # a host's cast in between: the bias is fp32 now, so must the weight be
    restore_linear(model)
    assert type(model[0]) is nn.Linear
    assert type(model[0].weight) is nn.Parameter
    assert not model[0].weight.requires_grad
    assert_sqnr(weight, model[0].weight, GAUSSIAN_FLOOR_DB["e4m3"])
    x = torch.randn(2, K)
    assert_bitwise(model[0](x), nn.functional.linear(x, model[0].weight, model[0].bias))


def set_data(weight: torch.Tensor) -> None:
    weight.data = torch.zeros(N, K)


@pytest.mark.parametrize(
    "write",
    [
        set_data,
        lambda weight: weight.add_(1.0),
        lambda weight: weight.copy_(torch.zeros(N, K)),
        lambda weight: weight.__setitem__(0, 1.0),
        lambda weight: weight.__iadd__(1.0),
        lambda weight: setattr(weight, "data", weight.data + 1.0),
        nn.init.normal_,
    ],
    ids=["data", "add_", "copy_", "item", "+=", "data +=", "init"],
)
def test_changing_the_weight_is_refused(write) -> None:
    layer = make()
    before = layer.weight.clone()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"cannot be written.*allow_merging.*restore_linear"):
        write(layer.weight)
    with pytest.raises(KeyError, match="weight"):
        layer.weight = nn.Parameter(torch.zeros(N, K))
    assert_bitwise(layer.weight, before)


def test_reading_the_weight_gives_plain_tensors() -> None:
    layer = make()
    values, x = layer.weight.data, torch.randn(3, K)
    assert type(values) is torch.Tensor
    for found, expected in (
        (layer.weight + 1, values + 1),
        (~(layer.weight > 0), ~(values > 0)),
        (layer.weight[1:3].t(), values[1:3].t()),
        (torch.cat([layer.weight, values]), torch.cat([values, values])),
        (layer.weight.requires_grad_(False).double().float(), values),
        (torch.ones(N, K).add_(layer.weight), 1 + values),
        (nn.functional.linear(x, layer.weight), x @ values.t()),
    ):
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("safe", [True, False])
def test_peft_merges_only_where_asked_to_and_unmerges_to_the_bit(safe: bool) -> None:
    model = replace_linear_with_fp8(nn.Sequential(nn.Linear(K, N), nn.Tanh(), nn.Linear(N, K)))
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False))
    before = model(x := torch.randn(4, K))
    with pytest.raises(RuntimeError, match="allow_merging"):
        model.merge_adapter(safe_merge=safe)
    assert_bitwise(model(x), before)
    with allow_merging(model):
        model.merge_adapter(safe_merge=safe)
    assert_sqnr(before, model(x), 20)
    model.unmerge_adapter()
    assert_bitwise(model(x), before)
