"""Rules between the keys of a job, each with the trainers that it applies to.

An error would make the run differ from the file, or fail; a warning is only surprising. Rules about ai-toolkit
describe 0.12.26. Types and single values have been checked before.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from pathlib import Path

from ..base.names import COAT_OPTIMIZER, COAT_QTYPE, COAT_TYPE
from .ai_toolkit_keys import ROWS
from .coat import ADAMW_OPTIONS, parse_optimizer_params
from .entry import AI_TOOLKIT, ALONE, BOTH, STANDALONE, STANDALONE_ARCHS, TOOLKIT, Entry, arch_of
from .findings import Findings
from .job_sections import DTYPES, LR_PARAMS, OPTIMIZER_PARAMS, PRODIGY_LOW_LR
from .options import FORMATS, Option, parse_keys

HIGH_LR, LOW_LR = 1e-2, 2e-6  # for LoRAs of FLUX
FINDS_LR = ("prodigy", "dadapt", "automagic")  # optimizers that choose their own steps
OWN_EPS = ("adam", "adamw", "adam8", "adamw8", "adam8bit", "adamw8bit", "ademamix8bit", "prodigy", "prodigy8bit")
TORCH_SWITCHES = ("amsgrad", "capturable", "differentiable", "foreach", "fused", "maximize")  # of adam and adamw
MODEL_FLAGS = tuple(row["key"] for row in ROWS if row["block"] == "ModelConfig" and row["key"].startswith("is_"))
NETWORKS = ("lora", "lokr", "dora", "fullrank", "lorm")  # what finds layers in FLUX
NO_SCHEDULER = ("step", "polynomial", "piecewise_constant")
UNQUANTIZED = ("sd1", "sd2", "sdxl", "ssd", "vega", "pixart", "pixart_sigma", "auraflow")
# files that a run writes to its folder
WRITTEN = ("coat", "config.yaml", "optimizer.pt", "samples")
FULL_OPTIMIZERS = (COAT_OPTIMIZER, "adamw", "adam", "adamw8bit", "lion")  # `plan` knows their memory
OFFLOAD_KEYS = ("coat.optimizer.offload", "train.optimizer_params.offload")
BUCKET_STEP = 32  # FLUX.1: 8 (VAE) × 2 (packing) × 2
SIDE_STEP, MIN_RESOLUTION = 16, 32
TRIGGER_TAG = "[trigger]"
FOREIGN_SHARE = 0.1  # of a text's letters, from which on it is reported
T5_BLIND = "FLUX's text encoder T5 reads {} characters as <unk>"
SIDE_FOLDERS = (  # pictures that belong to the photos
    *("mask_path", "inpaint_path", "unconditional_path", "clip_image_path"),
    *("control_path", "control_path_1", "control_path_2", "control_path_3"),
)
MAX_NAME = 200  # bytes; a suffix is added
_BAD_NAME = re.compile(r'[<>:"/\\|?*\x00-\x1f\[\]]|^[. ]|[. ]$|^(con|prn|aux|nul|com\d|lpt\d)(\.|$)', re.IGNORECASE)
_DEVICE = re.compile(r"cuda(:\d+)?|mps|cpu")
_CAPTION_EXT = re.compile(r"\.?\w+(\.\w+)*")
_NO_CAPTIONS = ("json", "jsonl", "csv", "jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff")
_PROMPT_FLAG = re.compile(r"\s--[a-z]")
_SCRIPTS = {"CJK": "Chinese", "HIRAGANA": "Japanese", "KATAKANA": "Japanese", "HANGUL": "Korean"}
_SCRIPTS |= {"CYRILLIC": "all Cyrillic", "GREEK": "all Greek"}  # the vocabulary has a part of them


def check_entry(entry: Entry) -> None:
    """Check combinations of an entry's keys."""
    for check in (_places, _frame, _network, _full, _train, _params, _model, _datasets, _samples, _coat):
        check(entry)


