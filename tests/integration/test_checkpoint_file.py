"""FLUX.1 in one file, as on the hub and as ComfyUI users have it, in the stand-alone trainer."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.loaders import single_file_utils
from safetensors.torch import save_file

from coat_flux.blocks.models.checkpoint import CheckpointError, flux_config, read_header
from coat_flux.blocks.models.flux1 import FLUX_DEV_TRANSFORMER_CONFIG, make_flux_dev_geometry
from coat_flux.mini_flux import MINI_FLUX
from coat_flux.trainers.standalone.loading import ModelLoadError, load_encoders, load_transformer
from coat_flux.trainers.standalone.trainer import COATTrainer
from tests.helpers.asserts import assert_all_bitwise
from tests.helpers.engine_job import engine_job, write_images
from tests.helpers.original_layout import original_state, write_original

PREFIX = "model.diffusion_model."


@pytest.fixture(scope="module")
def mini() -> FluxTransformer2DModel:
    return FluxTransformer2DModel.from_pretrained(MINI_FLUX, subfolder="transformer", torch_dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def diffusers_reader(mini: FluxTransformer2DModel):
    """diffusers' converter, with the mini-FLUX's width in place of FLUX.1-dev's, which is written into it."""
    source = inspect.getsource(single_file_utils.convert_flux_transformer_checkpoint_to_diffusers)
    assert "inner_dim = 3072" in source
    namespace = {"torch": torch}
    exec(source.replace("inner_dim = 3072", f"inner_dim = {mini.inner_dim}"), namespace)
    return namespace["convert_flux_transformer_checkpoint_to_diffusers"]


@pytest.mark.parametrize(("prefix", "fp8"), [("", ""), (PREFIX, "cast"), ("", "scaled")])
def test_every_layout_is_read_as_diffusers_reads_it(mini, diffusers_reader, tmp_path: Path, prefix, fp8) -> None:
    path = tmp_path / "flux1-dev.safetensors"
    meant = write_original(mini, path, prefix=prefix, fp8=fp8)
    expected = diffusers_reader(dict(meant))
    model = load_transformer(str(path), torch.bfloat16)
    state = model.state_dict()
    assert_all_bitwise(state, expected)
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in model.parameters())
    if not fp8:
        assert_all_bitwise(state, mini.state_dict())


def test_flux_dev_s_own_shapes_give_its_config() -> None:
    d, head, mlp = 3072, 128, 12288
    shapes = {
        "img_in.weight": [d, 64],
        "txt_in.weight": [d, 4096],
        "vector_in.in_layer.weight": [d, 768],
        "guidance_in.in_layer.weight": [d, 256],
        "final_layer.linear.weight": [64, d],
        "double_blocks.0.img_attn.norm.query_norm.scale": [head],
        **{f"double_blocks.{i}.img_attn.qkv.weight": [3 * d, d] for i in range(19)},
        **{f"single_blocks.{i}.linear1.weight": [3 * d + mlp, d] for i in range(38)},
    }
    config = flux_config({name: {"shape": shape} for name, shape in shapes.items()})
    expected = {**FLUX_DEV_TRANSFORMER_CONFIG, "out_channels": 64}
    assert {**config, "axes_dims_rope": tuple(config["axes_dims_rope"])} == expected


def test_a_job_trains_on_a_file(mini, tmp_path: Path) -> None:
    """With what the file does not hold from the model it was made of, or another that is named."""
    path = tmp_path / "flux1-dev-fp8.safetensors"
    write_original(mini, path, prefix=PREFIX, fp8="scaled")
    with pytest.raises(ModelLoadError, match=r"name_or_path=black-forest-labs/FLUX\.1-dev: vae cannot be loaded"):
        load_encoders(str(path), torch.bfloat16)
    raw = engine_job("file", model=path, images=write_images(tmp_path / "photos", 1), out=tmp_path, train={"steps": 1})
    raw["config"]["process"][0]["model"]["extras_name_or_path"] = str(MINI_FLUX)
    assert COATTrainer(raw).train().is_file()


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"double_blocks.0.img_attn.qkv.lora_A.weight": (4, 4)}, "is a LoRA; give a FLUX.1 checkpoint"),
        ({"model.diffusion_model.input_blocks.0.0.weight": (4, 4)}, "is Stable Diffusion; "),
        ({"encoder.block.0.layer.0.SelfAttention.q.weight": (4, 4)}, "is the text encoder T5; "),
        ({"decoder.conv_in.weight": (4, 4)}, "is a VAE; "),
        ({"double_blocks.0.img_attn.qkv.weight.absmax": (4,)}, "is FLUX in a format for inference only; "),
        ({"double_blocks.0.img_attn.qkv.weight": (12, 4)}, "has no tensor img_in.weight; download it again"),
        ({"transformer_blocks.0.attn.to_q.weight": (4, 4)}, "is a transformer in diffusers layout; "),
        ({"x": (1,)}, "is an unknown model; "),
    ],
)
def test_other_files_are_named(tmp_path: Path, tensors, words) -> None:
    path = tmp_path / "a.safetensors"
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, path)
    with pytest.raises(ModelLoadError, match=r"model\.name_or_path=") as caught:
        load_transformer(str(path), torch.bfloat16)
    assert words in str(caught.value)


def test_a_file_that_is_not_whole_is_told_from_its_header(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(64)}, path)
    data = path.read_bytes()
    for spoiled, words in (
        (data[:-64], "so it is not whole; download it again"),
        (data[:4], "is not a safetensors file, or only the start of one"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        (data[:8] + b"\x00" + data[9:], "has a damaged header"),
    ):
        path.write_bytes(spoiled)
        with pytest.raises(CheckpointError, match=words):
            read_header(path)


def test_a_tensor_too_many_is_named(mini, tmp_path: Path) -> None:
    path, state = tmp_path / "a.safetensors", original_state(mini)
    save_file({**state, "img_out.weight": torch.zeros(1)}, path)
    with pytest.raises(ModelLoadError, match=r"has a tensor img_out\.weight, which FLUX\.1 does not have"):
        load_transformer(str(path), torch.bfloat16)


# -- its geometry with random weights --------------------------------------------------------------------------------


def test_flux_dev_geometry_has_its_parameters_and_is_filled_on_the_device():
    model = make_flux_dev_geometry("meta", torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_901_408_320
    small = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 1, "joint_attention_dim": 32}
    model = make_flux_dev_geometry("cpu", torch.bfloat16, **small)
    assert {(p.device.type, p.dtype, p.requires_grad) for p in model.parameters()} == {("cpu", torch.bfloat16, False)}
    weight = model.transformer_blocks[0].ff.net[0].proj.weight
    assert weight.float().std().item() == pytest.approx(128**-0.5, rel=0.02)
    assert torch.equal(model.transformer_blocks[0].attn.norm_q.weight, torch.ones(128, dtype=torch.bfloat16))
    assert torch.equal(weight, make_flux_dev_geometry("cpu", **small).transformer_blocks[0].ff.net[0].proj.weight)
