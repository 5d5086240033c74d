"""Between key layouts: names, exactness, what is refused, and files that are whole or not there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from coat_flux.cli.machine import add_parsers
from coat_flux.export import convert as convert_module
from coat_flux.export.convert import convert_file, convert_pairs
from coat_flux.export.layouts import ExportError, layout_of, read_pairs, write_pairs
from tests.helpers.lora_files import HIDDEN, OUTSIDE, SINGLE, lora_tensors, module_names

ALL_MODULES = [*module_names(), *OUTSIDE]
QKV = [f"transformer_blocks.0.attn.{name}" for name in ("to_q", "to_k", "to_v")]


def converted(tensors, layout, dtype=None):
    given = layout_of(tensors)
    return write_pairs(convert_pairs(read_pairs(tensors, given), given, layout, dtype), layout)


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for key in ours:
        assert ours[key].dtype == theirs[key].dtype, key
        assert torch.equal(ours[key], theirs[key]), key


def delta(tensors, module):
    pair = read_pairs(tensors, layout_of(tensors))[module]
    return pair.scale * (pair.up.double() @ pair.down.double())


@pytest.fixture
def lora(tmp_path):
    path = tmp_path / "shirt.safetensors"
    save_file(
        lora_tensors(module_names()), path, {"ss_output_name": "shirt", "sshs_model_hash": "0123", "format": "pt"}
    )
    return path


def test_names_of_the_checkpoint():
    keys = converted(lora_tensors(ALL_MODULES), "comfyui")
    assert {key.removeprefix("diffusion_model.").rsplit(".lora_down", 1)[0] for key in keys if "lora_down" in key} == {
        *(f"double_blocks.0.{side}_{name}" for side in ("img", "txt") for name in ("attn.qkv", "attn.proj", "mod.lin")),
        *(f"double_blocks.0.{side}_mlp.{number}" for side in ("img", "txt") for number in (0, 2)),
        *("single_blocks.0.linear1", "single_blocks.0.linear2", "single_blocks.0.modulation.lin"),
        *(f"{name}_in.{layer}_layer" for name in ("time", "vector", "guidance") for layer in ("in", "out")),
        *("img_in", "txt_in", "final_layer.adaLN_modulation.1", "final_layer.linear"),
    }


def test_kohya_spells_the_same_names_with_underscores():
    tensors = lora_tensors(ALL_MODULES)
    kohya, comfyui = converted(tensors, "kohya"), converted(tensors, "comfyui")
    assert "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight" in kohya
    assert len(kohya) == len(comfyui)
    assert_same(converted(kohya, "comfyui"), comfyui)
    assert_same(converted(comfyui, "kohya"), kohya)


@pytest.mark.parametrize("layout", ["kohya", "comfyui"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_there_and_back_is_the_same_bit_for_bit(layout, dtype):
    tensors = lora_tensors([*module_names(2, 3), *OUTSIDE], rank=4, dtype=dtype)
    assert_same(converted(converted(tensors, layout), "diffusers"), tensors)


@settings(max_examples=60)
@given(modules=st.sets(st.sampled_from(ALL_MODULES), min_size=1), rank=st.integers(1, 7), zero_up=st.booleans())
def test_any_part_of_the_linears_comes_back(modules, rank, zero_up):
    tensors = lora_tensors(sorted(modules), rank=rank, dtype=torch.float16)
    if zero_up:  # a LoRA before its first step
        tensors = {key: tensor * 0 if "lora_B" in key else tensor for key, tensor in tensors.items()}
    assert_same(converted(converted(tensors, "kohya"), "diffusers"), tensors)


def test_a_fused_adapter_changes_each_part_as_its_own_did():
    tensors = lora_tensors([*QKV, *(f"single_transformer_blocks.0.{name}" for name in SINGLE[:4])], rank=3)
    fused = converted(tensors, "comfyui")
    own = [delta(tensors, module) for module in QKV]
    assert torch.equal(delta(fused, "double_blocks.0.img_attn.qkv"), torch.cat(own))
    own = [delta(tensors, f"single_transformer_blocks.0.{name}") for name in SINGLE[:4]]
    assert own[3].shape[0] == 4 * HIDDEN
    assert torch.equal(delta(fused, "single_blocks.0.linear1"), torch.cat(own))
    assert fused["diffusion_model.single_blocks.0.linear1.lora_down.weight"].shape == (12, HIDDEN)


def test_a_part_without_an_adapter_stays_unchanged():
    tensors = lora_tensors([QKV[1], "single_transformer_blocks.0.proj_mlp"], rank=3)
    fused = converted(tensors, "kohya")
    assert fused["lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight"].shape == (3 * HIDDEN, 9)
    change = delta(fused, "double_blocks.0.img_attn.qkv")
    assert torch.equal(change[HIDDEN : 2 * HIDDEN], delta(tensors, QKV[1]))
    assert change[:HIDDEN].count_nonzero() == change[2 * HIDDEN :].count_nonzero() == 0
    change = delta(fused, "single_blocks.0.linear1")
    assert change[: 3 * HIDDEN].count_nonzero() == 0
    assert torch.equal(change[3 * HIDDEN :], delta(tensors, "single_transformer_blocks.0.proj_mlp"))


def test_the_final_modulation_has_scale_and_shift_swapped():
    tensors = lora_tensors(["norm_out.linear"])
    up = tensors["transformer.norm_out.linear.lora_B.weight"]
    theirs = converted(tensors, "kohya")["lora_unet_final_layer_adaLN_modulation_1.lora_up.weight"]
    assert torch.equal(theirs, torch.cat([up[HIDDEN:], up[:HIDDEN]]))


def test_an_adapter_trained_on_a_fused_linear_is_shared_by_its_parts_and_comes_back():
    draw = torch.Generator().manual_seed(3)
    fused = {
        "lora_unet_double_blocks_7_txt_attn_qkv.lora_down.weight": torch.randn(6, HIDDEN, generator=draw),
        "lora_unet_double_blocks_7_txt_attn_qkv.lora_up.weight": torch.randn(3 * HIDDEN, 6, generator=draw),
        "lora_unet_double_blocks_7_txt_attn_qkv.alpha": torch.tensor(6.0),
    }
    split = converted(fused, "diffusers")
    assert len(split) == 6
    change = delta(fused, "double_blocks.7.txt_attn.qkv")
    for i, name in enumerate(("add_q_proj", "add_k_proj", "add_v_proj")):
        part = delta(split, f"transformer_blocks.7.attn.{name}")
        assert torch.equal(part, change[i * HIDDEN : (i + 1) * HIDDEN])
    assert_same(converted(split, "kohya"), fused)


@pytest.mark.parametrize(("alpha", "dtype"), [(4.0, None), (16.0, None), (1.0, torch.float32), (3.0, torch.float32)])
def test_alpha_is_multiplied_into_the_weights_where_that_can_be_undone(alpha, dtype):
    kohya = converted(lora_tensors(module_names(), rank=8, dtype=torch.float16), "kohya")
    kohya |= {key: tensor * alpha / 8 for key, tensor in kohya.items() if key.endswith("alpha")}
    split = converted(kohya, "diffusers", dtype)
    assert {tensor.dtype for tensor in split.values()} == {dtype or torch.float16}
    change, whole = delta(split, QKV[2]), delta(kohya, "double_blocks.0.img_attn.qkv")
    assert torch.equal(change, whole[2 * HIDDEN :])


@pytest.mark.parametrize("alpha", [1.0, 5.0])  # an eighth makes fp16's smallest values smaller than it has
def test_alpha_that_cannot_be_undone_is_refused(alpha):
    kohya = converted(lora_tensors(module_names(), rank=8, dtype=torch.float16), "kohya")
    kohya |= {key: tensor * alpha / 8 for key, tensor in kohya.items() if key.endswith("alpha")}
    with pytest.raises(ExportError, match=r"not the same bit for bit \(rank .*give --dtype float32"):
        converted(kohya, "diffusers")


def test_alpha_of_a_high_rank_is_exact_in_bf16():
    """172 · 3 = 516 would be 516 or 520 in bf16, and the LoRA stronger or weaker than trained."""
    fused = converted(lora_tensors(QKV, rank=172, dtype=torch.bfloat16), "kohya")
    assert float(fused["lora_unet_double_blocks_0_img_attn_qkv.alpha"]) == 516
    assert read_pairs(fused, "kohya")["double_blocks.0.img_attn.qkv"].scale == 1


def test_parts_of_different_ranks_are_refused():
    tensors = lora_tensors(QKV[:1], rank=2) | lora_tensors(QKV[1:], rank=4)
    with pytest.raises(ExportError, match=r"double_blocks\.0\.img_attn\.qkv: its parts have ranks \[2, 4, 4\]"):
        converted(tensors, "kohya")


def test_an_adapter_that_would_be_lost_is_refused():
    tensors = lora_tensors(module_names())
    tensors |= {key: tensor * 0 for key, tensor in tensors.items() if f"transformer.{QKV[1]}." in key}
    with pytest.raises(ExportError, match=r"to_k \(1 in all\): its adapter is all zero"):
        converted(tensors, "kohya")


def test_a_file_keeps_its_metadata_but_not_hashes_of_other_tensors(lora, tmp_path):
    target = tmp_path / "out" / "kohya.safetensors"
    report = convert_file(lora, target, "kohya")
    assert report.line().startswith("loads in: ComfyUI, sd-scripts (")  # diffusers knows FLUX.1's own size only
    assert report.layers == 13
    assert report.ranks == (2, 6, 8)
    with safe_open(target, "pt") as file:
        assert file.metadata() == {"ss_output_name": "shirt", "format": "pt"}
    convert_file(target, tmp_path / "back.safetensors", "diffusers")
    assert_same(load_file(tmp_path / "back.safetensors"), load_file(lora))


def test_a_smaller_dtype_rounds_once(lora, tmp_path):
    target = tmp_path / "half.safetensors"
    assert convert_file(lora, target, "diffusers", torch.bfloat16).dtypes == ("bf16",)
    assert_same(load_file(target), {key: tensor.bfloat16() for key, tensor in load_file(lora).items()})


@pytest.mark.parametrize(
    ("layout", "name", "message"),
    [
        ("kohya", "shirt.safetensors", "may not take the place of what it is made from"),
        ("diffusers", "new.safetensors", "it is in the diffusers layout already"),
        ("peft", "new.safetensors", "layout='peft': must be one of diffusers, kohya, comfyui"),
    ],
)
def test_refusals_write_nothing(lora, layout, name, message):
    before = lora.read_bytes()
    with pytest.raises(ExportError, match=message):
        convert_file(lora, lora.with_name(name), layout)
    assert lora.read_bytes() == before
    assert [path.name for path in lora.parent.iterdir()] == ["shirt.safetensors"]


def test_adapters_of_text_encoders_are_not_dropped_in_silence(lora):
    tensors = load_file(lora) | {"text_encoder.x.lora_A.weight": torch.ones(2, 4)}
    save_file(tensors, lora)
    with pytest.raises(ExportError, match="it holds 1 tensors of text encoders"):
        convert_file(lora, lora.with_name("new.safetensors"), "kohya")


def test_a_failed_write_leaves_what_was_there(lora, monkeypatch):
    target = lora.with_name("kohya.safetensors")
    target.write_bytes(b"earlier")

    def full_disk(_, path, *__):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert_module, "save_file", full_disk)
    with pytest.raises(ExportError, match=r"kohya\.safetensors: cannot be written .*No space left"):
        convert_file(lora, target, "kohya")
    assert target.read_bytes() == b"earlier"
    assert sorted(path.name for path in lora.parent.iterdir()) == ["kohya.safetensors", "shirt.safetensors"]


def command(*arguments):
    import argparse

    parser = argparse.ArgumentParser()
    add_parsers(parser.add_subparsers())
    args = parser.parse_args(["export", *map(str, arguments)])
    return args.run(args)


def test_the_command_names_the_file_so_that_no_resume_takes_it(lora, capsys):
    command(lora, "--to", "kohya", "--dtype", "bfloat16")
    target = lora.with_name("kohya-shirt.safetensors")
    assert not target.name.startswith(lora.stem)
    assert capsys.readouterr().out.startswith(
        f"wrote {target}\nloads in: ComfyUI, sd-scripts (13 layers, ranks 2, 6, 8"
    )
    assert load_file(target)["lora_unet_single_blocks_0_linear2.lora_up.weight"].dtype == torch.bfloat16


def test_the_command_refuses_in_one_line(tmp_path):
    with pytest.raises(ExportError, match=r"absent\.safetensors: cannot be read as safetensors"):
        command(tmp_path / "absent.safetensors", "--to", "kohya")