# -- places ------------------------------------------------------------------------------------------------------------


def _places(entry: Entry) -> None:
    """Name and folder of a run; its samples and charts must not land among its photos."""
    folder, findings = entry.get("training_folder"), entry.findings
    name, name_path = entry.name, "config.name"
    if entry.get("name") is not None:
        name, name_path = entry.get("name"), f"{entry.path}.name"
    if not name or _BAD_NAME.search(name) or len(name.encode(errors="replace")) > MAX_NAME:
        rule = f"names the run's folder, at most {MAX_NAME} bytes, without <>:\"/\\|?*[], a dot or a space at an end"
        findings.add(name_path, f"{rule}; write another", name)
    path = f"{entry.path}.training_folder"
    if _check_folder(folder, path, findings) and findings.sound(name_path):
        run = Path(folder, name)
        if run.exists() and not run.is_dir():
            findings.add(name_path, f"{run} is a file, not a run's folder; write another, or move it away", name)
    if folder is not None and findings.sound(path):
        run = Path(folder, name).resolve()
        photos = [item.get("folder_path") or item.get("dataset_path") for item in entry.entries("datasets")]
        if inside := next((one for one in photos if one and (run / "x").is_relative_to(Path(one).resolve())), None):
            rule = f"is inside the data set {inside}, so samples and charts would be trained on as photos"
            findings.add(path, f"{rule}; write a folder outside", folder)
    _check_folder(entry.get("log_dir"), f"{entry.path}.log_dir", findings)
    if place := entry.get("model.name_or_path"):
        _check_path(place, f"{entry.path}.model.name_or_path", findings)


def _check_folder(folder: str | None, path: str, findings: Findings) -> bool:
    if not folder or not _check_path(folder, path, findings):
        return False
    try:
        place = Path(folder)
        there = next((part for part in (place, *place.parents) if part.exists() or part.is_symlink()), None)
        if there is None or there.is_dir():
            return True
        what = "a file" if there.exists() else "a link to nothing"
        findings.add(path, f"{there} is {what}, not a folder; write another, or move it away", folder)
    except OSError as error:
        findings.add(path, f"cannot be a folder: {error.strerror}; write another", folder)
    return False


def _check_path(value: str, path: str, findings: Findings) -> bool:
    """Refuse `~`, unexpanded variables and escapes in a path; True if sound."""
    rule = ""
    if value.startswith("~"):
        rule = "~ is not replaced by the home folder; write the whole path, or ${HOME}/…"
    elif re.match(r"\$\w|%\w+%", value):
        rule = "environment variables are replaced only as ${NAME}; write it so, or write the whole path"
    elif re.search(r"[\x00-\x1f]", value):
        rule = "holds a tab or line break, as \\t and \\n make in double quotes; use single quotes, or / in paths"
    if rule:
        findings.add(path, rule, value)
    return not rule


# -- the run -----------------------------------------------------------------------------------------------------------


def _frame(entry: Entry) -> None:
    rule, device = entry.rule, entry.get("device", "cuda")
    missing = entry.get("training_folder") is None
    rule(TOOLKIT, "training_folder", missing, "is missing, must be a string; write output, for example")
    kind, _, number = device.partition(":")
    text = f"ai-toolkit trains on the first visible GPU; write cuda and set CUDA_VISIBLE_DEVICES={number}"
    rule(TOOLKIT, "device", number not in ("", "0"), text)
    rule(TOOLKIT, "device", kind not in ("cuda", "cpu", "mps"), "must be cuda, mps or cpu; write cuda")
    wrong = not _DEVICE.fullmatch(device)
    rule(ALONE, "device", wrong, "must be cuda, cuda:0, mps or cpu; write one, or null")
    if entry.num_processes == 1:
        return
    # our loop inside ai-toolkit sums the gradients of a network, and of nothing else
    others = any(map(entry.raw.get, ("embedding", "adapter", "decorator")))
    if not entry.enabled:
        text = "ai-toolkit does not synchronize LoRA gradients between processes"
        text += f"; write type: {COAT_TYPE}, with coat.enabled: true, or start one"
        entry.findings.add("num_processes", text, entry.num_processes)
    elif not entry.raw.get("network") or others or entry.get("train.merge_network_on_save") is True:
        text = "several processes train a network (a LoRA) and nothing else; start one"
        entry.findings.add("num_processes", text, entry.num_processes)


