"""What a run needs to go on bit for bit and ai-toolkit does not save, beside its own files in the same set.

    coat/state-000000500/
        <name>_000000500.safetensors, optimizer.pt   ai-toolkit's own, published in the run's folder
        aitk/lora.safetensors                        the raw LoRA in fp32 (ai-toolkit's file is the EMA, in save.dtype)
        aitk/ema.safetensors                         the average, where one is kept
        aitk/rng.safetensors                         states of Python's, NumPy's and torch's random generators
        aitk/state.json                              steps done, place in the data, lr schedule, guard, path, identity

ai-toolkit counts otherwise: its save at step N is made after N + 1 updates and says N, and a run that goes on from it
repeats step N. Here the metadata say how many steps are done, and a run goes on with the next. `epoch` is counted the
same way. Gradient accumulation has no state: `train.gradient_accumulation` runs all its micro-batches in one step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

__all__ = ["RunState", "plain", "restore_schedule"]

FOLDER = "aitk"  # not state.json in the set's own folder, which is the stand-alone trainer's
RECORD = "state.json"
PLAIN = (bool, int, float, str, type(None))
COUNTERS = ("last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial")


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those values that JSON keeps as they are: numbers, strings, and lists of them."""
    return {key: value for key, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return isinstance(value, PLAIN)


class RunState:
    """The state of a run at a save.

    Attributes:
        folder: of the committed set.
        record: `state.json`.
    """

    def __init__(self, folder: Path, record: dict[str, Any]):
        self.folder, self.record = folder, record
        self._folder = folder / FOLDER

    @classmethod
    def read(cls, folder: Path) -> RunState | None:
        """Read the state of a committed set; None where another host wrote it."""
        path = folder / FOLDER / RECORD
        return cls(folder, json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None

    @staticmethod
    def write(
        folder: Path,
        record: Mapping[str, Any],
        lora: Mapping[str, Tensor],
        ema: list[Tensor],
        rng: Mapping[str, Tensor],
    ) -> None:
        """Write a state into the folder of a set.

        Args:
            folder: of the set.
            record: plain JSON.
            lora: raw LoRA by parameter name, as trained.
            ema: averages in the order of the optimizer's parameters; empty where none is kept.
            rng: states of the random generators.
        """
        target = folder / FOLDER
        target.mkdir()
        _save(target / "lora.safetensors", lora)
        if ema:
            _save(target / "ema.safetensors", {str(index): tensor for index, tensor in enumerate(ema)})
        _save(target / "rng.safetensors", rng)
        (target / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")

    @property
    def step(self) -> int:
        """Steps done."""
        return int(self.record["step"])

    def restore_lora(self, network: nn.Module) -> None:
        """Put the raw LoRA back.

        Raises:
            ValueError: the network has other parameters; names one.
        """
        _copy(dict(network.named_parameters()), load_file(self._folder / "lora.safetensors"))

    def restore_ema(self, averages: list[Tensor]) -> bool:
        """Put the averages back; False where the saved run kept none."""
        path = self._folder / "ema.safetensors"
        if not path.exists():
            return False
        _copy({str(index): tensor for index, tensor in enumerate(averages)}, load_file(path))
        return True

    def rng(self) -> dict[str, Tensor]:
        """States of the random generators."""
        return load_file(self._folder / "rng.safetensors")


def _save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}, path)


@torch.no_grad()
def _copy(targets: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    differing = [
        name
        for name in {**targets, **saved}
        if name not in targets or name not in saved or targets[name].shape != saved[name].shape
    ]
    if differing:
        raise ValueError(f"{len(differing)} of {len(targets)} tensors are others than the saved ones ({differing[0]})")
    for name, tensor in targets.items():
        tensor.copy_(saved[name])


def restore_schedule(scheduler: Any, saved: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Put an lr schedule back to where it stopped, if it is the same one.

    A schedule with other settings (the config was changed) stays as ai-toolkit put it: at its own place for this step.

    Args:
        scheduler: of torch, with or without accelerate's wrapper.
        saved: `plain(state_dict())` of the saved run's.
        say: takes one line.
    """
    inner = getattr(scheduler, "scheduler", scheduler)
    now = plain(inner.state_dict())
    if _settings(now) != _settings(saved):
        if now["_last_lr"] != saved["_last_lr"]:
            say(f"[coat] resume: lr is {now['_last_lr']} by the changed schedule, not {saved['_last_lr']}")
        return
    inner.load_state_dict({**inner.state_dict(), **saved})
    for group, lr in zip(inner.optimizer.param_groups, saved["_last_lr"], strict=True):
        group["lr"] = lr


def _settings(schedule: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schedule.items() if key not in COUNTERS}
