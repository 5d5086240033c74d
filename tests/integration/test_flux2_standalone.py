"""The stand-alone trainer on a tiny FLUX.2 klein: numbers are those of diffusers' pipeline, which loads the LoRA."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch.nn.functional import pixel_unshuffle

from coat_flux.cli import main
from coat_flux.data.cache import encode_latents
from coat_flux.export.lora_files import convert_file
from coat_flux.trainers.standalone.flow_matching import predict_velocity
from coat_flux.trainers.standalone.loading import load_encoders, load_transformer
from coat_flux.trainers.standalone.trainer import COATTrainer
from tests.helpers.asserts import assert_all_bitwise, assert_bitwise
from tests.helpers.engine_job import engine_job, tiny_place
from tests.helpers.flux2_folder import TOKENS, write_flux2

pytestmark = pytest.mark.skipif(not hasattr(diffusers, "Flux2KleinPipeline"), reason="diffusers 0.37 has FLUX.2 klein")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    root = tmp_path_factory.mktemp("flux2")
    with tiny_place(root, 2, tokens=TOKENS) as place:
        yield {**place, "model": write_flux2(root / "klein")}


@pytest.fixture(scope="module")
def pipeline(place: dict[str, Path]) -> Any:
    return diffusers.Flux2KleinPipeline.from_pretrained(place["model"], torch_dtype=torch.bfloat16)


def job_of(name: str, place: dict[str, Path], **blocks: Any) -> dict[str, Any]:
    """With every option of COAT on, rank 16 on all linears."""
    network = {"linear": 16, "transformer_only": False}
    job = engine_job(name, **place, coat={"memory": {"checkpointing": "none"}}, network=network, **blocks)
    model = job["config"]["process"][0]["model"]
    del model["is_flux"]
    model["arch"] = "flux2_klein_4b"
    return job


def test_trains_resumes_to_the_bit_and_diffusers_loads_the_lora(place, pipeline):
    train = {"steps": 6, "lr": 2e-2, "disable_sampling": False}
    sample = {"sample_every": 6}
    final = COATTrainer(job_of("klein", place, train=train, sample=sample, save={"save_every": 5})).train()
    log = (final.parent / "coat" / "log.txt").read_text(encoding="utf-8")
    first, last = map(float, re.findall(r"validation loss (\S+) -> (\S+)", log)[0])
    assert last < first
    assert len(list((final.parent / "samples").glob("*.jpg"))) == 2
    whole = load_file(final)
    assert main(["rewind", str(final.parent), "--to-step", "5"]) == 0
    again = load_file(COATTrainer(job_of("klein", place, train=train, save={"save_every": 5})).train())
    assert_all_bitwise(again, whole)

    pipeline.load_lora_weights(final)
    loaded = [name for name, _ in pipeline.transformer.named_parameters() if ".lora_A." in name]
    assert 2 * len(loaded) == len(whole)
    layer = pipeline.transformer.transformer_blocks[0].attn.to_v
    assert layer.scaling["default_0"] == 1.0
    saved = whole["transformer.transformer_blocks.0.attn.to_v.lora_B.weight"]
    assert_bitwise(layer.lora_B["default_0"].weight.detach(), saved.bfloat16())
    pipeline.unload_lora_weights()


def test_prompts_latents_and_prediction_are_the_pipelines(place, pipeline):
    encoders = load_encoders(str(place["model"]), torch.bfloat16)
    assert encoders.text is not None
    assert encoders.distilled
    embeds, pooled = encoders.text.encode(["a red shirt"])
    expected, text_ids = pipeline.encode_prompt("a red shirt", max_sequence_length=TOKENS)
    assert_bitwise(embeds, expected)
    assert pooled.shape == (1, 0)

    pixels = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = encode_latents(encoders.vae, pixels)
    with torch.no_grad():
        theirs = pipeline._encode_vae_image(pixels.bfloat16(), generator=None)
    torch.testing.assert_close(pixel_unshuffle(latents, 2), theirs.float(), rtol=0.02, atol=0.02)

    packed, ids = pipeline.prepare_latents(1, 8, 64, 96, torch.bfloat16, "cpu", None, pixel_unshuffle(latents, 2))
    model = load_transformer(str(place["model"]), torch.bfloat16)
    with torch.no_grad():
        velocity = predict_velocity(model, latents, torch.tensor([0.5]), embeds, pooled, dtype=torch.bfloat16)
        out = model(packed, embeds, torch.tensor([0.5]), ids, text_ids, None, return_dict=False)[0]
    expected = pipeline._unpack_latents_with_ids(out, ids, 4, 6)
    assert_bitwise(pixel_unshuffle(velocity, 2), expected.float())


@pytest.mark.parametrize("layout", ["comfyui", "kohya"])
def test_other_layouts_and_back(place, tmp_path, layout):
    model = load_transformer(str(place["model"]), torch.bfloat16)
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            for part, shape in (("A", (4, module.in_features)), ("B", (module.out_features, 4))):
                tensors[f"transformer.{name}.lora_{part}.weight"] = torch.randn(shape, generator=generator)
    save_file(tensors, tmp_path / "lora.safetensors")
    report = convert_file(tmp_path / "lora.safetensors", tmp_path / "other.safetensors", layout)
    assert "ComfyUI" in report.programs
    convert_file(tmp_path / "other.safetensors", tmp_path / "back.safetensors", "diffusers")
    assert_all_bitwise(load_file(tmp_path / "back.safetensors"), tensors)


def test_check_says_what_is_wrong(place, tmp_path, capsys):
    def check(model: Path, **changes: Any) -> str:
        job = job_of("damaged", {**place, "model": model})
        job["config"]["process"][0]["model"] |= changes
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")
        assert main(["check", str(tmp_path / "job.yaml"), "--host", "standalone"]) == 2
        return " ".join(capsys.readouterr().err.split())

    folder = shutil.copytree(place["model"], tmp_path / "klein")
    assert "write model.arch: flux2_klein_4b or flux2_klein_9b" in check(folder, arch="flux")
    assert "FLUX.2 is loaded from a folder" in check(next((folder / "transformer").glob("*.safetensors")))
    config = folder / "text_encoder" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_size": 48}), encoding="utf-8")
    assert "gives 3 x 48 features and the transformer takes 96" in check(folder)
    shutil.rmtree(folder / "tokenizer")
    assert "has no tokenizer/" in check(folder)
