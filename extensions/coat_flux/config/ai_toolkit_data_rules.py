"""What ai-toolkit takes and then does not do with datasets, sample prompts and validation images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .ai_toolkit_entry import Entry
from .common_rules import check_caption_ext, check_path, check_resolution, check_trigger

BESIDE = (  # folders of pictures that belong to the photos
    *("mask_path", "inpaint_path", "unconditional_path", "clip_image_path"),
    *("control_path", "control_path_1", "control_path_2", "control_path_3"),
)
SIDE_STEP, MIN_RESOLUTION = 16, 32


def check_datasets(entry: Entry) -> None:
    """Every dataset, and what they have in common: their captions are cached or are not."""
    datasets = list(entry.entries("datasets"))
    listed = entry.process.get("datasets")
    if listed is None or listed == []:
        entry.add("datasets", "there is nothing to train on; write '- folder_path: …' below it", listed)
    everywhere = entry.block("train").get("cache_text_embeddings") is True
    cached = [everywhere or dataset.get("cache_text_embeddings") is True for _, dataset in datasets]
    if any(cached) and not all(cached):
        rule = "must be the same in all datasets; write it in train: instead"
        entry.findings.add(f"{datasets[cached.index(False)][0]}.cache_text_embeddings", rule, False)
    if any(cached) and entry.block("train").get("train_text_encoder") is True:
        rule = "cached captions leave the text encoder nothing to learn; write false, or cache_text_embeddings: false"
        entry.add("train.train_text_encoder", rule, True)
    for (path, dataset), is_cached in zip(datasets, cached, strict=True):
        _check_dataset(entry, path, dataset)
        if is_cached:
            _check_cached_captions(entry, path, dataset)


def _check_dataset(entry: Entry, path: str, dataset: Mapping[str, Any]) -> None:
    findings = entry.findings
    place = dataset.get("folder_path") or dataset.get("dataset_path")
    if not place:
        findings.add(f"{path}.folder_path", "is missing, must be a string; add it")
    elif isinstance(place, str):
        check_path(place, f"{path}.folder_path", findings)
    if isinstance(dataset.get("caption_ext"), str):
        check_caption_ext(dataset["caption_ext"], f"{path}.caption_ext", findings)
    _check_sizes(entry, f"{path}.resolution", dataset.get("resolution"))
    for key in BESIDE:
        for side in _list(dataset.get(key)) or [dataset.get(key)]:
            if isinstance(side, str) and check_path(side, f"{path}.{key}", findings) and not Path(side).is_dir():
                rule = f"no such folder in {Path.cwd()}, and ai-toolkit would go on without it; correct the path"
                findings.add(f"{path}.{key}", rule, side)
    cache = next((key for key in ("cache_latents_to_disk", "cache_latents") if dataset.get(key) is True), None)
    if cache and (dataset.get("augments") or dataset.get("augmentations")):
        findings.warn(f"{path}.{cache}", "ai-toolkit turns it off beside augmentations; write false", True)
    if dataset.get("type", "image") != "image" and findings.sound(f"{path}.type"):
        rule = "ai-toolkit has data sets of images only, and stops after loading the model; write image"
        findings.add(f"{path}.type", rule, dataset["type"])
    _check_videos(entry, path, dataset)
    if dataset.get("poi") is not None:
        findings.add(f"{path}.poi", "ai-toolkit no longer has it and stops; remove it", dataset["poi"])


def _check_videos(entry: Entry, path: str, dataset: Mapping[str, Any]) -> None:
    """What makes ai-toolkit look for videos too, which the VAE of FLUX.1 cannot encode."""
    frames, rule = dataset.get("num_frames", 1), "looks for videos, and ai-toolkit fails on the first one with FLUX.1"
    if not entry.is_flux:
        return
    if entry.findings.sound(f"{path}.num_frames") and frames > 1:
        entry.findings.add(f"{path}.num_frames", f"{rule}; write 1", frames)
    if dataset.get("auto_frame_count") is True:
        entry.findings.add(f"{path}.auto_frame_count", f"{rule}; write false", True)


def _check_sizes(entry: Entry, path: str, value: Any) -> None:
    sizes = value if isinstance(value, list) else [value]
    if not entry.findings.sound(path) or value is None:
        return
    wrong = [size for size in sizes if isinstance(size, bool) or not isinstance(size, int) or size < MIN_RESOLUTION]
    if wrong or not sizes:
        rule = f"must be a whole number, or a list of them, each of at least {MIN_RESOLUTION}; write [512]"
        entry.findings.add(path, rule, value)
    elif entry.is_flux:
        check_resolution(sizes, path, entry.findings)


def _check_cached_captions(entry: Entry, path: str, dataset: Mapping[str, Any]) -> None:
    if dataset.get("shuffle_tokens") is True:
        rule = "a cached caption is encoded once, in one order; write false, or cache_text_embeddings: false"
        entry.findings.add(f"{path}.shuffle_tokens", rule, True)
    lost = (
        ["token_dropout_rate"] if entry.schema.drops_cached_captions else ["token_dropout_rate", "caption_dropout_rate"]
    )
    for key in lost:
        if isinstance(rate := dataset.get(key), (int, float)) and rate > 0:
            rule = f"ai-toolkit {entry.schema.version} ignores it beside cached text embeddings"
            entry.findings.add(f"{path}.{key}", f"{rule}; write 0, or cache_text_embeddings: false", rate)


def check_sample(entry: Entry) -> None:
    """Prompts, sampler and sizes of the samples."""
    sample = entry.block("sample")
    neg = sample.get("neg", "")
    if not isinstance(neg, str):
        entry.add("sample.neg", 'must be a string, else the first sample fails; write neg: ""', neg)
    prompts = sample.get("prompts")
    if prompts and sample.get("samples"):
        entry.add("sample.prompts", "ai-toolkit ignores it beside samples; keep one of them", prompts)
    texts = [(f"{entry.path}.sample.prompts[{i}]", text) for i, text in enumerate(_list(prompts))]
    for path, text in texts:
        if not isinstance(text, str):
            entry.findings.add(path, "must be a string; write it in quotes", text)
    texts += [(f"{path}.prompt", item.get("prompt")) for path, item in entry.entries("sample.samples")]
    trigger = entry.process.get("trigger_word")
    check_trigger(trigger if isinstance(trigger, str) else None, texts, entry.path, entry.findings)
    wanted = texts and entry.block("train").get("disable_sampling") is not True
    if wanted and entry.is_flux and entry.text("sample", "sampler", "ddpm") != "flowmatch":
        rule = "FLUX is sampled by flowmatch, which is not ai-toolkit's default; write sampler: flowmatch"
        entry.add("sample.sampler", rule, sample.get("sampler"))
    for side in ("width", "height"):
        value = sample.get(side)
        if entry.is_flux and isinstance(value, int) and value % SIDE_STEP:
            rule = f"no multiple of {SIDE_STEP}, so FLUX draws {value // SIDE_STEP * SIDE_STEP}; write that"
            entry.warn(f"sample.{side}", rule, value)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def check_validation(entry: Entry) -> None:
    """The images ai-toolkit opens for a validation loss, after the model is loaded."""
    validation = entry.block("train").get("validation_config")
    items = _list(validation.get("validation_items")) if isinstance(validation, Mapping) else []
    for i, item in enumerate(items):
        place = item.get("image_path") if isinstance(item, Mapping) else None
        if isinstance(place, str) and not Path(place).is_file():
            key = f"train.validation_config.validation_items[{i}].image_path"
            entry.add(key, f"no such image in {Path.cwd()}; write the path of one", place)
