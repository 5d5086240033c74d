"""Puts everything of a save back into the parts of a new session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...base.names import COAT_OPTIMIZER
from ...blocks.runner import BlockRunner
from ...saves.path import path_of
from .network import load_lora_tensors
from .optim import restore_optimizer
from .progress import RunLog
from .resume import ResumeError, ResumePoint

__all__ = ["path_changes", "path_record", "restore_lora", "restore_optimizer_state"]

WORDS = {"gemm": "GEMMs of the blocks", "compile": "compilation", "recomputed": "blocks that recompute"}


def restore_lora(transformer: nn.Module, point: ResumePoint) -> None:
    """Load the raw LoRA.

    Raises:
        ResumeError: it does not fit the adapters.
    """
    try:
        load_lora_tensors(transformer, point.lora(), source=str(point.path))
    except ValueError as error:
        raise ResumeError(str(error)) from error


def restore_optimizer_state(optimizer: Optimizer, point: ResumePoint, name: str, log: RunLog) -> None:
    """Load the optimizer's state, converted where its formats changed; the config's hyper-parameters stay.

    Args:
        optimizer: of this run.
        point: the save.
        name: `train.optimizer`.
        log: is told what changed.

    Raises:
        ResumeError: another optimizer wrote it, or it does not fit.
    """
    saved_with = point.record.get("optimizer", name)
    if saved_with != name and not (name == COAT_OPTIMIZER and saved_with in ("adamw", "adam")):
        raise ResumeError(
            f"{point.optimizer_file}: was written by {saved_with}, which train.optimizer={name} cannot read; "
            f"go back to {saved_with}, or choose another config.name to start over"
        )
    try:
        changes = restore_optimizer(optimizer, point.optimizer())
    except (ValueError, KeyError, TypeError) as error:
        raise ResumeError(f"{point.optimizer_file}: does not fit this run's LoRA ({error})") from error
    for change in changes:
        log.say(f"Resume: the config's optimizer settings replace the saved ones: {change}")


def path_record(transformer: nn.Module) -> dict[str, Any]:
    """What the first step chose and rounding depends on: GEMMs, compilation, which blocks recompute."""
    policy = BlockRunner.of(transformer)
    return {} if policy is None else {**path_of(transformer), "recomputed": policy.plan.recomputed}


def path_changes(transformer: nn.Module, record: Mapping[str, Any]) -> list[str]:
    """What differs from the saved path after the first step, one line each: from there on rounding differs."""
    saved, now = record.get("path", {}), path_record(transformer)
    return [
        f"Resume: {WORDS[key]} {saved[key]} -> {now[key]}; results differ from here on by rounding"
        for key in WORDS
        if key in saved and key in now and saved[key] != now[key]
    ]
