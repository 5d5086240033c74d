"""Conversion of whole models: what becomes FP8, what does not and why, and back."""

import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from coat_core import FP8Linear, FP8TrainableLinear, replace_linear_with_fp8
from coat_core.config import FP8LinearConfig
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.tolerances import product_floor_db


class Special(nn.Linear):
    pass


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.odd_in, self.odd_out = nn.Linear(20, 32), nn.Linear(32, 10)
        self.special, self.head = Special(32, 32), nn.Linear(32, 32)
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))


def test_report_names_every_linear_and_its_reason(caplog):
    with caplog.at_level(logging.INFO):
        model = replace_linear_with_fp8(Model(), filter_fn=lambda module, name: name != "head")
    size = "in and out features must be multiples of 16"
    assert model.fp8_report["converted"] == ["body.0", "body.2"]
    assert model.fp8_report["skipped"] == {
        "odd_in": size,
        "odd_out": size,
        "special": "a subclass of nn.Linear (Special)",
        "head": "excluded by the filter",
        "norm": "a subclass of nn.Linear (ParametrizedLinear)",
    }
    (message,) = caplog.messages
    assert message.startswith(f"Model: 2 linear layers in FP8; 2 left: {size}; 1 left: a subclass of")
    assert type(model.body[0]) is FP8Linear
    assert type(model.head) is nn.Linear


def test_a_second_conversion_changes_nothing():
    model = replace_linear_with_fp8(Model())
    codes = model.body[0].weight_codes.clone()
    replace_linear_with_fp8(model, FP8LinearConfig(weight_format="e5m2"))
    assert model.fp8_report["converted"] == []
    assert model.fp8_report["skipped"]["body.0"] == "already FP8"
    assert_bitwise(model.body[0].weight_codes, codes)
    assert model.body[0].config.weight_format == "e4m3"


@pytest.mark.parametrize("trainable", [False, True])
def test_a_model_that_is_itself_a_linear(trainable):
    linear, x = nn.Linear(32, 32), torch.randn(64, 32)
    expected = linear(x)
    model = replace_linear_with_fp8(linear, trainable=trainable)
    assert model is linear
    assert type(model) is (FP8TrainableLinear if trainable else FP8Linear)
    assert model.fp8_report["converted"] == [""]
    assert_sqnr(expected, model(x), product_floor_db("e4m3", "e4m3"))


def test_one_layer_in_two_places_is_converted_once_and_stays_one():
    shared = nn.Linear(32, 32)
    model = replace_linear_with_fp8(nn.ModuleDict({"first": shared, "second": shared}))
    assert model["first"] is model["second"]
    assert model.fp8_report["converted"] == ["first"]
    x = torch.randn(4, 32)
    assert_bitwise(model["first"](x), model["second"](x))


def test_lora_matrices_are_never_quantized():
    """Rank 16 is a multiple of 16: sizes alone would let A and B through."""
    model = get_peft_model(nn.ModuleDict({"layer": nn.Linear(32, 32)}), LoraConfig(r=16, target_modules=["layer"]))
    replace_linear_with_fp8(model)
    layer = model.base_model.model["layer"]
    assert type(layer.base_layer) is FP8Linear
    assert type(layer.lora_A["default"]) is type(layer.lora_B["default"]) is nn.Linear
    assert set(model.fp8_report["skipped"].values()) == {"a LoRA matrix: never quantized"}
    assert layer.lora_A["default"].weight.requires_grad
