"""Full fine-tuning, a job without `network:`: what holds of its config, and what cannot be asked of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ..base.names import COAT_OPTIMIZER, COAT_TYPE
from .build import build
from .coat import COATConfig
from .combinations import check_combinations
from .entry import ALONE, BOTH, TOOLKIT, Entry, arch_of
from .findings import Findings
from .job_sections import DTYPES
from .options import FORMATS

# what a run writes in its folder, where ai-toolkit takes the newest entry that begins with the name for its newest save
WRITTEN = ("coat", "config.yaml", "optimizer.pt", "samples")
FULL_OPTIMIZERS = (COAT_OPTIMIZER, "adamw", "adam", "adamw8bit", "lion")  # whose memory `plan` knows for any tensor
OFFLOAD_KEYS = ("coat.optimizer.offload", "train.optimizer_params.offload")


def is_full(process: Mapping[str, Any]) -> bool:
    """Whether this entry of `config.process` trains the transformer itself, and not something beside it."""
    adapter = process.get("adapter")
    trains_adapter = isinstance(adapter, Mapping) and bool(adapter.get("train"))
    return not (trains_adapter or any(map(process.get, ("network", "embedding", "decorator"))))


def coat_of_entry(process: Mapping[str, Any], file: str) -> COATConfig:
    """The block of an entry of `config.process` as it holds inside ai-toolkit.

    Args:
        process: the entry.
        file: named in errors.

    Raises:
        ConfigError: as `COATConfig.from_dict`.
    """
    path, findings = "config.process[0].coat", Findings(file)
    coat = build(COATConfig, process.get("coat"), path, findings)
    check_combinations(coat, path, findings)
    findings.raise_if_any()
    return coat_of_full(coat, path, findings.given) if is_full(process) else coat


def coat_of_full(coat: COATConfig, path: str, given: Collection[str]) -> COATConfig:
    """The block as it holds in full fine-tuning.

    Trained weights change in every step, so blocks take the generic flow, run eager, and nothing is measured for the
    fused one. INT8 is for frozen weights, so the fallback is bf16. bf16 weights are rounded stochastically where the
    block does not say otherwise: an update is mostly smaller than half a step of bf16, and to nearest it would be lost.

    Args:
        coat: the `coat:` block.
        path: its key.
        given: keys that were written.
    """
    optimizer = coat.optimizer
    if f"{path}.optimizer.stochastic_rounding" not in given:
        optimizer = replace(optimizer, stochastic_rounding=True)
    return replace(
        coat,
        optimizer=optimizer,
        activation=replace(coat.activation, flow="generic"),
        speed=replace(coat.speed, cuda_graphs="never", measure="never"),
        fallback="error" if coat.fallback == "error" else "bf16",
    )


def check_full(entry: Entry) -> None:
    """Add what a job with or without `network:` cannot have."""
    get, rule = entry.get, entry.rule
    fused, coat = get("train.fused_backward") is True, entry.coat is not None and entry.coat.enabled
    text = "is for full fine-tuning, and network trains a LoRA; remove it, or network"
    offloads = [key for key in OFFLOAD_KEYS if get(key) == "cpu"]
    if not is_full(entry.raw):
        for key in offloads:
            rule(BOTH, key, True, text)
        rule(BOTH, "train.fused_backward", fused, text)
        for key, default in (("coat.include", ["*"]), ("coat.exclude", [])):
            words = "network.network_kwargs.only_if_contains and ignore_if_contains"
            rule(BOTH, key, list(get(key, default)) != default, f"{text} ({words} choose its layers)")
        rule(BOTH, "coat.activation.wgrad_format", get("coat.activation.wgrad_format", "bf16") != "bf16", text)
        return
    text = f"is read with type: {COAT_TYPE} and coat.enabled: true only; write those, or remove it"
    rule(TOOLKIT, "train.fused_backward", fused and not coat, text)
    name = entry.get("name") or entry.name
    text = "is also the name of the final model's folder in the run's folder, which has another of that name; change it"
    rule(ALONE, "name", name in ("coat", "samples"), text, default=name)
    text = "keeps states that are not known for whole models; write one of {} for full fine-tuning, or add network"
    rule(ALONE, "train.optimizer", entry.optimizer not in FULL_OPTIMIZERS, text.format(", ".join(FULL_OPTIMIZERS)))
    text = f"updates single weights, which only {COAT_OPTIMIZER} can; write optimizer: {COAT_OPTIMIZER}, or false"
    rule(BOTH, "train.fused_backward", fused and entry.optimizer != COAT_OPTIMIZER, text)
    text = f"has the moments of {COAT_OPTIMIZER} in host memory; write optimizer: {COAT_OPTIMIZER}, or none"
    for key in offloads:
        rule(BOTH, key, entry.optimizer != COAT_OPTIMIZER, text)
    text = "quantizes frozen weights, and without network the transformer is trained; write false, or add network"
    rule(BOTH if coat else ALONE, "model.quantize", get("model.quantize") is True, text)
    if entry.coat is None or not coat:
        return
    remedy = "or add network to train a LoRA"
    text = f"is for frozen weights, trained ones are cast to FP8 at each use; write e4m3 or e5m2, {remedy}"
    rule(BOTH, "coat.weight.format", entry.coat.weight.format not in FORMATS, text)
    text = f"streams frozen codes, and without network the weights are trained; write 0, {remedy}"
    rule(BOTH, "coat.memory.stream_blocks", entry.coat.memory.stream_blocks != 0, text)
    text = f"is for frozen weights, trained ones take the generic flow; write generic or remove it, {remedy}"
    rule(BOTH, "coat.activation.flow", get("coat.activation.flow") == "fused", text)
    _check_inside_ai_toolkit(entry, fused)


def _check_inside_ai_toolkit(entry: Entry, fused: bool) -> None:
    """What ai-toolkit does with a whole model that a resume, or COAT, cannot go with."""
    get, rule, name = entry.get, entry.rule, entry.get("name") or entry.name
    remedy = "or add network to train a LoRA"
    family = arch_of(get("model", {}))
    text = f"its whole model is not trained with COAT, FLUX.1's is; write arch: flux, {remedy}"
    rule(TOOLKIT, "model.arch", family != "flux", text, default=family)
    text = "ai-toolkit takes the newest entry in the run's folder that begins with it for its save; write a longer one"
    rule(TOOLKIT, "name", any(one.startswith(name) for one in WRITTEN), text, default=name)
    trained = DTYPES.get(get("train.dtype", "fp32"))
    other = entry.given("save.dtype") and DTYPES.get(get("save.dtype")) != trained
    text = f"ai-toolkit saves a whole FLUX as it is trained; write {trained}, or remove it"
    rule(TOOLKIT, "save.dtype", other, text)
    text = "ai-toolkit's average changes weights unseen, so FP8 codes of them would be old; write use_ema: false, "
    text += "or train with `coat-flux train`"
    rule(TOOLKIT, "train.ema_config", get("train.ema_config.use_ema") is True, text)
    for key in ("lora_path", "assistant_lora_path", "inference_lora_path"):
        text = "is added to the weights at each start, so a resumed run would have it twice; remove it"
        rule(TOOLKIT, f"model.{key}", get(f"model.{key}"), text)
    for key in ("only_if_contains", "ignore_if_contains"):
        text = "coat.include and coat.exclude choose what is trained; write those instead"
        rule(TOOLKIT, f"model.{key}", get(f"model.{key}"), text)
    text = "more than the transformer would be trained, which COAT does not resume; write false"
    rule(TOOLKIT, "train.train_text_encoder", get("train.train_text_encoder") is True, text)
    rule(TOOLKIT, "adapter", get("adapter"), f"a whole model is trained without one; remove it, {remedy}")
    text = f"blocks with trained weights run eager; write false, {remedy}"
    rule(TOOLKIT, "model.compile", get("model.compile") is True, text)
    text = "spreads the model over GPUs, and with COAT one trains it; write false"
    rule(TOOLKIT, "model.split_model_over_gpus", get("model.split_model_over_gpus") is True, text)
    for key in ("diff_output_preservation", "blank_prompt_preservation", "inverted_mask_prior"):
        text = f"compares with the model without its LoRA, and here the model itself is trained; write false, {remedy}"
        rule(TOOLKIT, f"train.{key}", get(f"train.{key}") is True, text)
    text = "has ai-toolkit go backward several times in a micro-batch, and fused_backward updates in one pass; write {}"
    several = fused and get("train.single_item_batching") is True
    rule(TOOLKIT, "train.single_item_batching", several, text.format("false"))
    rule(TOOLKIT, "train.loss_type", fused and get("train.loss_type") == "mean_flow", text.format("mse"))