def _network(entry: Entry) -> None:
    get, rule, flux = entry.get, entry.rule, entry.is_flux
    ours = entry.enabled and get("network")
    text = "saves the whole model, which FP8 weights cannot give; write false, or coat: {enabled: false}"
    rule(TOOLKIT, "train.merge_network_on_save", ours and get("train.merge_network_on_save") is True, text)
    fp8 = ours and get("save.dtype") in ("8bit", "e4m3fn", "float8")
    rule(TOOLKIT, "save.dtype", fp8, "a LoRA in FP8 is read by no other program; write float16 or bf16")
    linear, rank = get("network.linear"), get("network.rank")
    twice, text = None not in (linear, rank), "an old name of linear, which is given too; remove rank"
    rule(ALONE, "network.rank", twice, text)
    rule(TOOLKIT, "network.rank", twice and rank != linear, text)
    size = next((value for value in (rank, linear) if value is not None), 4)
    key = "network.alpha" if get("network.linear_alpha") is None else "network.linear_alpha"
    wrong = flux and get(key) not in (None, size) and entry.sound("network.linear", "network.rank")
    text = f"ai-toolkit ignores it on FLUX, alpha is the rank; write {size}, and scale lr instead"
    rule(BOTH, key, wrong, text)
    text = "finds no layer of FLUX to adapt, and ai-toolkit stops; write lora or lokr"
    rule(TOOLKIT, "network.type", flux and get("network.type", "lora").lower() not in NETWORKS, text)
    key, text = (
        "network.network_kwargs.only_if_contains",
        "an empty list leaves nothing to train; write null or some names",
    )
    rule(BOTH, key, get(key) == [], text)


def _train(entry: Entry) -> None:
    get, rule, optimizer, flux = entry.get, entry.rule, entry.optimizer, entry.is_flux
    text = "in ai-toolkit only the last of these micro-steps counts; write gradient_accumulation instead"
    rule(BOTH, "train.gradient_accumulation_steps", get("train.gradient_accumulation_steps", 1) != 1, text)
    high = get("train.max_denoising_steps", 999)
    text = f"must not be above max_denoising_steps, which is {high}; write less"
    rule(BOTH, "train.min_denoising_steps", get("train.min_denoising_steps", 0) > high, text)
    lr, tuned = get("train.lr", 1e-6), not (optimizer.startswith(FINDS_LR) or entry.full)
    text = f"LoRAs diverge with {optimizer} above about {HIGH_LR:g}; write 0.0001"
    rule(BOTH, "train.lr", tuned and lr > HIGH_LR, text, warn=True)
    text = "a LoRA hardly learns at so low a rate" + ("" if entry.given("train.lr") else ", which is the default")
    rule(BOTH, "train.lr", tuned and lr < LOW_LR, f"{text}; write 0.0001", warn=True, default=lr)
    text = "as in ai-toolkit it is 1 for prodigy where it is below 0.1; write 1.0"
    rule(ALONE, "train.lr", optimizer == "prodigy" and lr < PRODIGY_LOW_LR, text, warn=True, default=lr)
    half = get("train.dtype") in ("fp16", "float16", "half")
    text = "FLUX overflows in fp16, and FP8 codes of it do too; use bf16"
    rule(TOOLKIT, "train.dtype", half, text, warn=entry.coat is None and not flux)
    text = "ai-toolkit stops on it; write constant, cosine or linear"
    rule(TOOLKIT, "train.lr_scheduler", get("train.lr_scheduler") in NO_SCHEDULER, text)
    still = get("train.max_grad_norm", 1.0) <= 0 and optimizer != "adafactor"  # which is not clipped
    text = "gradients are scaled down to this norm, so nothing is learned; write 1.0"
    rule(TOOLKIT, "train.max_grad_norm", still, text)
    text = "FLUX is trained by flowmatch, which is not ai-toolkit's default; write noise_scheduler: flowmatch"
    rule(TOOLKIT, "train.noise_scheduler", flux and get("train.noise_scheduler") != "flowmatch", text)


