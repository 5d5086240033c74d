"""The job of the stand-alone trainer: ai-toolkit's names and defaults, refusals by name, contradictions."""

from __future__ import annotations

import copy
from importlib.machinery import ModuleSpec

import pytest
import yaml

from coat_flux.config.check import require_packages
from coat_flux.config.coat import COATConfig
from coat_flux.config.findings import ConfigError
from coat_flux.config.job import JobConfig
from coat_flux.config.job_sections import SampleItem

BASE = {
    "job": "extension",
    "config": {
        "name": "run",
        "process": [
            {
                "type": "coat_flux_trainer",
                "training_folder": "output",
                "network": {"type": "lora", "linear": 16, "linear_alpha": 16},
                "datasets": [{"folder_path": "photos", "caption_ext": "txt", "resolution": [512, 768]}],
                "train": {"steps": 20, "lr": 1e-4, "optimizer": "coat_fp8_adamw", "dtype": "bf16"},
                "model": {"name_or_path": "models/tiny", "is_flux": True, "quantize": True, "qtype": "coat_fp8"},
                "sample": {"width": 64, "height": 64, "prompts": ["a", "b"]},
            }
        ],
    },
    "meta": {"name": "[name]", "version": "1.0"},
}
PLAIN = {"train.optimizer": "adamw", "model.quantize": False, "model.qtype": "qfloat8"}


def job_with(changes: dict, **outer) -> dict:
    """BASE with dotted keys of the process entry set; a value of ... removes the key."""
    raw = copy.deepcopy(BASE)
    process = raw["config"]["process"][0]
    for dotted, value in changes.items():
        *parents, leaf = dotted.split(".")
        place = process
        for parent in parents:
            place = place[int(parent)] if isinstance(place, list) else place.setdefault(parent, {})
        if value is ...:
            place.pop(leaf, None)
        else:
            place[leaf] = value
    return {**raw, **outer}


def parse(changes: dict | None = None, **outer) -> JobConfig:
    return JobConfig.from_dict(job_with(changes or {}, **outer), file="f.yaml")


def findings(changes: dict, **outer) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(changes, **outer)
    return [line.removeprefix("f.yaml: ").removeprefix("config.process[0].") for line in caught.value.findings]


def test_a_job_is_typed_and_has_ai_toolkit_s_defaults():
    job = parse()
    assert (job.name, job.training_folder, str(job.folder)) == ("run", "output", str(job.folder))
    assert job.folder.parts[-2:] == ("output", "run")
    assert (job.network.linear, job.network.linear_alpha, job.network.dropout) == (16, 16.0, None)
    assert job.network.network_kwargs.only_if_contains is None
    assert (job.save.dtype, job.save.save_every, job.save.max_step_saves_to_keep) == ("fp16", 1000, 5)
    entry = job.datasets[0]
    assert (entry.caption_ext, entry.resolution, entry.num_repeats, entry.buckets) == (".txt", (512, 768), 1, True)
    train = job.train
    assert (train.batch_size, train.gradient_accumulation, train.timestep_type) == (1, 1, "sigmoid")
    assert (train.lr, train.lr_scheduler, train.max_grad_norm, train.dtype) == (1e-4, "constant", 1.0, "bf16")
    assert (train.gradient_checkpointing, train.ema_config.use_ema, train.ema_config.ema_decay) == (True, False, 0.999)
    assert (train.optimizer_params, train.lr_scheduler_params) == ({}, {})
    assert (job.sample.sampler, job.sample.guidance_scale, job.sample.sample_steps) == ("flowmatch", 7.0, 20)
    assert (job.logging.log_every, job.training_seed, job.device, job.trigger_word) == (100, None, None, None)
    assert job.meta == {"name": "run", "version": "1.0"}
    assert job.coat == COATConfig()
    assert (job.file, job.notes) == ("f.yaml", ())


