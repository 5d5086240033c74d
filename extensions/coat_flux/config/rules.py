"""Rules between the keys of an entry of `config.process`, as both trainers see it.

An error would make the run differ from the file, or fail; a warning is only surprising. Rules about ai-toolkit
describe 0.12.26. Types and single values have been checked before. `rules.tsv` has the rules without arithmetic.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.names import COAT_OPTIMIZER
from .ai_toolkit_keys import BLOCKS, Toolkit, check_keys
from .coat import COATConfig, OptimizerParams, check_allowed
from .findings import RULES, Block, Findings
from .job_sections import DTYPES, LR_SCHEDULERS, PRODIGY_LOW_LR
from .options import build

STANDALONE, AI_TOOLKIT = "standalone", "ai-toolkit"
STANDALONE_ARCHS = ("flux", "flux2", "flux2_klein_4b", "flux2_klein_9b")  # that our own trainer trains
FLAGS = ("pixart_sigma", "auraflow", "lumina2", "vega", "ssd", "pixart")
_LEGACY = {"is_flux": "flux", "is_xl": "sdxl", "is_v2": "sd2", "is_v3": "sd3"}
_LEGACY |= {f"is_{name}": name for name in FLAGS}

HIGH_LR, LOW_LR = 1e-2, 2e-6  # for LoRAs of FLUX
FINDS_LR = ("prodigy", "dadapt", "automagic")  # optimizers that choose their own steps
WRITTEN = ("coat", "config.yaml", "optimizer.pt", "samples")  # files that a run writes to its folder
TRIGGER_TAG = "[trigger]"
FOREIGN_SHARE = 0.1  # of a text's letters, from which on it is reported
T5_BLIND = "FLUX's text encoder T5 reads {} characters as <unk>"
_BAD_NAME = re.compile(r'[<>:"/\\|?*\x00-\x1f\[\]]|^[. ]|[. ]$')
_PROMPT_FLAG = re.compile(r"\s--[a-z]")
_SCRIPTS = {"CJK": "Chinese", "HIRAGANA": "Japanese", "KATAKANA": "Japanese", "HANGUL": "Korean"}
OF_DATASETS = [row | {"key": row["key"][9:]} for row in RULES if row["key"].startswith("datasets.")]


class Entry(Block):
    """An entry of `config.process`; `coat` is None for ai-toolkit's process types inside ai-toolkit."""

    def __init__(
        self,
        trainer: str,
        raw: Mapping[str, Any],
        path: str,
        findings: Findings,
        name: str,
        coat: COATConfig | None,
    ):
        super().__init__(raw, path, findings)
        self.name = self.get("name", name)
        self.name_path = "config.name" if self.get("name") is None else f"{path}.name"
        self.coat, self.enabled = coat, coat is not None and coat.enabled
        self.alone = trainer == STANDALONE
        self.full = is_full(raw)
        self.optimizer = self.get("train.optimizer", "adamw").lower()  # as ai-toolkit compares it
        trains = "model" if self.full else "network"
        arch = arch_of(self.get("model", {}))
        self.facts = {"trainer": trainer, "trains": trains, "enabled": str(self.enabled).lower(), "arch": arch}
        self.is_flux = self.alone or arch == "flux"  # the stand-alone trainer applies FLUX.1's rules to FLUX.2, too


def arch_of(model: Mapping[str, Any]) -> str:
    """The architecture that a `model` block selects in ai-toolkit."""
    arch = str(model.get("arch") or "").split(":")[0]
    arch = arch or next((name for key, name in _LEGACY.items() if model.get(key) is True), "sd1")
    return "flux" if arch == "flex1" else arch


def is_full(process: Mapping[str, Any]) -> bool:
    """Whether this entry of `config.process` trains the transformer itself."""
    adapter = process.get("adapter")
    if isinstance(adapter, Mapping) and adapter.get("train"):
        return False
    return not any(process.get(key) for key in ("network", "embedding", "decorator"))