def _params(entry: Entry) -> None:
    findings, path, alone = entry.findings, f"{entry.path}.train.optimizer_params", entry.trainer == STANDALONE
    params, kind = entry.get("train.optimizer_params", {}), entry.optimizer
    if entry.sound("train.optimizer"):
        if kind == COAT_OPTIMIZER:
            parse_optimizer_params(params, path, findings)
        elif alone:
            parse_keys(OPTIMIZER_PARAMS.get(kind, ADAMW_OPTIONS), params, path, findings)
        elif kind in OWN_EPS:
            for key in ("lr", "eps"):
                text = f"ai-toolkit gives {key} to {kind} itself and fails on a second one; remove it"
                entry.rule(TOOLKIT, f"train.optimizer_params.{key}", key in params, text)
            if kind in ("adam", "adamw"):
                known = [option for option in ADAMW_OPTIONS if option.key != "eps"]
                known += [Option(key, False, "bool", "") for key in TORCH_SWITCHES]
                others = {key: value for key, value in params.items() if key not in ("lr", "eps")}
                parse_keys(known, others, path, findings)
    options = LR_PARAMS.get(entry.get("train.lr_scheduler", "constant"))
    if options and entry.sound("train.lr_scheduler"):
        options += () if alone else (Option("last_epoch", -1, "int", ""),)
        given = entry.get("train.lr_scheduler_params", {})
        parse_keys(options, given, f"{entry.path}.train.lr_scheduler_params", findings)


def _model(entry: Entry) -> None:
    get, rule, qtype = entry.get, entry.rule, entry.qtype
    arch, place, family = get("model.arch", "").split(":")[0], get("model.name_or_path"), arch_of(get("model", {}))
    text = "is missing; write a folder in diffusers layout or a hub name"
    rule(TOOLKIT, "model.name_or_path", place is None, text)
    trains = "the stand-alone trainer trains FLUX.1 and FLUX.2"
    rule(ALONE, "model.arch", arch not in ("", *STANDALONE_ARCHS), f"{trains}; write {', '.join(STANDALONE_ARCHS)}")
    other = not arch and not get("model.is_flux")
    rule(ALONE, "model.is_flux", other, f"{trains}; write true, or arch: flux2", default=False)
    unnamed = place is not None and not any(get(f"model.{key}") for key in ("arch", *MODEL_FLAGS))
    text = "without it ai-toolkit loads Stable Diffusion 1; write true"
    rule(TOOLKIT, "model.is_flux", unnamed, text, warn=True)
    text = f"the stand-alone trainer quantizes as {COAT_QTYPE} only; write qtype: {COAT_QTYPE} or quantize: false"
    rule(ALONE, "model.qtype", qtype not in (None, COAT_QTYPE), text, default=qtype)
    text = f"ai-toolkit does not quantize {family} while it loads, whatever the qtype; write quantize: false"
    rule(TOOLKIT, "model.qtype", qtype == COAT_QTYPE and family in UNQUANTIZED, text)
    whole = get("model.compile") is True and not get("model.block_compile")
    text = "without block_compile FLUX fails at the first step; write block_compile: true too"
    rule(TOOLKIT, "model.compile", whole, text, warn=not entry.is_flux)


