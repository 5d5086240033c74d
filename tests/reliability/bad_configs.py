"""Malformed configs as one table: what is wrong, for which trainer, and what the one line about it must name."""

import copy
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from coat_flux.config.check import check_job_dict
from coat_flux.config.findings import ConfigError, Finding
from coat_flux.config.job_file import load_job_yaml
from tests.helpers.changes import change

BOTH = ("standalone", "ai-toolkit")
ALONE, AITK = ("standalone",), ("ai-toolkit",)

PROCESS: dict[str, Any] = yaml.safe_load("""
type: coat_flux_trainer
training_folder: output
device: cuda
trigger_word: coatwear
training_seed: 42
network: {type: lora, linear: 16, linear_alpha: 16}
save: {dtype: float16, save_every: 250, max_step_saves_to_keep: 4}
datasets:
  - {folder_path: photos, caption_ext: txt, caption_dropout_rate: 0.05, cache_latents_to_disk: true,
     resolution: [512, 768]}
  - {folder_path: details, num_repeats: 2, resolution: 1024}
train: {batch_size: 1, steps: 1500, gradient_accumulation: 2, gradient_checkpointing: true, dtype: bf16,
        noise_scheduler: flowmatch, timestep_type: sigmoid, max_grad_norm: 1.0, lr: 1.0e-4, lr_scheduler: cosine,
        lr_scheduler_params: {eta_min: 1.0e-6}, ema_config: {use_ema: true, ema_decay: 0.99},
        optimizer: coat_fp8_adamw, optimizer_params: {weight_decay: 1.0e-2, betas: [0.9, 0.999]}}
model: {name_or_path: models/flux, is_flux: true, quantize: true, qtype: coat_fp8}
sample: {sampler: flowmatch, sample_every: 250, width: 1024, height: 1024, neg: "", seed: 42, walk_seed: true,
         guidance_scale: 4, sample_steps: 20, prompts: ["[trigger], a red shirt", a woman in a coatwear dress]}
logging: {log_every: 100}
coat:
  enabled: true
  optimizer: {m1_format: e4m3, m2_format: e5m2, block_size: 128}
  weight: {use_fp8: true, granularity: per_row}
  activation: {format: e4m3, grad_format: e5m2, exclude: [transformer_blocks.0.*]}
  memory: {checkpointing: auto, budget_gb: 22.5}
  data: {background: white}
  guard: {enabled: true}
  resume: {allow: [data]}
  fallback: bf16
""")
Changes = dict[str, Any]  # dotted key of the process entry, or of the job where it starts with / → value


def job_with(changes: Changes | None = None) -> dict[str, Any]:
    """A job that both trainers take without a warning, with changes; a value of ... removes its key."""
    job = {
        "job": "extension",
        "config": {"name": "run", "process": [copy.deepcopy(PROCESS)]},
        "meta": {"name": "[name]", "version": "1.0"},
    }
    for key, value in (changes or {}).items():
        change(job, {key[1:] if key.startswith("/") else f"config.process.0.{key}": value})
    return job


def check_job_file(path: Path, **keywords: Any) -> list[Finding]:
    """All findings about a job file, also those of reading it."""
    try:
        return check_job_dict(load_job_yaml(path), file=str(path), **keywords)
    except ConfigError as error:
        return list(error.findings)


def yaml_of(job: dict[str, Any]) -> str:
    """The text of a job file."""
    return yaml.safe_dump(job, sort_keys=False)


class Bad(NamedTuple):
    """One malformed job: the finding is about `key` and has the words `says`; `trainers` must refuse it."""

    key: str
    says: str
    changes: Changes
    trainers: tuple[str, ...] = BOTH


def _values(trainers: tuple[str, ...], *rows: tuple[str, Any, str]) -> list[Bad]:
    """Rows of a key of the process entry, its value, and the words of its rule."""
    return [Bad(re.sub(r"\.(\d)", r"[\1]", key), says, {key: value}, trainers) for key, value, says in rows]