def test_a_bf16_baseline_parses():
    job = parse({**PLAIN, "coat": {"enabled": False}})
    assert not job.coat.enabled
    assert (job.train.optimizer, job.model.quantize) == ("adamw", False)


def test_fp8_weights_without_quantize_are_fine():
    assert parse({"model.quantize": False, "model.qtype": ...}).coat.weight.use_fp8


@pytest.mark.parametrize("kind", ["sd_trainer", "diffusion_trainer", "ui_trainer"])
def test_ai_toolkit_s_own_types_run_plain_without_a_coat_block(kind):
    job = parse({"type": kind, **PLAIN})
    assert not job.coat.enabled
    assert job.notes == ()


def test_ai_toolkit_s_own_types_take_from_coat_what_optimizer_and_qtype_select():
    both = parse({"type": "sd_trainer"}).coat
    assert (both.enabled, both.optimizer.use_fp8, both.weight.use_fp8, both.activation.use_fp8) == (True,) * 4
    only_optimizer = parse({"type": "sd_trainer", "model.quantize": False}).coat
    assert (only_optimizer.enabled, only_optimizer.optimizer.use_fp8, only_optimizer.weight.use_fp8) == (
        True,
        True,
        False,
    )
    only_weight = parse({"type": "sd_trainer", "train.optimizer": "adamw"}).coat
    assert (only_weight.enabled, only_weight.optimizer.use_fp8, only_weight.weight.use_fp8) == (True, False, True)
    assert only_weight.memory.checkpointing == "all"
    kept = parse({"type": "sd_trainer", "train.gradient_checkpointing": False}).coat
    assert kept.memory.checkpointing == "none"


def test_a_coat_block_beside_another_type_is_used_and_noted():
    job = parse({"type": "sd_trainer", "coat": {"weight": {"granularity": "per_row"}}})
    assert job.coat.weight.granularity == "per_row"
    assert "ai-toolkit reads this block with type: coat_flux_trainer only" in job.notes[0]


@pytest.mark.parametrize(
    ("changes", "attribute", "value"),
    [
        ({"network.linear": ..., "network.linear_alpha": ..., "network.rank": 8}, "network.linear", 8),
        ({"network.linear_alpha": ...}, "network.linear_alpha", None),
        ({"train.dtype": "bfloat16"}, "train.dtype", "bf16"),
        ({"train.dtype": "float"}, "train.dtype", "fp32"),
        ({"save.dtype": "bfloat16"}, "save.dtype", "bf16"),
        ({"train.lr": 1}, "train.lr", 1.0),
        ({"training_seed": 7}, "training_seed", 7),
        ({"device": "cuda:1"}, "device", "cuda:1"),
        ({"name": "own"}, "name", "own"),
        ({"model.is_flux": ..., "model.arch": "flux"}, "model.arch", "flux"),
        ({"model.is_flux": ..., "model.arch": "flux:dev"}, "model.arch", "flux:dev"),
        ({"train.cfg_scale": 1}, "train.steps", 20),
        ({"train.ema_config": None}, "train.ema_config.use_ema", False),
    ],
)
def test_spellings_ai_toolkit_knows(changes, attribute, value):
    found = parse(changes)
    for part in attribute.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_cache_text_embeddings_of_train_is_every_dataset_s():
    two = [{"folder_path": "a"}, {"folder_path": "b", "resolution": 256}]
    job = parse({"train.cache_text_embeddings": True, "datasets": two})
    assert [entry.cache_text_embeddings for entry in job.datasets] == [True, True]
    assert job.datasets[1].resolution == (256,)