# -- the `coat:` block -------------------------------------------------------------------------------------------------


def _coat(entry: Entry) -> None:
    coat, alone = entry.coat, entry.trainer == STANDALONE
    switches = ("train.optimizer", "model.quantize", "model.qtype", "coat.enabled", "coat.optimizer", "coat.weight")
    if coat is None or not entry.sound(*switches):
        return
    rule, optimizer, qtype = entry.rule, entry.optimizer, entry.qtype
    given, kind = entry.given("coat"), entry.get("type", COAT_TYPE)
    if alone and given and kind != COAT_TYPE:
        text = f"ai-toolkit reads this block with type: {COAT_TYPE} only, not with {kind}"
        entry.findings.warn(f"{entry.path}.coat", text)
    if not coat.enabled:
        text = "coat.enabled: false asks for a run without COAT; write {} or coat.enabled: true"
        rule(BOTH, "model.qtype", given and qtype == COAT_QTYPE, text.format("quantize: false,"))
        rule(BOTH, "train.optimizer", given and optimizer == COAT_OPTIMIZER, text.format("adamw,"))
        return
    text = "coat.weight.use_fp8: false asks for bf16 weights; write quantize: false"
    rule(BOTH, "model.qtype", qtype == COAT_QTYPE and not coat.weight.use_fp8, text)
    text = "linears stay as ai-toolkit quantizes them and multiply its way"
    text += f"; write {COAT_QTYPE} for FP8 GEMMs"
    rule(TOOLKIT, "model.qtype", qtype not in (None, COAT_QTYPE), text, warn=True, default=qtype)
    other, fp8 = optimizer != COAT_OPTIMIZER, coat.optimizer.use_fp8
    text = f"the block coat.optimizer would have no effect; write {COAT_OPTIMIZER}, or coat.optimizer.use_fp8: false"
    rule(BOTH, "train.optimizer", other and fp8 and entry.given("coat.optimizer"), text, default=optimizer)
    text = f"stores the moments its own way, not as COAT; write {COAT_OPTIMIZER} for FP8 moments"
    rule(BOTH, "train.optimizer", other and (alone or fp8), text, warn=True, default=optimizer)
    forbidden = entry.get("train.gradient_checkpointing") is False
    text = "train.gradient_checkpointing: false forbids recomputation; write none or auto, or true there"
    rule(BOTH, "coat.memory.checkpointing", forbidden and coat.memory.checkpointing == "all", text)
    kernel, device = coat.speed.attention, entry.get("device", "cuda")
    text = f"is a kernel for NVIDIA GPUs, and device is {device}; write auto"
    rule(BOTH, "coat.speed.attention", kernel != "auto" and device in ("cpu", "mps"), text)