def check_entry(entry: Entry) -> None:
    """Check combinations of an entry's keys."""
    _check_datasets(entry)
    _check_places(entry)
    linear, rank = entry.get("network.linear"), entry.get("network.rank")
    size = entry.get("network.rank", entry.get("network.linear", 4))
    if linear is not None and rank is not None and rank != linear:
        entry.error("network.rank", "contradicts linear, its new name; remove rank")
    alpha = "network.alpha" if entry.get("network.linear_alpha") is None else "network.linear_alpha"
    sizes_sound = entry.sound("network.linear", "network.rank")
    if entry.is_flux and sizes_sound and entry.get(alpha) not in (None, size):
        entry.error(alpha, f"on FLUX alpha is the rank; write {size}, and scale lr instead")
    if entry.full and any(file.startswith(entry.name) for file in WRITTEN):
        entry.findings.add(entry.name_path, "begins another file's name of the run; write a longer one", entry.name)
    saved, trained = entry.get("save.dtype"), DTYPES.get(entry.get("train.dtype", "fp32"))
    differs = saved is not None and DTYPES.get(saved) != trained
    if entry.full and differs and entry.enabled and not entry.alone:
        entry.error("save.dtype", f"ai-toolkit saves a whole FLUX as it is trained; write {trained}")
    _check_train(entry)
    _check_samples(entry)
    if entry.coat is not None:
        check_allowed(entry.coat, f"{entry.path}.coat", entry.findings)
    entry.check(row for row in RULES if not row["key"].startswith("datasets."))


def _check_places(entry: Entry) -> None:
    """Name and folder of a run; its samples and charts must not land among its photos."""
    name = entry.name
    if not name or _BAD_NAME.search(name):
        text = "names the run's folder, so without <>:\"/\\|?*[] and a dot or blank at an end; write another"
        entry.findings.add(entry.name_path, text, name)
    for key in ("training_folder", "log_dir", "model.name_or_path"):
        _check_path(entry, key)
    folder = entry.get("training_folder")
    if folder is not None and entry.findings.sound(entry.name_path):
        run = Path(folder, name).resolve()
        for dataset in entry.blocks("datasets"):
            photos = dataset.get("folder_path") or dataset.get("dataset_path")
            if photos and (run / "x").is_relative_to(Path(photos).resolve()):
                entry.error("training_folder", f"is inside the data set {photos}; write a folder outside")


def _check_path(block: Block, key: str) -> None:
    """Refuse `~`, unexpanded variables and escapes in a path."""
    path = block.get(key, "")
    if path.startswith("~"):
        block.error(key, "~ is not replaced by the home folder; write ${HOME}/…")
    elif re.match(r"\$\w|%\w+%", path):
        block.error(key, "variables are replaced only as ${NAME}; write it so")
    elif re.search(r"[\x00-\x1f]", path):
        block.error(key, "has a tab or line break, as \\t in double quotes is; use single quotes, or /")


def _check_train(entry: Entry) -> None:
    get, optimizer = entry.get, entry.optimizer
    high = get("train.max_denoising_steps", 999)
    if get("train.min_denoising_steps", 0) > high:
        text = f"must not be above max_denoising_steps, which is {high}; write less"
        entry.error("train.min_denoising_steps", text)
    if get("train.dtype") in ("fp16", "float16", "half"):
        add = entry.error if entry.is_flux or entry.coat is not None else entry.warn
        add("train.dtype", "FLUX and FP8 codes overflow in fp16; use bf16")

    rate = get("train.lr", 1e-6)
    if entry.alone and optimizer == "prodigy" and rate < PRODIGY_LOW_LR:
        entry.warn("train.lr", "for prodigy it is 1 where it is below 0.1, as in ai-toolkit; write 1.0")
    if not (entry.full or optimizer.startswith(FINDS_LR)):
        if rate > HIGH_LR:
            entry.warn("train.lr", f"LoRAs diverge with {optimizer} above about {HIGH_LR:g}; write 0.0001")
        elif rate < LOW_LR:
            default = ", which is the default" if get("train.lr") is None else ""
            entry.warn("train.lr", f"a LoRA hardly learns at so low a rate{default}; write 0.0001")

    path = f"{entry.path}.train"
    if entry.sound("train.optimizer"):
        params, where = get("train.optimizer_params", {}), f"{path}.optimizer_params"
        if optimizer == COAT_OPTIMIZER:
            build(OptimizerParams, params, where, entry.findings)
        elif entry.alone:
            check_keys(params, where, Toolkit(), entry.findings, optimizer if optimizer in BLOCKS else "adamw")
    scheduler = get("train.lr_scheduler", "constant")
    if scheduler in LR_SCHEDULERS and entry.sound("train.lr_scheduler"):
        params, where = get("train.lr_scheduler_params", {}), f"{path}.lr_scheduler_params"
        check_keys(params, where, Toolkit(), entry.findings, scheduler)


