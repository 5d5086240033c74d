"""The job of the stand-alone trainer: reading its file, ai-toolkit's names and defaults, what is stored of it."""

import json
import math
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from coat_flux.config.findings import ConfigError
from coat_flux.config.job import JobConfig
from coat_flux.config.job_file import load_job_yaml
from coat_flux.config.job_sections import SampleItem
from tests.architecture.sources import ROOT
from tests.reliability.bad_configs import job_with

FRAME = "job: extension\nconfig:\n  name: run\n  process:\n    - type: coat_flux_trainer\n"
SMALL = {
    "network": {"type": "lora", "linear": 16, "linear_alpha": 16},
    "datasets": [{"folder_path": "photos", "caption_ext": "txt", "resolution": [512, 768]}],
    "train": {"steps": 20, "lr": 1e-4, "optimizer": "coat_fp8_adamw", "dtype": "bf16"},
    "sample": {"width": 64, "height": 64, "prompts": ["a", "b"]},
    **dict.fromkeys(("save", "trigger_word", "training_seed", "device", "coat"), ...),
}
PLAIN = {"train.optimizer": "adamw", "model.quantize": False, "model.qtype": "qfloat8"}


def parse(changes: dict[str, Any] | None = None) -> JobConfig:
    return JobConfig.from_dict(job_with(SMALL | (changes or {})), file="f.yaml")


def write(folder: Path, text: str, name: str = "job.yaml", encoding: str = "utf-8") -> Path:
    path = folder / name
    path.write_bytes(text.encode(encoding))
    return path


SCALARS = {
    "1e-4": 1e-4, "1E-4": 1e-4, "-2e+3": -2e3, "1.5e-4": 1.5e-4, "1.e3": 1000.0, ".5": 0.5, ".inf": math.inf, "10": 10,
    "true": True, "'1e-4'": "1e-4", "1e": "1e", "e4m3": "e4m3", "1e4m3": "1e4m3", "null": None,
}  # fmt: skip


def test_scalars_follow_ai_toolkit_s_float_rule(tmp_path):
    path = write(tmp_path, FRAME + f"      values: [{', '.join(SCALARS)}]\n")
    values = load_job_yaml(path)["config"]["process"][0]["values"]
    assert [(type(value), value) for value in values] == [(type(value), value) for value in SCALARS.values()]


def test_name_is_replaced_everywhere_and_may_come_from_the_command_line(tmp_path):
    text = FRAME + "      list: ['[name]-1', {k: '[name]'}]\nmeta:\n  name: '[name]'\n"
    path = write(tmp_path, text)
    job = load_job_yaml(path)
    assert (job["config"]["process"][0]["list"], job["meta"]) == (["run-1", {"k": "run"}], {"name": "run"})
    job = load_job_yaml(path, name="other")
    assert (job["config"]["name"], job["meta"]["name"]) == ("other", "other")
    nameless = write(tmp_path, text.replace("  name: run\n", ""))
    assert load_job_yaml(nameless, name="other")["config"]["name"] == "other"


