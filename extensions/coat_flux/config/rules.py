"""Rules between the keys of an entry of `config.process`, as both trainers see it.

An error would make the run differ from the file, or fail; a warning is only surprising. Rules about ai-toolkit
describe 0.12.26. Types and single values have been checked before.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.names import COAT_OPTIMIZER, COAT_QTYPE, COAT_TYPE
from .coat import ADAMW_OPTIONS, COAT_PARAMS, COATConfig
from .findings import ABSENT, Findings
from .job_sections import DTYPES, LR_PARAMS, OPTIMIZER_PARAMS, PRODIGY_LOW_LR
from .options import FORMATS, Option, parse_keys

STANDALONE, AI_TOOLKIT = "standalone", "ai-toolkit"
STANDALONE_ARCHS = ("flux", "flux2", "flux2_klein_4b", "flux2_klein_9b")  # that our own trainer trains
FLAGS = ("pixart_sigma", "auraflow", "lumina2", "vega", "ssd", "pixart")
_LEGACY = {"is_flux": "flux", "is_xl": "sdxl", "is_v2": "sd2", "is_v3": "sd3"}
_LEGACY |= {f"is_{name}": name for name in FLAGS}
UNQUANTIZED = ("sd1", "sd2", "sdxl", "ssd", "vega", "pixart", "pixart_sigma", "auraflow")

HIGH_LR, LOW_LR = 1e-2, 2e-6  # for LoRAs of FLUX
FINDS_LR = ("prodigy", "dadapt", "automagic")  # optimizers that choose their own steps
FULL_OPTIMIZERS = (COAT_OPTIMIZER, "adamw", "adam", "adamw8bit", "lion")  # `plan` knows their memory
OFFLOAD_KEYS = ("coat.optimizer.offload", "train.optimizer_params.offload")
WRITTEN = ("coat", "config.yaml", "optimizer.pt", "samples")  # files that a run writes to its folder
ALONE_IN_FULL = (  # features of ai-toolkit that full fine-tuning with COAT excludes
    "train.train_text_encoder",
    "train.diff_output_preservation",
    "train.blank_prompt_preservation",
    "train.inverted_mask_prior",
    "model.compile",
    "model.split_model_over_gpus",
)

DISTILLED = re.compile(r"(schnell|turbo|lightning|klein-(?!base)[^/]*)[^/]*/?$", re.IGNORECASE)
BUCKET_STEP = 32  # FLUX.1: 8 (VAE) × 2 (packing) × 2; also the least resolution
TRIGGER_TAG = "[trigger]"
FOREIGN_SHARE = 0.1  # of a text's letters, from which on it is reported
T5_BLIND = "FLUX's text encoder T5 reads {} characters as <unk>"
SIDE_FOLDERS = (  # pictures that belong to the photos
    "mask_path",
    "inpaint_path",
    "unconditional_path",
    "clip_image_path",
    "control_path",
    "control_path_1",
    "control_path_2",
    "control_path_3",
)
_BAD_NAME = re.compile(r'[<>:"/\\|?*\x00-\x1f\[\]]|^[. ]|[. ]$')
_NO_CAPTIONS = ("json", "jsonl", "csv", "jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff")
_PROMPT_FLAG = re.compile(r"\s--[a-z]")
_SCRIPTS = {"CJK": "Chinese", "HIRAGANA": "Japanese", "KATAKANA": "Japanese", "HANGUL": "Korean"}


class Block:
    """A block of type-checked keys, and where findings about it go."""

    def __init__(self, raw: Mapping[str, Any], path: str, findings: Findings):
        self.raw, self.path, self.findings = raw, path, findings

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key; the default if it is absent, null or refused."""
        value = self._written(key)
        return default if value is None or value is ABSENT or not self.sound(key) else value

    def blocks(self, key: str) -> list[Block]:
        """The blocks of a list of blocks."""
        blocks, entries = [], self.get(key)
        for i, entry in enumerate(entries if isinstance(entries, list) else ()):
            if isinstance(entry, Mapping):
                blocks.append(Block(entry, f"{self.path}.{key}[{i}]", self.findings))
        return blocks

    def error(self, key: str, text: str) -> None:
        """Add an error `<rule>; <remedy>` at a dotted key."""
        self.findings.add(f"{self.path}.{key}", text, self._written(key))

    def warn(self, key: str, text: str) -> None:
        """Add a warning at a dotted key."""
        self.findings.warn(f"{self.path}.{key}", text, self._written(key))

    def forbid(self, key: str, text: str) -> None:
        """Add an error if the key is true or not empty."""
        if self.get(key):
            self.error(key, text)

    def sound(self, *keys: str) -> bool:
        """Whether none of these keys was refused."""
        return self.findings.sound(*(f"{self.path}.{key}" for key in keys))

    def _written(self, key: str) -> Any:
        value: Any = self.raw
        for part in key.split("."):
            value = value.get(part, ABSENT) if isinstance(value, Mapping) else ABSENT
        return value


