"""A block is read once, and again after anything that may change what it computes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from peft import LoraConfig
from torch import nn

from coat_core.linear.weight import drop_transposed, keep_transposed, store_weight
from coat_flux.blocks.fused.chooser import FusedForms
from coat_flux.blocks.fused.frozen import NotFusable
from coat_flux.blocks.gemms import multiply_in_bf16
from tests.helpers.flux import coat_flux_model, tiny_flux
from tests.helpers.toolkit_lora import Network
from tests.unit.test_flow_chooser import arguments

Change = Callable[[Any, Any], Any]


def _data_moved(model: Any, block: Any) -> None:
    codes = block.attn.to_q.base_layer.weight_codes
    codes.data = codes.data.clone()


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
    "a buffer's data moved": _data_moved,
    "a copy kept": _of_base(lambda base: keep_transposed(base, base.config)),
    "GEMM in bf16": _of_base(lambda base: multiply_in_bf16([base])),
    "converted back": _of_base(lambda base: base.to_linear()),
    "a trained bias": _of_base(lambda base: base.bias.requires_grad_(True)),
    "a trained norm": lambda model, block: block.attn.norm_q.weight.requires_grad_(True),
    "a norm's eps": lambda model, block: setattr(block.attn.norm_q, "eps", 1e-3),
    "another activation": lambda model, block: setattr(block, "act_mlp", nn.SiLU()),
    "another processor": lambda model, block: setattr(block.attn, "processor", object()),
    "the processor's backend": lambda model, block: setattr(block.attn.processor, "_attention_backend", "flash"),
    "fused projections": lambda model, block: setattr(block.attn, "fused_projections", True),
}


def _form(forms: FusedForms, block: Any, args: tuple[Any, ...]) -> Any:
    try:
        return forms.form_of(block, args, {}, None)
    except NotFusable as error:
        return str(error)


@pytest.fixture
def coat() -> Any:
    """A model with PEFT's adapters, one of its blocks, what it is called with, and its forms."""
    model, _, _ = coat_flux_model()
    block = model.single_transformer_blocks[0]
    return model, block, arguments(model), FusedForms()


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(coat: Any, name: str) -> None:
    model, block, args, forms = coat
    before = _form(forms, block, args)
    assert callable(before)
    assert _form(forms, block, args) is before
    CHANGES[name](model, block)
    after = _form(forms, block, args)
    assert after is not before
    if callable(after):  # read as it now is, and once
        assert _form(forms, block, args) is after


def test_a_dropped_copy_an_attention_backend_and_another_packing_are_noticed(coat: Any) -> None:
    _, block, args, forms = coat
    base = block.proj_out.base_layer
    keep_transposed(base, base.config)
    before = _form(forms, block, args)
    drop_transposed(base)
    after = _form(forms, block, args)
    assert before.block.output.linear.bases[0].weight.transposed is not None
    assert after.block.output.linear.bases[0].weight.transposed is None
    with attention_backend("_native_math"):
        assert "attention backend _native_math" in _form(forms, block, args)
    assert callable(_form(forms, block, args))
    with pytest.raises(NotFusable, match="no rotary embedding"):
        forms.form_of(block, (*args[:3], None), {}, None)


def test_nothing_keeps_the_codes_of_a_model_that_moved(coat: Any) -> None:
    _, block, args, forms = coat
    _form(forms, block, args)
    gc.collect()
    codes = [weakref.ref(x.untyped_storage()) for x in block.buffers()]
    block._apply(lambda x: x.clone())
    assert [found() for found in codes] == [None] * len(codes)


NETWORK_CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "switched off": lambda network, lora: setattr(network, "is_active", False),
    "merged": lambda network, lora: setattr(network, "is_merged_in", True),
    "another strength": lambda network, lora: setattr(network, "multiplier", 0.5),
    "a strength per image": lambda network, lora: setattr(network, "multiplier", [0.5, 1.0]),
    "dropout": lambda network, lora: setattr(lora, "dropout", 0.1),
    "evaluation": lambda network, lora: network.eval(),
    "its scale": lambda network, lora: setattr(lora, "_runtime_scale", torch.ones(())),
    "its matrix": lambda network, lora: setattr(lora.lora_up, "weight", nn.Parameter(lora.lora_up.weight.detach())),
    "a bias": lambda network, lora: setattr(lora.lora_up, "bias", nn.Parameter(torch.zeros(lora.lora_up.out_features))),
    "taken off": lambda network, lora: delattr(lora.org_module[0], "forward"),
    "another on top": lambda network, lora: Network([lora.org_module[0]], 2),
}


@pytest.mark.parametrize("name", NETWORK_CHANGES)
def test_a_change_of_ai_toolkits_network_is_noticed(name: str) -> None:
    model = tiny_flux()
    block = model.single_transformer_blocks[0]
    network = Network([block.attn.to_q, block.proj_out], 2).train()
    network.multiplier = [1.0]
    args, forms = arguments(model), FusedForms()
    before = _form(forms, block, args)
    assert callable(before)
    assert _form(forms, block, args) is before
    made = NETWORK_CHANGES[name](network, network.unet_loras[1])  # kept alive: its modules refer to it weakly
    assert _form(forms, block, args) is not before, made


def test_a_strength_changed_in_its_list_is_noticed() -> None:
    model = tiny_flux()
    block = model.single_transformer_blocks[0]
    network = Network([block.attn.to_q], 2).train()
    network.multiplier = [1.0]
    args, forms = arguments(model), FusedForms()
    before = _form(forms, block, args)
    network._multiplier[0] = 0.25
    after = _form(forms, block, args)
    assert [form.block.inputs.linears.all_adapters[0].factors[1] for form in (before, after)] == [1.0, 0.25]


def test_training_steps_change_nothing(coat: Any) -> None:
    """Updates in place, gradients, and a configuration replaced by an equal one."""
    _, block, args, forms = coat
    before = _form(forms, block, args)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(1e-3)
    for parameter in block.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    base = block.attn.to_q.base_layer
    base.config = replace(base.config)
    assert _form(forms, block, args) is before
