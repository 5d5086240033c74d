"""What our process type refuses, and what it warns of, before ai-toolkit loads a model.

ai-toolkit accepts unknown keys and several settings that then do something else than they say. Where that would spoil a
COAT run it is refused here, by key, value, rule and remedy; where it only surprises, one line is printed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .optimizer import OPTIMIZER_NAME
from .quantizer import QTYPE

if TYPE_CHECKING:
    from ..config import COATConfig

__all__ = ["config_file", "find_conflict", "find_refusal", "find_surprises", "raise_refusal"]

HALF = ("fp16", "float16")
HOST_QTYPE = "qfloat8"
Refusal = tuple[str, object, str, str]


def config_file(save_root: str) -> str:
    """Return the job's YAML as given on the command line, or the copy ai-toolkit keeps in the save folder."""
    given = [word for word in sys.argv[1:] if word.endswith((".yaml", ".yml", ".json", ".jsonc"))]
    return given[0] if len(given) == 1 else os.path.join(save_root, "config.yaml")


def raise_refusal(refusal: Refusal | None, file: str) -> None:
    """Raise the ConfigError of a refusal, if there is one.

    Raises:
        ConfigError: "<file>: <key>=<value>: <rule>; <remedy>".
    """
    if refusal is None:
        return
    from ..config import ConfigError

    key, value, rule, remedy = refusal
    raise ConfigError(f"{file}: {key}={value!r}: {rule}; {remedy}")


def _block(process: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return process.get(name) or {}


def find_refusal(process: Mapping[str, Any], num_processes: int) -> Refusal | None:
    """Return the first setting that ai-toolkit would take and not do, as (key, value, rule, remedy).

    Args:
        process: our entry of `config.process`, as written.
        num_processes: how many processes accelerate started.
    """
    train, sample = _block(process, "train"), _block(process, "sample")
    if num_processes > 1:
        return (
            "num_processes",
            num_processes,
            "ai-toolkit does not synchronize LoRA gradients between processes",
            "start one process, or train on several GPUs with `accelerate launch ... coat-flux train`",
        )
    steps = train.get("gradient_accumulation_steps", 1)
    if steps != 1:
        return (
            "train.gradient_accumulation_steps",
            steps,
            "ai-toolkit zeroes the gradients at every micro-step, so only the last one counts",
            "use train.gradient_accumulation",
        )
    dtype = train.get("dtype", "fp32")
    if dtype in HALF:
        return (
            "train.dtype",
            dtype,
            "fp16 gradients overflow without a scaler, which FLUX training has not",
            "use bf16",
        )
    neg = sample.get("neg", "")
    if not isinstance(neg, str):
        return ("sample.neg", neg, "ai-toolkit needs a string and fails at the first sample", 'write neg: ""')
    return None


def find_conflict(process: Mapping[str, Any], coat: COATConfig) -> Refusal | None:
    """Return the first contradiction of the `coat:` block and ai-toolkit's own keys: (key, value, rule, remedy)."""
    model, train = _block(process, "model"), _block(process, "train")
    qtype = model.get("qtype", HOST_QTYPE) if model.get("quantize") else None
    optimizer = str(train.get("optimizer", "adamw")).lower()
    if not coat.enabled:
        return _conflict_when_off(qtype, optimizer)
    if qtype == QTYPE and not coat.weight.use_fp8:
        return ("model.qtype", qtype, "coat.weight.use_fp8=false asks for bf16 weights", "set model.quantize: false")
    if qtype not in (None, QTYPE) and coat.weight.use_fp8:
        return (
            "model.qtype",
            qtype,
            "coat.weight.use_fp8=true asks for FP8 weights, one layer cannot be stored both ways",
            f"set model.qtype: {QTYPE}, or coat.weight.use_fp8: false",
        )
    asked = "optimizer" in _block(process, "coat") and coat.optimizer.use_fp8
    if optimizer != OPTIMIZER_NAME and asked:
        return (
            "train.optimizer",
            optimizer,
            "the coat.optimizer block would have no effect",
            f"set train.optimizer: {OPTIMIZER_NAME}, or coat.optimizer.use_fp8: false",
        )
    return None


def _conflict_when_off(qtype: str | None, optimizer: str) -> Refusal | None:
    rule = "coat.enabled=false asks for ai-toolkit's own run"
    if qtype == QTYPE:
        return ("model.qtype", qtype, rule, "set model.quantize: false, or coat.enabled: true")
    if optimizer == OPTIMIZER_NAME:
        return ("train.optimizer", optimizer, rule, "set train.optimizer: adamw, or coat.enabled: true")
    return None


def find_surprises(process: Mapping[str, Any]) -> list[str]:
    """Return one line for each setting that ai-toolkit takes and that does not do what it says on FLUX.1."""
    model, network, train = _block(process, "model"), _block(process, "network"), _block(process, "train")
    lines = []
    rank, alpha = network.get("linear"), network.get("linear_alpha")
    if alpha is not None and rank is not None and alpha != rank:
        lines.append(f"network.linear_alpha={alpha} is ignored by ai-toolkit on FLUX: alpha is the rank, {rank}")
    kind = str(network.get("type", "lora")).lower()
    if network and kind != "lora":
        lines.append(f"network.type={kind}: FP8 adapter inputs are for lora; these adapters keep their own inputs")
    if model.get("layer_offloading"):
        lines.append("model.layer_offloading does nothing for FLUX.1")
    if model.get("compile") and not model.get("block_compile"):
        lines.append(
            "model.compile without block_compile fails at the first step on torch 2.13; set block_compile: true"
        )
    if str(train.get("optimizer", "adamw")).lower() != OPTIMIZER_NAME:
        lines.append(f"train.optimizer is not {OPTIMIZER_NAME}: the moments are stored as that optimizer does")
    if ":" in str(process.get("device", "")) and not str(process.get("device")).endswith(":0"):
        lines.append(f"device={process['device']}: ai-toolkit uses the first visible GPU; set CUDA_VISIBLE_DEVICES")
    return lines