class Entry(Block):
    """An entry of `config.process`.

    Attributes:
        name: of the run.
        coat: its options; None for ai-toolkit's process types inside ai-toolkit.
        alone: the stand-alone trainer runs it, not ai-toolkit.
        full: the transformer itself is trained.
        optimizer: its name, normalized as in ai-toolkit.
        qtype: how the transformer is quantized, or None.
        is_flux: FLUX.1 is loaded; the stand-alone trainer applies FLUX.1's rules to FLUX.2, too.
    """

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
        self.optimizer = self.get("train.optimizer", "adamw").lower()
        qtype = self.get("model.qtype", "qfloat8") if self.get("model.quantize") else None
        self.qtype = qtype if self.alone or qtype is None else qtype.partition("|")[0]
        self.is_flux = self.alone or arch_of(self.get("model", {})) == "flux"

    def given(self, key: str) -> bool:
        """Whether the key is present."""
        return f"{self.path}.{key}" in self.findings.given


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
    if entry.full:
        _check_full(entry)
    else:
        _check_network(entry)
    _check_train(entry)
    _check_model(entry)
    _check_samples(entry)
    _check_coat(entry)


# --- places ---


def _check_places(entry: Entry) -> None:
    """Name, folder and device of a run; its samples and charts must not land among its photos."""
    name, device = entry.name, entry.get("device", "cuda")
    if not name or _BAD_NAME.search(name):
        text = "names the run's folder, so without <>:\"/\\|?*[] and a dot or blank at an end; write another"
        entry.findings.add(entry.name_path, text, name)
    if not entry.alone and entry.get("training_folder") is None:
        entry.error("training_folder", "is missing; write output, for example")
    for key in ("training_folder", "log_dir", "model.name_or_path"):
        _check_path(entry, key)
    folder = entry.get("training_folder")
    if folder is not None and entry.findings.sound(entry.name_path):
        run = Path(folder, name).resolve()
        for dataset in entry.blocks("datasets"):
            photos = dataset.get("folder_path") or dataset.get("dataset_path")
            if photos and (run / "x").is_relative_to(Path(photos).resolve()):
                entry.error("training_folder", f"is inside the data set {photos}; write a folder outside")
    if not re.fullmatch(r"cuda(:\d+)?|mps|cpu", device):
        entry.error("device", "must be cuda, cuda:0, mps or cpu; write cuda")
    elif not entry.alone and device.startswith("cuda:") and device != "cuda:0":
        remedy = f"write cuda and set CUDA_VISIBLE_DEVICES={device.removeprefix('cuda:')}"
        entry.error("device", f"ai-toolkit takes the first visible GPU; {remedy}")