UNKNOWN = {  # key → the nearest known one
    "traning_folder": "training_folder",
    "network.network_kwargs.only_if_contain": "only_if_contains",
    "datasets.0.folder_pth": "folder_path",
    "train.Lr": "lr",
    "train.learning_rate": "lr",  # kohya's
    "train.optimizer_params.weightdecay": "weight_decay",
    "train.lr_scheduler_params.eta_minimum": "eta_min",
    "coat.optimizer.blocksize": "block_size",
    "coat.m1_format": "optimizer: {m1_format",
}
CACHED, FEWER = {"train.cache_text_embeddings": True}, {"train.max_denoising_steps": 100}
ALL = {"coat.memory": {"checkpointing": "all"}}
SDXL = {"name_or_path": "x", "is_xl": True, "quantize": True, "qtype": "coat_fp8"}
BAD_CONFIGS: list[Bad] = [
    *_values(BOTH, *((key, 1, f"unknown key; did you mean '{near}") for key, near in UNKNOWN.items())),
    # wrong type, range or choice
    *_values(
        BOTH,
        ("train.lr", "1e-4", "without quotes"),
        ("train.lr", 0, "above 0"),
        ("train.lr", float("nan"), "must be a number"),
        ("train.steps", 1500.0, "must be a whole number"),
        ("train.steps", None, "has no value"),
        ("train.gradient_checkpointing", "yes", "true or false"),
        ("train.ema_config.ema_decay", 99, "from 0 to 1"),
        ("train", "fast", "must be a block of keys"),
        ("datasets", {"folder_path": "a"}, "must be a list"),
        ("datasets.0", "photos", "must be a block of keys"),
        ("datasets.0.folder_path", ["a", "b"], "must be a string"),
        ("datasets.0.resolution", [512, "768"], "must be a whole number"),
        ("datasets.0.resolution", [], "must be a whole number"),
        ("datasets.0.resolution", [31], "must be a whole number"),
        ("coat.optimizer.block_size", 24, "multiple of 16"),
        ("coat.optimizer.block_size", 4112, "from 16 to 4096"),
        ("coat.optimizer.m1_format", "E4M3", "did you mean 'e4m3'"),
        ("train.optimizer_params", [], "must be a block of keys"),
        ("train.optimizer_params.betas", 0.9, "two numbers"),
        ("train.optimizer_params.betas", [0.9, 1.0], "below 1"),
        ("train.optimizer_params.eps", 0, "above 0"),
        ("train.optimizer", "coat_fp8_adam", "coat_fp8_adamw"),
        ("type", "coat_flux_trainr", "coat_flux_trainer"),
    ),
    # what is missing
    *_values(
        BOTH,
        ("datasets", [], "nothing to train on"),
        ("datasets.0.folder_path", ..., "is missing"),
        ("model.name_or_path", ..., "is missing"),
        ("training_folder", ..., "is missing"),
        ("type", ..., "is missing"),
    ),
    # what contradicts another key
    *_values(
        BOTH,
        ("network.linear_alpha", 32, "alpha is the rank"),
        ("network.rank", 8, "linear"),
        ("network.network_kwargs.only_if_contains", [], "nothing to train"),
        ("train.dtype", "fp16", "bf16"),
        ("train.gradient_accumulation_steps", 4, "gradient_accumulation"),
        ("datasets.0.caption_ext", "json", "plain text"),
        ("datasets.0.folder_path", "$HOME/photos", "only as ${NAME}"),
        ("training_folder", "~/output", "~ is not replaced"),
        ("model.name_or_path", "D:\train\new", "single quotes"),
        ("trigger_word", "[trigger]", "the word itself"),
        ("trigger_word", "ohwx ", "blank"),
        ("device", "gpu", "write cuda"),
        ("name", "../x", "names the run's folder"),
    ),
    Bad("train.7", "unknown key", {"train": {**PROCESS["train"], 7: 1}}),
    Bad("train.null", "unknown key", {"train": {**PROCESS["train"], None: 1}}),
    Bad("datasets[0].shuffle_tokens", "cache_text_embeddings", {"datasets.0.shuffle_tokens": True, **CACHED}),
    Bad("datasets[1].cache_text_embeddings", "all datasets", {"datasets.0.cache_text_embeddings": True}),
    Bad("train.min_denoising_steps", "which is 100", {"train.min_denoising_steps": 101, **FEWER}),
    Bad("model.qtype", "coat.weight.use_fp8", {"coat.weight.use_fp8": False}),
    Bad("train.optimizer", "coat.optimizer", {"train.optimizer": "adamw"}),
    Bad("train.optimizer", "coat.enabled", {"coat.enabled": False, "model.quantize": False}),
    Bad("model.qtype", "coat.enabled", {"coat.enabled": False, "train.optimizer": "adam"}),
    Bad("coat.memory.checkpointing", "gradient_checkpointing", {**ALL, "train.gradient_checkpointing": False}),
    Bad("sample.prompts", "samples", {"sample.samples": [{"prompt": "[trigger]"}]}),
    Bad("training_folder", "inside the data set", {"training_folder": "photos/out"}),
    Bad("training_folder", "inside the data set", {"training_folder": "out", "datasets.1.folder_path": "."}),
    Bad("datasets[0].is_reg", "leaves no photos", {"datasets.0.is_reg": True, "datasets.1.is_reg": True}),
    Bad("datasets[0].mask_path", "buckets: true", {"datasets.0.mask_path": ".", "datasets.0.buckets": False}),
    Bad("datasets[0].alpha_mask", "buckets: true", {"datasets.0.alpha_mask": True, "datasets.0.buckets": False}),
    Bad("datasets[0].mask_path", "alpha_mask: true", {"datasets.0.mask_path": ".", "datasets.0.alpha_mask": True}),
    Bad("/job", "extension", {"/job": "train"}),
    Bad("/meta", "must be a block of keys", {"/meta": "x"}),
    Bad("/mata", "'meta'", {"/mata": {}}),
    Bad("/config.training_folder", "unknown key", {"/config.training_folder": "x"}),
    Bad("/config.name", "names the run's folder", {"/config.name": "../run"}),
    Bad("/config.name", "names the run's folder", {"/config.name": ""}),
    # what only the stand-alone trainer refuses
    *_values(
        ALONE,
        ("train.loss_target", "source", "not supported by the stand-alone trainer"),
        ("adapter", {"type": "ip"}, "not supported by the stand-alone trainer"),
        ("model.qtype", "qfloat8", "coat_fp8"),
        ("sample.width", 1000, "multiple of 16"),
        ("train.timestep_type", "next_sample", "not supported by the stand-alone trainer"),
        ("train.train_unet", False, "not supported by the stand-alone trainer"),
        ("network.type", "dora", "inside ai-toolkit, or write lora"),
        ("network.type", "loha", "must be one of lora"),
        ("type", "concept_slider", "must be one of coat_flux_trainer, sd_trainer"),
        ("train.optimizer", "sgd", "must be one of adamw, adam"),
        ("train.optimizer", "lion8bit", "not supported by the stand-alone trainer"),
        ("train.max_grad_norm", 0, "above 0"),
        ("datasets.0.folder_path", " ", "is empty"),
        ("model.arch", "sdxl", "write flux"),
        ("model.is_flux", ..., "write true"),
        ("train.optimizer_params.block_sze", 64, "'block_size'"),
    ),
    Bad("sample.prompts[0]", "flags", {"sample.prompts": ["[trigger] --w 512"]}, ALONE),
    # what ai-toolkit takes, and then fails on or does not do
    *_values(
        AITK,
        ("device", "cuda:1", "CUDA_VISIBLE_DEVICES"),
        ("train.noise_scheduler", ..., "flowmatch"),
        ("sample.sampler", ..., "flowmatch"),
        ("train.do_cfg", "yes", "true or false"),
        ("datasets.0.controls", 3, "must be a list or a string"),
        ("train.do_cgf", True, "did you mean 'do_cfg'"),
        ("adapter.in_chanels", 3, "in_channels"),
        ("train.max_grad_norm", 0, "nothing is learned"),
        ("train.lr_scheduler", "polynomial", "must be one of constant"),
        ("train.merge_network_on_save", True, "saves the whole model"),
        ("model.qtype", "fp8", "must be one of coat_fp8"),
        ("save.dtype", "float8", "write float16"),
        ("datasets.0.mask_path", "nowhere", "no such folder"),
        ("datasets.0.control_path", ["masks"], "no such folder"),
        ("model.compile", True, "block_compile: true"),
    ),
    Bad("sample.prompts[0]", "in quotes", {"sample.prompts": [5]}, AITK),
    Bad("coat", "coat_flux_trainer", {"type": "sd_trainer"}, AITK),
    Bad("model.qtype", "write quantize: false", {"model": SDXL}, AITK),
    Bad("datasets[0].token_dropout_rate", "cached", {"datasets.0.token_dropout_rate": 0.1, **CACHED}, AITK),
]

