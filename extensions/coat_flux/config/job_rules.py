"""What must hold between the blocks of a job."""

from __future__ import annotations

import importlib.util
import re

from ..base.names import COAT_OPTIMIZER, COAT_QTYPE, COAT_TYPE
from .build import parse_keys
from .coat import ADAMW_OPTIONS, COATConfig, parse_optimizer_params
from .common_rules import (
    check_apart,
    check_caption_ext,
    check_folder,
    check_lr,
    check_path,
    check_resolution,
    check_run,
    check_trigger,
)
from .findings import ConfigError, Findings, finding
from .job_sections import LR_PARAMS, OPTIMIZER_PACKAGES, OPTIMIZER_PARAMS, Job

PRODIGY_LOW_LR = 0.1
_DEVICE = re.compile(r"cuda(:\d+)?|mps|cpu")
_PROMPT_FLAG = re.compile(r"\s--[a-z]")


def coat_without_block(job: Job) -> COATConfig:
    """COAT in a job of ai-toolkit's own process types without a `coat:` block: what optimizer and qtype select.

    As in ai-toolkit: the optimizer name and the qtype each work alone, everything else is a plain run.
    """
    optimizer = job.train.optimizer == COAT_OPTIMIZER
    weights = job.model.quantize and job.model.qtype == COAT_QTYPE
    block = {
        "enabled": optimizer or weights,
        "optimizer": {"use_fp8": optimizer},
        "weight": {"use_fp8": weights},
        "activation": {"use_fp8": weights},
        "memory": {
            "enable_efficient_checkpoint": False,
            "checkpointing": "all" if job.train.gradient_checkpointing else "none",
        },
    }
    return COATConfig.from_dict(block)


def check_job(job: Job, path: str, findings: Findings) -> None:
    """Add what contradicts, or would have no effect, between the blocks of `job`."""
    _check_names(job, path, findings)
    _check_network(job, f"{path}.network", findings)
    _check_datasets(job, f"{path}.datasets", findings)
    _check_train(job, f"{path}.train", findings)
    _check_model(job, f"{path}.model", findings)
    _check_sample(job, f"{path}.sample", findings)
    _check_coat(job, path, findings)


def require_packages(job: Job) -> None:
    """Check that what the job needs beyond this package's own requirements is installed.

    Raises:
        ConfigError: one of them is not.
    """
    module, package = OPTIMIZER_PACKAGES.get(job.train.optimizer, ("", ""))
    if module and not _is_installed(module):
        text = f"needs the package {package}; pip install {package}, or write {COAT_OPTIMIZER} or adamw"
        raise ConfigError(finding(job.file, "config.process[0].train.optimizer", text, job.train.optimizer))
    if job.logging.use_wandb and not _is_installed("wandb"):
        text = "needs the package wandb; pip install wandb, or write false"
        raise ConfigError(finding(job.file, "config.process[0].logging.use_wandb", text, True))