def _check_datasets(entry: Entry) -> None:
    datasets, everywhere = entry.blocks("datasets"), bool(entry.get("train.cache_text_embeddings"))
    cached = [everywhere or bool(dataset.get("cache_text_embeddings")) for dataset in datasets]
    if any(cached):
        if not all(cached):
            odd = datasets[cached.index(False)]
            odd.error("cache_text_embeddings", "must be the same in all datasets; write it in train:")
        if entry.get("train.train_text_encoder"):
            entry.error("train.train_text_encoder", "learns nothing from cached captions; write false")
    if datasets and all(dataset.get("is_reg") for dataset in datasets):
        datasets[0].error("is_reg", "leaves no photos to learn, regularization is for beside them; write false")
    for dataset, is_cached in zip(datasets, cached, strict=True):
        dataset.facts = entry.facts | {"cached": str(is_cached).lower()}
        dataset.check(OF_DATASETS)
        for key in [key for key in BLOCKS["DatasetConfig"] if "_path" in key]:
            folders = dataset.get(key, [])
            if isinstance(folders, str):
                _check_path(dataset, key)
                folders = [folders]
            for folder in folders if key not in ("folder_path", "dataset_path") else ():
                if isinstance(folder, str) and not Path(folder).is_dir():
                    dataset.error(key, f"no such folder in {Path.cwd()}; correct the path")


def _check_samples(entry: Entry) -> None:
    prompts, items = entry.get("sample.prompts", []), entry.blocks("sample.samples")
    texts = {f"{entry.path}.sample.prompts[{i}]": text for i, text in enumerate(prompts)}
    for item in items:
        texts[f"{item.path}.prompt"] = item.get("prompt", "")

    trigger = entry.get("trigger_word", "")
    if trigger == TRIGGER_TAG:
        entry.error("trigger_word", "is the placeholder; write the word itself")
    if trigger != trigger.strip():
        entry.error("trigger_word", "starts or ends with a blank, which captions lack; remove it")
    share, script = foreign_script(trigger)
    if share > FOREIGN_SHARE:
        entry.warn("trigger_word", f"{T5_BLIND.format(script)}; write a rare word in Latin letters")
    trigger_sound, add, warn = entry.sound("trigger_word"), entry.findings.add, entry.findings.warn
    for path, prompt in texts.items():
        if not isinstance(prompt, str):
            add(path, "must be a string; write it in quotes", prompt)
            continue
        if entry.alone and _PROMPT_FLAG.search(prompt):
            add(path, "has flags, which only ai-toolkit reads; write an entry of samples", prompt)
        share, script = foreign_script(prompt)
        if share > FOREIGN_SHARE:
            warn(path, f"{T5_BLIND.format(script)}; write the prompt in English", prompt)
        if not trigger_sound:
            continue
        if trigger and TRIGGER_TAG not in prompt and trigger not in prompt:
            warn(path, f"without the trigger word it shows no LoRA; write {TRIGGER_TAG}", prompt)
        elif not trigger and TRIGGER_TAG in prompt:
            warn(path, f"there is no trigger word for {TRIGGER_TAG}; write trigger_word", prompt)


def foreign_script(text: str) -> tuple[float, str]:
    """Share of letters that FLUX's T5 lacks, and their main script; it has Latin, and few others."""
    letters = [unicodedata.name(c, "").partition(" ")[0] for c in text if c.isalpha()]
    latin = ("LATIN", "FULLWIDTH", "MODIFIER", "FEMININE", "MASCULINE")
    counts = Counter(name for name in letters if name not in latin)
    if not counts:
        return 0.0, ""
    name = counts.most_common(1)[0][0]
    return counts.total() / len(letters), _SCRIPTS.get(name, name.title())