FRAME = "job: extension\nconfig:\n  name: run\n  process:\n    - type: coat_flux_trainer\n"
BAD_TEXTS: list[tuple[str, str | bytes, str, str]] = [  # suffix, content, two words
    (".yaml", "", "job and config", "the file"),
    (".yaml", bytes(range(256)), "not UTF-8", "UTF-8"),
    (".yaml", FRAME + "\ttrain: 1\n", "line 6", "spaces, not tabs"),
    (".yaml", FRAME + "      trigger_word: a: b\n", "line 6", "quotes"),
    (".yaml", FRAME + "      resolution: [512, 768\n", "not YAML", "brackets"),
    (".yaml", FRAME + "      train: {lr: 1, steps: 2, lr: 3}\n", "line 6", "the key lr is written twice"),
    (".yaml", "config: {name: a, process: [{}]}\n", "job", "is missing"),
    (".yaml", "job: extension\n", "config", "must be a block"),
    (".yaml", "job: extension\nconfig: {process: [{type: x}]}\n", "config.name", "must be a string"),
    (".yaml", "job: extension\nconfig: {name: a}\n", "config.process", "must be a list"),
    (".yaml", "job: extension\nconfig: {name: a, process: [b]}\n", "config.process[0]", "must be a block"),
    (".yaml", FRAME + "---\n" + FRAME, "another document", "line 6"),
    (".yaml", FRAME + "      a: !!python/object/apply:os.system ['true']\n", "line 6", "could not determine"),
    (".yaml", FRAME + "      training_seed: 2024-13-45\n", "month", "in quotes"),
    (".yaml", FRAME + "      a: &x [*x]\n", "alias", "contains itself"),
    (".yaml", FRAME + "      training_folder: ${COAT_FLUX_UNSET_VARIABLE}\n", "line 6", "not set"),
    (".yaml", FRAME + '      training_folder: "C:\\Users\\me"\n', "line 6", "single quotes"),
    (".json", '{"job": "extension",\n}', "line 2", "not JSON"),
    (".json", '{"job": {"a": 1, "a": 2}}', "'a' is written twice", "quotes"),
    (".json", "[" * 90_000, "nested too deeply", "brackets"),
    (".txt", FRAME, "ends in .yaml", "rename it"),
]
