"""Malformed configs as data: what is wrong, for which host, and what the one line about it must say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.reliability.ai_toolkit_configs import ai_toolkit_configs
from tests.reliability.bad_config import ALONE, BOTH, PROCESS, BadConfig
from tests.reliability.config_texts import texts


def _unknown_keys() -> Iterator[BadConfig]:
    for key, near in [
        ("traning_folder", "training_folder"),
        ("triger_word", "trigger_word"),
        ("trainer", "train"),
        ("coats", "coat"),
        ("network.liner", "linear"),
        ("network.network_kwargs.only_if_contain", "only_if_contains"),
        ("save.save_evry", "save_every"),
        ("datasets.0.folder_pth", "folder_path"),
        ("datasets.1.resolutions", "resolution"),
        ("datasets.0.caption_extension", "caption_ext"),
        ("train.stpes", "steps"),
        ("train.batchsize", "batch_size"),
        ("train.gradient_clipping", "max_grad_norm"),
        ("train.Lr", "lr"),
        ("train.ema_config.decay", "ema_decay"),
        ("train.optimizer_params.weightdecay", "weight_decay"),
        ("train.lr_scheduler_params.eta_minimum", "eta_min"),
        ("model.quantise", "quantize"),
        ("model.name_or_pth", "name_or_path"),
        ("sample.promts", "prompts"),
        ("sample.guidance_scal", "guidance_scale"),
        ("logging.log_evry", "log_every"),
        ("coat.enabeld", "enabled"),
        ("coat.optimiser", "optimizer"),
        ("coat.optimizer.blocksize", "block_size"),
        ("coat.weight.use_fp16", "use_fp8"),
        ("coat.activation.groupsize", "group_size"),
        ("coat.memory.budget", "budget_gb"),
        ("coat.guard.nonfinite_step", "nonfinite_steps"),
        ("coat.data.backgroud", "background"),
        ("coat.resume.allowed", "allow"),
        ("coat.m1_format", "optimizer: {m1_format"),
    ]:
        yield BadConfig(f"unknown {key}", (f".{_leaf(key)}", "unknown key", near), BOTH, ((key, 1),))
    yield BadConfig("unknown in job", ("mata", "unknown key", "meta"), changes=(("/mata", {}),))
    yield BadConfig(
        "unknown in config", ("config.training_folder", "unknown key"), changes=(("/config.training_folder", "x"),)
    )
    yield BadConfig("a key that is a number", (".7", "unknown key"), changes=(("train", {**PROCESS["train"], 7: 1}),))
    yield BadConfig("a key that is null", (".null", "unknown key"), changes=(("train", {**PROCESS["train"], None: 1}),))


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


def _types() -> Iterator[BadConfig]:
    for key, value, rule in [
        ("train.lr", "1e-4", "1e-4 without quotes"),
        ("train.lr", "fast", "must be a number"),
        ("train.lr", True, "must be a number"),
        ("train.lr", 0, "above 0"),
        ("train.lr", float("nan"), "must be a number"),
        ("train.lr", [1e-4], "must be a number"),
        ("train.lr", -1, "write 0.0001, for example"),
        ("train.lr", "0,0001", "write 0.0001"),
        ("train.lr", "10^-4", "write 0.0001"),
        ("train.lr", "１e-4", "write 0.0001"),
        ("train.steps", "1,500", "write 1500"),
        ("train.steps", "2k", "write 2000"),
        ("train.steps", "08", "write 8"),
        ("train.steps", "1500", "1500 without quotes"),
        ("train.steps", 1500.0, "write 1500"),
        ("train.steps", 12.5, "must be a whole number"),
        ("train.steps", 0, "at least 1"),
        ("train.steps", -5, "at least 1"),
        ("train.steps", None, "has no value"),
        ("train.steps", {"a": 1}, "must be a whole number"),
        ("train.batch_size", 0, "at least 1"),
        ("train.gradient_accumulation", 0, "at least 1"),
        ("train.gradient_checkpointing", "yes", "true without quotes"),
        ("train.gradient_checkpointing", 1, "write true"),
        ("train.max_grad_norm", "one", "must be a number"),
        ("train.optimizer_params", [], "must be a block of keys"),
        ("train.ema_config", True, "must be a block of keys"),
        ("train.ema_config.use_ema", "false", "false without quotes"),
        ("train.ema_config.ema_decay", 99, "from 0 to 1"),
        ("train", "fast", "must be a block of keys"),
        ("train", [], "must be a block of keys"),
        ("network", 16, "must be a block of keys"),
        ("network.linear", "16", "16 without quotes"),
        ("network.linear", 16.5, "must be a whole number"),
        ("network.network_kwargs", "transformer", "must be a block of keys"),
        ("save.save_every", "250", "250 without quotes"),
        ("save.max_step_saves_to_keep", None, "has no value"),
        ("datasets", {"folder_path": "a"}, "must be a list"),
        ("datasets", "photos", "must be a list"),
        ("datasets.0", "photos", "must be a block of keys"),
        ("datasets.0.folder_path", 5, "must be a string"),
        ("datasets.0.folder_path", ["a", "b"], "must be a string"),
        ("datasets.0.caption_ext", True, "must be a string"),
        ("datasets.0.num_repeats", "2", "2 without quotes"),
        ("datasets.0.num_repeats", 0, "at least 1"),
        ("datasets.0.caption_dropout_rate", 5, "from 0 to 1"),
        ("datasets.0.caption_dropout_rate", "0.05", "0.05 without quotes"),
        ("datasets.0.cache_latents_to_disk", "true", "true without quotes"),
        ("datasets.0.resolution", "512", "must be a whole number"),
        ("datasets.0.resolution", [512, "768"], "must be a whole number"),
        ("datasets.0.resolution", [], "must be a whole number"),
        ("datasets.0.resolution", [8], "must be a whole number"),
        ("model", "flux", "must be a block of keys"),
        ("model.quantize", "coat_fp8", "true or false"),
        ("model.name_or_path", 1, "must be a string"),
        ("sample.width", "1024", "1024 without quotes"),
        ("sample.prompts", "a coatwear shirt", "must be a list"),
        ("sample.walk_seed", "no", "false without quotes"),
        ("sample.seed", "42", "42 without quotes"),
        ("trigger_word", 5, "must be a string"),
        ("trigger_word", ["coatwear"], "must be a string"),
        ("training_seed", "42", "42 without quotes"),
        ("training_folder", 3, "must be a string"),
        ("logging.log_every", 1.5, "must be a whole number"),
        ("coat", True, "must be a block of keys"),
        ("coat.enabled", "true", "true without quotes"),
        ("coat.optimizer", "fp8", "must be a block of keys"),
        ("coat.optimizer.block_size", 24, "multiple of 16"),
        ("coat.optimizer.block_size", "128", "128 without quotes"),
        ("coat.weight.use_fp8", 1, "write true"),
        ("coat.activation.exclude", "blocks.*", "must be a list of strings"),
        ("coat.memory.budget_gb", "24GB", "must be a number"),
        ("coat.memory.log_every", 0, "at least 1"),
        ("coat.guard.max_saturation", 5, "above 0"),
    ]:
        found = key.replace("datasets.0", "datasets[0]")
        yield BadConfig(f"{key}: {value!r}", (f"config.process[0].{found}", rule), BOTH, ((key, value),))


def _choices() -> Iterator[BadConfig]:
    for key, value, near in [
        ("train.timestep_type", "sigmoi", "sigmoid"),
        ("train.loss_type", "msee", "mse"),
        ("train.content_or_style", "contnet", "content"),
        ("train.dtype", "bf61", "bf16"),
        ("train.lr_scheduler", "cosin", "cosine"),
        ("train.optimizer", "coat_fp8_adam", "coat_fp8_adamw"),
        ("train.noise_scheduler", "flowmach", "flowmatch"),
        ("network.type", "loar", "lora"),
        ("save.dtype", "flaot16", "float16"),
        ("sample.format", "jpgg", "jpg"),
        ("type", "coat_flux_trainr", "coat_flux_trainer"),
        ("coat.optimizer.m1_format", "e4m2", "e4m3"),
        ("coat.weight.granularity", "per_raw", "per_row"),
        ("coat.activation.attention", "fp16", "fp8"),
        ("coat.memory.checkpointing", "atuo", "auto"),
        ("coat.data.background", "pink", "white"),
        ("coat.resume.allow", ["dta"], "data"),
        ("coat.fallback", "fp32", "bf16"),
    ]:
        yield BadConfig(f"{key}: {value!r}", (f"config.process[0].{key}=", near), BOTH, ((key, value),))


def _contradictions() -> Iterator[BadConfig]:
    def case(name: str, where: str, words: str, *changes: tuple[str, Any], hosts: tuple[str, ...] = BOTH) -> BadConfig:
        return BadConfig(name, (where, words), hosts, changes)

    cached = ("train.cache_text_embeddings", True)
    yield case("alpha is not rank", "network.linear_alpha=", "alpha is the rank", ("network.linear_alpha", 32))
    yield case("rank and linear", "network.rank=", "old name of linear", ("network.rank", 8))
    yield case(
        "trains nothing", "only_if_contains=", "nothing to train", ("network.network_kwargs", {"only_if_contains": []})
    )
    yield case("no data", "datasets", "nothing to train on", ("datasets", []))
    yield case("no folder", "datasets[0].folder_path", "is missing", ("datasets.0.folder_path", ...))
    yield case("no model", "model.name_or_path", "is missing", ("model.name_or_path", ...))
    yield case("no training folder", "training_folder", "is missing", ("training_folder", ...))
    yield case(
        "cached and shuffled", "datasets[0].shuffle_tokens", "encoded once", ("datasets.0.shuffle_tokens", True), cached
    )
    yield case(
        "cached here and not there",
        "datasets[1].cache_text_embeddings",
        "must be the same in all datasets",
        ("datasets.0.cache_text_embeddings", True),
    )
    yield case("fp16", "train.dtype=", "bf16", ("train.dtype", "fp16"))
    yield case("half", "train.dtype=", "bf16", ("train.dtype", "half"))
    yield case(
        "micro-steps",
        "train.gradient_accumulation_steps=4",
        "gradient_accumulation",
        ("train.gradient_accumulation_steps", 4),
    )
    yield case(
        "noise levels",
        "train.min_denoising_steps=",
        "max_denoising_steps",
        ("train.min_denoising_steps", 900),
        ("train.max_denoising_steps", 100),
    )
    yield case("weights both ways", "model.qtype='coat_fp8'", "coat.weight.use_fp8", ("coat.weight.use_fp8", False))
    yield case("another qtype", "model.qtype='qfloat8'", "coat_fp8", ("model.qtype", "qfloat8"), hosts=ALONE)
    yield case("block without its optimizer", "train.optimizer='adamw'", "coat.optimizer", ("train.optimizer", "adamw"))
    yield case(
        "off with our optimizer", "train.optimizer=", "coat.enabled", ("coat.enabled", False), ("model.quantize", False)
    )
    yield case("off with our weights", "model.q", "coat.enabled", ("coat.enabled", False), ("train.optimizer", "adam"))
    yield case("a key that was removed", "coat.memory.every_n=3", "checkpointing", ("coat.memory", {"every_n": 3}))
    yield case("budget without auto", "coat.memory.budget_gb=", "auto", ("coat.memory.checkpointing", "none"))
    yield case(
        "recompute forbidden",
        "coat.memory.checkpointing='all'",
        "gradient_checkpointing",
        ("coat.memory", {"checkpointing": "all"}),
        ("train.gradient_checkpointing", False),
    )
    yield case("prompts twice", "sample.prompts=", "samples", ("sample.samples", [{"prompt": "[trigger]"}]))
    yield case("caption files are photos", "datasets[0].caption_ext=", "images", ("datasets.0.caption_ext", "jpg"))
    yield case(
        "caption files elsewhere", "datasets[0].caption_ext=", "end of a file name", ("datasets.0.caption_ext", "/../x")
    )
    for folder, photos in [
        ("photos", "photos"),
        ("photos/out", "photos"),
        ("out", "."),
        ("photos/../photos", "photos"),
    ]:
        where = ("training_folder", folder), ("datasets.1.folder_path", photos)
        yield case(f"run in {folder} of {photos}", "training_folder=", f"inside the data set {photos}", *where)
    yield case("captions in JSON", "datasets[0].caption_ext=", "plain text", ("datasets.0.caption_ext", "json"))
    yield case("type missing", "type", "is missing", ("type", ...))
    yield case("another job", "job='train'", "extension", ("/job", "train"))


def _paths() -> Iterator[BadConfig]:
    for name in (
        "../run",
        "a/b",
        "a\\b",
        "..",
        ".hidden",
        "run ",
        "a:b",
        "a*",
        "CON",
        "nul.txt",
        "x" * 300,
        "a\nb",
        "",
    ):
        yield BadConfig(
            f"name {name[:9]!r}", ("config.name=", "names the run's folder"), BOTH, (("/config.name", name),)
        )
    yield BadConfig(
        "own name escapes", ("config.process[0].name=", "names the run's folder"), BOTH, (("name", "../x"),)
    )
    yield BadConfig(
        "folder is a file", ("training_folder=", "a file, not a folder"), BOTH, (("training_folder", __file__),)
    )
    yield BadConfig(
        "folder in a file", ("training_folder=", "a file, not a folder"), BOTH, (("training_folder", f"{__file__}/x"),)
    )
    yield BadConfig("log_dir in a file", ("log_dir=", "a file, not a folder"), BOTH, (("log_dir", f"{__file__}/x"),))
    yield BadConfig("home", ("training_folder=", "~ is not replaced"), BOTH, (("training_folder", "~/output"),))
    yield BadConfig(
        "photos at home", ("datasets[0].folder_path=", "~ is not replaced"), BOTH, (("datasets.0.folder_path", "~/p"),)
    )
    yield BadConfig(
        "model at home", ("model.name_or_path=", "~ is not replaced"), BOTH, (("model.name_or_path", "~/flux"),)
    )
    for key, found in [
        ("training_folder", "training_folder"),
        ("datasets.0.folder_path", "datasets[0].folder_path"),
        ("model.name_or_path", "model.name_or_path"),
    ]:
        for what, value, words in [
            ("blank at the end", "photos ", "starts or ends with a blank"),
            ("escapes", "D:\train\new", "use single quotes"),
            ("quotes", "'photos'", "quotes within the quotes"),
            ("variable", "$HOME/photos", "only as ${NAME}"),
            ("Windows variable", "%USERPROFILE%\\photos", "only as ${NAME}"),
        ]:
            yield BadConfig(f"{key}: {what}", (f"{found}=", words), BOTH, ((key, value),))
    yield BadConfig("long trigger", ("trigger_word='xxx", "at most 200"), BOTH, (("trigger_word", "x" * 100_000),))
    yield BadConfig("placeholder", ("trigger_word=", "the word itself"), BOTH, (("trigger_word", "[trigger]"),))
    yield BadConfig("trigger and blank", ("trigger_word=", "remove the blank"), BOTH, (("trigger_word", "ohwx "),))
    for sign in ("\u00a0", "\u200b", "\ufeff", "\u3000"):
        yield BadConfig(
            f"key with U+{ord(sign):04X}",
            ("train.lr?: ", f"U+{ord(sign):04X}", "type the key again"),
            BOTH,
            (("train", {**PROCESS["train"], f"lr{sign}": 1}),),
        )
    yield BadConfig("NUL in a folder", ("training_folder", "U+0000"), BOTH, (("training_folder", "a\0b"),))
    yield BadConfig("escape in a trigger", ("trigger_word", "U+001B"), BOTH, (("trigger_word", "\x1b[2J"),))
    yield BadConfig("NUL in a key", ("train.l?r", "U+0000"), BOTH, (("train", {**PROCESS["train"], "l\0r": 1}),))
    yield BadConfig("half a character", ("trigger_word", "U+D800"), BOTH, (("trigger_word", "\ud800"),), suffix=".json")


def _one_host() -> Iterator[BadConfig]:
    for key, value in [
        ("model.compile", True),
        ("model.is_xl", True),
        ("train.do_cfg", True),
        ("train.loss_target", "source"),
        ("train.validation_config", {"validation_items": []}),
        ("datasets.0.mask_path", "masks"),
        ("datasets.0.random_crop", True),
        ("adapter", {"type": "ip"}),
        ("save.push_to_hub", True),
    ]:
        words = (key.replace("datasets.0", "datasets[0]"), "not supported by the stand-alone trainer")
        yield BadConfig(f"stand-alone {key}", words, ALONE, ((key, value),))
    yield BadConfig("stand-alone sides", ("sample.width=1000", "multiple of 16"), ALONE, (("sample.width", 1000),))
    yield BadConfig(
        "stand-alone flags", ("sample.prompts[0]=", "flags"), ALONE, (("sample.prompts", ["[trigger] --w 512"]),)
    )
    yield BadConfig("stand-alone device", ("device='gpu'", "must be cuda"), ALONE, (("device", "gpu"),))


BAD_CONFIGS: tuple[BadConfig, ...] = (
    *_unknown_keys(),
    *_types(),
    *_choices(),
    *_contradictions(),
    *_paths(),
    *_one_host(),
    *ai_toolkit_configs(),
    *texts(),
)
