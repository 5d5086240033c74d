"""A `StepWatch` outside of a trainer, with a log that keeps its lines; and the guard's limits, which no config sets."""

from collections.abc import Mapping
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from coat_flux.config.coat import COATConfig, GuardOptions
from coat_flux.watch.phases import PhaseTracker
from coat_flux.watch.step_watch import StepWatch


def set_limits(monkeypatch: pytest.MonkeyPatch, **limits: Any) -> None:
    """Let every `GuardOptions` made from here on have these limits, for a test that cannot wait for its own."""
    defaults = {field.name: getattr(GuardOptions, field.name) for field in fields(GuardOptions)}
    monkeypatch.setattr(GuardOptions.__init__, "__defaults__", tuple((defaults | limits).values()))


def step_watch(
    coat: str | COATConfig = "{}", model: nn.Module | None = None, lora: Mapping[str, Tensor] | None = None, **rest: Any
) -> tuple[StepWatch, Any]:
    """The watch of a run on a CPU that writes no memory report; its log keeps lines `said`, `details`, and `rows`."""
    config = coat if isinstance(coat, COATConfig) else COATConfig.from_dict(yaml.safe_load(coat))
    log = SimpleNamespace(said=[], details=[], rows=[])
    log.info, log.detail, log.precision = log.said.append, log.details.append, log.rows.extend
    phases = PhaseTracker(torch.device("cpu"), None, counts=False)
    return StepWatch(config, model or nn.Identity(), None, lora or {}, None, log, phases, lambda: 1 / 0, **rest), log
