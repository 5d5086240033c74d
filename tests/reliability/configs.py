"""Malformed configs as tables: what is wrong, for which trainer, and what the one line about it must name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.reliability.bad_config import AITK, ALONE, BOTH, PROCESS, BadConfig

Row = tuple[str, Any, str]

UNKNOWN: list[tuple[str, str]] = [  # key → the nearest known one
    ("traning_folder", "training_folder"),
    ("coats", "coat"),
    ("network.liner", "linear"),
    ("network.network_kwargs.only_if_contain", "only_if_contains"),
    ("save.save_evry", "save_every"),
    ("datasets.0.folder_pth", "folder_path"),
    ("datasets.1.resolutions", "resolution"),
    ("train.stpes", "steps"),
    ("train.batchsize", "batch_size"),
    ("train.Lr", "lr"),
    ("train.ema_config.decay", "ema_decay"),
    ("train.optimizer_params.weightdecay", "weight_decay"),
    ("train.lr_scheduler_params.eta_minimum", "eta_min"),
    ("model.quantise", "quantize"),
    ("sample.promts", "prompts"),
    ("logging.log_evry", "log_every"),
    ("coat.enabeld", "enabled"),
    ("coat.optimiser", "optimizer"),
    ("coat.optimizer.blocksize", "block_size"),
    ("coat.activation.groupsize", "group_size"),
    ("coat.memory.budget", "budget_gb"),
    ("coat.resume.allowed", "allow"),
    ("coat.m1_format", "optimizer: {m1_format"),
]
VALUES: list[Row] = [  # wrong type, range or choice: key, value, rule
    ("train.lr", "1e-4", "1e-4 without quotes"),
    ("train.lr", True, "must be a number"),
    ("train.lr", 0, "above 0"),
    ("train.lr", float("nan"), "must be a number"),
    ("train.lr", [1e-4], "must be a number"),
    ("train.steps", "1500", "1500 without quotes"),
    ("train.steps", 1500.0, "write 1500"),
    ("train.steps", 12.5, "must be a whole number"),
    ("train.steps", 0, "at least 1"),
    ("train.steps", None, "has no value"),
    ("train.gradient_checkpointing", "yes", "true or false"),
    ("train.gradient_checkpointing", 1, "true or false"),
    ("train.optimizer_params", [], "must be a block of keys"),
    ("train.ema_config", True, "must be a block of keys"),
    ("train.ema_config.ema_decay", 99, "from 0 to 1"),
    ("train", "fast", "must be a block of keys"),
    ("network", 16, "must be a block of keys"),
    ("network.linear", 16.5, "must be a whole number"),
    ("network.network_kwargs", "transformer", "must be a block of keys"),
    ("save.max_step_saves_to_keep", None, "has no value"),
    ("datasets", {"folder_path": "a"}, "must be a list"),
    ("datasets.0", "photos", "must be a block of keys"),
    ("datasets.0.folder_path", ["a", "b"], "must be a string"),
    ("datasets.0.num_repeats", 0, "at least 1"),
    ("datasets.0.caption_dropout_rate", 5, "from 0 to 1"),
    ("datasets.0.resolution", [512, "768"], "must be a whole number"),
    ("datasets.0.resolution", [], "must be a whole number"),
    ("datasets.0.resolution", [8], "must be a whole number"),
    ("model", "flux", "must be a block of keys"),
    ("model.name_or_path", 1, "must be a string"),
    ("sample.prompts", "a coatwear shirt", "must be a list"),
    ("trigger_word", 5, "must be a string"),
    ("training_folder", 3, "must be a string"),
    ("coat", True, "must be a block of keys"),
    ("coat.enabled", "true", "true or false"),
    ("coat.optimizer.block_size", 24, "multiple of 16"),
    ("coat.activation.exclude", "blocks.*", "must be a list of strings"),
    ("coat.memory.budget_gb", "24GB", "must be a number"),
    ("train.timestep_type", "sigmoi", "sigmoid"),
    ("train.optimizer", "coat_fp8_adam", "coat_fp8_adamw"),
    ("train.lr_scheduler", "cosin", "cosine"),
    ("network.type", "loar", "lora"),
    ("save.dtype", "flaot16", "float16"),
    ("type", "coat_flux_trainr", "coat_flux_trainer"),
    ("coat.weight.granularity", "per_raw", "per_row"),
    ("coat.data.background", "pink", "white"),
    ("coat.resume.allow", ["dta"], "data"),
]
CACHED, KEEP = ("train.cache_text_embeddings", True), ("train.gradient_checkpointing", False)
TOGETHER: list[tuple[str, str, tuple[tuple[str, Any], ...]]] = [  # what contradicts itself: key, words, changes
    ("network.linear_alpha=", "alpha is the rank", (("network.linear_alpha", 32),)),
    ("network.rank=", "linear", (("network.rank", 8),)),
    ("only_if_contains=", "nothing to train", (("network.network_kwargs", {"only_if_contains": []}),)),
    ("datasets", "nothing to train on", (("datasets", []),)),
    ("datasets[0].folder_path", "is missing", (("datasets.0.folder_path", ...),)),
    ("model.name_or_path", "is missing", (("model.name_or_path", ...),)),
    ("training_folder", "is missing", (("training_folder", ...),)),
    ("type", "is missing", (("type", ...),)),
    ("job='train'", "extension", (("/job", "train"),)),
    ("mata", "'meta'", (("/mata", {}),)),
    ("config.training_folder", "unknown key", (("/config.training_folder", "x"),)),
    ("train.7", "unknown key", (("train", {**PROCESS["train"], 7: 1}),)),
    ("train.null", "unknown key", (("train", {**PROCESS["train"], None: 1}),)),
    ("datasets[0].shuffle_tokens", "cache_text_embeddings", (("datasets.0.shuffle_tokens", True), CACHED)),
    ("datasets[1].cache_text_embeddings", "all datasets", (("datasets.0.cache_text_embeddings", True),)),
    ("train.dtype=", "bf16", (("train.dtype", "fp16"),)),
    ("gradient_accumulation_steps=4", "gradient_accumulation", (("train.gradient_accumulation_steps", 4),)),
    (
        "train.min_denoising_steps=",
        "max_denoising_steps",
        (("train.min_denoising_steps", 900), ("train.max_denoising_steps", 100)),
    ),
    ("model.qtype='coat_fp8'", "coat.weight.use_fp8", (("coat.weight.use_fp8", False),)),
    ("train.optimizer='adamw'", "coat.optimizer", (("train.optimizer", "adamw"),)),
    ("train.optimizer=", "coat.enabled", (("coat.enabled", False), ("model.quantize", False))),
    ("model.qtype=", "coat.enabled", (("coat.enabled", False), ("train.optimizer", "adam"))),
    ("coat.memory.every_n=3", "checkpointing", (("coat.memory", {"every_n": 3}),)),
    ("coat.guard.health_every=3", "guard.enabled", (("coat.guard", {"health_every": 3}),)),
    ("coat.memory.budget_gb=", "auto", (("coat.memory.checkpointing", "none"),)),
    ("coat.memory.checkpointing=", "gradient_checkpointing", (("coat.memory", {"checkpointing": "all"}), KEEP)),
    ("sample.prompts=", "samples", (("sample.samples", [{"prompt": "[trigger]"}]),)),
    ("datasets[0].caption_ext=", "plain text", (("datasets.0.caption_ext", "json"),)),
    ("datasets[0].caption_ext=", "end of a file name", (("datasets.0.caption_ext", "/../x"),)),
    (
        "training_folder=",
        "inside the data set",
        (("training_folder", "photos/out"), ("datasets.1.folder_path", "photos")),
    ),
    ("training_folder=", "inside the data set", (("training_folder", "out"), ("datasets.1.folder_path", "."))),
    ("config.name=", "names the run's folder", (("/config.name", "../run"),)),
    ("config.name=", "names the run's folder", (("/config.name", "nul.txt"),)),
    ("config.name=", "names the run's folder", (("/config.name", "x" * 300),)),
    ("config.name=", "names the run's folder", (("/config.name", ""),)),
    ("process[0].name=", "names the run's folder", (("name", "../x"),)),
    ("training_folder=", "a file, not a folder", (("training_folder", f"{__file__}/x"),)),
    ("log_dir=", "a file, not a folder", (("log_dir", __file__),)),
    ("training_folder=", "~ is not replaced", (("training_folder", "~/output"),)),
    ("datasets[0].folder_path=", "only as ${NAME}", (("datasets.0.folder_path", "$HOME/photos"),)),
    ("model.name_or_path=", "single quotes", (("model.name_or_path", "D:\train\new"),)),
    ("trigger_word=", "the word itself", (("trigger_word", "[trigger]"),)),
    ("trigger_word=", "blank", (("trigger_word", "ohwx "),)),
    ("trigger_word", "U+001B", (("trigger_word", "\x1b[2J"),)),
    ("train.l?r", "U+0000", (("train", {**PROCESS["train"], "l\0r": 1}),)),
]
STANDALONE: list[Row] = [
    ("model.compile", True, "not supported by the stand-alone trainer"),
    ("train.loss_target", "source", "not supported by the stand-alone trainer"),
    ("datasets.0.mask_path", "masks", "not supported by the stand-alone trainer"),
    ("adapter", {"type": "ip"}, "not supported by the stand-alone trainer"),
    ("save.push_to_hub", True, "not supported by the stand-alone trainer"),
    ("model.qtype", "qfloat8", "coat_fp8"),
    ("sample.width", 1000, "multiple of 16"),
    ("model.is_xl", True, "not supported by the stand-alone trainer"),
    ("train.timestep_type", "next_sample", "not supported by the stand-alone trainer"),
    ("train.train_unet", False, "nothing else to train"),
    ("network.type", "lokr", "inside ai-toolkit"),
    ("network.type", "loha", "write lora"),
    ("type", "concept_slider", "must be one of coat_flux_trainer, sd_trainer"),
    ("train.optimizer", "sgd", "must be one of adamw, adam"),
    ("train.max_grad_norm", 0, "above 0"),
    ("datasets.0.folder_path", " ", "is empty"),
    ("model.arch", "sdxl", "write flux"),
    ("model.is_flux", ..., "write true"),
    ("train.lr_scheduler_params", {"total_iters": 5}, "total_iters: unknown key"),
    ("train.optimizer_params", {"block_sze": 64}, "'block_size'"),
]
AI_TOOLKIT: list[Row] = [  # what ai-toolkit takes, and then fails on or does not do
    ("device", "cuda:1", "CUDA_VISIBLE_DEVICES=1"),
    ("device", "gpu", "write cuda"),
    ("train.noise_scheduler", ..., "flowmatch"),
    ("sample.sampler", ..., "flowmatch"),
    ("sample.prompts", [5], "in quotes"),
    ("train.do_cfg", "yes", "true or false"),
    ("train.noise_offset", "0.1", "without quotes"),
    ("datasets.0.controls", 3, "must be a list or a string"),
    ("train.do_cgf", True, "did you mean 'do_cfg'"),
    ("adapter", {"in_chanels": 3}, "in_channels"),
    ("train.validation_config", {"validation_items": [{"image_pth": "x"}]}, "image_path"),
    ("train.validation_config", {"validation_items": [{"image_path": "gone.jpg"}]}, "no such image"),
    ("train.max_grad_norm", 0, "nothing is learned"),
    ("train.lr_scheduler", "polynomial", "write constant"),
    ("train.merge_network_on_save", True, "saves the whole model"),
    ("model.qtype", "fp8", "must be one of coat_fp8"),
    ("network.type", "locon", "write lora"),
    ("save.dtype", "float8", "write float16"),
    ("datasets.0.mask_path", "nowhere", "no such folder"),
    ("datasets.0.control_path", ["masks"], "no such folder"),
    ("model.compile", True, "block_compile: true"),
    ("model", {"name_or_path": "x", "is_xl": True, "quantize": True, "qtype": "coat_fp8"}, "write quantize: false"),
    ("model", {"name_or_path": "x", "arch": "ace_step_15"}, "train one of anima"),
    ("type", "sd_trainer", "coat_flux_trainer"),
]
FRAME = "job: extension\nconfig:\n  name: run\n  process:\n    - type: coat_flux_trainer\n"
TEXTS: list[tuple[str | bytes, str, str]] = [  # a file, two words
    ("", "job and config", "the file"),
    ("- a\n- b\n", "job and config", "the file"),
    (bytes(range(256)), "not UTF-8", "UTF-8"),
    (FRAME + "      a: \0\n", "#x0000", "that value"),
    (FRAME + "\ttrain: 1\n", "line 6", "spaces, not tabs"),
    (FRAME + "      trigger_word: a: b\n", "line 6", "quotes"),
    (FRAME + "      resolution: [512, 768\n", "not YAML", "brackets"),
    (FRAME + "     train:\n        steps: 1\n", "not YAML", "indentation"),
    (FRAME + "      train: {lr: 1, steps: 2, lr: 3}\n", "line 6", "the key lr is written twice"),
    ("config: {name: a, process: [{}]}\n", "job", "is missing"),
    ("job: extension\n", "config", "must be a block"),
    ("job: extension\nconfig: {process: [{type: x}]}\n", "config.name", "must be a string"),
    ("job: extension\nconfig: {name: a}\n", "config.process", "must be a list"),
    ("job: extension\nconfig: {name: a, process: [b]}\n", "config.process[0]", "must be a block"),
    (FRAME + "---\n" + FRAME, "another document", "line 6"),
    (FRAME + "      a: !!python/object/apply:os.system ['true']\n", "line 6", "could not determine a constructor"),
    (FRAME + "      training_seed: 2024-01-31\n", "training_seed", "in quotes"),
    (FRAME + "      training_seed: 2024-13-45\n", "month", "in quotes"),
    (FRAME + "      a: !!set {b}\n", "config.process[0].a", "set"),
    (FRAME + "      ? [1, 2]\n      : 3\n", "line 6", "unhashable"),
    (FRAME + "      a: &x [*x]\n", "alias", "contains itself"),
    (FRAME + "      a: *nothing\n", "line 6", "undefined alias"),
    (FRAME + "      training_folder: ${COAT_FLUX_UNSET_VARIABLE}\n", "line 6", "not set"),
    (FRAME + '      training_folder: "C:\\Users\\me"\n', "line 6", "single quotes"),
]
JSON: list[tuple[str, str]] = [
    ("", "not JSON"),
    ('{"job": "extension",\n}', "line 2"),
    ('{"job": {"a": 1, "a": 2}}', "'a' is written twice"),
    ("[" * 90_000, "nested too deeply"),
    ('{"job": ' + "9" * 5000 + "}", "4300 digits"),
    (r'{"job": "extension", "config": {"name": "a", "process": [{"x": "\ud800"}]}}', "U+D800"),
]


def _place(key: str) -> str:
    return key.replace("datasets.0", "datasets[0]").replace("datasets.1", "datasets[1]")


def _cases() -> Iterator[BadConfig]:
    for key, near in UNKNOWN:
        yield BadConfig(f"unknown {key}", (_place(key), "unknown key", near), BOTH, ((key, 1),))
    for rows, hosts in ((VALUES, BOTH), (STANDALONE, ALONE), (AI_TOOLKIT, AITK)):
        for number, (key, value, rule) in enumerate(rows):
            where = "" if isinstance(value, dict) or key == "type" else f"config.process[0].{_place(key)}"
            yield BadConfig(f"{hosts[-1]} {number} {key}: {value!r}"[:60], (where, rule), hosts, ((key, value),))
    for number, (place, words, changes) in enumerate(TOGETHER):
        yield BadConfig(f"{number} {place} {words}", (place, words), BOTH, changes)
    for number, (text, *words) in enumerate(TEXTS):
        yield BadConfig(f"text {number}: {words[1]}", tuple(words), text=text)
    for number, (text, word) in enumerate(JSON):
        yield BadConfig(f"JSON {number}: {word}", (word,), text=text, suffix=".json")
    yield BadConfig("no suffix", ("ends in .yaml",), text=FRAME, suffix="")
    control = ("datasets.0.token_dropout_rate", 0.1)
    yield BadConfig("ai-toolkit token dropout", ("token_dropout_rate=", "cached"), AITK, (control, CACHED))
    params = ("train.optimizer_params", {"eps": 1e-8}), ("coat.optimizer", {"use_fp8": False})
    yield BadConfig("ai-toolkit second eps", ("optimizer_params.eps=",), AITK, (("train.optimizer", "adamw"), *params))
    flags = ("sample.prompts", ["[trigger] --w 512"])
    yield BadConfig("flags", ("sample.prompts[0]=", "flags"), ALONE, (flags,))


BAD_CONFIGS: tuple[BadConfig, ...] = tuple(_cases())
