"""The look at a job's model, `model.arch` and GPU before it is loaded: what each trainer is told about them."""

import json
import os
import shutil
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import diffusers
import pytest
import torch
from safetensors.torch import save_file

from coat_flux.blocks.models import ARCHS, REFUSED
from coat_flux.blocks.models.check import archs_of, check_arch, check_device, check_model, check_models
from coat_flux.config.findings import ConfigError, Findings
from coat_flux.mini_flux import EMBEDDED_MODEL, MINI_FLUX
from coat_flux.plan.job import find_model
from tests.helpers.flux2_folder import write_flux2
from tests.helpers.original_layout import write_original
from tests.reliability.bad_configs import job_with

ALONE, AITK = "standalone", "ai-toolkit"
DEV, KONTEXT = "black-forest-labs/FLUX.1-dev", "black-forest-labs/FLUX.1-Kontext-dev"


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
    return [f"{item.severity}: {item.key}: {item.text}" for item in findings.all]


def edit(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def test_a_whole_folder_and_the_embedded_model_are_fine_and_pickles_for_ai_toolkit_alone(model):
    for trainer in (ALONE, AITK):
        assert found(model, trainer) == found(EMBEDDED_MODEL, trainer) == []
    assert "does not fit arch wan21" in found(EMBEDDED_MODEL, AITK, is_flux=False, arch="wan21")[0]
    (model / "vae" / "diffusion_pytorch_model.safetensors").rename(model / "vae" / "diffusion_pytorch_model.bin")
    assert ["only as a pickle (diffusion_pytorch_model.bin)" in line for line in found(model)] == [True]
    assert found(model, AITK) == []


def _shards(model: Path) -> None:
    names = {"a": "x-00001-of-00002.safetensors", "b": "x-00002-of-00002.safetensors"}
    (model / "transformer" / "x.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    save_file({"a": torch.zeros(1)}, model / "transformer" / names["a"])


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def _pipeline(name: str) -> Any:
    return lambda model: edit(model / "model_index.json", _class_name=name)


def _transformer(**entries: Any) -> Any:
    return lambda model: edit(model / "transformer" / "config.json", **entries)


SPOILT = {
    "no T5": (lambda m: shutil.rmtree(m / "text_encoder_2"), "has no text_encoder_2/"),
    "no tokenizer files": (lambda m: (m / "tokenizer_2" / "tokenizer.json").unlink(), "has none of tokenizer.json"),
    "no config": (lambda m: (m / "vae" / "config.json").unlink(), "is missing or not JSON"),
    "no weights": (lambda m: next((m / "vae").glob("*.safetensors")).unlink(), "vae has no .safetensors file"),
    "a shard is missing": (_shards, "has no x-00002-of-00002.safetensors, which x.safetensors.index.json lists"),
    "half a download": (lambda m: _cut(m / "text_encoder_2" / "model.safetensors"), "so it is not whole"),
    "SDXL": (_pipeline("StableDiffusionXLPipeline"), "StableDiffusionXL"),
    "Kontext": (_pipeline("FluxKontextPipeline"), "arch: flux_kontext"),
    "Fill": (_transformer(in_channels=384), "is FLUX.1 Fill, which needs a second"),
    "FLUX.2": (_transformer(_class_name="Flux2Transformer2DModel"), "holds a Flux2Transformer2DModel"),
    "Flex.2": (_transformer(in_channels=196), "has 196 channels, and Flex.2 has 196; give a folder of arch flux"),
    "T5 of another size": (lambda m: edit(m / "text_encoder_2" / "config.json", d_model=512), "gives 512 features and"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_folder_is_one_error(model, name):
    spoil, words = SPOILT[name]
    spoil(model)
    for trainer in (ALONE, AITK):
        (line,) = found(model, trainer)
        assert line.startswith("error: model.name_or_path: ")
        assert words in line
        assert line.count("; ") == 1


@pytest.mark.parametrize(
    ("pipeline", "keys", "words"),
    [
        ("FluxKontextPipeline", {"arch": "flux_kontext"}, None),
        ("StableDiffusionXLPipeline", {"is_xl": True}, None),
        ("StableDiffusionXLPipeline", {}, "does not fit arch sd1; write model.arch: sdxl"),
        ("UnheardPipeline", {"arch": "flux"}, None),
        (["pipeline", "Flex2Pipeline"], {"arch": "flux"}, None),
        ("FluxPipeline", {"arch": "flex2"}, "has 64 channels, and Flex.2 has 196"),
        ("FluxPipeline", {"arch": "wan21"}, "does not fit arch wan21; write model.arch: flux"),
        ("StableDiffusionPipeline", {"arch": "sd2"}, None),
    ],
)
def test_each_folder_has_its_arch_in_ai_toolkit(model, pipeline, keys, words):
    _pipeline(pipeline)(model)
    lines = found(model, AITK, **{"is_flux": False, **keys})
    assert [words in line for line in lines] == ([] if words is None else [True])


def test_folders_around_and_inside_a_model_are_told(model, tmp_path):
    cache, files = tmp_path / "models--x--flux", tmp_path / "unet"
    shutil.copytree(model, cache / "snapshots" / "abc")
    files.mkdir()
    (files / "flux1-dev.safetensors").write_bytes(b"")
    for place, words in (
        (model / "transformer", f"give the folder around it, {model}"),
        (cache, f"give {cache / 'snapshots' / 'abc'}"),
        (files, f"one file, such as {files / 'flux1-dev.safetensors'}"),
        (tmp_path / "datasets" / "x", "correct the path"),
        ("https://huggingface.co/black-forest-labs/FLUX.1-dev", "is a web address"),
    ):
        assert [(line[:7], words in line) for line in found(place)] == [("error: ", True)]


@pytest.mark.parametrize("trainer", [ALONE, AITK])
def test_a_model_behind_an_agreement_is_told_before_the_download(trainer, monkeypatch, tmp_path):
    (line,) = found(DEV, trainer)
    assert line.startswith("error: model.name_or_path: must be agreed to before the download")
    assert f"https://huggingface.co/{DEV}" in line
    (tmp_path / ".env").write_text("A=1\nHF_TOKEN=hf_x\n")
    assert found(DEV, AITK, root=tmp_path) == []
    monkeypatch.setenv("HF_ENDPOINT", "https://hf-mirror.com")
    assert [line[:9] for line in found(DEV, trainer)] == ["warning: "]
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_x")
    assert found(DEV, trainer) == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert ["HF_HUB_OFFLINE" in line for line in found(DEV, trainer)] == [True]
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(tmp_path))
    assert found(DEV, trainer) == []


@pytest.mark.parametrize(
    ("name", "trainer", "keys", "words"),
    [
        ("black-forest-labs/FLUX.1-Fill-dev", ALONE, {}, f"is FLUX.1 Fill, which is not trained here; write {DEV}"),
        (KONTEXT, AITK, {}, "does not fit arch flux; write model.arch: flux_kontext"),
        (KONTEXT, AITK, {"arch": "flux_kontext"}, None),
        ("black-forest-labs/FLUX.2-klein-4B", ALONE, {}, "write model.arch: flux2_klein_4b"),
        ("black-forest-labs/FLUX1-dev", ALONE, {}, f"did you mean {DEV}?"),
        ("FLUX.1-dev", ALONE, {}, f"did you mean {DEV}?"),
        ("stabilityai/stable-diffusion-xl-base-1.0", ALONE, {}, "is Stable Diffusion by its name"),
        ("someone/my-flux", ALONE, {}, "downloaded from the hub"),
        ("black-forest-labs/FLUX.1-schnell", ALONE, {}, "downloaded from the hub"),
    ],
)
def test_names_on_the_hub(monkeypatch, name, trainer, keys, words):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_x")
    lines = found(name, trainer, **{"is_flux": "arch" not in keys, **keys})
    assert [words in line for line in lines] == ([] if words is None else [True])
    warned = words is not None and ("downloaded" in words or name.endswith("/FLUX1-dev"))
    assert all(line.startswith("warning: " if warned else "error: ") for line in lines)


def test_one_file_is_for_the_stand_alone_trainer(tmp_path, model):
    from diffusers import FluxTransformer2DModel

    path = tmp_path / "flux1-dev.safetensors"
    write_original(FluxTransformer2DModel.from_pretrained(model, subfolder="transformer"), path, kind="cast")
    assert found(path, extras_name_or_path=str(model)) == []
    (line,) = found(path)
    assert line.startswith("error: model.extras_name_or_path: must be agreed to before the download")
    assert ["ai-toolkit loads FLUX from a folder" in line for line in found(path, AITK)] == [True]
    shutil.rmtree(model / "vae")
    assert ["has no vae/; " in line for line in found(path, extras_name_or_path=str(model))] == [True]
    _cut(path)
    assert ["so it is not whole" in line for line in found(path)] == [True]
    for name, words in (
        ("flux.gguf", "is not a whole GGUF file"),
        ("flux.ckpt", "is not a .safetensors or .gguf file"),
    ):
        (tmp_path / name).write_bytes(b"x")
        assert [words in line for line in found(tmp_path / name)] == [True]


@pytest.mark.skipif(not hasattr(diffusers, "Flux2KleinPipeline"), reason="this diffusers has no FLUX.2 klein")
def test_check_and_plan_take_all_but_the_transformer_from_extras(tmp_path):
    whole, alone = write_flux2(tmp_path / "whole"), tmp_path / "alone"
    shutil.copytree(whole / "transformer", alone / "transformer")
    shutil.copy(whole / "model_index.json", alone)
    keys = {"is_flux": False, "arch": "flux2_klein_4b"}
    assert ["has no vae/; " in line for line in found(alone, **keys)] == [True]
    assert found(alone, **keys, extras_name_or_path=str(whole)) == []
    assert find_model(str(alone), "model", str(whole)) is find_model(str(whole), "model")
    for name in ("none", str(whole / "model_index.json")):
        with pytest.raises(ConfigError, match=rf"model\.extras_name_or_path='{name}'"):
            find_model(str(alone), "model", name)


@pytest.mark.parametrize(
    ("device", "version", "gpus", "words"),
    [
        ("cuda", None, 0, "built without CUDA"),
        ("cuda:0", "13.0", 0, "torch finds no cuda device here"),
        ("cuda:2", "13.0", 2, "torch finds 2 GPUs here"),
        ("cuda:1", "13.0", 2, None),
        ("cpu", None, 0, None),
        (None, None, 0, None),
        ("cuda", "13.2", 0, "install a driver for CUDA 13.2"),
    ],
)
def test_a_gpu_that_is_not_here_is_an_error(monkeypatch, device, version, gpus, words):
    if version == "13.2":
        monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=RuntimeError("driver on your system is too old")))
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    findings = Findings("f.yaml")
    check_device(device, "device", findings)
    assert [words in item.line() for item in findings.errors] == ([] if words is None else [True])


def test_what_an_ai_toolkit_job_fails_without(model, monkeypatch):
    def needs(changes: dict[str, Any], **options: Any) -> list[tuple[str, str]]:
        raw = job_with({"model.name_or_path": EMBEDDED_MODEL, "device": "cpu", **changes})
        return [(item.severity, item.key[18:]) for item in check_models(raw, trainer=AITK, **options)]

    decorated = {"decorator": {"x": 1}}
    assert needs(decorated, elsewhere=True) == [("error", "decorator")]
    edit(model / "text_encoder_2" / "config.json", d_model=4096)  # FLUX.1's own, and the decorator's
    edit(model / "transformer" / "config.json", joint_attention_dim=4096)
    assert needs({"model.name_or_path": str(model), **decorated}) == []
    for key, hub in (("train.latent_feature_extractor_path", "v10"), ("model.lora_path", "a/b/c.safetensors")):
        assert [needs({key: fine}) for fine in ("flux", None, hub)] == [[]] * 3
        assert [needs({key: path}) for path in ("/nowhere", "flux/x", "x")] == [[("error", key)]] * 3
    of_flux2 = needs({"model.lora_path": "/nowhere", "model.is_flux": False, "model.arch": "flux2"})
    assert "model.lora_path" not in [key for _, key in of_flux2]
    here = {"wandb": ModuleSpec("wandb", None)}  # a folder of that name
    monkeypatch.setattr("importlib.util.find_spec", here.get)
    for severity in ("warning", "error"):
        for key, value in (("logging.use_wandb", True), ("train.optimizer", "AdamW8bit"), ("train.xformers", True)):
            assert needs({key: value}) == [(severity, key)]
        here["lycoris"] = ModuleSpec("lycoris", None, origin="x")  # without it another Python runs the job


NEWER = {"qwen25_omni", "yue2"}  # of ai-toolkit 0.13
NO_MODELS = {"example", "sapiens2_1b"}  # ai-toolkit's template of a model, and a feature extractor
LEGACY = {"flux", "sd1", "sd2", "sd3", "sdxl", "ssd", "vega", "pixart", "pixart_sigma", "auraflow", "lumina2"}


def checkout(root: Path) -> Path:
    built_in = root / "extensions_built_in" / "new"
    built_in.mkdir(parents=True)
    (built_in / "model.py").write_text("class New(BaseModel):\n    arch = 'new_model'\n    # arch = 'old'\n")
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "model.py").write_text('class Mine(Base):\n    arch: str = "mine"\n\narch = "outside"\n')
    (root / "extensions").mkdir()
    (root / "extensions" / "mine").symlink_to(elsewhere, target_is_directory=True)
    return root