def _is_installed(module: str) -> bool:
    """Whether it can be imported; a folder that only has its name, as wandb makes one for its files, is no module."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def _check_names(job: Job, path: str, findings: Findings) -> None:
    name_path = f"{path}.name" if f"{path}.name" in findings.given else "config.name"
    folder_path = f"{path}.training_folder"
    folder = job.training_folder if findings.sound(folder_path) else None
    check_run(job.name, name_path, folder, path, findings)
    check_apart(folder, str(job.name), (entry.folder_path for entry in job.datasets), path, findings)
    if job.log_dir:
        check_folder(job.log_dir, f"{path}.log_dir", findings)
    if job.model.name_or_path:
        check_path(job.model.name_or_path, f"{path}.model.name_or_path", findings)
    if job.device is not None and not _DEVICE.fullmatch(job.device):
        findings.add(f"{path}.device", "must be cuda, cuda:0, mps or cpu; write one, or null", job.device)


def _check_network(job: Job, path: str, findings: Findings) -> None:
    rank, alpha = job.network.linear, job.network.linear_alpha
    if findings.sound(path) and not job.raw["config"]["process"][0].get("network"):
        rule = "is missing, and the stand-alone trainer trains LoRAs only"
        findings.add(path, f"{rule}; add network: {{type: lora, linear: 16, linear_alpha: 16}}")
    if {f"{path}.linear", f"{path}.rank"} <= findings.given:
        findings.add(f"{path}.rank", "an old name of linear, which is given too; remove rank", rank)
    if alpha is not None and alpha != rank and findings.sound(f"{path}.linear", f"{path}.rank"):
        rule = f"ai-toolkit ignores it on FLUX, alpha is the rank; write {rank} or remove it, and scale lr instead"
        findings.add(f"{path}.linear_alpha", rule, alpha)
    if job.network.network_kwargs.only_if_contains == ():
        rule = "an empty list leaves nothing to train; write null or some names"
        findings.add(f"{path}.network_kwargs.only_if_contains", rule, [])


def _check_datasets(job: Job, path: str, findings: Findings) -> None:
    if not job.datasets:
        findings.add(path, "there is nothing to train on; write '- folder_path: …' below it")
    cached = [entry.cache_text_embeddings for entry in job.datasets]
    if any(cached) and not all(cached):
        rule = "must be the same in all datasets; write it in train: instead"
        findings.add(f"{path}[{cached.index(False)}].cache_text_embeddings", rule, False)
    for i, entry in enumerate(job.datasets):
        if entry.folder_path:
            check_path(entry.folder_path, f"{path}[{i}].folder_path", findings)
        check_caption_ext(entry.caption_ext, f"{path}[{i}].caption_ext", findings)
        check_resolution(entry.resolution, f"{path}[{i}].resolution", findings)
        if entry.cache_text_embeddings and entry.shuffle_tokens:
            rule = "a cached caption is encoded once, in one order; write false, or cache_text_embeddings: false"
            findings.add(f"{path}[{i}].shuffle_tokens", rule, True)


def _check_train(job: Job, path: str, findings: Findings) -> None:
    train = job.train
    if train.gradient_accumulation_steps != 1:
        rule = "in ai-toolkit only the last of these micro-steps counts; write gradient_accumulation instead"
        findings.add(f"{path}.gradient_accumulation_steps", rule, train.gradient_accumulation_steps)
    if train.min_denoising_steps > train.max_denoising_steps:
        rule = f"must not be above max_denoising_steps, which is {train.max_denoising_steps}; write less"
        findings.add(f"{path}.min_denoising_steps", rule, train.min_denoising_steps)
    check_lr(train.lr, train.optimizer, path, findings, given=f"{path}.lr" in findings.given)
    if findings.sound(f"{path}.optimizer"):
        if train.optimizer == COAT_OPTIMIZER:
            parse_optimizer_params(train.optimizer_params, f"{path}.optimizer_params", findings)
        else:
            options = OPTIMIZER_PARAMS.get(train.optimizer, ADAMW_OPTIONS)
            parse_keys(options, train.optimizer_params, f"{path}.optimizer_params", findings)
        if train.optimizer == "prodigy" and findings.sound(f"{path}.lr") and train.lr < PRODIGY_LOW_LR:
            rule = "prodigy finds its step size itself, so as in ai-toolkit lr is 1 where it is below 0.1; write 1.0"
            findings.warn(f"{path}.lr", rule, train.lr)
    if findings.sound(f"{path}.lr_scheduler"):
        parse_keys(LR_PARAMS[train.lr_scheduler], train.lr_scheduler_params, f"{path}.lr_scheduler_params", findings)


def _check_model(job: Job, path: str, findings: Findings) -> None:
    model = job.model
    arch = (model.arch or "").split(":")[0]
    if arch not in ("", "flux"):
        findings.add(f"{path}.arch", "the stand-alone trainer trains FLUX.1; write flux", model.arch)
    elif not arch and not model.is_flux:
        findings.add(f"{path}.is_flux", "the stand-alone trainer trains FLUX.1; write true", model.is_flux)
    if model.quantize and model.qtype != COAT_QTYPE:
        rule = f"the stand-alone trainer quantizes as {COAT_QTYPE} only; write qtype: {COAT_QTYPE} or quantize: false"
        findings.add(f"{path}.qtype", rule, model.qtype)


def _check_sample(job: Job, path: str, findings: Findings) -> None:
    sample = job.sample
    if sample.prompts and sample.samples:
        findings.add(f"{path}.prompts", "ai-toolkit ignores it beside samples; keep one of them", list(sample.prompts))
    texts = [(f"prompts[{i}]", prompt) for i, prompt in enumerate(sample.prompts)]
    texts += [(f"samples[{i}].prompt", item.prompt) for i, item in enumerate(sample.samples)]
    for where, text in texts:
        if text is not None and _PROMPT_FLAG.search(text):
            rule = "flags in a prompt are not supported by the stand-alone trainer; write an entry of samples instead"
            findings.add(f"{path}.{where}", rule, text)
    root = path.removesuffix(".sample")
    check_trigger(job.trigger_word, [(f"{path}.{where}", text) for where, text in texts], root, findings)


def _check_coat(job: Job, path: str, findings: Findings) -> None:
    coat, train = job.coat, job.train
    switches = ("train.optimizer", "model.quantize", "model.qtype", "coat.enabled", "coat.optimizer", "coat.weight")
    if not findings.sound(*(f"{path}.{key}" for key in switches)):
        return
    uses_optimizer = train.optimizer == COAT_OPTIMIZER
    uses_weights = job.model.quantize and job.model.qtype == COAT_QTYPE
    block_given = f"{path}.coat" in findings.given
    if block_given and job.type != COAT_TYPE:
        findings.warn(f"{path}.coat", f"ai-toolkit reads this block with type: {COAT_TYPE} only, not with {job.type}")
    if block_given and not coat.enabled:
        remedy = "coat.enabled is false; write {} or coat.enabled: true"
        if uses_optimizer:
            findings.add(f"{path}.train.optimizer", remedy.format("adamw"), train.optimizer)
        if uses_weights:
            findings.add(f"{path}.model.quantize", remedy.format("false"), True)
        return
    if uses_weights and not coat.weight.use_fp8:
        findings.add(f"{path}.model.qtype", "coat.weight.use_fp8 is false; write quantize: false", job.model.qtype)
    if coat.optimizer.use_fp8 and not uses_optimizer and f"{path}.coat.optimizer" in findings.given:
        rule = f"the block coat.optimizer needs {COAT_OPTIMIZER}; write that, or coat.optimizer: {{use_fp8: false}}"
        findings.add(f"{path}.train.optimizer", rule, train.optimizer)
    if coat.enabled and not uses_optimizer and not coat.optimizer.use_fp8:
        findings.warn(f"{path}.train.optimizer", f"{train.optimizer} stores the moments its own way, not as COAT")
    if coat.memory.checkpointing in ("all", "every_n") and not train.gradient_checkpointing and block_given:
        rule = "train.gradient_checkpointing: false forbids recomputation; write none or auto, or true there"
        findings.add(f"{path}.coat.memory.checkpointing", rule, coat.memory.checkpointing)