def _full(entry: Entry) -> None:
    get, rule, optimizer, remedy = entry.get, entry.rule, entry.optimizer, "or add network to train a LoRA"
    fused, offloads = get("train.fused_backward") is True, [key for key in OFFLOAD_KEYS if get(key) == "cpu"]
    if not entry.full:
        text = "is for full fine-tuning, and network trains a LoRA; remove it, or network"
        for key in offloads:
            rule(BOTH, key, True, text)
        rule(BOTH, "train.fused_backward", fused, text)
        for key, default in (("coat.include", ["*"]), ("coat.exclude", [])):
            words = "network.network_kwargs.only_if_contains and ignore_if_contains"
            rule(BOTH, key, list(get(key, default)) != default, f"{text} ({words} choose its layers)")
        rule(BOTH, "coat.activation.wgrad_format", get("coat.activation.wgrad_format", "bf16") != "bf16", text)
        return
    text = f"is read with type: {COAT_TYPE} and coat.enabled: true only; write those, or remove it"
    rule(TOOLKIT, "train.fused_backward", fused and not entry.enabled, text)
    name = entry.get("name") or entry.name
    text = "is the name of another folder in the run's folder; change it"
    rule(ALONE, "name", name in ("coat", "samples"), text, default=name)
    text = "is not for whole models; write one of {}, or add network"
    rule(ALONE, "train.optimizer", optimizer not in FULL_OPTIMIZERS, text.format(", ".join(FULL_OPTIMIZERS)))
    text = f"updates single weights, which only {COAT_OPTIMIZER} can; write optimizer: {COAT_OPTIMIZER}, or false"
    rule(BOTH, "train.fused_backward", fused and optimizer != COAT_OPTIMIZER, text)
    text = f"has the moments of {COAT_OPTIMIZER} in host memory; write optimizer: {COAT_OPTIMIZER}, or none"
    for key in offloads:
        rule(BOTH, key, optimizer != COAT_OPTIMIZER, text)
    text = "quantizes frozen weights, and here they are trained; write false, or add network"
    rule(BOTH if entry.enabled else ALONE, "model.quantize", get("model.quantize") is True, text)
    if entry.coat is None or not entry.enabled:
        return
    text = f"is for frozen weights, trained ones are cast to FP8 at each use; write e4m3 or e5m2, {remedy}"
    rule(BOTH, "coat.weight.format", entry.coat.weight.format not in FORMATS, text)
    text = f"streams frozen codes, and without network the weights are trained; write 0, {remedy}"
    rule(BOTH, "coat.memory.stream_blocks", entry.coat.memory.stream_blocks != 0, text)
    text = f"is for frozen weights, trained ones take the generic flow; write generic or remove it, {remedy}"
    rule(BOTH, "coat.activation.flow", get("coat.activation.flow") == "fused", text)
    if entry.trainer == STANDALONE:
        return
    # ai-toolkit's handling of whole models that rules out a resume, or COAT
    family, trained = arch_of(get("model", {})), DTYPES.get(get("train.dtype", "fp32"))
    text = f"its whole model is not trained with COAT, FLUX.1's is; write arch: flux, {remedy}"
    rule(TOOLKIT, "model.arch", family != "flux", text, default=family)
    text = "ai-toolkit takes what begins with it in the run's folder for its save; write a longer one"
    rule(TOOLKIT, "name", any(one.startswith(name) for one in WRITTEN), text, default=name)
    other = entry.given("save.dtype") and DTYPES.get(get("save.dtype")) != trained
    rule(TOOLKIT, "save.dtype", other, f"ai-toolkit saves a whole FLUX as it is trained; write {trained}, or remove it")
    text = "ai-toolkit's average changes weights unseen, so FP8 codes of them would be old; write use_ema: false"
    rule(TOOLKIT, "train.ema_config", get("train.ema_config.use_ema") is True, text)
    for key in ("lora_path", "assistant_lora_path", "inference_lora_path"):
        text = "is added at each start, so a resumed run would have it twice; remove it"
        rule(TOOLKIT, f"model.{key}", get(f"model.{key}"), text)
    for key in ("only_if_contains", "ignore_if_contains"):
        text = "coat.include and coat.exclude choose what is trained; write those instead"
        rule(TOOLKIT, f"model.{key}", get(f"model.{key}"), text)
    text = "a whole model is trained with COAT alone, on one GPU, without the model as it was; write false"
    for key in (
        *("train.train_text_encoder", "train.diff_output_preservation", "train.blank_prompt_preservation"),
        *("train.inverted_mask_prior", "model.compile", "model.split_model_over_gpus"),
    ):
        rule(TOOLKIT, key, get(key) is True, text)
    rule(TOOLKIT, "adapter", get("adapter"), f"a whole model is trained without one; remove it, {remedy}")
    text = "goes backward several times, and fused_backward updates in one pass; write {}"
    several = fused and get("train.single_item_batching") is True
    rule(TOOLKIT, "train.single_item_batching", several, text.format("false"))
    several = fused and get("train.loss_type") == "mean_flow"
    rule(TOOLKIT, "train.loss_type", several, text.format("mse"))


