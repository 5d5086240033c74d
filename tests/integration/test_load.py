"""The transformer is read weight by weight and quantized on the way, from a folder or from one file as on the hub."""

import copy
import gc
import inspect
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import yaml
from diffusers import FluxTransformer2DModel
from diffusers.loaders import single_file_utils
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch import nn

from coat_core.linear.function import read_weight
from coat_core.linear.module import FP8Linear
from coat_flux.base.names import COAT_TYPE
from coat_flux.blocks.apply import apply_coat
from coat_flux.blocks.cast_loss import WEIGHT_PRECISION
from coat_flux.blocks.held import HeldTensors
from coat_flux.blocks.models.checkpoint import CheckpointError, describe_file, flux_config
from coat_flux.blocks.models.encodings import read_header
from coat_flux.blocks.models.flux1 import FLUX_DEV_TRANSFORMER_CONFIG
from coat_flux.cli.entry import main
from coat_flux.config.coat import COATConfig
from coat_flux.config.findings import ConfigError
from coat_flux.config.job import JobConfig
from coat_flux.config.job_sections import ModelSection
from coat_flux.mini_flux import MINI_FLUX
from coat_flux.plan.job import find_model
from coat_flux.trainers import weights
from coat_flux.trainers.standalone import loading
from coat_flux.trainers.standalone.loading import ModelLoadError, load_encoders, load_transformer
from coat_flux.trainers.standalone.trainer import COATTrainer
from tests.helpers.asserts import assert_all_bitwise
from tests.helpers.engine_job import engine_job, write_images
from tests.helpers.flux2_folder import write_flux2
from tests.helpers.original_layout import GGUF, KINDS, original_state, write_original

BF16, FP32 = torch.bfloat16, torch.float32
SHARDS = 4
PREFIX = "model.diffusion_model."
COATS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "nvfp4": {"weight": {"format": "nvfp4"}},
    "codes that are streamed": {"weight": {"granularity": "per_row"}, "memory": {"stream_blocks": "all"}},
    "weights in bf16": {"weight": {"use_fp8": False}},
}


@pytest.fixture(scope="module")
def mini() -> FluxTransformer2DModel:
    return FluxTransformer2DModel.from_pretrained(MINI_FLUX, subfolder="transformer", torch_dtype=BF16)