@pytest.mark.parametrize(
    ("arch", "checked_out", "severity", "words"),
    [
        *((arch, False, "error", f"{REFUSED[arch]}; write coat: {{enabled: false}}") for arch in REFUSED),
        ("flux", True, None, ""),
        ("new_model", True, "warning", "cautiously"),
        ("unheard", False, "warning", "cautiously"),  # without a checkout nobody can know
        ("flux_kontex", True, "error", "did you mean 'flux_kontext'?"),
        ("unheard", True, "error", "docs/models.md"),
    ],
)
def test_an_arch_is_trained_refused_or_treated_cautiously(tmp_path, arch, checked_out, severity, words):
    findings = Findings("f.yaml")
    check_arch(arch, set(archs_of(checkout(tmp_path))) if checked_out else set(), "model.arch", findings)
    assert [item.severity for item in findings.all] == ([severity] if severity else [])
    assert all(words in item.text for item in findings.all)


def test_an_arch_is_refused_where_coat_would_train_it():
    jobs = [("coat_flux_trainer", True, AITK), ("coat_flux_trainer", False, AITK), ("sd_trainer", True, AITK)]
    refused = []
    for kind, enabled, trainer in [*jobs, ("coat_flux_trainer", True, ALONE)]:  # whose own rules refuse it
        process = {"type": kind, "coat": {"enabled": enabled}, "model": {"name_or_path": "x", "arch": "hidream"}}
        findings = check_models({"config": {"process": [process]}}, trainer=trainer, elsewhere=True)
        refused.append([item.key for item in findings])
    assert refused == [["config.process[0].model.arch"], [], [], []]


@pytest.mark.aitk
def test_the_families_have_every_arch_of_the_pinned_ai_toolkit():
    assert (
        set(archs_of(Path(os.environ["AI_TOOLKIT_ROOT"]))) - NO_MODELS | LEGACY == ARCHS.keys() | REFUSED.keys() - NEWER
    )
    assert not ARCHS.keys() & REFUSED.keys()


def test_what_ai_toolkit_loads_of_a_flux2_folder_is_one_file(tmp_path):
    keys = {"trainer": AITK, "is_flux": False, "arch": "flux2_klein_4b"}
    (tmp_path / "model_index.json").write_text('{"_class_name": "Flux2KleinPipeline"}', encoding="utf-8")
    assert ["has no flux-2-klein-base-4b.safetensors" in line for line in found(tmp_path, **keys)] == [True]
    (tmp_path / "flux-2-klein-base-4b.safetensors").touch()
    assert found(tmp_path, **keys) == []
