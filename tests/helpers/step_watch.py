"""A `StepWatch` outside of a trainer, and a log that keeps what it is given."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from coat_flux.config.coat import COATConfig
from coat_flux.watch.casts import CastPrecision
from coat_flux.watch.phases import PhaseTracker
from coat_flux.watch.step_watch import StepWatch


class KeptLog:
    """Keeps lines and rows."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.details: list[str] = []
        self.rows: list[CastPrecision] = []

    def info(self, line: str) -> None:
        self.said.append(line)

    def detail(self, line: str) -> None:
        self.details.append(line)

    def precision(self, rows: Sequence[CastPrecision]) -> None:
        self.rows += rows


def step_watch(
    coat: str | COATConfig = "{}", model: nn.Module | None = None, lora: Mapping[str, Tensor] | None = None, **rest: Any
) -> tuple[StepWatch, KeptLog]:
    """The watch of a run on a CPU that writes no memory report."""
    config = coat if isinstance(coat, COATConfig) else COATConfig.from_dict(yaml.safe_load(coat))
    log, phases = KeptLog(), PhaseTracker(torch.device("cpu"), None, counts=False)
    return StepWatch(config, model or nn.Identity(), None, lora or {}, None, log, phases, lambda: 1 / 0, **rest), log
