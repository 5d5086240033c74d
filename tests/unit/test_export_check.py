"""The check after a save: what it says of a sound LoRA, and every way in which one is refused."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from safetensors.torch import save_file

from coat_flux.export.check import check_export
from coat_flux.export.layouts import ExportError
from tests.helpers.lora_files import HIDDEN, OUTSIDE, lora_tensors, module_names
from tests.tolerances import LORA_NORM_RTOL

Q = "transformer.transformer_blocks.0.attn.to_q"


@pytest.fixture
def tensors():
    return lora_tensors(module_names(), dtype=torch.float16)


@pytest.fixture
def check(tmp_path):
    def check_tensors(tensors, **options):
        path = tmp_path / "lora.safetensors"
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
        return check_export(path, **options)

    return check_tensors


def test_a_sound_lora(check, tensors):
    report = check(tensors, expected={key: tensor.shape for key, tensor in tensors.items()})
    assert report.programs == ("diffusers", "ComfyUI", "ai-toolkit")
    assert (report.layers, report.ranks, report.dtypes, report.idle) == (20, (2,), ("fp16",), ())
    assert report.line() == (
        "loads in: diffusers, ComfyUI, ai-toolkit (20 layers, rank 2, fp16, "
        f"largest delta norm {report.largest_norm:.2g} in {report.largest})"
    )


def test_the_largest_delta_is_the_norm_of_the_product(check, tensors):
    products = {
        key.removesuffix(".lora_B.weight"): tensor.double() @ tensors[key.replace("lora_B", "lora_A")].double()
        for key, tensor in tensors.items()
        if "lora_B" in key
    }
    norms = {module: float(product.norm()) for module, product in products.items()}
    report = check(tensors)
    assert report.largest == max(norms, key=norms.get)
    assert report.largest_norm == pytest.approx(max(norms.values()), rel=LORA_NORM_RTOL)


def test_a_delta_below_the_square_root_of_the_smallest_float_is_not_zero(check):
    tensors = {key: tensor * 1e-25 for key, tensor in lora_tensors(module_names()).items()}
    report = check(tensors)
    assert 0 < report.largest_norm < 1e-40
    assert report.idle == ()


def test_layers_that_change_nothing_are_counted(check, tensors):
    tensors[f"{Q}.lora_B.weight"].zero_()
    report = check(tensors)
    assert report.idle == ("transformer_blocks.0.attn.to_q",)
    assert report.line().endswith("; 1 layers change nothing, first transformer_blocks.0.attn.to_q")


@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_a_lora_without_effect_is_refused(check, tensors, half):
    with pytest.raises(ExportError, match=r"lora\.safetensors: all 20 adapters change nothing .*check train\.lr"):
        check({key: tensor * 0 if half in key else tensor for key, tensor in tensors.items()})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_values_that_are_not_finite_are_refused(check, tensors, half, value):
    tensors[f"{Q}.{half}.weight"][1, 1] = value
    with pytest.raises(ExportError, match=r"0\.attn\.to_q: its \w+ matrix holds NaN or infinity"):
        check(tensors)


def _without(key):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name != key}


def _with(key, tensor):
    return lambda tensors: {**tensors, key: tensor}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without(f"{Q}.lora_B.weight"), r"to_q: its up matrix is missing"),
        (_without(f"{Q}.lora_A.weight"), r"to_q: its down matrix is missing"),
        (_with(f"{Q}.lora_A.weight", torch.ones(3, HIDDEN)), r"down \(3, 64\) and up \(64, 2\): must be \[r, K\]"),
        (_with(f"{Q}.lora_A.weight", torch.ones(2, 1, HIDDEN)), r"must be \[r, K\] and \[N, r\]"),
        (_with(f"{Q}.lora_A.weight", torch.ones(2, HIDDEN).int()), r"torch\.int32: must be float16, bfloat16"),
        (_with(f"{Q}.lora_A.weight", torch.ones(2, 32)), r"to_q: .* do not fit hidden size 64"),
        (_with(f"{Q}.lora_B.weight", torch.ones(65, 2)), r"to_q: .* do not fit hidden size 64"),
        (_with(f"{Q}.lora_down.weight", torch.ones(2, HIDDEN)), r"two down matrices of transformer_blocks\.0"),
        (_with(f"{Q}.dora_scale", torch.ones(1)), r"dora_scale: ends in none of .*; only plain LoRA"),
        (_with("transformer.blocks.0.q.lora_A.weight", torch.ones(2, 64)), r"FLUX has no such linear"),
        (_with("transformer.single_transformer_blocks.00.proj_mlp.lora_A.weight", torch.ones(2, 64)), "no such linear"),
        (_with("unet.x.lora_down.weight", torch.ones(2, 4)), r"1 of 41 keys are of no known layout .*'unet\.x"),
        (_with(f"{Q}.alpha", torch.zeros(1)), r"alpha=\[0\.0\]: must be one number above 0"),
        (_with(f"{Q}.alpha", torch.ones(2)), r"alpha=\[1\.0, 1\.0\]: must be one number above 0"),
        (lambda _: {}, "it holds nothing of a transformer"),
    ],
)
def test_what_is_not_a_lora_of_flux_is_refused(check, tensors, change, message):
    with pytest.raises(ExportError, match=message):
        check(change(tensors))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without(f"{Q}.lora_B.weight"), r"to_q\.lora_B\.weight is missing from the file \(1 such keys\)"),
        (_with("transformer.x_embedder.lora_A.weight", torch.ones(2, 64)), r"x_embedder\.lora_A.* is unexpected in"),
        (_with(f"{Q}.lora_A.weight", torch.ones(4, HIDDEN)), r"has shape \(4, 64\), trained was \(2, 64\)"),
    ],
)
def test_what_is_not_what_was_trained_is_refused(check, tensors, change, message):
    with pytest.raises(ExportError, match=message):
        check(change(tensors), expected={key: tuple(tensor.shape) for key, tensor in tensors.items()})


@pytest.mark.parametrize("content", [b"", b"torn", pickle.dumps({"a": 1}), b"\xff" * 64, None])
def test_files_of_other_kinds_are_refused(tmp_path, content):
    path = tmp_path / "lora.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ExportError, match=r"lora\.safetensors: cannot be read as safetensors"):
        check_export(path)


def test_a_torn_file_is_refused(tmp_path, tensors):
    path = tmp_path / "lora.safetensors"
    save_file(tensors, path)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ExportError, match="cannot be read as safetensors"):
        check_export(path)


def test_adapters_of_text_encoders_are_counted_only(check, tensors):
    tensors["lora_te1.text_model.encoder.layers.0.mlp.fc1.lora_A.weight"] = torch.ones(2, 4)
    report = check(tensors)
    assert (report.layers, report.others) == (20, 1)
    assert report.line().endswith("; 1 tensors of text encoders were not looked at")


def test_ai_toolkit_would_lose_an_alpha(check, tensors):
    tensors[f"{Q}.alpha"] = torch.tensor(1.0)
    report = check(tensors)
    assert report.programs == ("diffusers", "ComfyUI")
    assert report.line().endswith("; not in ai-toolkit: it ignores alpha; convert with --to diffusers")


def test_outside_the_blocks_kohya_is_lost_on_others(check):
    """In diffusers' converter embedders and the final layer lose their prefix; what has none is dropped or refused.

    diffusers 0.36 refuses the whole file for an alpha it cannot place.
    """
    from coat_flux.export.convert import convert_pairs
    from coat_flux.export.layouts import read_pairs, write_pairs

    tensors = lora_tensors([*OUTSIDE, "transformer_blocks.0.norm1.linear"])
    report = check(tensors)
    assert (report.programs, report.layers) == (("diffusers", "ComfyUI", "ai-toolkit"), 11)
    report = check(write_pairs(convert_pairs(read_pairs(tensors, "diffusers"), "diffusers", "kohya"), "kohya"))
    assert report.programs == ("ComfyUI",)
    assert set(report.refusals) == {"diffusers", "sd-scripts"}
    assert report.refusals["sd-scripts"] == "it has no adapters outside the blocks"
    drops, refuses = "it drops norm_out.linear without a word", "it refuses the file (ValueError: Incompatible keys"
    assert report.refusals["diffusers"].startswith((drops, refuses))


def test_without_diffusers_the_check_goes_on_and_says_so(check, tensors, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "diffusers.loaders", None)
    report = check(tensors)
    assert report.programs == ("ComfyUI", "ai-toolkit")
    assert report.refusals["diffusers"].startswith("not checked, it cannot be imported (")
