"""A block is read once, and again after anything that may change what it computes."""

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn

from coat_core.linear.function import TRANSPOSED, keep_transposed, store_weight
from coat_flux.blocks.gemms import multiply_in_bf16
from coat_flux.blocks.runner import BlockRunner, BlockState
from tests.helpers.asserts import assert_bitwise
from tests.helpers.flux import coat_flux_model, predict, tiny_flux
from tests.helpers.toolkit_lora import Network

Change = Callable[[Any, Any], Any]


def _of_base(change: Callable[[Any], Any]) -> Change:
    return lambda model, block: change(block.attn.to_q.base_layer)


def _of_lora(change: Callable[[Any], Any]) -> Change:
    return lambda model, block: change(block.attn.to_q)


def _new_matrix(lora: Any) -> None:
    lora.lora_B["default"].weight = nn.Parameter(lora.lora_B["default"].weight.detach().clone())


CHANGES: dict[str, Change] = {
    "adapters off": lambda model, block: model.disable_adapters(),
    "an adapter added": lambda model, block: model.add_adapter(LoraConfig(r=2, target_modules=["to_q"]), "second"),
    "an adapter removed": lambda model, block: model.delete_adapters("default"),
    "an adapter taken off": lambda model, block: setattr(block.attn, "to_q", block.attn.to_q.base_layer),
    "another active adapter": _of_lora(lambda lora: lora._active_adapter.clear()),
    "merged": _of_lora(lambda lora: lora.merged_adapters.append("default")),
    "a scaling": _of_lora(lambda lora: lora.scaling.update(default=0.3)),
    "a variant": _of_lora(lambda lora: lora.lora_variant.update(default=object())),
    "a new matrix": _of_lora(_new_matrix),
    "a matrix of another class": _of_lora(lambda lora: setattr(lora.lora_A["default"], "__class__", nn.Bilinear)),
    "LoRA dropout": _of_lora(lambda lora: lora.lora_dropout.update({"default": nn.Dropout(0.1)})),
    "evaluation": lambda model, block: block.eval(),
    "a hook": _of_base(lambda base: base.register_forward_hook(lambda *_: None)),
    "a hook in an adapter": _of_lora(lambda lora: lora.lora_A["default"].register_forward_pre_hook(lambda *_: None)),
    "a backward hook": lambda model, block: block.register_full_backward_hook(lambda *_: None),
    "the block's forward": lambda model, block: setattr(block, "forward", partial(block.forward)),
    "a linear's forward": _of_base(lambda base: setattr(base, "forward", lambda x: x)),
    "weights quantized again": _of_base(lambda base: store_weight(base, torch.randn(base.weight.shape), base.config)),
    "weights moved": _of_base(lambda base: base._apply(lambda x: x.clone())),
    "a copy kept": _of_base(lambda base: keep_transposed(base, base.config)),
    "GEMM in bf16": _of_base(lambda base: multiply_in_bf16([base])),
    "converted back": _of_base(lambda base: base.to_linear()),
    "a trained bias": _of_base(lambda base: base.bias.requires_grad_(True)),
    "a trained norm": lambda model, block: block.attn.norm_q.weight.requires_grad_(True),
    "another activation": lambda model, block: setattr(block, "act_mlp", nn.SiLU()),
}


def changed(state: BlockState) -> bool:
    return state.key() != state.before


@pytest.fixture(scope="module")
def made() -> nn.Module:
    return coat_flux_model()[0]


@pytest.fixture
def coat(made: nn.Module) -> Any:
    """A model with PEFT's adapters, and one of its blocks."""
    model = copy.deepcopy(made)
    return model, model.single_transformer_blocks[0]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(coat, name):
    model, block = coat
    state = BlockState([block], lambda: None)
    assert not changed(state)
    CHANGES[name](model, block)
    assert changed(state)
    state = BlockState([block], lambda: None)
    assert not changed(state)
    if name == "a copy kept":
        del block.attn.to_q.base_layer._buffers[TRANSPOSED]
        assert changed(state)


def test_nothing_keeps_the_codes_of_a_model_that_moved(coat):
    model, block = coat
    predict(model)
    runner = BlockRunner.of(model)
    gc.collect()
    codes = [weakref.ref(x.untyped_storage()) for x in block.buffers()]
    assert len(runner.forms) == 4
    block._apply(lambda x: x.clone())
    assert [found() for found in codes] == [None] * len(codes)
    predict(model)
    assert len(runner.forms) == 4


@pytest.mark.parametrize("name", ["adapters off", "weights quantized again"])
def test_the_next_pass_computes_with_the_change(name):
    """As a model that was so from the start."""
    models: list[Any] = [coat_flux_model()[0] for _ in range(2)]
    predict(models[0])
    generation = BlockRunner.of(models[0]).generation
    for model in models:
        torch.manual_seed(0)
        CHANGES[name](model, model.single_transformer_blocks[0])
    found, expected = map(predict, models)
    assert_bitwise(found, expected)
    assert BlockRunner.of(models[0]).generation != generation


NETWORK_CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "switched off": lambda network, lora: setattr(network, "is_active", False),
    "merged": lambda network, lora: setattr(network, "is_merged_in", True),
    "another strength": lambda network, lora: setattr(network, "multiplier", 0.5),
    "a strength per image": lambda network, lora: setattr(network, "multiplier", [0.5, 1.0]),
    "a strength in its list": lambda network, lora: network._multiplier.__setitem__(0, 0.25),
    "evaluation": lambda network, lora: network.eval(),
    "its scale": lambda network, lora: setattr(lora, "scale", 0.5),
    "its matrix": lambda network, lora: setattr(lora.lora_up, "weight", nn.Parameter(lora.lora_up.weight.detach())),
    "a bias": lambda network, lora: setattr(lora.lora_up, "bias", nn.Parameter(torch.zeros(lora.lora_up.out_features))),
    "taken off": lambda network, lora: delattr(lora.org_module[0], "forward"),
    "another on top": lambda network, lora: Network([lora.org_module[0]], 2),
}


@pytest.mark.parametrize("name", NETWORK_CHANGES)
def test_a_change_of_ai_toolkits_network_is_noticed(name):
    block = tiny_flux().single_transformer_blocks[0]
    network = Network([block.attn.to_q, block.proj_out], 2).train()
    network.multiplier = [1.0]
    state = BlockState([block], lambda: None)
    network.multiplier = [1.0]  # the trainer sets it at every step, as another tensor
    assert not changed(state)
    made = NETWORK_CHANGES[name](network, network.unet_loras[1])  # kept alive: its modules refer to it weakly
    assert changed(state), made
