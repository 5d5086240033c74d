"""What must hold between the keys of a job; each rule says for which trainer it holds.

An error is what would make another run than the file says, or none: what contradicts itself, what ai-toolkit takes and
then does not do, or fails on after minutes of loading (as seen running in 0.12.26). A warning is what only surprises.
Types and single values were checked before; the rules about photos, captions and prompts are in `data_rules`.
"""

from __future__ import annotations

import re

from ..base.names import COAT_OPTIMIZER, COAT_QTYPE, COAT_TYPE
from .ai_toolkit_keys import ROWS
from .build import parse_keys
from .coat import ADAMW_OPTIONS, parse_optimizer_params
from .data_rules import check_datasets, check_samples
from .entry import ALONE, BOTH, STANDALONE, STANDALONE_ARCHS, TOOLKIT, Entry, arch_of, check_places
from .full_rules import check_full, is_full
from .job_sections import LR_PARAMS, OPTIMIZER_PARAMS, PRODIGY_LOW_LR
from .options import Option

HIGH_LR, LOW_LR = 1e-2, 2e-6  # LoRAs of FLUX diverge above the one, and hardly learn below the other
FINDS_LR = ("prodigy", "dadapt", "automagic")  # optimizers that choose their own steps
OWN_EPS = ("adam", "adamw", "adam8", "adamw8", "adam8bit", "adamw8bit", "ademamix8bit", "prodigy", "prodigy8bit")
TORCH_SWITCHES = ("amsgrad", "capturable", "differentiable", "foreach", "fused", "maximize")  # of adam and adamw
MODEL_FLAGS = tuple(row["key"] for row in ROWS if row["block"] == "ModelConfig" and row["key"].startswith("is_"))
NETWORKS = ("lora", "lokr", "dora", "fullrank", "lorm")  # what finds layers in FLUX; locon and lycoris look for others
NO_SCHEDULER = ("step", "polynomial", "piecewise_constant")  # ai-toolkit gives them total_iters, which none takes
UNQUANTIZED = ("sd1", "sd2", "sdxl", "ssd", "vega", "pixart", "pixart_sigma", "auraflow")
_DEVICE = re.compile(r"cuda(:\d+)?|mps|cpu")


def check_entry(entry: Entry) -> None:
    """Add what the keys of an entry say together."""
    check_places(entry)
    _check_frame(entry)
    _check_network(entry)
    check_full(entry)
    _check_train(entry)
    _check_loss(entry)
    _check_params(entry)
    _check_model(entry)
    check_datasets(entry)
    check_samples(entry)
    _check_coat(entry)


def _check_frame(entry: Entry) -> None:
    rule, device = entry.rule, entry.get("device", "cuda")
    missing = entry.get("training_folder") is None
    rule(TOOLKIT, "training_folder", missing, "is missing, must be a string; write output, for example")
    kind, _, number = device.partition(":")
    text = f"ai-toolkit trains on the first visible GPU; write cuda and set CUDA_VISIBLE_DEVICES={number}"
    rule(TOOLKIT, "device", number not in ("", "0"), text)
    rule(TOOLKIT, "device", kind not in ("cuda", "cpu", "mps"), "must be cuda, mps or cpu; write cuda")
    wrong = not _DEVICE.fullmatch(device)
    rule(ALONE, "device", wrong, "must be cuda, cuda:0, mps or cpu; write one, or null")
    if entry.num_processes > 1:
        _check_processes(entry)


def _check_processes(entry: Entry) -> None:
    """Several processes inside ai-toolkit: our loop sums the gradients of a network, and of nothing else."""
    missing = not entry.raw.get("network") or any(map(entry.raw.get, ("embedding", "adapter", "decorator")))
    if entry.coat is None or not entry.coat.enabled:
        text = f"ai-toolkit does not synchronize LoRA gradients between processes; write type: {COAT_TYPE}, with "
        text += "coat.enabled: true, or start one"
    elif missing or entry.get("train.merge_network_on_save") is True:
        text = "several processes train a network (a LoRA) and nothing else; start one"
    else:
        return
    entry.findings.add("num_processes", text, entry.num_processes)