def _check_path(block: Block, key: str) -> None:
    """Refuse `~`, unexpanded variables and escapes in a path."""
    path = block.get(key, "")
    if path.startswith("~"):
        block.error(key, "~ is not replaced by the home folder; write ${HOME}/…")
    elif re.match(r"\$\w|%\w+%", path):
        block.error(key, "variables are replaced only as ${NAME}; write it so")
    elif re.search(r"[\x00-\x1f]", path):
        block.error(key, "has a tab or line break, as \\t in double quotes is; use single quotes, or /")


# --- the network, and full fine-tuning ---


def _check_network(entry: Entry) -> None:
    """What is trained is a network: a LoRA, mostly."""
    get = entry.get
    full_only = "is for full fine-tuning; remove it, or network"
    for key in OFFLOAD_KEYS:
        if get(key) == "cpu":
            entry.error(key, full_only)
    entry.forbid("train.fused_backward", full_only)
    if get("coat.activation.wgrad_format", "bf16") != "bf16":
        entry.error("coat.activation.wgrad_format", full_only)
    for key, default in (("coat.include", ["*"]), ("coat.exclude", [])):
        if list(get(key, default)) != default:
            entry.error(key, f"{full_only} (a LoRA has network_kwargs.only_if_contains)")

    linear, rank = get("network.linear"), get("network.rank")
    if linear is not None and rank is not None and rank != linear:
        entry.error("network.rank", "contradicts linear, its new name; remove rank")
    size = 4 if linear is None else linear
    if rank is not None:
        size = rank
    alpha_key = "network.alpha" if get("network.linear_alpha") is None else "network.linear_alpha"
    sizes_sound = entry.sound("network.linear", "network.rank")
    if entry.is_flux and sizes_sound and get(alpha_key) not in (None, size):
        entry.error(alpha_key, f"on FLUX alpha is the rank; write {size}, and scale lr instead")
    if get("network.network_kwargs.only_if_contains") == []:
        entry.error("network.network_kwargs.only_if_contains", "leaves nothing to train; write null or names")
    if entry.enabled and get("network") and not entry.alone:
        entry.forbid("train.merge_network_on_save", "saves the whole model, which is in FP8; write false")
        if get("save.dtype") in ("8bit", "e4m3fn", "float8"):
            entry.error("save.dtype", "no other program reads a LoRA in FP8; write float16 or bf16")


def _check_full(entry: Entry) -> None:
    """What is trained is the transformer itself."""
    get, optimizer, remedy = entry.get, entry.optimizer, "or add network to train a LoRA"
    if any(file.startswith(entry.name) for file in WRITTEN):
        entry.findings.add(entry.name_path, "begins another file's name of the run; write a longer one", entry.name)
    if entry.alone and optimizer not in FULL_OPTIMIZERS:
        entry.error("train.optimizer", f"is not for whole models; write one of {', '.join(FULL_OPTIMIZERS)}")
    if not entry.alone and not entry.enabled:
        entry.forbid("train.fused_backward", f"needs type: {COAT_TYPE} and coat.enabled: true; remove it")
    if optimizer != COAT_OPTIMIZER:
        entry.forbid("train.fused_backward", f"only {COAT_OPTIMIZER} updates in backward; write false")
        for key in OFFLOAD_KEYS:
            if get(key) == "cpu":
                entry.error(key, f"is for the moments of {COAT_OPTIMIZER}; write none")
    if entry.enabled or entry.alone:
        entry.forbid("model.quantize", f"is for frozen weights; write false, {remedy}")
    if not entry.enabled:
        return
    if entry.coat.weight.format not in FORMATS:
        entry.error("coat.weight.format", f"is for frozen weights; write e4m3 or e5m2, {remedy}")
    if entry.coat.memory.stream_blocks != 0:
        entry.error("coat.memory.stream_blocks", f"is for frozen weights; write 0, {remedy}")
    if get("coat.activation.flow") == "fused":
        entry.error("coat.activation.flow", f"is for frozen weights; write generic, {remedy}")
    if entry.alone:
        return

    # ai-toolkit's handling of whole models that rules out a resume, or COAT
    if arch_of(get("model", {})) != "flux":
        entry.error("model.arch", f"is not trained as a whole with COAT; write arch: flux, {remedy}")
    trained = DTYPES.get(get("train.dtype", "fp32"))
    if entry.given("save.dtype") and DTYPES.get(get("save.dtype")) != trained:
        entry.error("save.dtype", f"ai-toolkit saves a whole FLUX as it is trained; write {trained}")
    if get("train.ema_config.use_ema"):
        entry.error("train.ema_config", "the average changes weights behind their codes; write use_ema: false")
    for key in ("model.lora_path", "model.assistant_lora_path", "model.inference_lora_path"):
        entry.forbid(key, "is added at each start, so twice to a resumed run; remove it")
    for key in ("model.only_if_contains", "model.ignore_if_contains"):
        entry.forbid(key, "coat.include and exclude choose what is trained; write those")
    for key in ALONE_IN_FULL:
        entry.forbid(key, "is not for full fine-tuning with COAT; write false")
    entry.forbid("adapter", f"is not for full fine-tuning with COAT; remove it, {remedy}")
    if get("train.fused_backward"):
        text = "goes backward several times, fused_backward once"
        entry.forbid("train.single_item_batching", f"{text}; write false")
        if get("train.loss_type") == "mean_flow":
            entry.error("train.loss_type", f"{text}; write mse")


