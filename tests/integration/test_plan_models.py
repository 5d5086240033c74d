"""`plan` for models of many families: bytes against counted ones, where configs come from, and what it assumes."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from coat_flux.blocks.counted import CountedBlock, Probe
from coat_flux.blocks.sizes import UnknownBlock
from coat_flux.cli.entry import main
from coat_flux.config.check import job_for_plan
from coat_flux.plan.job import JobFacts
from coat_flux.plan.predict import predict
from tests.architecture.sources import ROOT
from tests.helpers.plan_models import folder_of, job_of, measure
from tests.helpers.toolkit_lora import ROOT_VARIABLE
from tests.tolerances import PLAN_MODELS_RTOL

COUNTED = ("chroma", "zimage", "wan21", "lumina2", "cogview4")  # the page has all, in minutes
QTYPES = ("qfloat8", "uint4", "convrot8", "nvfp4")


def assert_as_counted(row: dict[str, Any]) -> None:
    assert row["weights"] == pytest.approx(row["weights_counted"], rel=PLAN_MODELS_RTOL)
    assert row["saved"] == pytest.approx(row["saved_counted"], rel=PLAN_MODELS_RTOL)


@pytest.mark.parametrize("arch", COUNTED)
def test_bytes_are_those_counted(arch, tmp_path):
    row = measure(arch, tmp_path / "model")
    assert_as_counted(row)
    assert ["taken to be diffusers'" in line for line in row["assumed"]] == [True] * (arch == "chroma")


@pytest.mark.aitk
def test_bases_that_ai_toolkit_quantizes():
    arguments = [word for qtype in QTYPES for word in ("--qtype", qtype)]
    done = subprocess.run(
        [os.environ["AI_TOOLKIT_PYTHON"], "-m", "tests.helpers.plan_models", "qwen_image", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (os.environ[ROOT_VARIABLE], done.stderr[-2000:])
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["qtype"] for row in rows] == list(QTYPES)
    for row in rows:
        assert_as_counted(row)


def facts_of(arch: str, folder: Path, **model: Any) -> JobFacts:
    raw = job_of(arch, folder, "", "none")
    raw["config"]["process"][0]["model"] |= model
    return JobFacts(job_for_plan(raw))


def test_of_two_transformers_one_saves_and_both_are_held(tmp_path):
    folder, _, _ = folder_of("wan21", tmp_path / "model")
    one = facts_of("wan21", folder)
    (folder / "transformer_2").mkdir()
    (folder / "transformer_2" / "config.json").write_bytes((folder / "transformer" / "config.json").read_bytes())
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "transformer_2": index["transformer"]}))
    both = facts_of("wan22_14b", folder)
    assert (both.transformer_bytes, both.lora_bytes) == (2 * one.transformer_bytes, 2 * one.lora_bytes)
    saved = [predict(facts).phases["step"]["saved activations"] for facts in (one, both)]
    assert saved[0] == pytest.approx(saved[1], rel=0.01)
    assert len(both.blocks) == 2 * len(one.blocks)


def test_what_does_not_run_without_weights_is_assumed_and_named(tmp_path, monkeypatch):
    folder, _, _ = folder_of("cogview4", tmp_path / "model")
    assert {type(block) for block in facts_of("cogview4", folder).blocks} == {CountedBlock}

    def fails(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("Cannot copy out of meta tensor")

    monkeypatch.setattr(Probe, "inputs", fails)
    monkeypatch.setattr("coat_flux.plan.job.largest_held", fails)
    config = folder / "vae" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "sample_size": 64}))  # no part that is known
    facts = facts_of("cogview4", folder)
    assert {type(block) for block in facts.blocks} == {UnknownBlock}
    for kind in ("CogView4Transformer2DModel", "CLIPTextModel", "AutoencoderKL"):
        assert any(line.startswith(kind) for line in predict(facts).assumptions), kind


def test_the_command_takes_a_job_of_ai_toolkit(tmp_path, capsys):
    folder, _, _ = folder_of("wan21", tmp_path / "model")
    raw = job_of("wan21", folder, "uint4", "auto")
    raw["config"]["process"][0]["train"]["noise_scheduler"] = "ddpm"
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(raw))
    assert main(["plan", str(file), "--gpu", "24"]) == 0
    printed = capsys.readouterr().out
    assert "WanTransformerBlock" in printed
    assert "train.noise_scheduler" in printed
    part = folder / "transformer" / "config.json"
    part.write_text(json.dumps({**json.loads(part.read_text()), "_class_name": "NewTransformer"}))
    assert main(["plan", str(file)]) != 0
    assert "NewTransformer" in capsys.readouterr().err
