"""Malformed configs that only ai-toolkit's rules are about: what it takes, and then fails on or does not do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.reliability.bad_config import AITK, PROCESS, BadConfig


def ai_toolkit_configs() -> Iterator[BadConfig]:
    """The cases."""

    def case(name: str, where: str, words: str, *changes: tuple[str, Any]) -> BadConfig:
        return BadConfig(f"ai-toolkit {name}", (where, words), AITK, changes)

    yield case("second GPU", "device='cuda:1'", "CUDA_VISIBLE_DEVICES=1", ("device", "cuda:1"))
    yield case("no device", "device='gpu'", "write cuda", ("device", "gpu"), ("train.start_step", 0))
    yield case("no scheduler", "train.noise_scheduler", "flowmatch", ("train.noise_scheduler", ...))
    yield case("no sampler", "sample.sampler", "flowmatch", ("sample.sampler", ...))
    yield case("neg is no text", "sample.neg=false", 'neg: ""', ("sample.neg", False))
    yield case("neg is null", "sample.neg=null", 'neg: ""', ("sample.neg", None))
    yield case("prompt is no text", "sample.prompts[0]=5", "in quotes", ("sample.prompts", [5]))
    yield case("host bool", "train.do_cfg='yes'", "true without quotes", ("train.do_cfg", "yes"))
    yield case("host number", "train.noise_offset='0.1'", "without quotes", ("train.noise_offset", "0.1"))
    yield case("host list", "datasets[0].controls=3", "must be a list or a string", ("datasets.0.controls", 3))
    yield case("number or block", "lorm_extract_mode_param=", "a number or a block", ("lorm_extract_mode_param", "x"))
    yield case("host key", "train.do_cgf", "did you mean 'do_cfg'", ("train.do_cgf", True))
    yield case(
        "nested host key",
        "validation_items[0].image_pth",
        "image_path",
        ("train.validation_config", {"validation_items": [{"image_pth": "x"}]}),
    )
    yield case(
        "validation image",
        "validation_items[0].image_path=",
        "no such image",
        ("train.validation_config", {"validation_items": [{"image_path": "gone.jpg"}]}),
    )
    yield case("adapter key", "adapter.in_chanels", "in_channels", ("adapter", {"in_chanels": 3}))
    yield case(
        "second eps",
        "train.optimizer_params.eps=",
        "itself",
        ("train.optimizer", "adamw"),
        ("train.optimizer_params", {"eps": 1e-8}),
        ("coat.optimizer", {"use_fp8": False}),
    )
    yield case(
        "token dropout",
        "datasets[0].token_dropout_rate=",
        "cached text embeddings",
        ("datasets.0.token_dropout_rate", 0.1),
        ("train.cache_text_embeddings", True),
    )
    yield case(
        "cached text encoder",
        "train.train_text_encoder=",
        "text encoder",
        ("train.train_text_encoder", True),
        ("train.cache_text_embeddings", True),
    )
    for key, value, words in [
        ("train.min_snr_gamma", 5.0, "DDPM"),
        ("train.snr_gamma", 5.0, "DDPM"),
        ("train.learnable_snr_gos", True, "DDPM"),
        ("train.free_u", True, "U-Nets"),
        ("train.train_turbo", True, "at the first step"),
        ("train.do_paramiter_swapping", True, "adafactor"),
        ("train.loss_target", "differential_noise", "needs augmentations"),
        ("train.loss_target", "unaugmented", "needs a DDPM schedule"),
        ("train.max_grad_norm", 0, "nothing is learned"),
        ("train.max_grad_norm", -1.0, "nothing is learned"),
        ("datasets.0.type", "video", "write image"),
        ("datasets.0.num_frames", 9, "looks for videos"),
        ("datasets.0.auto_frame_count", True, "looks for videos"),
        ("train.short_and_long_captions", True, "no short captions"),
        ("train.lr_scheduler", "polynomial", "write constant"),
        ("train.merge_network_on_save", True, "saves the whole model"),
        ("model.qtype", "fp8", "must be one of coat_fp8"),
        ("network.type", "locon", "write lora"),
        ("network.type", "lycoris", "write lora"),
        ("save.dtype", "float8", "write float16"),
        ("embedding", {"trigger": "xyz"}, "trigger_word"),
        ("datasets.0.mask_path", "nowhere", "no such folder"),
        ("datasets.0.control_path", ["masks"], "no such folder"),
    ]:
        yield case(f"{key}={value!r}", f"{key.replace('datasets.0', 'datasets[0]')}=", words, (key, value))
    compiled = ("model.compile", True), ("model.compile_mode", "default")
    yield case("whole compile", "model.compile=", "block_compile: true", *compiled)
    control = {"type": "control_lora"}
    control_path = ("datasets.0.control_path", ".")
    yield case(
        "no control images", "datasets[1].control_path", "write their folder", ("adapter", control), control_path
    )
    step = {"train": {**PROCESS["train"], "lr_scheduler": "step", "lr_scheduler_params": {"step_size": 10}}}
    yield case("steps of lr", "train.lr_scheduler='step'", "write constant", *step.items())
    keep, blank = ("train.diff_output_preservation", True), ("train.blank_prompt_preservation", True)
    yield case("both preservations", "blank_prompt_preservation=", "not with", keep, blank)
    yield case("preserves and no trigger", "diff_output_preservation=", "a trigger_word", keep, ("trigger_word", None))
    yield case("preserves and encoder", "train_text_encoder=", "not with", keep, ("train.train_text_encoder", True))
    passed, guided = ("train.bypass_guidance_embedding", True), ("train.do_guidance_loss", True)
    yield case("guidance loss without guidance", "do_guidance_loss=", "not with", passed, guided)
    both = [("datasets.0.is_reg", True), ("datasets.1.is_reg", True)]
    yield case("only regularization", "datasets[0].is_reg=", "add one", *both)
    sdxl = ("model", {"name_or_path": "x", "is_xl": True, "quantize": True, "qtype": "coat_fp8"})
    yield case("SDXL in FP8", "model.qtype=", "write quantize: false", sdxl)
    music = ("model", {"name_or_path": "x", "arch": "ace_step_15"})
    yield case("a model COAT does not train", "model.arch='ace_step_15'", "train one of anima", music)
    yield case("poi", "datasets[0].poi=", "no longer", ("datasets.0.poi", "face"))
    yield case("nothing trained", "train.train_unet=", "nothing is left to train", ("train.train_unet", False))
    yield case("coat beside another type", "config.process[0].coat", "coat_flux_trainer", ("type", "sd_trainer"))