# --- training ---


def _check_train(entry: Entry) -> None:
    get, optimizer = entry.get, entry.optimizer
    if get("train.gradient_accumulation_steps", 1) != 1:
        text = "ai-toolkit counts the last of these steps only; write gradient_accumulation"
        entry.error("train.gradient_accumulation_steps", text)
    high = get("train.max_denoising_steps", 999)
    if get("train.min_denoising_steps", 0) > high:
        text = f"must not be above max_denoising_steps, which is {high}; write less"
        entry.error("train.min_denoising_steps", text)
    if get("train.dtype") in ("fp16", "float16", "half"):
        add = entry.error if entry.is_flux or entry.coat is not None else entry.warn
        add("train.dtype", "FLUX and FP8 codes overflow in fp16; use bf16")
    if not entry.alone:
        if get("train.max_grad_norm", 1.0) <= 0 and optimizer != "adafactor":  # which is not clipped
            entry.error("train.max_grad_norm", "scales gradients to 0, so nothing is learned; write 1.0")
        if entry.is_flux and get("train.noise_scheduler") != "flowmatch":
            entry.error("train.noise_scheduler", "the default is not for FLUX; write flowmatch")

    rate = get("train.lr", 1e-6)
    if entry.alone and optimizer == "prodigy" and rate < PRODIGY_LOW_LR:
        entry.warn("train.lr", "for prodigy it is 1 where it is below 0.1, as in ai-toolkit; write 1.0")
    if not (entry.full or optimizer.startswith(FINDS_LR)):
        if rate > HIGH_LR:
            entry.warn("train.lr", f"LoRAs diverge with {optimizer} above about {HIGH_LR:g}; write 0.0001")
        elif rate < LOW_LR:
            default = "" if entry.given("train.lr") else ", which is the default"
            entry.warn("train.lr", f"a LoRA hardly learns at so low a rate{default}; write 0.0001")

    path = f"{entry.path}.train"
    if entry.sound("train.optimizer"):
        options = COAT_PARAMS if optimizer == COAT_OPTIMIZER else None
        if options is None and entry.alone:
            options = OPTIMIZER_PARAMS.get(optimizer, ADAMW_OPTIONS)
        if options is not None:
            parse_keys(options, get("train.optimizer_params", {}), f"{path}.optimizer_params", entry.findings)
    options = LR_PARAMS.get(get("train.lr_scheduler", "constant"))
    if options and entry.sound("train.lr_scheduler"):
        if not entry.alone:
            options = (*options, Option("last_epoch", -1, "int"))
        parse_keys(options, get("train.lr_scheduler_params", {}), f"{path}.lr_scheduler_params", entry.findings)


