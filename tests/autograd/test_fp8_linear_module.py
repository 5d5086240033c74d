"""FP8Linear as a module: what it stores, casts, copies, state_dict, PEFT around it."""

import copy
import logging
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from coat_core import FP8Linear, allow_merging, replace_linear_with_fp8, restore_linear, sqnr_db
from coat_core.config import FP8LinearConfig
from coat_core.linear import module
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.tolerances import GAUSSIAN_FLOOR_DB, UNIFORM_FLOOR_DB

K, N = 64, 48


def make(dtype: torch.dtype = torch.float32, **config: str) -> FP8Linear:
    return FP8Linear.from_linear(nn.Linear(K, N, dtype=dtype), FP8LinearConfig(**config))


def test_constructor_and_refused_sizes():
    layer = FP8Linear(K, N, bias=False, dtype=torch.bfloat16, config=FP8LinearConfig(weight_format="e5m2"))
    assert (layer.weight_codes.dtype, layer.config.weight_format) == (torch.uint8, "e5m2")
    assert layer(torch.randn(2, K, dtype=torch.bfloat16)).shape == (2, N)
    with pytest.raises(ValueError, match=r"Linear\(24, 48\): in and out features must be multiples of 16"):
        FP8Linear(24, 48)
    with pytest.raises(ValueError, match="its weight is not a plain floating parameter"):
        FP8Linear.from_linear(make())


def test_state_of_another_kind_of_weight_is_refused():
    with pytest.raises(RuntimeError, match="weight_scale_bits"):
        make(weight_granularity="per_row").load_state_dict(make().state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        make().load_state_dict(nn.Linear(2 * K, N).state_dict())


@pytest.mark.parametrize("weight_format", ["e4m3", "e5m2", "nvfp4"])
def test_a_high_precision_weight_is_quantized_as_it_is_loaded(weight_format):
    linear = nn.Linear(K, N)
    layer = make(weight_format=weight_format)
    layer.load_state_dict(linear.state_dict())
    assert_bitwise(layer.bias, linear.bias)
    assert_bitwise(layer.weight, FP8Linear.from_linear(linear, layer.config).weight)


def test_restore_gives_what_was_multiplied_by():
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


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.add_(1.0),
        lambda weight: weight.copy_(torch.zeros(N, K)),
        lambda weight: weight.__setitem__(0, 1.0),
        lambda weight: weight.__iadd__(1.0),
        lambda weight: setattr(weight, "data", weight.data + 1.0),
        nn.init.normal_,
        lambda weight: torch.add(weight, 1.0, out=weight),
        lambda weight: setattr(weight.owner, "weight", weight + 1.0),
    ],
    ids=["add_", "copy_", "item", "+=", "data", "init", "out", "another tensor"],
)
def test_changing_the_weight_is_refused(write):
    layer = make()
    before = layer.weight.clone()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"cannot be written.*allow_merging.*restore_linear"):
        write(layer.weight)
    with pytest.raises(KeyError, match="weight"):
        layer.weight = nn.Parameter(torch.zeros(N, K))
    assert_bitwise(layer.weight, before)


def test_reading_the_weight_gives_plain_tensors():
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
    assert (layer.weight.shape, layer.weight.dtype) == (values.shape, values.dtype)
    assert (layer.weight.device, layer.weight.is_meta) == (values.device, False)
    assert_bitwise(torch.from_numpy(copy.deepcopy(layer).weight.numpy()), values)


def adapted(**config: Any) -> tuple[nn.Module, nn.Module]:
    """The same two linears with PEFT's adapters, on FP8 weights and on their dequantized values."""
    torch.manual_seed(0)
    model = replace_linear_with_fp8(nn.Sequential(nn.Linear(K, N), nn.Tanh(), nn.Linear(N, K)))
    plain = restore_linear(copy.deepcopy(model))
    models = []
    for each in (model, plain):
        torch.manual_seed(1)
        with allow_merging(each):
            models.append(get_peft_model(each, LoraConfig(r=4, target_modules=["0", "2"], **config)))
    return models[0], models[1]


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [model.get_base_model()[i].weight.clone() for i in (0, 2)]


@pytest.mark.parametrize("config", [{}, {"use_dora": True}, {"lora_bias": True}], ids=str)
@pytest.mark.parametrize("safe", [True, False])
def test_a_merge_that_was_asked_for_quantizes_the_sum_and_is_taken_back_to_the_bit(safe, config, caplog):
    model, plain = adapted(init_lora_weights=False, **config)
    x = torch.randn(4, K)
    before, output, expected = weights(model), model(x), plain(x)
    with allow_merging(model), caplog.at_level(logging.WARNING):
        model.merge_adapter(safe_merge=safe)
        copied = copy.deepcopy(model)
    plain.merge_adapter()
    costs = [sqnr_db(merged, stored) for merged, stored in zip(weights(plain), weights(model), strict=True)]
    assert min(costs) >= UNIFORM_FLOOR_DB["e4m3"]
    [record] = caplog.records
    assert record.args[1] == 2
    assert min(costs) - 0.1 <= record.args[2] <= max(costs) + 0.1
    assert_sqnr(expected, model(x), 20)
    for each in (model, copied):
        each.unmerge_adapter()
        assert all(torch.equal(*pair) for pair in zip(before, weights(each), strict=True))
        assert_bitwise(each(x), output)
        with pytest.raises(RuntimeError, match="allow_merging"):
            each.merge_adapter()


def test_an_initialization_that_changes_the_weight_keeps_the_output_and_is_not_unmerged():
    model, plain = adapted(init_lora_weights="olora")
    x = torch.randn(64, K)
    assert_sqnr(plain(x), model(x), 20)
    with allow_merging(model):
        model.merge_adapter()
        with pytest.raises(RuntimeError, match="initialization"):  # PEFT unmerges after it
            model.add_adapter("second", LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights="pissa"))


def test_peft_dequantizes_no_weight_to_add_or_remove_an_adapter(monkeypatch):
    reads: list[nn.Module] = []
    read = module.read_weight
    monkeypatch.setattr(module, "read_weight", lambda layer, *how: reads.append(layer) or read(layer, *how))
    model, _ = adapted()
    reads.clear()
    model.add_adapter("second", LoraConfig(r=4, target_modules=["0", "2"]))
    model.delete_adapter("default")
    base = model.unload()
    assert type(base[0]) is FP8Linear
    assert reads == []
    assert len(base[0].weight + 1) == N
    assert reads == [base[0]]
