"""The rules about photos, captions, trigger words and sample prompts, for both trainers."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from pathlib import Path

from .entry import AI_TOOLKIT, STANDALONE, Entry, check_path

BUCKET_STEP = 32  # FLUX.1: 8 (VAE) × 2 (packing) × 2
SIDE_STEP, MIN_RESOLUTION = 16, 32
TRIGGER_TAG = "[trigger]"
MAX_TRIGGER = 200  # characters; CLIP reads 77 tokens, T5 512
FOREIGN_SHARE = 0.1  # of a text's letters, from which on it is reported
T5_BLIND = "FLUX's text encoder T5 does not know {} characters and reads <unk> in their place"
SIDE_FOLDERS = (  # pictures that belong to the photos
    *("mask_path", "inpaint_path", "unconditional_path", "clip_image_path"),
    *("control_path", "control_path_1", "control_path_2", "control_path_3"),
)
_SCRIPTS = {
    "CJK": "Chinese",
    "HIRAGANA": "Japanese",
    "KATAKANA": "Japanese",
    "HANGUL": "Korean",
    "CYRILLIC": "all Cyrillic",
    "GREEK": "all Greek",  # its vocabulary has a part of them
}
_CAPTION_EXT = re.compile(r"\.?\w+(\.\w+)*")
_IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff")
_PROMPT_FLAG = re.compile(r"\s--[a-z]")


def check_datasets(entry: Entry) -> None:
    """Every data set, and what they have in common: their captions are cached or are not."""
    datasets = entry.entries("datasets")
    if not entry.raw.get("datasets"):
        entry.add("datasets", "there is nothing to train on; write '- folder_path: …' below it")
    everywhere = entry.get("train.cache_text_embeddings") is True
    cached = [everywhere or dataset.get("cache_text_embeddings") is True for dataset in datasets]
    if any(cached) and not all(cached):
        rule = "must be the same in all datasets; write it in train: instead"
        entry.findings.add(f"{datasets[cached.index(False)].path}.cache_text_embeddings", rule, False)
    if any(cached) and entry.get("train.train_text_encoder") is True:
        rule = "cached captions leave the text encoder nothing to learn; write false, or cache_text_embeddings: false"
        entry.add("train.train_text_encoder", rule)
    for dataset, is_cached in zip(datasets, cached, strict=True):
        if place := dataset.get("folder_path") or dataset.get("dataset_path"):
            check_path(place, f"{dataset.path}.folder_path", entry.findings)
        else:
            dataset.add("folder_path", "is missing, must be a string; add it")
        _check_caption_ext(dataset)
        _check_resolution(dataset)
        if is_cached and dataset.get("shuffle_tokens") is True:
            rule = "a cached caption is encoded once, in one order; write false, or cache_text_embeddings: false"
            dataset.add("shuffle_tokens", rule)
        if entry.trainer == AI_TOOLKIT:
            _check_ai_toolkit_dataset(dataset, is_cached)


def _check_caption_ext(dataset: Entry) -> None:
    extension = dataset.get("caption_ext", "txt")
    if not _CAPTION_EXT.fullmatch(extension):
        dataset.add("caption_ext", "must be the end of a file name, such as txt; write that")
    elif extension.lower().rpartition(".")[2] in ("json", "jsonl", "csv"):
        rule = "captions are read as plain text, here with all braces and keys; write each one alone into a .txt file"
        dataset.add("caption_ext", rule)
    elif extension.lower().lstrip(".") in _IMAGES:
        dataset.add("caption_ext", "is the extension of the images, not of their captions; write txt")


def _check_resolution(dataset: Entry) -> None:
    """Sizes, of which those that are not a multiple of the bucket step train photos smaller than they say."""
    value = dataset.get("resolution", [512])
    sizes = value if isinstance(value, list) else [value]
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < MIN_RESOLUTION for size in sizes):
        rule = f"must be a whole number, or a list of them, each of at least {MIN_RESOLUTION}; write [512]"
        dataset.add("resolution", rule)
        return
    for size in sizes:
        if dataset.is_flux and size % BUCKET_STEP:
            low = size // BUCKET_STEP * BUCKET_STEP
            rule = f"not a multiple of {BUCKET_STEP}, FLUX's bucket step, so a square photo is trained at {low}×{low}"
            text = f"{rule}; write {low} or {low + BUCKET_STEP}"
            dataset.findings.warn(f"{dataset.path}.resolution", text, size)


def _check_ai_toolkit_dataset(dataset: Entry, is_cached: bool) -> None:
    """What only ai-toolkit has, and does not do or fails on."""
    for key in SIDE_FOLDERS:
        value = dataset.get(key)
        path = f"{dataset.path}.{key}"
        for side in value if isinstance(value, list) else [value]:
            if isinstance(side, str) and check_path(side, path, dataset.findings) and not Path(side).is_dir():
                rule = f"no such folder in {Path.cwd()}, and ai-toolkit would go on without it; correct the path"
                dataset.findings.add(path, rule, side)
    cache = next((key for key in ("cache_latents_to_disk", "cache_latents") if dataset.get(key) is True), None)
    if cache and (dataset.get("augments") or dataset.get("augmentations")):
        dataset.add(cache, "ai-toolkit turns it off with augmentations; write false", warn=True)
    if dataset.get("type", "image") != "image":
        rule = "ai-toolkit has data sets of images only, and stops after loading the model; write image"
        dataset.add("type", rule)
    if dataset.get("poi") is not None:
        dataset.add("poi", "ai-toolkit no longer has it and stops; remove it")
    if dataset.is_flux:
        rule = "looks for videos, and ai-toolkit fails on the first one with FLUX.1"  # whose VAE cannot encode them
        if dataset.get("num_frames", 1) > 1:
            dataset.add("num_frames", f"{rule}; write 1")
        if dataset.get("auto_frame_count") is True:
            dataset.add("auto_frame_count", f"{rule}; write false")
    if is_cached and dataset.get("token_dropout_rate", 0) > 0:
        rule = "ai-toolkit ignores it with cached text embeddings; write 0, or cache_text_embeddings: false"
        dataset.add("token_dropout_rate", rule)


def check_samples(entry: Entry) -> None:
    """Prompts, sampler and sizes of the samples; the trigger word."""
    alone, prompts = entry.trainer == STANDALONE, entry.get("sample.prompts", [])
    if prompts and entry.get("sample.samples"):
        entry.add("sample.prompts", "ai-toolkit ignores it when there are samples; keep one of them")
    neg = (entry.raw.get("sample") or {}).get("neg", "") if entry.sound("sample") else ""
    if not alone and not isinstance(neg, str):
        entry.add("sample.neg", 'must be a string, else the first sample fails; write neg: ""')
    texts = [(f"{entry.path}.sample.prompts[{i}]", text) for i, text in enumerate(prompts)]
    for path, text in texts:
        if not isinstance(text, str):
            entry.findings.add(path, "must be a string; write it in quotes", text)
    texts += [(f"{item.path}.prompt", item.get("prompt")) for item in entry.entries("sample.samples")]
    texts = [(path, text) for path, text in texts if isinstance(text, str)]
    for path, text in texts:
        if alone and _PROMPT_FLAG.search(text):
            rule = "flags in a prompt are not supported by the stand-alone trainer; write an entry of samples instead"
            entry.findings.add(path, rule, text)
    _check_trigger(entry, texts)
    if alone or not entry.is_flux:
        return
    wanted = prompts or entry.entries("sample.samples")
    if wanted and entry.get("train.disable_sampling") is not True and entry.get("sample.sampler") != "flowmatch":
        rule = "FLUX is sampled by flowmatch, which is not ai-toolkit's default; write sampler: flowmatch"
        entry.add("sample.sampler", rule)
    for side in ("width", "height"):
        if (value := entry.get(f"sample.{side}", SIDE_STEP)) % SIDE_STEP:
            rule = f"not a multiple of {SIDE_STEP}, so FLUX draws {value // SIDE_STEP * SIDE_STEP}; write that"
            entry.add(f"sample.{side}", rule, warn=True)
    for item in entry.entries("train.validation_config.validation_items"):
        place = item.get("image_path")
        if isinstance(place, str) and not Path(place).is_file():
            item.add("image_path", f"no such image in {Path.cwd()}; write the path of one")


def _check_trigger(entry: Entry, prompts: list[tuple[str, str]]) -> None:
    """Refuse what cannot be a trigger word, and warn of sample prompts that do not show what is trained."""
    trigger = entry.get("trigger_word", "")
    share, script = foreign_script(trigger)
    if len(trigger) > MAX_TRIGGER:
        rule = f"goes into every caption, so at most {MAX_TRIGGER} characters; write one rare word"
        entry.add("trigger_word", rule)
    elif trigger == TRIGGER_TAG:
        entry.add("trigger_word", "is the placeholder for the trigger word; write the word itself")
    elif trigger != trigger.strip():
        entry.add("trigger_word", "starts or ends with a blank, so it is found in no caption; remove the blank")
    elif share > FOREIGN_SHARE:
        entry.add("trigger_word", f"{T5_BLIND.format(script)}; write a rare word in Latin letters", warn=True)
    if not entry.sound("trigger_word"):
        return
    for path, text in prompts:
        share, script = foreign_script(text)
        if share > FOREIGN_SHARE:
            entry.findings.warn(path, f"{T5_BLIND.format(script)}; write the prompt in English", text)
        if trigger and TRIGGER_TAG not in text and trigger not in text:
            rule = f"without the trigger word '{trigger}' a sample does not show the LoRA; write {TRIGGER_TAG} into it"
            entry.findings.warn(path, rule, text)
        elif not trigger and TRIGGER_TAG in text:
            rule = f"there is no trigger word for {TRIGGER_TAG}; write {entry.path}.trigger_word"
            entry.findings.warn(path, rule, text)


def foreign_script(text: str) -> tuple[float, str]:
    """How much of a text FLUX's T5 cannot read: its vocabulary has Latin letters and a part of the Cyrillic and Greek.

    Returns:
        (share of the letters, name of the most frequent such script), (0.0, "") where all are Latin.
    """
    letters = [unicodedata.name(c, "").partition(" ")[0] for c in text if c.isalpha()]
    latin = ("LATIN", "FULLWIDTH", "MODIFIER", "FEMININE", "MASCULINE")
    counts = Counter(name for name in letters if name not in latin)
    if not counts:
        return 0.0, ""
    name = counts.most_common(1)[0][0]
    return counts.total() / len(letters), _SCRIPTS.get(name, name.title())