def _check_model(entry: Entry) -> None:
    get, qtype = entry.get, entry.qtype
    arch = get("model.arch", "").split(":")[0]
    name = str(get("model.name_or_path", ""))
    if DISTILLED.search(name) and not get("model.assistant_lora_path"):
        rule = "is distilled to draw in a few steps, which training undoes"
        remedy = "train its base, or in ai-toolkit with assistant_lora_path"
        entry.warn("model.name_or_path", f"{rule}; {remedy}")
    if entry.alone:
        trains = "the stand-alone trainer trains FLUX.1 and FLUX.2"
        if arch and arch not in STANDALONE_ARCHS:
            entry.error("model.arch", f"{trains}; write {', '.join(STANDALONE_ARCHS)}")
        if not arch and not get("model.is_flux"):
            entry.error("model.is_flux", f"{trains}; write true, or arch: flux2")
        if qtype not in (None, COAT_QTYPE):
            remedy = f"write {COAT_QTYPE}, or quantize: false"
            entry.error("model.qtype", f"not supported by the stand-alone trainer; {remedy}")
        return
    family = arch_of(get("model", {}))
    if get("model.name_or_path") is None:
        entry.error("model.name_or_path", "is missing; write a folder in diffusers layout or a hub name")
    elif family == "sd1" and not arch and entry.sound("model.arch"):
        entry.warn("model.is_flux", "without it ai-toolkit loads Stable Diffusion 1; write true")
    if qtype == COAT_QTYPE and family in UNQUANTIZED:
        entry.error("model.qtype", f"ai-toolkit does not quantize {family}; write quantize: false")
    in_qtype = "|" in get("model.qtype", "")
    if in_qtype or get("model.accuracy_recovery_adapter"):
        key = "model.qtype" if in_qtype else "model.accuracy_recovery_adapter"
        if family == "flux" or qtype is None:
            entry.warn(key, "is not read for FLUX.1, or without quantize; remove it")
        elif qtype == COAT_QTYPE:
            entry.warn(key, f"is for another quantization than {COAT_QTYPE}; remove it")
    if get("model.compile") and not get("model.block_compile"):
        add = entry.error if entry.is_flux else entry.warn
        add("model.compile", "without block_compile FLUX fails at the first step; write block_compile: true")


# --- the `coat:` block ---


def _check_coat(entry: Entry) -> None:
    """The `coat:` block against the keys of ai-toolkit that ask for the same or the opposite."""
    coat, optimizer, qtype = entry.coat, entry.optimizer, entry.qtype
    switches = ("train.optimizer", "model.quantize", "model.qtype", "coat.enabled", "coat.optimizer", "coat.weight")
    if coat is None or not entry.sound(*switches):
        return
    kind = entry.get("type", COAT_TYPE)
    if entry.alone and entry.given("coat") and kind != COAT_TYPE:
        entry.findings.warn(f"{entry.path}.coat", f"ai-toolkit reads this block with type: {COAT_TYPE} only")
    if not coat.enabled:
        text = "contradicts coat.enabled: false"
        if entry.given("coat") and qtype == COAT_QTYPE:
            entry.error("model.qtype", f"{text}; write quantize: false, or coat.enabled: true")
        if entry.given("coat") and optimizer == COAT_OPTIMIZER:
            entry.error("train.optimizer", f"{text}; write adamw, or coat.enabled: true")
        return
    if qtype == COAT_QTYPE and not coat.weight.use_fp8:
        entry.error("model.qtype", "contradicts coat.weight.use_fp8: false; write quantize: false")
    if not entry.alone and qtype not in (None, COAT_QTYPE):
        entry.warn("model.qtype", f"linears stay as ai-toolkit quantizes them; write {COAT_QTYPE} for FP8 GEMMs")
    if optimizer != COAT_OPTIMIZER:
        if coat.optimizer.use_fp8 and entry.given("coat.optimizer"):
            text = f"does not read coat.optimizer; write {COAT_OPTIMIZER}, or coat.optimizer.use_fp8: false"
            entry.error("train.optimizer", text)
        elif coat.optimizer.use_fp8 or entry.alone:
            entry.warn("train.optimizer", f"stores moments not as COAT; write {COAT_OPTIMIZER} for FP8 moments")
    if entry.get("train.gradient_checkpointing") is False and coat.memory.checkpointing == "all":
        text = "contradicts train.gradient_checkpointing: false; write none or auto, or true there"
        entry.error("coat.memory.checkpointing", text)


