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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # unknown keys
        ({"train.learning_rate": 1}, "train.learning_rate: unknown key; "),
        ({"train.stpes": 1}, "train.stpes: unknown key; did you mean 'steps'?"),
        ({"traning_folder": "x"}, "traning_folder: unknown key; did you mean 'training_folder'?"),
        ({"datasets.0.folderpath": "x"}, "datasets[0].folderpath: unknown key; did you mean 'folder_path'?"),
        ({"network.network_kwargs": {"only_if_contain": []}}, "did you mean 'only_if_contains'?"),
        ({"train.blank_prompt_preservatoin": 1}, "did you mean 'blank_prompt_preservation'?"),
        # known to ai-toolkit, not to us
        ({"train.loss_target": "source"}, "train.loss_target='source': not supported by the stand-alone trainer; remo"),
        ({"train.do_cfg": True}, "train.do_cfg=true: not supported by the stand-alone trainer"),
        ({"train.unet_lr": 1e-4}, "train.unet_lr=0.0001: not supported"),
        ({"train.cfg_scale": 2}, "train.cfg_scale=2: not supported"),
        ({"train.do_guidance_loss": True}, "train.do_guidance_loss=true: not supported"),
        ({"datasets.0.mask_path": "m"}, "datasets[0].mask_path='m': not supported"),
        ({"datasets.0.num_frames": 8}, "datasets[0].num_frames=8: not supported"),
        ({"model.layer_offloading": True}, "model.layer_offloading=true: not supported"),
        ({"model.compile": True}, "model.compile=true: not supported"),
        ({"model.is_xl": True}, "model.is_xl=true: not supported"),
        ({"adapter": {"type": "ip"}}, 'adapter={"type": "ip"}: not supported'),
        ({"sample.network_multiplier": 0.5}, "sample.network_multiplier=0.5: not supported"),
        ({"train.timestep_type": "next_sample"}, "train.timestep_type='next_sample': not supported by the stand-alone"),
        ({"train.train_text_encoder": True}, "train.train_text_encoder=true: not supported by the stand-alone trainer"),
        ({"train.train_unet": False}, "train.train_unet=false: there is nothing else to train here"),
        ({"save.push_to_hub": True}, "save.push_to_hub=true: not supported by the stand-alone trainer"),
        ({"logging.use_wandb": "yes"}, "logging.use_wandb='yes': must be true or false"),
        ({"network.type": "lokr"}, "network.type='lokr': not supported by the stand-alone trainer; run this config"),
        ({"network.type": "dora"}, "network.type='dora': not supported by the stand-alone trainer; run this config"),
        ({"network.type": "loha"}, "network.type='loha': neither the stand-alone trainer nor ai-toolkit trains it"),
        ({"type": "concept_slider"}, "type='concept_slider': must be one of coat_flux_trainer, sd_trainer, "),
        # types and ranges
        ({"train.lr": "1e-4"}, "train.lr='1e-4': must be a number above 0; write 1e-4 without quotes"),
        ({"train.steps": 1e3}, "train.steps=1000.0: must be a whole number of at least 1; write 1000"),
        ({"train.batch_size": 0}, "train.batch_size=0: must be a whole number of at least 1"),
        ({"train.dtype": "fp16"}, "train.dtype='fp16': FLUX overflows in fp16; write bf16"),
        ({"train.max_grad_norm": 0}, "train.max_grad_norm=0: must be a number above 0"),
        ({"train.optimizer": "AdamW"}, "train.optimizer='AdamW': must be one of "),
        ({"train.optimizer": "sgd"}, "must be one of adamw, adam, adamw8bit, prodigy, adafactor, lion, coat_fp8_adamw"),
        ({"datasets.0.resolution": []}, "datasets[0].resolution=[]: must be a whole number, or a list of them"),
        ({"datasets.0.resolution": [512, "768"]}, "or a list of them, each from 32 to 8192; write 768 without quotes"),
        ({"datasets.0.caption_dropout_rate": 5}, "caption_dropout_rate=5: must be a number from 0 to 1"),
        ({"datasets": {"folder_path": "a"}}, "must be a list; put '- ' before the first key of each entry"),
        ({"datasets.0.folder_path": ...}, "datasets[0].folder_path: is missing, must be a string; add it"),
        ({"datasets.0.folder_path": " "}, "datasets[0].folder_path=' ': is empty; write one"),
        ({"model.name_or_path": ...}, "model.name_or_path: is missing, must be a string; add it"),
        ({"training_folder": ...}, "training_folder: is missing, must be a string; add it"),
        ({"training_folder": None}, "training_folder=null: has no value, must be a string; write one"),
        ({"trigger_word": 5}, "trigger_word=5: must be a string, or null; write it in quotes"),
        ({"sample.width": 1000}, "sample.width=1000: must be a whole number from 16 to 8192 and a multiple of 16"),
        ({"sample.prompts": "a"}, "sample.prompts='a': must be a list of strings; write ['a']"),
        ({"device": "gpu"}, "device='gpu': must be cuda, cuda:0, mps or cpu"),
        ({"name": "a/b"}, "name='a/b': names the run's folder"),
        # contradictions
        ({"network.linear_alpha": 8}, "network.linear_alpha=8: ai-toolkit ignores it on FLUX, alpha is the rank; wr"),
        ({"network.rank": 8, "network.linear_alpha": ...}, "network.rank=8: an old name of linear, which is given too"),
        ({"network.network_kwargs": {"only_if_contains": []}}, "only_if_contains=[]: an empty list leaves nothing to"),
        ({"datasets": []}, "datasets=[]: there is nothing to train on"),
        ({"datasets": [{"folder_path": "a", "cache_text_embeddings": True}, {"folder_path": "b"}]},
         "datasets[1].cache_text_embeddings=false: must be the same in all datasets"),
        ({"datasets.0.cache_text_embeddings": True, "datasets.0.shuffle_tokens": True},
         "datasets[0].shuffle_tokens=true: a cached caption is encoded once"),
        ({"train.gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4: in ai-toolkit only the last of the"),
        ({"train.min_denoising_steps": 500, "train.max_denoising_steps": 400}, "must not be above max_denoising_steps"),
        ({"train.optimizer_params": {"block_sze": 64}}, "train.optimizer_params.block_sze: unknown key; did you mean"),
        ({**PLAIN, "train.optimizer_params": {"block_size": 64}}, "train.optimizer_params.block_size: unknown key; kn"),
        ({"train.lr_scheduler_params": {"total_iters": 5}}, "lr_scheduler_params.total_iters: unknown key; known here"),
        ({"train.lr_scheduler": "cosine", "train.lr_scheduler_params": {"eta_min": "0"}}, "lr_scheduler_params.eta_mi"),
        ({"model.is_flux": ...}, "model.is_flux=false: the stand-alone trainer trains FLUX.1 and FLUX.2; write true"),
        ({"model.arch": "sdxl"}, "model.arch='sdxl': the stand-alone trainer trains FLUX.1 and FLUX.2; write flux,"),
        ({"model.qtype": "qfloat8"}, "model.qtype='qfloat8': the stand-alone trainer quantizes as coat_fp8 only"),
        ({"model.qtype": ...}, "model.qtype='qfloat8': the stand-alone trainer quantizes as coat_fp8 only"),
        ({"coat": {"weight": {"use_fp8": False}}}, "model.qtype='coat_fp8': coat.weight.use_fp8: false asks for bf16"),
        ({"coat": {"enabled": False}, "model.quantize": False}, "train.optimizer='coat_fp8_adamw': coat.enabled: fal"),
        ({"coat": {"enabled": False}, "train.optimizer": "adam"}, "model.qtype='coat_fp8': coat.enabled: false asks"),
        ({"train.optimizer": "adamw", "coat": {"optimizer": {"m1_format": "e5m2"}}},
         "train.optimizer='adamw': the block coat.optimizer would have no effect; write coat_fp8_adamw"),
        ({"train.gradient_checkpointing": False, "coat": {"memory": {"checkpointing": "all"}}},
         "coat.memory.checkpointing='all': train.gradient_checkpointing: false forbids recomputation"),
        ({"coat": {"optimiser": {}}}, "coat.optimiser: unknown key; did you mean 'optimizer'?"),
        ({"sample.samples": [{"prompt": "a"}]}, "sample.prompts="),
        ({"sample.prompts": ["a --w 512"]}, "sample.prompts[0]='a --w 512': flags in a prompt are not supported"),
        ({"sample.prompts": ..., "sample.samples": [{}]}, "sample.samples[0].prompt: is missing, must be a string"),
    ],
)  # fmt: skip
def test_a_wrong_job_is_refused_once_and_says_what_to_change(changes, message):
    (found,) = findings(changes)
    assert message in found
    assert "; " in found


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
