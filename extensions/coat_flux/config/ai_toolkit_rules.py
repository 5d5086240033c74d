"""What ai-toolkit takes and then does not do, or fails on after minutes of loading: rules between its keys.

As seen running in 0.12.26. An error is what would make another run than the file says, or none; a warning is what only
surprises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..base.names import COAT_OPTIMIZER, COAT_QTYPE
from .ai_toolkit_data_rules import check_datasets, check_sample, check_validation
from .ai_toolkit_entry import Entry
from .ai_toolkit_keys import ROWS
from .build import parse_keys
from .coat import ADAMW_OPTIONS, COATConfig, parse_optimizer_params
from .common_rules import check_apart, check_folder, check_lr, check_path, check_run
from .job_sections import LR_PARAMS
from .model_folder import arch_of
from .options import Option

HALF = ("fp16", "float16", "half")
OWN_EPS = ("adam", "adamw", "adam8", "adamw8", "adam8bit", "adamw8bit", "ademamix8bit", "prodigy", "prodigy8bit")
_TORCH = ("amsgrad", "capturable", "differentiable", "foreach", "fused", "maximize")
ADAM_SWITCHES = {"adam": _TORCH, "adamw": _TORCH}  # besides betas and weight_decay
MODEL_FLAGS = tuple(row["key"] for row in ROWS if row["block"] == "ModelConfig" and row["key"].startswith("is_"))


# keys of train that fail at the first step under flow matching, or on FLUX.1 at all, and why
NO_FLOW_MATCHING = dict.fromkeys(
    ("min_snr_gamma", "snr_gamma", "learnable_snr_gos"), "weighs the loss by a DDPM schedule, which flow matching lacks"
)
NO_FLUX = {"free_u": "is for U-Nets, FLUX has none", "train_turbo": "does not know FLUX's shifted noise levels"}
NO_SCHEDULER = ("step", "polynomial", "piecewise_constant")  # ai-toolkit gives them total_iters, which none takes
NETWORKS = ("lora", "lokr", "dora", "fullrank", "lorm")  # what finds layers in FLUX; locon and lycoris look for others
UNQUANTIZED = ("sd1", "sd2", "sdxl", "ssd", "vega", "pixart", "pixart_sigma", "auraflow")


def check_entry(entry: Entry) -> None:
    """Add what the blocks of an entry say together."""
    _check_places(entry)
    _check_crashes(entry)
    _check_device(entry)
    _check_model(entry)
    _check_network(entry)
    _check_train(entry)
    _check_params(entry)
    check_datasets(entry)
    check_sample(entry)
    check_validation(entry)
    if entry.coat is not None:
        _check_coat(entry, entry.coat)


def _check_crashes(entry: Entry) -> None:
    """What ai-toolkit takes, loads the model for, and then fails on; each seen in 0.12.26."""
    train, network, adapter = entry.block("train"), entry.block("network"), entry.block("adapter")
    flow_matching = entry.text("train", "noise_scheduler", "ddpm") == "flowmatch"
    wrong = (NO_FLOW_MATCHING if flow_matching else {}) | (NO_FLUX if entry.is_flux else {})
    for key, why in wrong.items():
        if train.get(key):
            entry.add(f"train.{key}", f"{why}, so ai-toolkit fails at the first step; remove it", train[key])
    if train.get("do_paramiter_swapping") is True and entry.optimizer != "adafactor":
        entry.add("train.do_paramiter_swapping", "ai-toolkit has it for adafactor only; write false", True)
    if entry.text("train", "lr_scheduler", "constant") in NO_SCHEDULER:
        rule = "ai-toolkit passes it an argument that it does not take, and stops; write constant, cosine or linear"
        entry.add("train.lr_scheduler", rule, train["lr_scheduler"])
    datasets = [dataset for _, dataset in entry.entries("datasets")]
    plain = not any(item.get("default_caption") or item.get("dataset_path") for item in datasets)
    changed = bool(datasets) and all(item.get("augmentations") for item in datasets)
    target, fails = train.get("loss_target"), "so ai-toolkit fails at the first step; write noise"
    if target == "unaugmented" and flow_matching:
        entry.add("train.loss_target", f"needs a DDPM schedule, which flow matching lacks, {fails}", target)
    elif target in ("unaugmented", "differential_noise") and not changed:
        entry.add("train.loss_target", f"needs augmentations, which a data set here lacks, {fails}", target)
    if train.get("short_and_long_captions") is True and plain:
        rule = "there are no short captions, which only a JSON list in dataset_path or default_caption can give"
        entry.add("train.short_and_long_captions", f"{rule}; write false", True)
    _check_preservation(entry)
    if not entry.is_flux:
        return
    kind = entry.text("network", "type", "lora").lower()
    if network and kind not in NETWORKS and entry.sound("network.type"):
        entry.add("network.type", "finds no layer of FLUX to adapt, and ai-toolkit stops; write lora or lokr", kind)
    if entry.process.get("embedding") is not None:
        entry.add(
            "embedding",
            "ai-toolkit cannot train embeddings of FLUX; remove it and use a trigger_word",
            entry.process["embedding"],
        )
    if adapter.get("type") == "control_lora":
        controls = ("control_path", "control_path_1", "controls", "inpaint_path")
        for path, dataset in entry.entries("datasets"):
            if not any(dataset.get(key) for key in controls):
                rule = "control_lora learns from control images, and without them ai-toolkit fails at the first step"
                entry.findings.add(f"{path}.control_path", f"{rule}; write their folder")


def _check_preservation(entry: Entry) -> None:
    """Combinations at which ai-toolkit stops while it makes the process, behind a message about something else."""
    train = entry.block("train")
    keeps, blank = train.get("diff_output_preservation") is True, train.get("blank_prompt_preservation") is True
    words = [entry.process.get("trigger_word"), *(item.get("trigger_word") for _, item in entry.entries("datasets"))]
    if keeps and blank:
        entry.add("train.blank_prompt_preservation", "not beside diff_output_preservation; write false", True)
    elif keeps and train.get("train_text_encoder") is True:
        entry.add("train.train_text_encoder", "not beside diff_output_preservation; write false", True)
    elif keeps and not any(words):
        entry.add(
            "train.diff_output_preservation", "replaces the trigger word by its class; write a trigger_word", True
        )
    if train.get("bypass_guidance_embedding") is True and train.get("do_guidance_loss") is True:
        entry.add("train.do_guidance_loss", "not beside bypass_guidance_embedding; write false", True)
    regular = [path for path, dataset in entry.entries("datasets") if dataset.get("is_reg") is True]
    if regular and len(regular) == len(list(entry.entries("datasets"))):
        rule = "there must be a data set besides those for regularization, else ai-toolkit fails at the first step"
        entry.findings.add(f"{regular[0]}.is_reg", f"{rule}; write false, or add one", True)


def _check_places(entry: Entry) -> None:
    process, path, findings = entry.process, entry.path, entry.findings
    own = isinstance(process.get("name"), str)
    folder = process.get("training_folder")
    if folder is None:
        entry.add("training_folder", "is missing, must be a string; write output, for example", folder)
    name, name_path = (process["name"], f"{path}.name") if own else (entry.name, "config.name")
    check_run(name, name_path, folder if isinstance(folder, str) else None, path, findings)
    photos = [dataset.get("folder_path") or dataset.get("dataset_path") for _, dataset in entry.entries("datasets")]
    check_apart(folder, str(name), photos, path, findings)
    if isinstance(process.get("log_dir"), str):
        check_folder(process["log_dir"], f"{path}.log_dir", findings)


def _check_device(entry: Entry) -> None:
    device = entry.process.get("device")
    if isinstance(device, str) and ":" in device and not device.endswith(":0"):
        number = device.rpartition(":")[2]
        rule = f"ai-toolkit trains on the first visible GPU; write cuda and set CUDA_VISIBLE_DEVICES={number}"
        entry.add("device", rule, device)
    elif isinstance(device, str) and device.partition(":")[0] not in ("cuda", "cpu", "mps"):
        entry.add("device", "must be cuda, mps or cpu; write cuda", device)
    if entry.num_processes > 1:
        rule = "ai-toolkit does not synchronize LoRA gradients between processes; start one, or train on several GPUs "
        entry.findings.add("num_processes", f"{rule}with `accelerate launch ... coat-flux train`", entry.num_processes)


def _check_model(entry: Entry) -> None:
    model = entry.block("model")
    place = model.get("name_or_path")
    if place is None:
        entry.add("model.name_or_path", "is missing; write a folder in diffusers layout or a hub name", place)
    elif isinstance(place, str):
        check_path(place, f"{entry.path}.model.name_or_path", entry.findings)
    if not entry.text("model", "arch", "") and not any(model.get(flag) for flag in MODEL_FLAGS) and place is not None:
        entry.warn("model.is_flux", "without it ai-toolkit loads Stable Diffusion 1; write true", model.get("is_flux"))
    if model.get("layer_offloading") is True and entry.is_flux:
        entry.warn("model.layer_offloading", "does nothing for FLUX.1; remove it", True)
    if model.get("compile") is True and not model.get("block_compile"):
        rule = "without block_compile FLUX fails at the first step; write block_compile: true too"
        (entry.add if entry.is_flux else entry.warn)("model.compile", rule, True)
    if model.get("quantize") is True and entry.qtype == COAT_QTYPE and arch_of(model) in UNQUANTIZED:
        rule = (
            f"ai-toolkit does not quantize {arch_of(model)} while it loads, whatever the qtype; write quantize: false"
        )
        more = ", COAT converts its linears after loading" if entry.coat is not None and entry.coat.enabled else ""
        entry.add("model.qtype", rule + more, entry.qtype)
    if model.get("extras_name_or_path") and entry.is_flux:
        entry.warn(
            "model.extras_name_or_path",
            "ai-toolkit does not read it for FLUX.1; remove it",
            model["extras_name_or_path"],
        )


def _check_network(entry: Entry) -> None:
    network = entry.block("network")
    if not entry.sound("network.linear", "network.rank", "network.linear_alpha", "network.alpha", "network.type"):
        return
    rank = network.get("linear") if network.get("rank") is None else network["rank"]
    alpha = network.get("linear_alpha", network.get("alpha"))
    if network.get("rank") is not None and network.get("linear") is not None and network["rank"] != network["linear"]:
        entry.add("network.rank", "an old name of linear, which is given too; remove rank", network["rank"])
    elif entry.is_flux and alpha is not None and alpha != (4 if rank is None else rank):
        key = "linear_alpha" if "linear_alpha" in network else "alpha"
        rule = f"ai-toolkit ignores it on FLUX, alpha is the rank; write {4 if rank is None else rank} or remove it"
        entry.add(f"network.{key}", f"{rule}, and scale lr instead", alpha)
    kind = entry.text("network", "type", "lora").lower()
    if entry.coat is not None and entry.coat.enabled and kind != "lora":
        rule = "FP8 adapter inputs are for lora, these adapters keep their own inputs; write lora to save their memory"
        entry.warn("network.type", rule, network["type"])
    names = entry.block("network").get("network_kwargs")
    if isinstance(names, Mapping) and names.get("only_if_contains") == []:
        rule = "an empty list leaves nothing to train; write null or some names"
        entry.add("network.network_kwargs.only_if_contains", rule, [])


def _check_train(entry: Entry) -> None:
    train = entry.block("train")
    steps = train.get("gradient_accumulation_steps", 1)
    if steps != 1:
        rule = "ai-toolkit zeroes the gradients at every micro-step, so only the last one counts"
        entry.add("train.gradient_accumulation_steps", f"{rule}; use train.gradient_accumulation", steps)
    if train.get("dtype") in HALF:
        rule = "FLUX overflows in fp16, and FP8 codes of it do too; use bf16"
        (entry.add if entry.coat is not None or entry.is_flux else entry.warn)("train.dtype", rule, train["dtype"])
    if entry.is_flux and entry.text("train", "noise_scheduler", "ddpm") != "flowmatch":
        rule = "FLUX is trained by flowmatch, which is not ai-toolkit's default; write noise_scheduler: flowmatch"
        entry.add("train.noise_scheduler", rule, train.get("noise_scheduler"))
    low, high = train.get("min_denoising_steps", 0), train.get("max_denoising_steps", 999)
    if isinstance(low, int) and isinstance(high, int) and low > high:
        entry.add(
            "train.min_denoising_steps", f"must not be above max_denoising_steps, which is {high}; write less", low
        )
    norm = train.get("max_grad_norm", 1.0)
    if entry.sound("train.max_grad_norm") and norm <= 0 and entry.optimizer != "adafactor":  # which is not clipped
        rule = "gradients are scaled down to this norm, so nothing is learned; write 1.0"
        entry.add("train.max_grad_norm", rule, norm)
    check_lr(train.get("lr", 1e-6), entry.optimizer, f"{entry.path}.train", entry.findings, given="lr" in train)
    if train.get("train_unet") is False and train.get("train_text_encoder") is not True:
        entry.add("train.train_unet", "nothing is left to train; write true", False)


def _check_params(entry: Entry) -> None:
    train = entry.block("train")
    params, path = train.get("optimizer_params"), f"{entry.path}.train.optimizer_params"
    if isinstance(params, Mapping) and entry.sound("train.optimizer"):
        if entry.optimizer == COAT_OPTIMIZER:
            parse_optimizer_params(params, path, entry.findings)
        elif entry.optimizer in OWN_EPS:
            _check_adam_params(entry, params, path)
    if not entry.sound("train.lr_scheduler"):
        return
    options = LR_PARAMS.get(entry.text("train", "lr_scheduler", "constant"))
    if options and isinstance(train.get("lr_scheduler_params"), Mapping):
        known = (*options, Option("last_epoch", -1, "int", ""))
        parse_keys(known, train["lr_scheduler_params"], f"{entry.path}.train.lr_scheduler_params", entry.findings)


def _check_adam_params(entry: Entry, params: Mapping[str, Any], path: str) -> None:
    """Keywords of an Adam; the host fails on a wrong one after the model is loaded."""
    for key in ("lr", "eps"):
        if key in params:
            rule = f"ai-toolkit gives {key} to {entry.optimizer} itself and fails on a second one; remove it"
            entry.findings.add(f"{path}.{key}", rule, params[key])
    if entry.optimizer in ADAM_SWITCHES:
        known = [option for option in ADAMW_OPTIONS if option.key != "eps"]
        known += [Option(key, False, "bool", "") for key in ADAM_SWITCHES[entry.optimizer]]
        others = {key: value for key, value in params.items() if key not in ("lr", "eps")}
        parse_keys(known, others, path, entry.findings)


def _check_saves(entry: Entry) -> None:
    """What a save of the whole model would be, which the FP8 weights cannot give, and LoRAs that nothing reads."""
    others = ("embedding", "adapter", "decorator")
    if not entry.block("network") and entry.sound("network") and not any(map(entry.process.get, others)):
        rule = "without it ai-toolkit trains the whole model, which does not work with COAT yet"
        remedy = "write network: {type: lora, linear: 16, linear_alpha: 16}, or coat: {enabled: false}"
        entry.add("network", f"{rule}; {remedy}", entry.process.get("network"))
    elif entry.block("train").get("merge_network_on_save") is True:
        rule = "saves the whole model, which FP8 weights cannot give; write false, or coat: {enabled: false}"
        entry.add("train.merge_network_on_save", rule, True)
    dtype = entry.text("save", "dtype", "float16")
    if dtype in ("8bit", "e4m3fn", "float8"):
        entry.add("save.dtype", "a LoRA in FP8 is read by no other program; write float16 or bf16", dtype)


def _check_coat(entry: Entry, coat: COATConfig) -> None:
    """The `coat:` block against the host's own keys."""
    if not entry.sound(
        "train.optimizer", "model.quantize", "model.qtype", "coat.enabled", "coat.optimizer", "coat.weight"
    ):
        return
    qtype, optimizer = entry.qtype, entry.optimizer
    if not coat.enabled:
        rule = "coat.enabled: false asks for ai-toolkit's own run; write {} or coat.enabled: true"
        if qtype == COAT_QTYPE:
            entry.add("model.qtype", rule.format("model.quantize: false,"), qtype)
        if optimizer == COAT_OPTIMIZER:
            entry.add("train.optimizer", rule.format("adamw,"), optimizer)
        return
    _check_saves(entry)
    if qtype == COAT_QTYPE and not coat.weight.use_fp8:
        rule = "coat.weight.use_fp8: false asks for bf16 weights; write model.quantize: false"
        entry.add("model.qtype", rule, qtype)
    if qtype not in (None, COAT_QTYPE) and coat.weight.use_fp8:
        rule = "coat.weight.use_fp8: true asks for FP8 weights, and a layer is stored one way only"
        entry.add("model.qtype", f"{rule}; write {COAT_QTYPE}, or coat.weight.use_fp8: false", qtype)
    if optimizer != COAT_OPTIMIZER:
        if f"{entry.path}.coat.optimizer" in entry.findings.given and coat.optimizer.use_fp8:
            rule = "the block coat.optimizer would have no effect"
            entry.add("train.optimizer", f"{rule}; write {COAT_OPTIMIZER}, or coat.optimizer.use_fp8: false", optimizer)
        elif coat.optimizer.use_fp8:
            rule = f"stores the moments its own way, not as COAT; write {COAT_OPTIMIZER} for FP8 moments"
            entry.warn("train.optimizer", rule, optimizer)
    recompute = entry.block("train").get("gradient_checkpointing", True)
    if coat.memory.checkpointing in ("all", "every_n") and recompute is False:
        rule = "train.gradient_checkpointing: false forbids recomputation; write none or auto, or true there"
        entry.add("coat.memory.checkpointing", rule, coat.memory.checkpointing)