@pytest.fixture(scope="module")
def models(mini: FluxTransformer2DModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The mini-FLUX in shards, in one file and in one of the original layout, and a FLUX.2, by name."""
    root = tmp_path_factory.mktemp("models")
    mini.save_pretrained(root / "shards" / "transformer", max_shard_size="2MB")
    assert len(list((root / "shards" / "transformer").glob("*.safetensors"))) == SHARDS
    write_original(mini, root / "original.safetensors", kind="scaled")
    found = {"shards": root / "shards", "one file": MINI_FLUX, "original": root / "original.safetensors"}
    return found | ({"FLUX.2": write_flux2(root / "klein")} if hasattr(diffusers, "Flux2KleinPipeline") else {})


def folder_of(models: dict[str, Path], name: str) -> Path:
    if name not in models:
        pytest.skip("this diffusers has no FLUX.2 klein; 0.37 has")
    return models[name]


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """All that a model holds: parameters and buffers, those outside of the state dict as well."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    """Equal to the bit, of the same classes, and with the same notes on precision."""
    assert_all_bitwise(tensors_of(model), tensors_of(expected))
    assert not any(parameter.requires_grad for parameter in model.parameters())
    modules = dict(expected.named_modules())
    for name, module in model.named_modules():
        assert type(module) is type(modules[name])
        for note in (WEIGHT_PRECISION, "weight_dtype"):
            assert getattr(module, note, None) == getattr(modules[name], note, None)


def whole(path: Path, dtype: torch.dtype, coat: COATConfig | None = None) -> nn.Module:
    if path.is_file():
        model = load_transformer(str(path), dtype)
    else:
        model = diffusers.AutoModel.from_pretrained(str(path), subfolder="transformer", torch_dtype=dtype)
        model.requires_grad_(False)
    if coat is not None:
        apply_coat(model, coat)
    return model


# -- what is loaded ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "dtype"), [("shards", BF16), ("one file", FP32), ("FLUX.2", BF16)], ids=str)
def test_every_tensor_is_what_diffusers_loads(models, name, dtype):
    expected = whole(folder_of(models, name), dtype)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    model = load_transformer(str(models[name]), dtype)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == FP32
    assert_same(model, expected)
    assert not model.training
    assert {**model.config, "_use_default_values": None} == {**expected.config, "_use_default_values": None}


@pytest.mark.parametrize(
    ("name", "coat"), [*(("shards", coat) for coat in COATS), ("original", "nvfp4"), ("FLUX.2", "defaults")]
)
def test_codes_are_those_of_a_model_loaded_whole(models, name, coat):
    folder = folder_of(models, name)
    config = COATConfig.from_dict(COATS[coat])
    model, expected = load_transformer(str(folder), BF16, config), whole(folder, BF16)
    reports = [apply_coat(each, config) for each in (model, expected)]
    assert_same(model, expected)
    assert reports[0].table() == reports[1].table()


def test_memory_holds_the_codes_and_one_weight(models, monkeypatch):
    monkeypatch.setattr(weights, "MAPPED_BYTES", 0)
    monkeypatch.setattr("coat_flux.blocks.apply.note_weight", lambda *_: None)  # takes more than these small weights
    read, maps = weights.Weights.read, []

    def counted(self: weights.Weights, name: str) -> torch.Tensor:
        maps.append(mapped_files(models["shards"]))
        return read(self, name)

    held = HeldTensors()
    gc.collect()

    def filled(*args: Any) -> None:  # without what is made on the meta device
        with held:
            weights.fill(*args)

    monkeypatch.setattr(weights.Weights, "read", counted)
    monkeypatch.setattr(loading, "fill", filled)
    model = load_transformer(str(models["shards"]), BF16, COATConfig())
    codes = sum(tensor.nbytes for tensor in tensors_of(model).values())
    largest = max(m.in_features * m.out_features for m in model.modules() if isinstance(m, nn.Linear))
    original = sum(path.stat().st_size for path in (models["shards"] / "transformer").glob("*.safetensors"))
    assert held.peak < codes + 18 * largest  # what quantizing a weight takes
    assert held.peak < original
    if maps[0] is not None:
        assert max(maps) - maps[0] <= 2 < len(maps)  # of the tensor before, and its module's
        assert mapped_files(models["shards"]) == maps[0]  # those of models that other tests hold
    count = len(maps)
    with pytest.raises(ConfigError, match="matches no linear layer"):  # found before a weight is read
        load_transformer(str(models["shards"]), BF16, COATConfig.from_dict({"activation": {"exclude": ["nothing*"]}}))
    assert len(maps) == count


def mapped_files(folder: Path) -> int | None:
    """How many maps of files in a folder the process has; None where the system does not say."""
    maps = Path("/proc/self/maps")
    return sum(str(folder) in line for line in maps.read_text().splitlines()) if maps.is_file() else None


def test_a_model_in_the_hub_s_cache(models, tmp_path, monkeypatch):
    """Sharded, as the hub's client leaves it: links to blobs; nothing is asked of the network."""
    repository = tmp_path / "models--someone--flux"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "0123abcd" / "transformer"
    for folder in (blobs, snapshot, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123abcd")
    for path in (models["shards"] / "transformer").iterdir():
        shutil.copyfile(path, blobs / path.name)
        os.symlink(blobs / path.name, snapshot / path.name)
    for path in MINI_FLUX.iterdir():
        if path.name != "transformer":
            os.symlink(path, snapshot.parent / path.name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert_same(load_transformer("someone/flux", BF16), whole(models["shards"], BF16))
    assert find_model("someone/flux", "model") is find_model(str(snapshot.parent), "model")
    with pytest.raises(ConfigError, match=r"someone/other.*cache"):
        find_model("someone/other", "model")
    (snapshot / weights.INDEX).unlink()
    with pytest.raises(ModelLoadError, match=f"someone/flux: has no transformer/{weights.WEIGHTS}"):
        load_transformer("someone/flux", BF16)
    with pytest.raises(ModelLoadError, match=r"someone/other: transformer cannot be loaded .*hub id you have access"):
        load_transformer("someone/other", BF16)


# -- one file --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def wide() -> FluxTransformer2DModel:
    """As wide as a block of GGUF's Q4_K."""
    torch.manual_seed(0)
    config = FluxTransformer2DModel.load_config(MINI_FLUX, subfolder="transformer")
    config |= {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 8, "joint_attention_dim": 256}
    return FluxTransformer2DModel.from_config(config).to(BF16)


@pytest.fixture(scope="module")
def diffusers_reader(wide: FluxTransformer2DModel):
    """diffusers' converter, with this model's width in place of FLUX.1-dev's, which is written into it."""
    source = inspect.getsource(single_file_utils.convert_flux_transformer_checkpoint_to_diffusers)
    assert "inner_dim = 3072" in source
    namespace = {"torch": torch}
    exec(source.replace("inner_dim = 3072", f"inner_dim = {wide.inner_dim}"), namespace)
    return namespace["convert_flux_transformer_checkpoint_to_diffusers"]


def named(kind: str, folder: Path) -> Path:
    return folder / f"flux1-dev.{'gguf' if kind in GGUF else 'safetensors'}"


@pytest.mark.parametrize(("prefix", "kind"), [("", ""), (PREFIX, "cast"), *(("", kind) for kind in KINDS[1:])])
def test_every_layout_is_read_as_diffusers_reads_it(wide, diffusers_reader, tmp_path, prefix, kind):
    path = named(kind, tmp_path)
    expected = diffusers_reader(dict(write_original(wide, path, prefix=prefix, kind=kind)))
    model = load_transformer(str(path), torch.bfloat16)
    state = model.state_dict()
    if kind in ("convrot", "mixed"):  # turned back by other sums
        assert state.keys() == expected.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=2**-7, atol=2**-12)
    else:
        assert_all_bitwise(state, expected)
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in model.parameters())
    if not kind:
        assert_all_bitwise(state, wide.state_dict())


TITLES = {"cast": "FP8 e4m3 unscaled", "int8": "INT8", "convrot": "INT8", "nvfp4": "NVFP4", "mixed": ""}


@pytest.mark.parametrize("granularity", ["per_tensor", "per_row"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_files_numbers_are_kept_or_their_loss_is_said(wide, diffusers_reader, tmp_path, kind, granularity):
    path, lines, whole_model = named(kind, tmp_path), [], copy.deepcopy(wide).float()
    meant = diffusers_reader(write_original(whole_model, path, kind=kind))
    whole_model.load_state_dict(meant)
    coat = COATConfig.from_dict({"weight": {"granularity": granularity}})
    model = load_transformer(str(path), BF16, coat, log=lines.append)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, FP8Linear)}
    kept = [name for name, m in linears.items() if torch.equal(read_weight(m, m.config), meant[f"{name}.weight"])]
    (line,) = lines
    assert f"{len(kept)} are used unchanged" in line
    section = ModelSection(name_or_path=str(path))
    said = describe_file(JobConfig(type=COAT_TYPE, training_folder="", model=section, coat=coat))
    title = f"13 in GGUF {kind}" if kind in GGUF else f"13 in {TITLES.get(kind, 'FP8 e4m3 scaled')}"
    assert ("used unchanged" in said, title in said, "dB" in said) == (bool(kept), kind != "mixed", line[-2:] == "dB")
    if kind in ("cast", "scaled", "fp8 noted"):
        assert len(kept) == len(linears)
        return
    assert len(kept) == 0 or kind == "mixed"
    (loss,) = re.findall(r"error of -([\d.]+) dB", line)
    assert 25 < float(loss) < 40  # of a cast to e4m3
    if kind not in ("convrot", "mixed"):
        apply_coat(whole_model.to(BF16), coat)
        assert_all_bitwise(model.state_dict(), whole_model.state_dict())


def test_flux_dev_s_own_shapes_give_its_config():
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
    assert flux_config(shapes) == {**FLUX_DEV_TRANSFORMER_CONFIG, "out_channels": 64}


def test_a_job_trains_on_a_file(mini, tmp_path):
    """With what the file does not hold from the model it was made of, or another that is named."""
    path = tmp_path / "flux1-dev-fp8.safetensors"
    write_original(mini, path, prefix=PREFIX, kind="scaled")
    with pytest.raises(ModelLoadError, match=r"name_or_path=black-forest-labs/FLUX\.1-dev: vae cannot be loaded"):
        load_encoders(str(path), torch.bfloat16)
    raw = engine_job("file", model=path, images=write_images(tmp_path / "photos", 1), out=tmp_path, train={"steps": 1})
    raw["config"]["process"][0]["model"]["extras_name_or_path"] = str(MINI_FLUX)
    assert COATTrainer(raw).train().is_file()
    assert find_model(str(path), "model", str(MINI_FLUX)).elements == find_model(str(MINI_FLUX), "model").elements


def test_check_and_plan_say_what_a_file_is_and_no_command_takes_a_bad_one(mini, tmp_path, capsys):
    path, job, other = tmp_path / "flux1-Q8_0.gguf", tmp_path / "job.yaml", tmp_path / "other"
    raw = engine_job("file", model=path, images=write_images(tmp_path / "photos", 1), out=tmp_path, coat={})
    raw["config"]["process"][0]["model"]["extras_name_or_path"] = str(MINI_FLUX)
    job.write_text(yaml.safe_dump(raw))
    write_original(mini, path, kind="Q8_0")
    said = f"\ntransformer: {path.name}, one file; weights of its blocks: 48 in GGUF Q8_0"
    for command in ("check", "plan"):
        assert main([command, str(job)]) == 0
        assert said in capsys.readouterr().out
    whole_file = path.read_bytes()
    write_original(mini, other)
    for data, words in (
        (whole_file[: len(whole_file) // 2], "is not a whole GGUF file"),
        (other.read_bytes(), "is a .safetensors file by its content; rename it"),
        (whole_file.replace(b"double_blocks.", b"blk.0.xblocks."), "is a language model or text encoder; "),
    ):
        path.write_bytes(data)
        for command in ("check", "plan", "train"):
            assert main([command, str(job)]) == 2
            errors = [line for line in "".join(capsys.readouterr()).splitlines() if "error: " in line]
            assert [words in line for line in errors] == [True]


# -- damaged and foreign weights ---------------------------------------------------------------------------------------
QKV = "double_blocks.0.img_attn.qkv"


def note(text: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda _: torch.tensor(list(text.encode()), dtype=torch.uint8)


def fp8(weight: torch.Tensor) -> torch.Tensor:
    return weight.to(torch.float8_e4m3fn)


OTHER, DAMAGED, FOREIGN = note('{"format": "float8_e5m2"}'), note('{"format": '), note('{"format": "mxfp8"}')
# kind of file, what becomes of tensors of `QKV`, words
SPOILED: dict[str, tuple[str, dict[str, Callable[[torch.Tensor], torch.Tensor] | None], str]] = {
    "a note of another format": ("nvfp4", {"comfy_quant": OTHER, "weight": fp8}, "e5m2, and"),
    "codes of another dtype": ("int8", {"weight": fp8}, "is int8_tensorwise, and holds F8_"),
    "a format of others": ("fp8 noted", {"comfy_quant": FOREIGN}, "as mxfp8, which is not"),
    "no scale": ("int8", {"weight_scale": None}, "has no scale of "),
    "no tensor scale": ("nvfp4", {"weight_scale_2": None}, "has no scale of "),
    "scales of another shape": ("nvfp4", {"weight_scale": lambda scale: scale[:-1]}, "scales of "),
    "a damaged note": ("int8", {"comfy_quant": DAMAGED}, "has a damaged note"),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_file_that_contradicts_itself_is_told_from_its_header(mini, tmp_path, what):
    kind, changes, words = SPOILED[what]
    path = tmp_path / "a.safetensors"
    write_original(mini, path, kind=kind)
    tensors = load_file(path)
    for suffix, change in changes.items():
        tensor = tensors.pop(f"{QKV}.{suffix}")
        if change is not None:
            tensors[f"{QKV}.{suffix}"] = change(tensor)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=words):
        read_header(path).encodings()
    with pytest.raises(ConfigError, match=words):
        find_model(str(path), "model")


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ("double_blocks.0.img_attn.qkv.lora_A.weight", "is a LoRA; give a FLUX.1 checkpoint"),
        ("model.diffusion_model.input_blocks.0.0.weight", "is Stable Diffusion; "),
        ("encoder.block.0.layer.0.SelfAttention.q.weight", "is the text encoder T5; "),
        ("decoder.conv_in.weight", "is a VAE; "),
        ("double_blocks.0.img_attn.qkv.weight.absmax", "is FLUX in a format for inference only; "),
        ("double_blocks.0.img_attn.qkv.weight", "has no tensor img_in.weight; download it again"),
        ("transformer_blocks.0.attn.to_q.weight", "is a transformer in diffusers layout; "),
        ("x", "is an unknown model; "),
        ("img_out.weight", "has a tensor img_out.weight, which FLUX.1 does not have"),
    ],
)
def test_other_files_are_named(mini, tmp_path, tensor, words):
    path, state = tmp_path / "a.safetensors", original_state(mini) if tensor == "img_out.weight" else {}
    save_file({**state, tensor: torch.zeros(4, 4)}, path)
    with pytest.raises(ModelLoadError, match=r"model\.name_or_path=") as caught:
        load_transformer(str(path), torch.bfloat16)
    assert words in str(caught.value)


def test_a_file_that_is_not_whole_is_told_from_its_header(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(64)}, path)
    data = path.read_bytes()
    for name, spoiled, words in (
        ("a.safetensors", data[:-64], "so it is not whole; download it again"),
        ("a.safetensors", data[:4], "is not safetensors"),
        ("a.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        ("a.safetensors", data[:8] + b"\x00" + data[9:], "is not safetensors"),
        ("a.gguf", b"no", r"is not a whole GGUF file .*; download it again"),
    ):
        path = tmp_path / name
        path.write_bytes(spoiled)
        with pytest.raises(CheckpointError, match=words):
            read_header(path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"coat-flux\[gguf\]"):
        read_header(path)


def changed(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / weights.WEIGHTS)
        edit(tensors)
        save_file(tensors, folder / weights.WEIGHTS)

    return change


def cut(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size // 2)


SHAPE = r"has proj_out\.bias of shape \[3\], not \[64\]; download it again"
UNET = '{"_class_name": "UNet2DConditionModel"}'
BAD: dict[str, tuple[str, Callable[[Path], Any], str]] = {  # of what, change of transformer/, words
    "missing": ("one file", changed(lambda t: t.pop("proj_out.bias")), r"lacks proj_out\.bias; download"),
    "unexpected": ("one file", changed(lambda t: t.update(img_out=torch.zeros(1))), "has img_out, which"),
    "wrong shape": ("one file", changed(lambda t: t.update({"proj_out.bias": torch.zeros(3)})), SHAPE),
    "cut": ("shards", cut, r"transformer/diffusion\S+-00002-of-\S+ is .* so it is not whole; download it again"),
    "index": ("shards", lambda f: (f / weights.INDEX).write_text("{}"), "has a damaged .*index.json"),
    "another model": ("one file", lambda f: (f / "config.json").write_text(UNET), "holds a UNet2DConditionModel; "),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_loaded_is_named(models, tmp_path, what):
    name, spoil, words = BAD[what]
    folder = tmp_path / "model"
    spoil(shutil.copytree(models[name] / "transformer", folder / "transformer"))
    with pytest.raises(ModelLoadError, match=words) as caught:
        load_transformer(str(folder), BF16)
    assert str(caught.value).startswith(f"model.name_or_path={folder}: ")