# -- photos and prompts ------------------------------------------------------------------------------------------------


def _datasets(entry: Entry) -> None:
    text = "there is nothing to train on; write '- folder_path: …' below it"
    entry.rule(BOTH, "datasets", not entry.raw.get("datasets"), text)
    datasets, everywhere = entry.entries("datasets"), entry.get("train.cache_text_embeddings") is True
    cached = [everywhere or dataset.get("cache_text_embeddings") is True for dataset in datasets]
    if any(cached) and not all(cached):
        text = "must be the same in all datasets; write it in train: instead"
        datasets[cached.index(False)].rule(BOTH, "cache_text_embeddings", True, text, default=False)
    text = "has nothing to learn from cached captions; write false, or cache_text_embeddings: false"
    entry.rule(BOTH, "train.train_text_encoder", any(cached) and entry.get("train.train_text_encoder") is True, text)
    for dataset, is_cached in zip(datasets, cached, strict=True):
        place = dataset.get("folder_path") or dataset.get("dataset_path")
        dataset.rule(BOTH, "folder_path", not place, "is missing, must be a string; add it")
        if place:
            _check_path(place, f"{dataset.path}.folder_path", entry.findings)
        extension = dataset.get("caption_ext", "txt").lower()
        wrong = not _CAPTION_EXT.fullmatch(extension) or extension.rpartition(".")[2] in _NO_CAPTIONS
        text = "must be the end of a file name that holds a caption as plain text; write txt"
        dataset.rule(BOTH, "caption_ext", wrong, text)
        _check_resolution(dataset)
        text = "a cached caption is encoded once, in one order; write false, or cache_text_embeddings: false"
        dataset.rule(BOTH, "shuffle_tokens", is_cached and dataset.get("shuffle_tokens") is True, text)
        if entry.trainer == AI_TOOLKIT:
            _check_inside_ai_toolkit(dataset, is_cached)


def _check_resolution(dataset: Entry) -> None:
    """Warn of sizes that are not a multiple of the bucket step: photos train smaller than configured."""
    value = dataset.get("resolution", [512])
    sizes = value if isinstance(value, list) else [value]
    wrong = [size for size in sizes if isinstance(size, bool) or not isinstance(size, int) or size < MIN_RESOLUTION]
    text = f"must be a whole number, or a list of them, each of at least {MIN_RESOLUTION}; write [512]"
    dataset.rule(BOTH, "resolution", not sizes or wrong, text)
    for size in () if wrong or not dataset.is_flux else sizes:
        low = size // BUCKET_STEP * BUCKET_STEP
        text = f"not a multiple of {BUCKET_STEP}, FLUX's bucket step, so a square photo is trained at {low}×{low}"
        if size % BUCKET_STEP:
            remedy = f"write {low} or {low + BUCKET_STEP}"
            dataset.findings.warn(f"{dataset.path}.resolution", f"{text}; {remedy}", size)


def _check_inside_ai_toolkit(dataset: Entry, is_cached: bool) -> None:
    for key in SIDE_FOLDERS:
        value, path = dataset.get(key), f"{dataset.path}.{key}"
        for side in value if isinstance(value, list) else [value]:
            if isinstance(side, str) and _check_path(side, path, dataset.findings) and not Path(side).is_dir():
                text = f"no such folder in {Path.cwd()}, and ai-toolkit would go on without it; correct the path"
                dataset.findings.add(path, text, side)
    text = f"ai-toolkit {dataset.toolkit.version} ignores it with cached text embeddings"
    text += "; write 0, or cache_text_embeddings: false"
    dataset.rule(TOOLKIT, "token_dropout_rate", is_cached and dataset.get("token_dropout_rate", 0) > 0, text)


