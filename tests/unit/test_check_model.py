"""The look at a job's model and GPU before it is loaded: what each trainer is told about a folder, file or hub name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from coat_flux.blocks.models.check import EMBEDDED, check_device, check_model
from coat_flux.config.findings import Findings
from coat_flux.mini_flux.folder import EMBEDDED_MODEL, MINI_FLUX

ALONE, AITK = "standalone", "ai-toolkit"
DEV = "black-forest-labs/FLUX.1-dev"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory, an empty hub's cache and no token."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MINI_FLUX, tmp_path / "flux"))


def found(place: Any, trainer: str = ALONE, *, root: Path | None = None, **keys: Any) -> list[str]:
    findings = Findings("f.yaml")
    check_model({"name_or_path": str(place), "is_flux": True, **keys}, "model", findings, trainer, root)
    return [f"{item.severity}: {item.key}: {item.text()}" for item in findings.all]


def edit(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def test_a_whole_folder_and_the_embedded_model_are_fine(model: Path) -> None:
    for trainer in (ALONE, AITK):
        assert found(model, trainer) == found(f"models/{EMBEDDED}", trainer) == []
    assert Path(EMBEDDED_MODEL).name == EMBEDDED


def _shards(model: Path) -> None:
    names = {"a": "x-00001-of-00002.safetensors", "b": "x-00002-of-00002.safetensors"}
    (model / "transformer" / "x.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    save_file({"a": torch.zeros(1)}, model / "transformer" / names["a"])


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


SPOILT = {
    "no T5": (lambda m: shutil.rmtree(m / "text_encoder_2"), "has no text_encoder_2/; give a complete folder"),
    "no scheduler": (lambda m: shutil.rmtree(m / "scheduler"), "has no scheduler/; "),
    "no tokenizer files": (lambda m: (m / "tokenizer_2" / "tokenizer.json").unlink(), "has none of tokenizer.json"),
    "no config": (lambda m: (m / "vae" / "config.json").unlink(), "is missing or not JSON; download the model again"),
    "no weights": (lambda m: next((m / "vae").glob("*.safetensors")).unlink(), "vae has no .safetensors file; "),
    "a shard is missing": (_shards, "has no x-00002-of-00002.safetensors, which x.safetensors.index.json lists"),
    "half a download": (lambda m: _cut(m / "text_encoder_2" / "model.safetensors"), "so it is not whole; download"),
    "SDXL": (lambda m: edit(m / "model_index.json", _class_name="StableDiffusionXLPipeline"), "StableDiffusionXL"),
    "Kontext": (lambda m: edit(m / "model_index.json", _class_name="FluxKontextPipeline"), "arch: flux_kontext"),
    "Fill": (
        lambda m: edit(m / "transformer" / "config.json", in_channels=384),
        "is FLUX.1 Fill, which needs a second",
    ),
    "Depth": (lambda m: edit(m / "transformer" / "config.json", in_channels=128), "is FLUX.1 Depth or Canny"),
    "FLUX.2": (
        lambda m: edit(m / "transformer" / "config.json", _class_name="Flux2Transformer2DModel"),
        "holds a Flux2Transformer2DModel",
    ),
    "T5 of another size": (
        lambda m: edit(m / "text_encoder_2" / "config.json", d_model=512),
        "text_encoder_2 gives 512 features and the transformer takes 128",
    ),
}


@pytest.mark.parametrize("trainer", [ALONE, AITK])
@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_folder_is_one_error(model: Path, name: str, trainer: str) -> None:
    spoil, words = SPOILT[name]
    spoil(model)
    (line,) = found(model, trainer)
    assert line.startswith("error: model.name_or_path: ")
    assert words in line
    assert line.count("; ") == 1


def test_pickles_are_for_ai_toolkit_alone(model: Path) -> None:
    (model / "vae" / "diffusion_pytorch_model.safetensors").rename(model / "vae" / "diffusion_pytorch_model.bin")
    (line,) = found(model)
    assert "only as a pickle (diffusion_pytorch_model.bin)" in line
    assert found(model, AITK) == []


def test_each_folder_has_its_arch_in_ai_toolkit(model: Path) -> None:
    edit(model / "model_index.json", _class_name="FluxKontextPipeline")
    assert found(model, AITK, is_flux=False, arch="flux_kontext") == []
    edit(model / "model_index.json", _class_name="StableDiffusionXLPipeline")
    assert found(model, AITK, is_flux=False, is_xl=True) == []
    (line,) = found(model, AITK, is_flux=False)
    assert "does not fit arch sd1; write model.arch: sdxl, or another folder" in line


def test_folders_around_and_inside_a_model_are_told(model: Path, tmp_path: Path) -> None:
    (line,) = found(model / "transformer")
    assert f"is only the FluxTransformer2DModel of a model; give the folder around it, {model}" in line
    cache = tmp_path / "models--x--flux"
    shutil.copytree(model, cache / "snapshots" / "abc")
    (line,) = found(cache)
    assert f"give {cache / 'snapshots' / 'abc'}, or the model's name on the hub" in line
    files = tmp_path / "unet"
    files.mkdir()
    (files / "flux1-dev.safetensors").write_bytes(b"")
    (line,) = found(files)
    assert f"one file, such as {files / 'flux1-dev.safetensors'}" in line
    (line,) = found(tmp_path / "datasets" / "x")
    assert f"no such folder or file in {tmp_path}; correct the path" in line
    (line,) = found("https://huggingface.co/black-forest-labs/FLUX.1-dev")
    assert "is a web address; write the repository's name" in line


@pytest.mark.parametrize("trainer", [ALONE, AITK])
def test_a_model_behind_an_agreement_is_told_before_the_download(
    trainer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (line,) = found(DEV, trainer)
    assert line.startswith("error: model.name_or_path: asks for an agreement before the download")
    assert line.endswith(f"accept it on https://huggingface.co/{DEV}, then run `hf auth login`")
    (tmp_path / ".env").write_text("HF_TOKEN=hf_x\n")
    assert found(DEV, AITK, root=tmp_path) == []
    monkeypatch.setenv("HF_ENDPOINT", "https://hf-mirror.com")
    (line,) = found(DEV, trainer)
    assert line.startswith("warning: ")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_x")
    assert found(DEV, trainer) == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (line,) = found(DEV, trainer)
    assert "HF_HUB_OFFLINE forbids a download; unset it, or give a folder" in line
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(tmp_path))
    assert found(DEV, trainer) == []


def test_names_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_x")
    (line,) = found("black-forest-labs/FLUX.1-Fill-dev")
    assert line.endswith(f"is FLUX.1 Fill, which is not trained here; write {DEV}")
    kontext = "black-forest-labs/FLUX.1-Kontext-dev"
    (line,) = found(kontext, AITK)
    assert line.endswith("is flux kontext, which does not fit arch flux; write model.arch: flux_kontext")
    assert found(kontext, AITK, is_flux=False, arch="flux_kontext") == []
    (line,) = found("black-forest-labs/FLUX1-dev")
    assert line.endswith(f"did you mean {DEV}?")
    (line,) = found("FLUX.1-dev")
    assert line.startswith("error: ")
    assert line.endswith(f"did you mean {DEV}?")
    (line,) = found("stabilityai/stable-diffusion-xl-base-1.0")
    assert "is Stable Diffusion by its name" in line
    (line,) = found("someone/my-flux")
    assert line.startswith("warning: model.name_or_path: no such folder here, so it is downloaded from the hub")


def test_what_ai_toolkit_loads_of_a_flux2_folder_is_one_file(tmp_path: Path) -> None:
    folder = tmp_path / "klein"
    folder.mkdir()
    (folder / "model_index.json").write_text('{"_class_name": "Flux2KleinPipeline"}', encoding="utf-8")
    (line,) = found(folder, AITK, is_flux=False, arch="flux2_klein_4b")
    assert line.endswith("which ai-toolkit loads for flux2_klein_4b; give the folder of that file")
    (folder / "flux-2-klein-base-4b.safetensors").touch()
    assert found(folder, AITK, is_flux=False, arch="flux2_klein_4b") == []


def test_one_file_is_for_the_stand_alone_trainer(tmp_path: Path, model: Path) -> None:
    from diffusers import FluxTransformer2DModel

    from tests.helpers.original_layout import write_original

    path = tmp_path / "flux1-dev.safetensors"
    write_original(FluxTransformer2DModel.from_pretrained(model, subfolder="transformer"), path, fp8="cast")
    assert found(path, extras_name_or_path=str(model)) == []
    (line,) = found(path)
    assert line.startswith("error: model.extras_name_or_path: asks for an agreement before the download")
    (line,) = found(path, AITK)
    assert "ai-toolkit loads FLUX from a folder in diffusers layout; write black-forest-labs/FLUX.1-dev" in line
    shutil.rmtree(model / "vae")
    (line,) = found(path, extras_name_or_path=str(model))
    assert "has no vae/; " in line
    _cut(path)
    (line,) = found(path)
    assert "so it is not whole; download it again" in line
    for name, words in [("flux.gguf", "made for inference only"), ("flux.ckpt", "is not a .safetensors file")]:
        (tmp_path / name).write_bytes(b"x")
        (line,) = found(tmp_path / name)
        assert words in line


# -- the GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "version", "gpus", "words"),
    [
        ("cuda", None, 0, "the installed torch is built without CUDA, so the run would be on the CPU; install one"),
        ("cuda:0", "13.0", 0, "torch finds no cuda device here, so the run would be on the CPU; run it on"),
        ("cuda:2", "13.0", 2, "torch finds 2 GPUs here, counted from 0; write cuda:0"),
        ("cuda:1", "13.0", 2, None),
        ("cuda", "13.0", 1, None),
        ("cpu", None, 0, None),
        (None, None, 0, None),
    ],
)
def test_a_gpu_that_is_not_here_is_an_error(monkeypatch: pytest.MonkeyPatch, device, version, gpus, words) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    findings = Findings("f.yaml")
    check_device(device, "device", findings)
    assert [words in item.line() for item in findings.errors] == ([] if words is None else [True])