def _check_network(entry: Entry) -> None:
    get, rule, flux = entry.get, entry.rule, entry.is_flux
    coat = entry.coat is not None and entry.coat.enabled
    kind, linear, rank = get("network.type", "lora").lower(), get("network.linear"), get("network.rank")
    merges = get("network") and coat and get("train.merge_network_on_save") is True
    text = "saves the whole model, which FP8 weights cannot give; write false, or coat: {enabled: false}"
    rule(TOOLKIT, "train.merge_network_on_save", merges, text)
    fp8 = coat and get("network") and get("save.dtype") in ("8bit", "e4m3fn", "float8")
    rule(TOOLKIT, "save.dtype", fp8, "a LoRA in FP8 is read by no other program; write float16 or bf16")

    twice = "an old name of linear, which is given too; remove rank"
    rule(ALONE, "network.rank", None not in (linear, rank), twice)
    rule(TOOLKIT, "network.rank", None not in (linear, rank) and rank != linear, twice)
    size = next((value for value in (rank, linear) if value is not None), 4)
    key = "network.alpha" if get("network.linear_alpha") is None else "network.linear_alpha"
    wrong = flux and get(key) not in (None, size) and entry.sound("network.linear", "network.rank")
    text = f"ai-toolkit ignores it on FLUX, alpha is the rank; write {size} or remove it, and scale lr instead"
    rule(BOTH, key, wrong, text)

    text = "finds no layer of FLUX to adapt, and ai-toolkit stops; write lora or lokr"
    rule(TOOLKIT, "network.type", flux and kind not in NETWORKS, text)
    text = "FP8 adapter inputs are for lora, these adapters keep their own inputs; write lora to save their memory"
    rule(TOOLKIT, "network.type", coat and kind != "lora", text, warn=True)
    text = "an empty list leaves nothing to train; write null or some names"
    key = "network.network_kwargs.only_if_contains"
    rule(BOTH, key, get(key) == [], text)
    text = "ai-toolkit cannot train embeddings of FLUX; remove it and use a trigger_word"
    rule(TOOLKIT, "embedding", flux and get("embedding") is not None, text)


def _check_train(entry: Entry) -> None:
    get, rule, optimizer = entry.get, entry.rule, entry.optimizer
    text = "in ai-toolkit only the last of these micro-steps counts; write gradient_accumulation instead"
    key = "train.gradient_accumulation_steps"
    rule(BOTH, key, get(key, 1) != 1, text)
    high = get("train.max_denoising_steps", 999)
    text = f"must not be above max_denoising_steps, which is {high}; write less"
    rule(BOTH, "train.min_denoising_steps", get("train.min_denoising_steps", 0) > high, text)
    lr, tuned = get("train.lr", 1e-6), not (optimizer.startswith(FINDS_LR) or is_full(entry.raw))
    text = f"LoRAs diverge with {optimizer} above about {HIGH_LR:g}; write 0.0001"
    rule(BOTH, "train.lr", tuned and lr > HIGH_LR, text, warn=True)
    text = "a LoRA hardly learns at so low a rate" + ("" if entry.given("train.lr") else ", which is the default")
    rule(BOTH, "train.lr", tuned and lr < LOW_LR, f"{text}; write 0.0001", warn=True, default=lr)
    text = "prodigy finds its step size itself, so as in ai-toolkit lr is 1 where it is below 0.1; write 1.0"
    rule(ALONE, "train.lr", optimizer == "prodigy" and lr < PRODIGY_LOW_LR, text, warn=True, default=lr)
    half = get("train.dtype") in ("fp16", "float16", "half")
    text = "FLUX overflows in fp16, and FP8 codes of it do too; use bf16"
    rule(TOOLKIT, "train.dtype", half, text, warn=entry.coat is None and not entry.is_flux)
    text = "ai-toolkit passes it an argument that it does not take, and stops; write constant, cosine or linear"
    rule(TOOLKIT, "train.lr_scheduler", get("train.lr_scheduler") in NO_SCHEDULER, text)
    still = get("train.max_grad_norm", 1.0) <= 0 and optimizer != "adafactor"  # which is not clipped
    text = "gradients are scaled down to this norm, so nothing is learned; write 1.0"
    rule(TOOLKIT, "train.max_grad_norm", still, text)
    swaps = get("train.do_paramiter_swapping") is True and optimizer != "adafactor"
    rule(TOOLKIT, "train.do_paramiter_swapping", swaps, "ai-toolkit has it for adafactor only; write false")
    nothing = get("train.train_unet") is False and get("train.train_text_encoder") is not True
    rule(TOOLKIT, "train.train_unet", nothing, "nothing is left to train; write true")


