"""LoRA files: the check after a save, other key layouts and back to the bit, and diffusers' own hands on them."""

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from diffusers.loaders import FluxLoraLoaderMixin
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from coat_flux.blocks.models.flux1 import make_flux_dev_geometry
from coat_flux.cli.entry import main
from coat_flux.export import lora_files
from coat_flux.trainers.ai_toolkit.resume import read_back
from tests.helpers.asserts import assert_all_bitwise
from tests.tolerances import LORA_DELTA_RTOL, LORA_NORM_RTOL

QKV = [f"transformer_blocks.0.attn.{name}" for name in ("to_q", "to_k", "to_v")]
Q = "transformer.transformer_blocks.0.attn.to_q"
FLUX_HIDDEN = 3072
HIDDEN = 64
OTHER_SIZE = 48  # features not in proportion to the hidden size: embedders' inputs, the final layer's outputs

DOUBLE = (
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj")),
    *("attn.to_add_out", "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    *("norm1.linear", "norm1_context.linear"),
)
SINGLE = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp", "proj_out", "norm.linear")
OUTSIDE = (
    *("x_embedder", "context_embedder", "norm_out.linear", "proj_out"),
    *(f"time_text_embed.{kind}_embedder.linear_{i}" for kind in ("timestep", "text", "guidance") for i in (1, 2)),
)


def module_names(double: int = 1, single: int = 1) -> list[str]:
    """diffusers' names of the linears inside the blocks, in module order."""
    return [f"transformer_blocks.{i}.{name}" for i in range(double) for name in DOUBLE] + [
        f"single_transformer_blocks.{i}.{name}" for i in range(single) for name in SINGLE
    ]


def lora_tensors(
    modules: Iterable[str], rank: int = 2, dtype: torch.dtype = torch.float32, hidden: int = HIDDEN, seed: int = 0
) -> dict[str, Tensor]:
    """A nonzero LoRA: `transformer.<module>.lora_A.weight` [rank, in] and `.lora_B.weight` [out, rank]."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for module in modules:
        linear, part = lora_files.place_of(module)
        width, height = linear.width * hidden or OTHER_SIZE, lora_files.height_of(linear, part) * hidden or OTHER_SIZE
        tensors[f"transformer.{module}.lora_A.weight"] = torch.randn(rank, width, generator=draw).to(dtype)
        tensors[f"transformer.{module}.lora_B.weight"] = torch.randn(height, rank, generator=draw).to(dtype)
    return tensors


def converted(tensors, layout, dtype=None):
    source = lora_files.layout_of(tensors)
    return lora_files.write_pairs(
        lora_files.convert_pairs(lora_files.read_pairs(tensors, source), source, layout, dtype), layout
    )


def delta(tensors, module):
    pair = lora_files.read_pairs(tensors, lora_files.layout_of(tensors))[module]
    return pair.scale * (pair.up.double() @ pair.down.double())


@pytest.fixture
def tensors():
    return lora_tensors(module_names(), dtype=torch.float16)


@pytest.fixture
def check(tmp_path):
    def check_tensors(tensors, **options):
        path = tmp_path / "lora.safetensors"
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
        return lora_files.check_export(path, **options)

    return check_tensors


@pytest.fixture
def lora(tmp_path):
    path, metadata = tmp_path / "shirt.safetensors", {"ss_output_name": "shirt", "sshs_model_hash": "0123"}
    save_file(lora_tensors(module_names()), path, metadata | {"format": "pt"})
    return path


def test_the_largest_delta_is_the_norm_of_the_product(check, tensors):
    norms = {}
    for key, up in tensors.items():
        if "lora_B" in key:
            down = tensors[key.replace("lora_B", "lora_A")]
            norms[key.removesuffix(".lora_B.weight")] = float((up.double() @ down.double()).norm())
    report = check(tensors)
    assert report.largest == max(norms, key=norms.get)
    assert report.largest_norm == pytest.approx(max(norms.values()), rel=LORA_NORM_RTOL)
    tiny = check({key: tensor.float() * 1e-25 for key, tensor in tensors.items()})  # the product underflows in fp32
    assert 0 < tiny.largest_norm < 1e-40
    assert tiny.idle == []


def test_idle_layers_text_encoders_and_alpha_are_told(check, tensors):
    tensors[f"{Q}.lora_B.weight"].zero_()
    tensors["lora_te1.text_model.encoder.layers.0.mlp.fc1.lora_A.weight"] = torch.ones(2, 4)
    tensors[f"{Q}.alpha"] = torch.tensor(1.0)
    report = check(tensors)
    assert (report.layers, report.idle, report.others) == (20, ["transformer_blocks.0.attn.to_q"], 1)
    assert report.programs == ["diffusers", "ComfyUI"]
    assert report.refusals.keys() == {"ai-toolkit"}  # it ignores alpha
    assert "1 layers change nothing" in report.line()


def test_a_lora_without_effect_is_refused(check, tensors):
    with pytest.raises(lora_files.ExportError, match=r"lora\.safetensors: all 20 adapters"):
        check({key: tensor * 0 if "lora_B" in key else tensor for key, tensor in tensors.items()})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (f"{Q}.lora_B.weight", None, "to_q: its up matrix"),
        (f"{Q}.lora_A.weight", None, "to_q: its down matrix"),
        (f"{Q}.lora_A.weight", torch.ones(3, HIDDEN), r"down \(3, 64\) and up \(64, 2\)"),
        (f"{Q}.lora_A.weight", torch.ones(2, 1, HIDDEN), r"\[r, K\] and \[N, r\]"),
        (f"{Q}.lora_A.weight", torch.ones(2, HIDDEN).int(), r"torch\.int32"),
        (f"{Q}.lora_A.weight", torch.full((2, HIDDEN), math.nan), r"0\.attn\.to_q: .*NaN"),
        (f"{Q}.lora_B.weight", torch.full((HIDDEN, 2), -math.inf), r"0\.attn\.to_q: .*NaN"),
        (f"{Q}.lora_A.weight", torch.ones(2, 32), "to_q: .* hidden size 64"),
        (f"{Q}.lora_B.weight", torch.ones(65, 2), "to_q: .* hidden size 64"),
        (f"{Q}.lora_down.weight", torch.ones(2, HIDDEN), "two down matrices"),
        (f"{Q}.dora_scale", torch.ones(1), "dora_scale: .*plain LoRA"),
        ("transformer.blocks.0.q.lora_A.weight", torch.ones(2, 64), "no such linear"),
        ("unet.x.lora_down.weight", torch.ones(2, 4), r"1 of 41 keys .*'unet\.x"),
        (f"{Q}.alpha", torch.zeros(1), r"alpha=\[0\.0\]"),
    ],
)
def test_what_is_not_a_lora_of_flux_is_refused(check, tensors, key, value, message):
    with pytest.raises(lora_files.ExportError, match=message):
        check({name: tensor for name, tensor in {**tensors, key: value}.items() if tensor is not None})


def test_what_is_not_what_was_trained_is_refused(check, tensors):
    trained = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    with pytest.raises(lora_files.ExportError, match=r"shape \(4, 64\), trained was \(2, 64\)"):
        check({**tensors, f"{Q}.lora_A.weight": torch.ones(4, HIDDEN)}, expected=trained)
    del tensors[f"{Q}.lora_B.weight"]
    with pytest.raises(lora_files.ExportError, match=r"to_q\.lora_B\.weight is missing"):
        check(tensors, expected=trained)


def test_files_of_other_kinds_are_refused(tmp_path, tensors):
    path = tmp_path / "lora.safetensors"
    save_file(tensors, path)
    torn = path.read_bytes()[:-1000]
    path.unlink()
    for content in (None, b"", torn):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(lora_files.ExportError, match=r"lora\.safetensors: cannot be read"):
            lora_files.check_export(path)
    with pytest.raises(lora_files.ExportError, match="is a folder"):
        lora_files.check_export(tmp_path)
    with pytest.raises(lora_files.ExportError, match="holds nothing"):
        lora_files.layout_of({})


def test_outside_the_blocks_kohya_is_lost_on_others(check):
    """diffusers' converter drops or refuses them; sd-scripts makes modules of embedders, none of the final layer."""
    tensors = lora_tensors([*OUTSIDE, "transformer_blocks.0.norm1.linear"])
    embedders = {key: tensor for key, tensor in tensors.items() if "out" not in key}
    assert check(converted(embedders, "kohya")).programs == ["ComfyUI", "sd-scripts"]
    report = check(tensors)
    assert (report.programs, report.layers) == (["diffusers", "ComfyUI", "ai-toolkit"], 11)
    report = check(converted(tensors, "kohya"))
    assert (report.programs, report.refusals.keys()) == (["ComfyUI"], {"diffusers", "sd-scripts"})


@settings(max_examples=20)
@given(
    modules=st.sets(st.sampled_from([*module_names(2, 3), *OUTSIDE]), min_size=1),
    rank=st.integers(1, 7),
    zero_up=st.booleans(),
    layout=st.sampled_from(["kohya", "comfyui"]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_any_part_of_the_linears_comes_back_bit_for_bit(modules, rank, zero_up, layout, dtype):
    tensors = lora_tensors(sorted(modules), rank=rank, dtype=dtype)
    if zero_up:  # a LoRA before its first step
        tensors = {key: tensor * 0 if "lora_B" in key else tensor for key, tensor in tensors.items()}
    assert_all_bitwise(converted(converted(tensors, layout), "diffusers"), tensors)


def test_an_adapter_trained_on_a_fused_linear_is_shared_by_its_parts_and_comes_back():
    draw, name = torch.Generator().manual_seed(3), "lora_unet_double_blocks_7_txt_attn_qkv"
    fused = {
        f"{name}.lora_down.weight": torch.randn(6, HIDDEN, generator=draw),
        f"{name}.lora_up.weight": torch.randn(3 * HIDDEN, 6, generator=draw),
        f"{name}.alpha": torch.tensor(6.0),
    }
    split = converted(fused, "diffusers")
    assert len(split) == 6
    change = delta(fused, "double_blocks.7.txt_attn.qkv")
    for i, part in enumerate(("add_q_proj", "add_k_proj", "add_v_proj")):
        of_part = delta(split, f"transformer_blocks.7.attn.{part}")
        assert torch.equal(of_part, change[i * HIDDEN : (i + 1) * HIDDEN])
    assert_all_bitwise(converted(split, "kohya"), fused)


def with_alpha(alpha):
    kohya = converted(lora_tensors(module_names(), rank=8, dtype=torch.float16), "kohya")
    return kohya | {key: tensor * alpha / 8 for key, tensor in kohya.items() if key.endswith("alpha")}


def test_alpha_is_multiplied_into_the_weights_where_that_can_be_undone():
    for alpha, dtype in ((16.0, None), (3.0, torch.float32)):
        split = converted(with_alpha(alpha), "diffusers", dtype)
        assert {tensor.dtype for tensor in split.values()} == {dtype or torch.float16}
        change, whole = delta(split, QKV[2]), delta(with_alpha(alpha), "double_blocks.0.img_attn.qkv")
        assert torch.equal(change, whole[2 * HIDDEN :])
    with pytest.raises(lora_files.ExportError, match="give --dtype float32"):
        converted(with_alpha(5.0), "diffusers")


def test_alpha_of_a_high_rank_is_exact_in_bf16():
    """172 · 3 = 516 would be 516 or 520 in bf16, and the LoRA stronger or weaker than trained."""
    fused = converted(lora_tensors(QKV, rank=172, dtype=torch.bfloat16), "kohya")
    assert float(fused["lora_unet_double_blocks_0_img_attn_qkv.alpha"]) == 516
    assert lora_files.read_pairs(fused, "kohya")["double_blocks.0.img_attn.qkv"].scale == 1


def test_parts_of_different_ranks_and_an_adapter_that_would_be_lost_are_refused():
    with pytest.raises(lora_files.ExportError, match=r"double_blocks\.0\.img_attn\.qkv: .*\[2, 4, 4\]"):
        converted(lora_tensors(QKV[:1], rank=2) | lora_tensors(QKV[1:], rank=4), "kohya")
    tensors = lora_tensors(module_names())
    tensors |= {key: tensor * 0 for key, tensor in tensors.items() if f"transformer.{QKV[1]}." in key}
    with pytest.raises(lora_files.ExportError, match=r"to_k \(1 in all\)"):
        converted(tensors, "kohya")


def test_a_file_keeps_its_metadata_but_not_hashes_of_other_tensors(lora, tmp_path):
    target = tmp_path / "out" / "kohya.safetensors"
    report = lora_files.convert_file(lora, target, "kohya")
    assert report.programs == ["ComfyUI", "sd-scripts"]  # diffusers knows FLUX.1's own size only
    assert (report.layers, report.ranks) == (13, [2, 6, 8])
    with safe_open(target, "pt") as file:
        assert file.metadata() == {"ss_output_name": "shirt", "format": "pt"}
    lora_files.convert_file(target, tmp_path / "back.safetensors", "diffusers")
    assert_all_bitwise(load_file(tmp_path / "back.safetensors"), load_file(lora))


@pytest.mark.parametrize(
    ("layout", "name", "message"),
    [
        ("kohya", "shirt.safetensors", "--out"),
        ("diffusers", "new.safetensors", "diffusers layout already"),
        ("peft", "new.safetensors", "layout='peft'"),
        ("kohya", "text.safetensors", "1 tensors of text encoders"),
    ],
)
def test_refusals_write_nothing(lora, layout, name, message):
    if name == "text.safetensors":
        save_file(load_file(lora) | {"text_encoder.x.lora_A.weight": torch.ones(2, 4)}, lora)
    before = lora.read_bytes()
    with pytest.raises(lora_files.ExportError, match=message):
        lora_files.convert_file(lora, lora.with_name(name), layout)
    assert lora.read_bytes() == before
    assert [path.name for path in lora.parent.iterdir()] == ["shirt.safetensors"]


def test_a_failed_write_leaves_what_was_there(lora, monkeypatch):
    target = lora.with_name("kohya.safetensors")
    target.write_bytes(b"earlier")
    monkeypatch.setattr(lora_files, "save_file", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(lora_files.ExportError, match=r"kohya\.safetensors: .*No space left"):
        lora_files.convert_file(lora, target, "kohya")
    assert target.read_bytes() == b"earlier"


def test_the_command_names_the_file_so_that_no_resume_takes_it(lora, capsys):
    assert main(["export", str(lora), "--to", "kohya", "--dtype", "bfloat16"]) == 0
    target = lora.with_name("kohya-shirt.safetensors")
    assert not target.name.startswith(lora.stem)
    assert capsys.readouterr().out.startswith(f"wrote {target}\nloads in: ComfyUI, sd-scripts (13 layers")
    assert load_file(target)["lora_unet_single_blocks_0_linear2.lora_up.weight"].dtype == torch.bfloat16


def test_every_linear_of_flux_has_its_two_names_and_its_size():
    modules = make_flux_dev_geometry("meta").named_modules()
    flux_dev = {name: module for name, module in modules if isinstance(module, nn.Linear)}
    for name, module in flux_dev.items():
        linear, part = lora_files.place_of(name)
        assert linear.members[part] == name
        assert lora_files.place_of(linear.name, "comfyui") == (linear, None)
        assert lora_files.place_of(linear.name.replace(".", "_"), "kohya") == (linear, None)
        assert lora_files.height_of(linear, part) in (0, module.out_features / FLUX_HIDDEN), name
        assert linear.width in (0, module.in_features / FLUX_HIDDEN), name
    assert len(flux_dev) == 504
    assert len({lora_files.place_of(name)[0].name for name in flux_dev}) == 19 * 10 + 38 * 3 + 10


def effect(tensors, module, probe):
    down, up = (tensors[f"transformer.{module}.{half}.weight"].double() for half in ("lora_A", "lora_B"))
    return up @ (down @ probe[: down.shape[1]])


@pytest.mark.parametrize(("layout", "blocks"), [("kohya", (19, 38)), ("comfyui", (1, 2))])
def test_diffusers_own_converter_finds_the_same_deltas_in_all_of_flux(layout, blocks):
    modules = module_names(*blocks)
    tensors = lora_tensors(modules, rank=1, hidden=FLUX_HIDDEN)
    theirs = FluxLoraLoaderMixin.lora_state_dict(converted(tensors, layout))
    assert theirs.keys() == tensors.keys()
    probe = torch.randn(5 * FLUX_HIDDEN, 2, dtype=torch.float64)
    for module in modules:
        ours = effect(tensors, module, probe)
        torch.testing.assert_close(effect(theirs, module, probe), ours, rtol=LORA_DELTA_RTOL, atol=0)


def test_the_final_layer_has_diffusers_order_of_scale_and_shift():
    tensors = lora_tensors(["norm_out.linear", "proj_out", "transformer_blocks.0.norm1.linear"])
    kohya = converted(tensors, "kohya")
    up = tensors["transformer.norm_out.linear.lora_B.weight"]
    swapped = kohya["lora_unet_final_layer_adaLN_modulation_1.lora_up.weight"]
    assert torch.equal(swapped, torch.cat([up[HIDDEN:], up[:HIDDEN]]))
    try:
        theirs = FluxLoraLoaderMixin.lora_state_dict(kohya)
    except ValueError as error:  # diffusers 0.36
        pytest.skip(f"this diffusers takes no LoRA on kohya's final layer: {error}")
    for name in ("norm_out.linear", "proj_out"):
        for half in ("lora_A", "lora_B"):
            ours = tensors[f"transformer.{name}.{half}.weight"]
            assert torch.equal(theirs[f"{name}.{half}.weight"], ours)


def test_a_lora_of_ai_toolkit_is_read_back_unless_it_is_still_zero(tmp_path):
    up = nn.Linear(4, 8, bias=False)
    nn.init.zeros_(up.weight)
    process: Any = SimpleNamespace(
        _full=None,
        model_config=SimpleNamespace(is_flux=True),
        network_config=SimpleNamespace(type="LoRA"),
        network=nn.ModuleDict({"block_lora_up": up}),
    )
    assert read_back(process, tmp_path) == ["the LoRA is still zero"]
    nn.init.ones_(up.weight)
    assert read_back(process, tmp_path) == []
    process.network_config.type = "lokr"
    assert read_back(process, tmp_path) == ["not read back: not a LoRA of FLUX"]