def test_a_variable_is_used_and_kept_unexpanded_in_what_is_stored(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hf_secret")
    monkeypatch.setenv("MY_STEPS", "7")
    text = (ROOT / "configs" / "flux_clothing_tiny.yaml").read_text(encoding="utf-8")
    text = text.replace("steps: 250", "steps: ${MY_STEPS}")
    text = text.replace("trigger_word: dngrs", 'trigger_word: "${MY_TOKEN}"')
    text = text[: text.index("\nmeta:")] + "\nmeta:\n  author: '[name] ${MY_TOKEN}'\n"
    job = JobConfig.load(write(tmp_path, text), name="mine")
    assert (job.train.steps, job.trigger_word, job.written["config"]["name"]) == (7, "hf_secret", "mine")
    assert job.written["meta"] == {"author": "mine ${MY_TOKEN}"}
    stored = yaml.safe_dump(job.written)
    assert "hf_secret" not in stored
    assert job.written["config"]["process"][0]["train"]["steps"] == "${MY_STEPS}"
    assert JobConfig.load(write(tmp_path, stored)).trigger_word == job.trigger_word


def test_json_a_byte_order_mark_windows_line_ends_and_merge_keys_are_read(tmp_path):
    job = {"job": "extension", "config": {"name": "run", "process": [{"type": "sd_trainer", "lr": 1e-4}]}}
    for suffix in (".json", ".jsonc", ".yml", ".YAML"):
        assert load_job_yaml(write(tmp_path, json.dumps(job), f"job{suffix}")) == job
    path = write(tmp_path, (FRAME + "      größe: groß\n").replace("\n", "\r\n"), encoding="utf-8-sig")
    assert load_job_yaml(path)["config"]["process"][0] == {"type": "coat_flux_trainer", "größe": "groß"}
    merged = FRAME + "      a: &base {x: 1, y: 2}\n      b: {<<: *base, y: 3}\n      c: *base\n"
    process = load_job_yaml(write(tmp_path, merged))["config"]["process"][0]
    assert (process["b"], process["c"]) == ({"x": 1, "y": 3}, {"x": 1, "y": 2})


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"network": {"type": "lora", "rank": 8}}, "network.linear", 8),
        ({"network.linear_alpha": ...}, "network.linear_alpha", None),
        ({"train.dtype": "bfloat16"}, "train.dtype", "bf16"),
        ({"train.dtype": "float"}, "train.dtype", "fp32"),
        ({"save": {"dtype": "bfloat16"}}, "save.dtype", "bf16"),
        ({"train.lr": 1}, "train.lr", 1.0),
        ({"device": "cuda:1"}, "device", "cuda:1"),
        ({"name": "own"}, "name", "own"),
        ({"model.is_flux": ..., "model.arch": "flux:dev"}, "model.arch", "flux:dev"),
        ({"train.ema_config": None}, "train.ema_config.use_ema", False),
        ({"model.quantize": False, "model.qtype": ...}, "coat.weight.use_fp8", True),
        ({**PLAIN, "coat": {"enabled": False}}, "coat.enabled", False),
        ({"type": "ui_trainer", **PLAIN}, "coat.enabled", False),
        ({"type": "sd_trainer"}, "coat.activation.use_fp8", True),
        ({"type": "sd_trainer"}, "coat.memory.checkpointing", "all"),
        ({"type": "sd_trainer", "train.gradient_checkpointing": False}, "coat.memory.checkpointing", "none"),
        ({"type": "sd_trainer", "model.quantize": False}, "coat.weight.use_fp8", False),
        ({"type": "sd_trainer", "model.quantize": False}, "coat.optimizer.use_fp8", True),
        ({"type": "sd_trainer", "train.optimizer": "adamw"}, "coat.optimizer.use_fp8", False),
        ({"type": "sd_trainer", "train.optimizer": "adamw"}, "coat.weight.use_fp8", True),
        ({"train.optimizer": "adam"}, "coat.optimizer.use_fp8", False),
        ({"train.optimizer": "adam"}, "coat.weight.use_fp8", True),
    ],
)
def test_a_spelling_of_ai_toolkit_gives_the_value(changes, key, value):
    parsed = reduce(getattr, key.split("."), parse(changes))
    assert parsed == value
    assert type(parsed) is type(value)


def test_what_has_no_effect_or_is_left_to_another_is_noted():
    silent = {"train.loss_target": "noise", "train.noise_offset": 0, "datasets.0.mask_path": None}
    assert parse(silent).notes == ()
    changes = {"network.conv": 16, "sample.neg": "ugly", "sqlite_db_path": "x.db", "model.quantize_te": True}
    assert {note.split(": ")[1].removeprefix("config.process[0].") for note in parse(changes).notes} == set(changes)
    (note,) = parse({"train.optimizer": "adam"}).notes
    assert note.startswith("f.yaml: config.process[0].train.optimizer='adam': ")
    job = parse({"type": "sd_trainer", "coat": {"weight": {"granularity": "per_row"}}})
    assert job.coat.weight.granularity == "per_row"
    assert "coat_flux_trainer" in job.notes[0]


def test_samples_are_filled_in_as_ai_toolkit_does():
    prompts = parse({"sample.seed": 5, "sample.walk_seed": True}).sample.items()
    assert prompts == (SampleItem("a", 64, 64, 5, 7.0, 20), SampleItem("b", 64, 64, 6, 7.0, 20))
    entries = [{"prompt": "a"}, {"prompt": "b", "seed": 42, "width": 128, "sample_steps": 4}, {"prompt": "c"}]
    items = parse({"sample.prompts": ..., "sample.samples": entries, "sample.guidance_scale": 4}).sample.items()
    assert [(i.seed, i.width, i.sample_steps, i.guidance_scale) for i in items] == [
        (0, 64, 20, 4.0),
        (42, 128, 4, 4.0),
        (42, 64, 20, 4.0),
    ]
    assert parse({"sample": ...}).sample.items() == ()


def keys_refused(raw: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        JobConfig.from_dict(raw)
    return [item.key.removeprefix("config.process[0].") for item in caught.value.findings]


def test_all_errors_of_a_job_come_together_and_it_has_one_entry():
    changes = {"train.lr": "x", "train.stpes": 1, "model.is_flux": False, "coat": {"weight": {"format": "x"}}}
    raw = job_with(SMALL | changes)
    assert keys_refused(raw) == ["train.lr", "train.stpes", "coat.weight.format", "model.is_flux"]
    raw["config"]["process"] *= 2
    assert keys_refused(raw) == ["config.process"]


def test_files_that_are_not_there_say_so(tmp_path):
    (tmp_path / "folder.yaml").mkdir()
    for name, says in (("missing.yaml", "no such file"), ("folder.yaml", "cannot be read")):
        with pytest.raises(ConfigError, match=says):
            load_job_yaml(tmp_path / name)