# --- photos and prompts ---


def _check_datasets(entry: Entry) -> None:
    if not entry.raw.get("datasets"):
        entry.error("datasets", "there is nothing to train on; write '- folder_path: …' below it")
    datasets, everywhere = entry.blocks("datasets"), bool(entry.get("train.cache_text_embeddings"))
    cached = [everywhere or bool(dataset.get("cache_text_embeddings")) for dataset in datasets]
    if any(cached):
        if not all(cached):
            odd = datasets[cached.index(False)]
            odd.error("cache_text_embeddings", "must be the same in all datasets; write it in train:")
        entry.forbid("train.train_text_encoder", "learns nothing from cached captions; write false")
    for dataset, is_cached in zip(datasets, cached, strict=True):
        _check_dataset(dataset, is_cached, entry.alone)


def _check_dataset(dataset: Block, is_cached: bool, alone: bool) -> None:
    if not (dataset.get("folder_path") or dataset.get("dataset_path")):
        dataset.error("folder_path", "is missing; add it")
    for key in ("folder_path", "dataset_path"):
        _check_path(dataset, key)
    if dataset.get("caption_ext", "txt").lower().rpartition(".")[2] in _NO_CAPTIONS:
        dataset.error("caption_ext", "is not of plain text files; write txt")
    sizes = dataset.get("resolution", [512])
    sizes = sizes if isinstance(sizes, list) else [sizes]
    whole = all(isinstance(size, int) and not isinstance(size, bool) for size in sizes)
    if not sizes or not whole or min(sizes) < BUCKET_STEP:
        text = f"must be a whole number of at least {BUCKET_STEP}, or a list of them; write [512]"
        dataset.error("resolution", text)
    if is_cached:
        dataset.forbid("shuffle_tokens", "a cached caption has one order; write cache_text_embeddings: false")
    if alone:
        return
    if is_cached:
        text = "has no effect on cached captions; write cache_text_embeddings: false"
        dataset.forbid("token_dropout_rate", text)
    for key in SIDE_FOLDERS:
        folders = dataset.get(key, [])
        if isinstance(folders, str):
            _check_path(dataset, key)
            folders = [folders]
        for folder in folders:
            if isinstance(folder, str) and not Path(folder).is_dir():
                dataset.error(key, f"no such folder in {Path.cwd()}; correct the path")


def _check_samples(entry: Entry) -> None:
    prompts, items = entry.get("sample.prompts", []), entry.blocks("sample.samples")
    if prompts and entry.get("sample.samples"):
        entry.error("sample.prompts", "ai-toolkit ignores it when there are samples; keep one of them")
    texts = {f"{entry.path}.sample.prompts[{i}]": text for i, text in enumerate(prompts)}
    for item in items:
        texts[f"{item.path}.prompt"] = item.get("prompt", "")
    draws = (prompts or items) and not entry.get("train.disable_sampling")
    if draws and entry.is_flux and not entry.alone and entry.get("sample.sampler") != "flowmatch":
        entry.error("sample.sampler", "the default is not for FLUX; write flowmatch")

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