def _samples(entry: Entry) -> None:
    rule, prompts, items = entry.rule, entry.get("sample.prompts", []), entry.entries("sample.samples")
    twice = prompts and entry.get("sample.samples")
    rule(BOTH, "sample.prompts", twice, "ai-toolkit ignores it when there are samples; keep one of them")
    texts = [(f"{entry.path}.sample.prompts[{i}]", text) for i, text in enumerate(prompts)]
    texts += [(f"{item.path}.prompt", item.get("prompt", "")) for item in items]
    for path, text in texts:
        if not isinstance(text, str):
            entry.findings.add(path, "must be a string; write it in quotes", text)
        elif entry.trainer == STANDALONE and _PROMPT_FLAG.search(text):
            wrong = "flags in a prompt are not supported by the stand-alone trainer; write an entry of samples instead"
            entry.findings.add(path, wrong, text)
    _check_trigger(entry, [(path, text) for path, text in texts if isinstance(text, str)])
    if entry.trainer == STANDALONE or not entry.is_flux:
        return
    draws = (prompts or items) and entry.get("train.disable_sampling") is not True
    text = "FLUX is sampled by flowmatch, which is not ai-toolkit's default; write sampler: flowmatch"
    rule(TOOLKIT, "sample.sampler", draws and entry.get("sample.sampler") != "flowmatch", text)
    for side in ("width", "height"):
        value = entry.get(f"sample.{side}", SIDE_STEP)
        text = f"not a multiple of {SIDE_STEP}, so FLUX draws {value // SIDE_STEP * SIDE_STEP}; write that"
        rule(TOOLKIT, f"sample.{side}", value % SIDE_STEP, text, warn=True)
    for item in entry.entries("train.validation_config.validation_items"):
        place = item.get("image_path")
        absent = isinstance(place, str) and not Path(place).is_file()
        item.rule(TOOLKIT, "image_path", absent, f"no such image in {Path.cwd()}; write the path of one")


def _check_trigger(entry: Entry, prompts: list[tuple[str, str]]) -> None:
    trigger, rule = entry.get("trigger_word", ""), entry.rule
    text = "is the placeholder for the trigger word; write the word itself"
    rule(BOTH, "trigger_word", trigger == TRIGGER_TAG, text)
    text = "starts or ends with a blank, so it is found in no caption; remove the blank"
    rule(BOTH, "trigger_word", trigger != trigger.strip(), text)
    share, script = foreign_script(trigger)
    text = f"{T5_BLIND.format(script)}; write a rare word in Latin letters"
    rule(BOTH, "trigger_word", share > FOREIGN_SHARE, text, warn=True)
    if not entry.sound("trigger_word"):
        return
    for path, prompt in prompts:
        share, script = foreign_script(prompt)
        if share > FOREIGN_SHARE:
            entry.findings.warn(path, f"{T5_BLIND.format(script)}; write the prompt in English", prompt)
        if trigger and TRIGGER_TAG not in prompt and trigger not in prompt:
            text = f"without the trigger word '{trigger}' it does not show the LoRA; write {TRIGGER_TAG}"
            entry.findings.warn(path, text, prompt)
        elif not trigger and TRIGGER_TAG in prompt:
            text = f"there is no trigger word for {TRIGGER_TAG}; write {entry.path}.trigger_word"
            entry.findings.warn(path, text, prompt)


def foreign_script(text: str) -> tuple[float, str]:
    """Share of letters that FLUX's T5 lacks, and their main script; it has Latin, some Cyrillic and Greek."""
    letters = [unicodedata.name(c, "").partition(" ")[0] for c in text if c.isalpha()]
    latin = ("LATIN", "FULLWIDTH", "MODIFIER", "FEMININE", "MASCULINE")
    counts = Counter(name for name in letters if name not in latin)
    if not counts:
        return 0.0, ""
    name = counts.most_common(1)[0][0]
    return counts.total() / len(letters), _SCRIPTS.get(name, name.title())