def test_samples_are_filled_in_as_ai_toolkit_does():
    prompts = parse({"sample.seed": 5, "sample.walk_seed": True}).sample.items()
    assert prompts == (
        SampleItem("a", 64, 64, 5, 7.0, 20),
        SampleItem("b", 64, 64, 6, 7.0, 20),
    )
    entries = [{"prompt": "a"}, {"prompt": "b", "seed": 42, "width": 128, "sample_steps": 4}, {"prompt": "c"}]
    items = parse({"sample.prompts": ..., "sample.samples": entries, "sample.guidance_scale": 4}).sample.items()
    assert [(i.seed, i.width, i.sample_steps, i.guidance_scale) for i in items] == [
        (0, 64, 20, 4.0),
        (42, 128, 4, 4.0),
        (42, 64, 20, 4.0),
    ]
    assert parse({"sample": ...}).sample.items() == ()


def test_all_findings_of_a_job_come_together():
    found = findings({"train.lr": "x", "train.stpes": 1, "model.is_flux": False, "coat": {"weight": {"format": "x"}}})
    assert [line.split(":")[0].split("=")[0] for line in found] == [
        "train.lr",
        "train.stpes",
        "coat.weight.format",
        "model.is_flux",
    ]


@pytest.mark.parametrize(
    ("outer", "message"),
    [
        ({"job": "train"}, "job='train': "),
        ({"meta": "x"}, "meta='x': must be a block of keys"),
        ({"mata": {}}, "mata: unknown key; did you mean 'meta'?"),
    ],
)
def test_the_frame_around_the_process_is_checked(outer, message):
    assert message in findings({}, **outer)[0]


def test_a_second_process_and_unknown_job_keys_are_refused():
    raw = job_with({})
    raw["config"]["process"] *= 2
    raw["config"]["proces"] = []
    raw["config"]["device"] = "cuda"
    with pytest.raises(ConfigError) as caught:
        JobConfig.from_dict(raw)
    assert caught.value.findings == (
        "config.proces: unknown key; did you mean 'process'?",
        "config.process: has 2 entries, the stand-alone trainer runs one; make a file for each",
    )


def test_host_keys_at_their_default_pass_and_the_ones_without_effect_are_noted():
    silent = {
        "train.loss_target": "noise",
        "train.noise_offset": 0,
        "datasets.0.mask_path": None,
        "model.model_kwargs": {},
    }
    assert parse(silent).notes == ()
    job = parse({"network.conv": 16, "sample.neg": "ugly", "sqlite_db_path": "x.db", "model.quantize_te": True})
    assert [note.split(": ")[1] for note in job.notes] == [
        "config.process[0].network.conv",
        "config.process[0].model.quantize_te",
        "config.process[0].sample.neg",
        "config.process[0].sqlite_db_path",
    ]


def test_another_optimizer_leaves_the_moments_to_it_and_says_so():
    job = parse({"train.optimizer": "adam"})
    assert not job.coat.optimizer.use_fp8
    assert job.coat.weight.use_fp8
    (note,) = job.notes
    assert note.startswith(
        "f.yaml: config.process[0].train.optimizer='adam': stores the moments its own way, not as COAT"
    )


def test_raw_is_the_job_as_read_and_load_takes_a_path_or_a_mapping(tmp_path):
    raw = job_with({"training_folder": "out/[name]"})
    job = JobConfig.load(raw)
    assert job.training_folder == "out/run"
    assert job.raw["config"]["process"][0]["training_folder"] == "out/run"
    assert raw["config"]["process"][0]["training_folder"] == "out/[name]"
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(job.raw), encoding="utf-8")
    again = JobConfig.load(path)
    assert (again.file, again.train, again.coat) == (str(path), job.train, job.coat)


def test_adamw8bit_needs_bitsandbytes(monkeypatch):
    job = parse({**PLAIN, "train.optimizer": "adamw8bit", "coat": {"enabled": False}})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"train\.optimizer='adamw8bit': needs the package bitsandbytes; pip install"):
        require_packages(job)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: ModuleSpec(name, None, origin="there"))
    assert require_packages(job) is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: ModuleSpec(name, None))  # a folder of that name
    with pytest.raises(ConfigError, match="needs the package bitsandbytes"):
        require_packages(job)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert require_packages(parse()) is None
