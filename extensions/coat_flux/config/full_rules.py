"""Full fine-tuning, a job without `network:`: what holds of its config, and what cannot be asked of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ..base.names import COAT_OPTIMIZER
from .coat import COATConfig
from .entry import ALONE, Entry
from .options import FORMATS

FULL_OPTIMIZERS = (COAT_OPTIMIZER, "adamw", "adam", "adamw8bit", "lion")  # whose memory `plan` knows for any tensor


def is_full(process: Mapping[str, Any]) -> bool:
    """Whether this entry of `config.process` trains the transformer itself."""
    return not process.get("network")


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
        speed=replace(coat.speed, compile="none", measure="never"),
        fallback="error" if coat.fallback == "error" else "bf16",
    )


def check_full(entry: Entry) -> None:
    """Add what a job with or without `network:` cannot have."""
    get, rule = entry.get, entry.rule
    fused = get("train.fused_backward") is True
    text = "is for full fine-tuning, and network trains a LoRA; remove it, or network"
    if not is_full(entry.raw):
        rule(ALONE, "train.fused_backward", fused, text)
        for key, default in (("coat.include", ["*"]), ("coat.exclude", [])):
            words = "network.network_kwargs.only_if_contains and ignore_if_contains"
            rule(ALONE, key, list(get(key, default)) != default, f"{text} ({words} choose its layers)")
        rule(ALONE, "coat.activation.wgrad_format", get("coat.activation.wgrad_format", "bf16") != "bf16", text)
        return
    name = entry.get("name") or entry.name
    text = "is also the name of the final model's folder in the run's folder, which has another of that name; change it"
    rule(ALONE, "name", name in ("coat", "samples"), text, default=name)
    text = "keeps states that are not known for whole models; write one of {} for full fine-tuning, or add network"
    rule(ALONE, "train.optimizer", entry.optimizer not in FULL_OPTIMIZERS, text.format(", ".join(FULL_OPTIMIZERS)))
    text = f"updates single weights, which only {COAT_OPTIMIZER} can; write optimizer: {COAT_OPTIMIZER}, or false"
    rule(ALONE, "train.fused_backward", fused and entry.optimizer != COAT_OPTIMIZER, text)
    text = "quantizes frozen weights, and without network the transformer is trained; write false, or add network"
    rule(ALONE, "model.quantize", get("model.quantize") is True, text)
    if entry.coat is None or not entry.coat.enabled:
        return
    coat, remedy = entry.coat, "or add network to train a LoRA"
    text = f"is for frozen weights, trained ones are cast to FP8 at each use; write e4m3 or e5m2, {remedy}"
    rule(ALONE, "coat.weight.format", coat.weight.format not in FORMATS, text)
    text = f"streams frozen codes, and without network the weights are trained; write 0, {remedy}"
    rule(ALONE, "coat.memory.stream_blocks", coat.memory.stream_blocks != 0, text)
    text = f"is for frozen weights, trained ones take the generic flow; write generic or remove it, {remedy}"
    rule(ALONE, "coat.activation.flow", get("coat.activation.flow") == "fused", text)
    text = f"is for frozen weights, blocks with trained ones run eager; write none or auto, {remedy}"
    rule(ALONE, "coat.speed.compile", get("coat.speed.compile") in ("blocks", "cudagraphs"), text)
