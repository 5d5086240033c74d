"""Exported LoRAs in diffusers' own hands: its converter, its loader, its model."""

from __future__ import annotations

import pytest
import torch
from diffusers.loaders import FluxLoraLoaderMixin
from safetensors.torch import save_file
from torch import nn

from coat_flux.export.check import check_export
from coat_flux.export.convert import convert_file, convert_pairs
from coat_flux.export.layouts import place_of, read_pairs, write_pairs
from coat_flux.mini_flux.geometry import make_flux_dev_geometry
from tests.helpers.lora_files import lora_tensors, module_names
from tests.helpers.tiny_flux import build_transformer
from tests.tolerances import LORA_DELTA_RTOL

FLUX_HIDDEN = 3072


@pytest.fixture(scope="module")
def flux_dev():
    """FLUX.1-dev's modules without memory."""
    return make_flux_dev_geometry("meta")


def linears(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def test_every_linear_of_flux_has_its_two_names_and_its_size(flux_dev):
    found = linears(flux_dev)
    for name, module in found.items():
        _, linear, part = place = place_of(name)
        assert linear.members[part] == name
        assert place_of(linear.name, "comfyui").linear == linear
        assert place_of(linear.name.replace(".", "_"), "kohya").linear == linear
        assert place.height in (0, module.out_features / FLUX_HIDDEN), name
        assert linear.width in (0, module.in_features / FLUX_HIDDEN), name
    assert len(found) == 504
    assert len({place_of(name).linear.name for name in found}) == 19 * 10 + 38 * 3 + 10


def kohya_of(tensors, layout="kohya"):
    return write_pairs(convert_pairs(read_pairs(tensors, "diffusers"), "diffusers", layout), layout)


def effect(tensors, module, probe):
    down, up = (tensors[f"transformer.{module}.{half}.weight"].double() for half in ("lora_A", "lora_B"))
    return up @ (down @ probe[: down.shape[1]])


@pytest.mark.parametrize("layout", ["kohya", "comfyui"])
def test_diffusers_own_converter_finds_the_same_deltas_in_all_of_flux(layout):
    modules = module_names(19, 38)
    assert len(modules) == 494
    tensors = lora_tensors(modules, rank=1, hidden=FLUX_HIDDEN)
    theirs = FluxLoraLoaderMixin.lora_state_dict(kohya_of(tensors, layout))
    assert theirs.keys() == tensors.keys()
    probe = torch.randn(5 * FLUX_HIDDEN, 2, dtype=torch.float64)
    for module in modules:
        torch.testing.assert_close(
            effect(theirs, module, probe), effect(tensors, module, probe), rtol=LORA_DELTA_RTOL, atol=0
        )


def test_diffusers_own_converter_finds_zero_where_nothing_was_trained():
    trained = ["transformer_blocks.3.attn.to_k", "single_transformer_blocks.9.proj_mlp"]
    tensors = lora_tensors(trained, rank=2, hidden=FLUX_HIDDEN, dtype=torch.float16)
    theirs = FluxLoraLoaderMixin.lora_state_dict(kohya_of(tensors))
    assert len(theirs) == 2 * (3 + 4)
    for key, tensor in theirs.items():
        if key in tensors:
            assert torch.equal(tensor, tensors[key]), key
        else:
            assert tensor.count_nonzero() == 0, key


def test_the_final_layer_has_diffusers_order_of_scale_and_shift():
    tensors = lora_tensors(["norm_out.linear", "proj_out", "transformer_blocks.0.norm1.linear"])
    try:
        theirs = FluxLoraLoaderMixin.lora_state_dict(kohya_of(tensors))
    except ValueError as error:  # diffusers 0.36
        pytest.skip(f"this diffusers takes no LoRA on kohya's final layer: {error}")
    for name in ("norm_out.linear", "proj_out"):
        for half in ("lora_A", "lora_B"):
            ours = tensors[f"transformer.{name}.{half}.weight"]
            assert torch.equal(theirs[f"{name}.{half}.weight"], ours)


def test_a_model_takes_a_lora_that_went_there_and_back(tmp_path):
    model = build_transformer(seed=0)
    inside = [name for name in linears(model) if "blocks." in name]
    hidden = model.config.num_attention_heads * model.config.attention_head_dim
    tensors = lora_tensors(inside, hidden=hidden)
    first, other, back = (tmp_path / f"{name}.safetensors" for name in ("first", "other", "back"))
    save_file(tensors, first)
    convert_file(first, other, "comfyui")
    convert_file(other, back, "diffusers")
    assert check_export(back, expected={key: tensor.shape for key, tensor in tensors.items()}).layers == len(inside)
    weights = FluxLoraLoaderMixin.lora_state_dict(tmp_path, weight_name=back.name)
    model.load_lora_adapter(weights, prefix="transformer", adapter_name="default")
    loaded = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" in name}
    assert len(loaded) == 2 * len(inside)
    for name, tensor in loaded.items():
        assert torch.equal(tensor, tensors[f"transformer.{name.replace('.default', '')}"]), name
