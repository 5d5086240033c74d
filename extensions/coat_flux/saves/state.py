"""The part of a save beyond the published LoRA, so that a resumed run ends as if it had never stopped.

    coat/state-000000500/      the stand-alone trainer's; inside ai-toolkit the same files are in the set's folder aitk/
        lora.safetensors       the raw LoRA in fp32 (the published one may be its average, in save.dtype)
        ema.safetensors        its average in fp32, if any
        rng.safetensors        states of the random generators (of the main process)
        state.json             steps done, position in the data, guard, execution mode of the blocks, identity

`optimizer.pt` is in the set's own folder in both. Saves come between optimizer steps, so there are never
half-accumulated gradients. Everything loads without pickle, `optimizer.pt` with weights_only=True.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from coat_core.optim.sharded import local_values, rows_like

from ..base.names import COAT_OPTIMIZER
from ..blocks.runner import BlockRunner
from .errors import ResumeError

STANDALONE, AI_TOOLKIT = "", "aitk"  # folder of a trainer's state in a set
RECORD_FILE = "state.json"
OPTIMIZER_FILE = "optimizer.pt"
SHARD_BYTES = 5 * 10**9  # of a file of a whole model; one is made in CPU memory at a time
REMEDY = "restore it from a backup, or choose another config.name to start over (all that is in this folder stays)"
EXECUTION_WORDS = {
    "weight_format": "format of the weights",
    "gemm": "GEMMs of the blocks",
    "recomputed": "blocks that recompute",
}


@dataclass(frozen=True)
class RunState:
    """The state in a committed set: its folder, trainer (`STANDALONE` or `AI_TOOLKIT`) and `state.json` as `record`."""

    folder: Path
    trainer: str
    record: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path, trainer: str) -> RunState | None:
        """The state of a set, without reading tensors, or None if it has none of this trainer; raises ResumeError."""
        path = folder / trainer / RECORD_FILE
        if not path.exists():
            return None
        try:
            return cls(folder, trainer, json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ResumeError(f"{path}: cannot be read ({error}); {REMEDY}") from error

    @staticmethod
    def write(
        folder: Path,
        trainer: str,
        record: Mapping[str, Any],
        lora: Mapping[str, Tensor],
        ema: Mapping[str, Tensor] | None,
        rng: Mapping[str, Tensor],
    ) -> None:
        """Write a state into a set's folder before its commit; `lora` is empty if the raw parameters are published."""
        target = folder / trainer
        target.mkdir(exist_ok=True)
        for part, tensors in (("lora", lora), ("ema", ema), ("rng", rng)):
            if tensors:
                save_tensors(target / f"{part}.safetensors", tensors)
        (target / RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.record["step"])

    def tensors(self, part: str) -> dict[str, Tensor] | None:
        """The raw parameters ("lora"), their average ("ema") or states of generators ("rng"), or None without such."""
        path = self.folder / self.trainer / f"{part}.safetensors"
        return load_tensors(path) if path.exists() or part == "rng" else None


def require_same_optimizer(path: Path, saved_with: str, optimizer: str) -> None:
    """Raise ResumeError if `optimizer` cannot read the state of another one."""
    readable = {optimizer.lower()}
    if optimizer.lower() == COAT_OPTIMIZER:
        readable |= {"adamw", "adam"}
    if saved_with.lower() not in readable:
        raise ResumeError(
            f"{path}: was written by {saved_with}, which train.optimizer={optimizer} cannot read; "
            f"go back to {saved_with}, or choose another config.name to start over"
        )


def require_readable(folder: Path, optimizer: str) -> None:
    """Raise ResumeError if a folder has 8-bit moments that `optimizer` cannot read."""
    if optimizer.lower() == COAT_OPTIMIZER:
        return
    path = folder / OPTIMIZER_FILE
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        stored = saved["param_groups"][0]["fp8"]
        is_quantized = stored["use_fp8_m1"] or stored["use_fp8_m2"]
    except Exception:  # not there, another optimizer's, or damaged
        return
    if is_quantized:
        raise ResumeError(
            f"{path}: was written by {COAT_OPTIMIZER}, whose 8-bit moments train.optimizer={optimizer} cannot read; "
            f"go back to {COAT_OPTIMIZER}, or choose another config.name to start over"
        )


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file of tensors from any device."""
    save_file({name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}, path, metadata)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file; raises ResumeError if it is missing or unreadable."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ResumeError(f"{path}: cannot be read ({error}); {REMEDY}") from error


@torch.no_grad()
def restore_tensors(targets: Mapping[str, Tensor], saved: Mapping[str, Tensor], source: Path | str) -> None:
    """Copy saved values into a run's tensors (or its rows of sharded ones); raises ResumeError before any copy."""
    odd = sorted(targets.keys() ^ saved.keys())
    if odd:
        raise ResumeError(
            f"{source}: {len(odd)} LoRA names differ from this run's, first {odd[0]!r}; "
            "use the network settings it was trained with, or another config.name to start over"
        )
    for name, tensor in targets.items():
        if saved[name].shape != tensor.shape:
            raise ResumeError(
                f"{source}: {name} has shape {tuple(saved[name].shape)}, this run's is {tuple(tensor.shape)}; "
                "use the rank (network.linear) it was trained with, or another config.name to start over"
            )
    for name, tensor in targets.items():
        local_values(tensor).copy_(rows_like(tensor, saved[name]))


# --- the execution mode, measured at a run's first step; rounding depends on it ---


def execution_of(transformer: nn.Module) -> dict[str, Any]:
    """Format of the weights, recomputed blocks; from the first step on GEMMs, attention kernel; empty without COAT."""
    runner = BlockRunner.of(transformer)
    if runner is None:
        return {}
    config = runner.plan.config
    execution: dict[str, Any] = {"recomputed": runner.plan.recomputed}
    if config.weight.use_fp8:
        execution["weight_format"] = config.linear_config().weight_format
    if config.chosen is not None:
        execution["weight_ms"] = dict(config.chosen.milliseconds)
    if runner.picked is not None:
        execution["gemm"] = runner.picked.name
    if runner.attention.kernel is not None:
        execution["attention"] = runner.attention.kernel
    return execution


def keep_execution(transformer: nn.Module, saved: Mapping[str, Any]) -> None:
    """Use a saved mode in the first step instead of measuring, if the config still allows it."""
    runner = BlockRunner.of(transformer)
    if runner is None:
        return
    if runner.gemms is not None and "gemm" in saved:
        runner.gemms.keep(saved["gemm"])
    runner.attention.resumed = saved.get("attention")


def execution_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences between two modes, one line each: from there on results differ by rounding."""
    return [
        f"Resume: {words} {saved[key]} -> {now[key]}; results differ from here on by rounding"
        for key, words in EXECUTION_WORDS.items()
        if key in saved and key in now and saved[key] != now[key]
    ]