def _check_loss(entry: Entry) -> None:
    """What ai-toolkit fails on at the first step, or while it makes the process, behind another message."""
    get, rule, flux, datasets = entry.get, entry.rule, entry.is_flux, entry.entries("datasets")
    flowmatch, fails = get("train.noise_scheduler") == "flowmatch", "so ai-toolkit fails at the first step"
    text = "FLUX is trained by flowmatch, which is not ai-toolkit's default; write noise_scheduler: flowmatch"
    rule(TOOLKIT, "train.noise_scheduler", flux and not flowmatch, text)
    for key in ("min_snr_gamma", "snr_gamma", "learnable_snr_gos"):
        text = f"weighs the loss by a DDPM schedule, which flow matching lacks, {fails}; remove it"
        rule(TOOLKIT, f"train.{key}", flowmatch and get(f"train.{key}"), text)
    text = f"is for U-Nets, FLUX has none, {fails}; remove it"
    rule(TOOLKIT, "train.free_u", flux and get("train.free_u"), text)
    text = f"does not know FLUX's shifted noise levels, {fails}; remove it"
    rule(TOOLKIT, "train.train_turbo", flux and get("train.train_turbo"), text)
    target, changed = get("train.loss_target"), bool(datasets) and all(one.get("augmentations") for one in datasets)
    text = f"needs a DDPM schedule, which flow matching lacks, {fails}; write noise"
    rule(TOOLKIT, "train.loss_target", target == "unaugmented" and flowmatch, text)
    text = f"needs augmentations, which a data set here lacks, {fails}; write noise"
    rule(TOOLKIT, "train.loss_target", target in ("unaugmented", "differential_noise") and not changed, text)
    lists = any(one.get("default_caption") or one.get("dataset_path") for one in datasets)
    text = "there are no short captions, which only a JSON list in dataset_path or default_caption can give"
    key = "train.short_and_long_captions"
    rule(TOOLKIT, key, get(key) is True and not lists, f"{text}; write false")

    keeps, blank = get("train.diff_output_preservation") is True, get("train.blank_prompt_preservation") is True
    encoder, words = get("train.train_text_encoder") is True, [one.get("trigger_word") for one in (entry, *datasets)]
    text = "not with diff_output_preservation; write false"
    rule(TOOLKIT, "train.blank_prompt_preservation", keeps and blank, text)
    rule(TOOLKIT, "train.train_text_encoder", keeps and encoder and not blank, text)
    text = "replaces the trigger word by its class; write a trigger_word"
    rule(TOOLKIT, "train.diff_output_preservation", keeps and not (blank or encoder or any(words)), text)
    both = get("train.bypass_guidance_embedding") is True and get("train.do_guidance_loss") is True
    rule(TOOLKIT, "train.do_guidance_loss", both, "not with bypass_guidance_embedding; write false")
    regular = bool(datasets) and all(one.get("is_reg") is True for one in datasets)
    text = "there must be a data set besides those for regularization, else ai-toolkit fails at the first step"
    for one in datasets[:1]:
        one.rule(TOOLKIT, "is_reg", regular, f"{text}; write false, or add one")
    control = flux and get("adapter.type") == "control_lora"
    text = "control_lora learns from control images, and without them ai-toolkit fails at the first step"
    for one in datasets:
        images = any(map(one.get, ("control_path", "control_path_1", "controls", "inpaint_path")))
        one.rule(TOOLKIT, "control_path", control and not images, f"{text}; write their folder")


def _check_params(entry: Entry) -> None:
    """Arguments of the optimizer and of the learning-rate scheduler."""
    findings, path = entry.findings, f"{entry.path}.train.optimizer_params"
    params, alone = entry.get("train.optimizer_params", {}), entry.trainer == STANDALONE
    if entry.sound("train.optimizer"):
        if entry.optimizer == COAT_OPTIMIZER:
            parse_optimizer_params(params, path, findings)
        elif alone:
            parse_keys(OPTIMIZER_PARAMS.get(entry.optimizer, ADAMW_OPTIONS), params, path, findings)
        elif entry.optimizer in OWN_EPS:
            for key in ("lr", "eps"):
                if key in params:
                    rule = f"ai-toolkit gives {key} to {entry.optimizer} itself and fails on a second one; remove it"
                    entry.add(f"train.optimizer_params.{key}", rule)
            if entry.optimizer in ("adam", "adamw"):
                known = [option for option in ADAMW_OPTIONS if option.key != "eps"]
                known += [Option(key, False, "bool", "") for key in TORCH_SWITCHES]
                parse_keys(known, {key: params[key] for key in params if key not in ("lr", "eps")}, path, findings)
    options = LR_PARAMS.get(entry.get("train.lr_scheduler", "constant"))
    if options and entry.sound("train.lr_scheduler"):
        options += () if alone else (Option("last_epoch", -1, "int", ""),)
        given = entry.get("train.lr_scheduler_params", {})
        parse_keys(options, given, f"{entry.path}.train.lr_scheduler_params", findings)


def _check_model(entry: Entry) -> None:
    get, rule, flux, qtype = entry.get, entry.rule, entry.is_flux, entry.qtype
    arch, place = get("model.arch", "").split(":")[0], get("model.name_or_path")
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
    family = arch_of(get("model", {}))
    text = f"ai-toolkit does not quantize {family} while it loads, whatever the qtype; write quantize: false"
    text += ", COAT converts its linears after loading" if entry.coat is not None and entry.coat.enabled else ""
    rule(TOOLKIT, "model.qtype", qtype == COAT_QTYPE and family in UNQUANTIZED, text)
    offloads = flux and get("model.layer_offloading") is True
    rule(TOOLKIT, "model.layer_offloading", offloads, "does nothing for FLUX.1; remove it", warn=True)
    whole = get("model.compile") is True and not get("model.block_compile")
    text = "without block_compile FLUX fails at the first step; write block_compile: true too"
    rule(TOOLKIT, "model.compile", whole, text, warn=not flux)
    extras = flux and get("model.extras_name_or_path")
    rule(TOOLKIT, "model.extras_name_or_path", extras, "ai-toolkit does not read it for FLUX.1; remove it", warn=True)


def _check_coat(entry: Entry) -> None:
    """The `coat:` block against ai-toolkit's own keys."""
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
    text = "linears stay as ai-toolkit quantizes them and multiply its way, and coat.weight holds for what it leaves"
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
